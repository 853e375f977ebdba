"""pipeline.yaml: its schema, the runner, the cache of artifacts, and the record of a run."""
