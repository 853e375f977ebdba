"""TODO compress/ir."""
