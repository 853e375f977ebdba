"""TODO compress/engines."""
