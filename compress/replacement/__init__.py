"""TODO compress/replacement."""
