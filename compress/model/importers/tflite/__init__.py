"""Import of float .tflite files."""
