"""TODO compress/importers/onnx."""
