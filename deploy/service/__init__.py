"""Serves a bundle over HTTP."""
