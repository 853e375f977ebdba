"""Models: the intermediate representation, .tflite files, importers, and detectors."""
