"""Everything that trains: TensorFlow is imported here and in importers and quantization, late."""
