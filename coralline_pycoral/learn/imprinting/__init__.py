"""Last layers from the embeddings of a few images."""
