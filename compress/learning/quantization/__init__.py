"""The quantization plan: what is decided about ranges and weights, as data; and its conversion to a file."""
