"""Import of Keras files: .keras and .h5, of Keras 3 and Keras 2."""
