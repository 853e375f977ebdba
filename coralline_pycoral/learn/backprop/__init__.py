"""Last layers that are trained."""
