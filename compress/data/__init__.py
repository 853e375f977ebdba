"""Data sets: samples from files, their splits, and preprocessing."""
