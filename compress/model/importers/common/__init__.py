"""Parts that the importers of all formats share."""
