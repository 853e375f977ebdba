"""The inside of a compiled model: its parameters, byte by byte, and the comparison with the model that it holds."""
