"""Finds out why an Edge TPU does not work."""
