"""What the Edge TPU and its compiler do: rules, placement, and the compiler itself. No TensorFlow."""
