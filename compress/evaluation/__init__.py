"""Probes: artifacts in, measurements out. They run on the TFLite runtime."""

from compress.evaluation.accuracy import Accuracy
from compress.evaluation.average_precision import Precision
from compress.evaluation.data_summary import DataSummary
from compress.evaluation.latency import Latency
from compress.evaluation.size import Size

__all__ = ["Accuracy", "DataSummary", "Latency", "Precision", "Size"]
