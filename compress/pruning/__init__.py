"""TODO compress/pruning."""
