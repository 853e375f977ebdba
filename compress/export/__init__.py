"""TODO compress/export."""
