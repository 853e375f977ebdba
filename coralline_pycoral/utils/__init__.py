"""Interpreters, Edge TPUs and label files."""
