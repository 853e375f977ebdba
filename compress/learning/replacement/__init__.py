"""Replacement of activations and blocks that the target runs badly."""
