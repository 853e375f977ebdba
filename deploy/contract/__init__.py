"""TODO deploy/contract."""
