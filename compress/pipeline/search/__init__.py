"""The search for the settings of a pipeline with the best trade-offs: `python -m compress search`."""
