"""Import rules for TFLite operators."""
