"""TODO compress/importers/keras."""
