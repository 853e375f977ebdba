"""Learns new classes on the device."""
