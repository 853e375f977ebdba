"""From what users have to the working model: Keras files, builders, .tflite files."""

KERAS_SUFFIXES = (".keras", ".h5", ".hdf5")
SUFFIXES = (*KERAS_SUFFIXES, ".onnx", ".tflite")
"""What model files may be called."""
