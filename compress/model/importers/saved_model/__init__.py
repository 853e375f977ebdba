"""Import of TensorFlow SavedModel folders."""
