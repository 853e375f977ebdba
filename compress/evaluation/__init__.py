"""Probes: artifacts in, measurements out. Only Sensitivity needs TensorFlow, and imports it late."""

from compress.evaluation.accuracy import Accuracy
from compress.evaluation.average_precision import Precision
from compress.evaluation.data_summary import DataSummary
from compress.evaluation.latency import Latency
from compress.evaluation.size import Size
from compress.stages.sensitivity import Sensitivity

__all__ = ["Accuracy", "DataSummary", "Latency", "Precision", "Sensitivity", "Size"]
