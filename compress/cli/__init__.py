"""TODO compress/cli."""
