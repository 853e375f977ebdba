"""TODO compress/targets."""
