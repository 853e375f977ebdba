"""Compiled Edge TPU programs (the chip's code name is DarwiNN): read, explain, verify and relink them."""
