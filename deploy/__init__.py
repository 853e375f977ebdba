"""The device side of Coralline: Python 3.7, numpy and a TFLite runtime; imports nothing else of ours."""
