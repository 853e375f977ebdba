"""TODO compress/pipeline."""
