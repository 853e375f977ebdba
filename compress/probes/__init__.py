"""Probes: artifacts in, measurements out. Only Sensitivity needs TensorFlow, and imports it late."""

from compress.probes.accuracy import Accuracy
from compress.probes.latency import Latency
from compress.probes.precision import Precision
from compress.probes.sensitivity import Sensitivity
from compress.probes.size import Size
from compress.probes.summary import DataSummary

__all__ = ["Accuracy", "DataSummary", "Latency", "Precision", "Sensitivity", "Size"]
