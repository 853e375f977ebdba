"""Coralline: takes a trained model to a Coral Edge TPU and proves what it lost and gained.

`python -m compress pipeline.yaml` is the way in; `compress.pipeline.schema` the one to read first.
"""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("coralline")
except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
