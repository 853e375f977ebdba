"""Targets: what a model is compiled for, and what is known of it without the hardware."""
