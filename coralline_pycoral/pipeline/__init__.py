"""Models that are split into segments."""
