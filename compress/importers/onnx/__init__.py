"""Import of ONNX models."""
