"""Other libraries that can do the work of the other packages: tensorflow-model-optimization."""
