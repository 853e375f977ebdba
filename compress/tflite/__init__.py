"""Reads and writes .tflite graphs: numpy and flatbuffers, no TensorFlow."""
