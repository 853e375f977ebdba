"""The CPU as a target: nothing to compile."""
