"""Structured pruning: which channels matter least, and how many are removed from which layers."""
