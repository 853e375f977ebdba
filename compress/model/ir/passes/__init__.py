"""Passes: functions from one network to another that computes the same."""
