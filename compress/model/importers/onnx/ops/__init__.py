"""Import rules for ONNX operators."""
