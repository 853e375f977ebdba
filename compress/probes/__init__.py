"""Probes: artifacts in, measurements out. None of them needs TensorFlow."""

from compress.probes.accuracy import Accuracy
from compress.probes.latency import Latency
from compress.probes.size import Size
from compress.probes.summary import DataSummary

__all__ = ["Accuracy", "DataSummary", "Latency", "Size"]
