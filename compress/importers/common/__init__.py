"""TODO compress/importers/common."""
