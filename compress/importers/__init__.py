"""From what users have to the working model: Keras files, builders, .tflite files."""
