"""Read and write .tflite graphs with numpy and flatbuffers, without TensorFlow."""
