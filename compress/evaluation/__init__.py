"""Probes: artifacts in, measurements out. They run on the TFLite runtime."""

from compress.evaluation.data_summary import DataSummary
from compress.evaluation.input_alternatives import InputAlternatives
from compress.evaluation.latency import Latency
from compress.evaluation.quality import Evaluation
from compress.evaluation.size import Size

__all__ = ["DataSummary", "Evaluation", "InputAlternatives", "Latency", "Size"]
