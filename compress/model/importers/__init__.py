"""Convert model files (Keras, SavedModel, ONNX, TFLite) and builders to the working Keras model."""

KERAS_SUFFIXES = (".keras", ".h5", ".hdf5")
SUFFIXES = (*KERAS_SUFFIXES, ".onnx", ".tflite")
"""The allowed extensions of model files."""
