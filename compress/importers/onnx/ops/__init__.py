"""TODO compress/importers/onnx/ops."""
