"""Functions that write the input of a model and read its outputs."""
