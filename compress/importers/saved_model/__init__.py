"""TODO compress/importers/saved_model."""
