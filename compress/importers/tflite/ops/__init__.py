"""TODO compress/importers/tflite/ops."""
