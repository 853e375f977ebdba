"""TODO compress/importers/tflite."""
