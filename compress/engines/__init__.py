"""Other libraries as engines for what the other packages do themselves."""
