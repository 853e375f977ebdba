"""The ways in: the command line, the Python interface, and the fleet of devices."""
