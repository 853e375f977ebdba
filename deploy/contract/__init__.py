"""The contract between host and device: all that the host may import from the device side."""
