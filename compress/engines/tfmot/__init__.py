"""TODO compress/engines/tfmot."""
