"""Probes: artifacts in, measurements out. They run on the TFLite runtime."""

from compress.pipeline.probes.data_summary import DataSummary
from compress.pipeline.probes.input_alternatives import InputAlternatives
from compress.pipeline.probes.latency import Latency
from compress.pipeline.probes.quality import Evaluation
from compress.pipeline.probes.size import Size

__all__ = ["DataSummary", "Evaluation", "InputAlternatives", "Latency", "Size"]
