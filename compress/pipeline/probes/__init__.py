"""Probes: artifacts in, measurements out. They run on the TFLite runtime."""

from compress.pipeline.probes.contents import DataSummary, OperatorGraph, Size
from compress.pipeline.probes.input_values import InputAlternatives
from compress.pipeline.probes.latency import Latency
from compress.pipeline.probes.quality import Evaluation

__all__ = ["DataSummary", "Evaluation", "InputAlternatives", "Latency", "OperatorGraph", "Size"]
