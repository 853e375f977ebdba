"""Runs and measures a bundle on this machine."""
