"""`check --sizes`: the sizes of the input at which the target runs a whole model, with the latency of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress import targets
from compress.core.errors import CorallineError, ModelError
from compress.surface.api.files import FilePath
from compress.targets.base import hardware_costs

if TYPE_CHECKING:
    from compress.targets.base import EstimateResult, Target

ON_CPU = "cpu"
SAMPLES = 2
"""Random samples for the quantization ranges of a trial file."""


@dataclass(frozen=True)
class InputSize:
    """A model with one size of its input.

    Attributes:
        size: height and width.
        operators: the number of operators of the 8-bit file; 0 if there is none.
        mapped: the number of those that run on the target.
        summary: the placement in one sentence, or why there is no file.
        latency: the predicted latency by host.
    """

    size: int
    operators: int
    mapped: int
    summary: str
    latency: Mapping[str, EstimateResult]

    @property
    def is_whole(self) -> bool:
        """Whether all operators run on the target."""
        return 0 < self.operators == self.mapped

    def to_json(self) -> dict[str, Any]:
        """Return the size as plain values."""
        latency = {
            host: {"value": prediction.latency_ms, "low": prediction.low_ms, "high": prediction.high_ms}
            for host, prediction in self.latency.items()
        }
        return {
            "size": self.size,
            "operators": self.operators,
            "mapped": self.mapped,
            "summary": self.summary,
            "latency_ms": latency,
        }


def describe(result: InputSize) -> str:
    """Return a result as one line."""
    hosts = ", ".join(f"{host} {prediction.latency_ms:.1f} ms" for host, prediction in result.latency.items())
    return f"{result.size}: {result.summary}" + (f"; predicted: {hosts}" if hosts else "")


def check_sizes(
    model: FilePath,
    sizes: Sequence[int],
    *,
    target: str | None = None,
    compiler: str | None = None,
    detector: str = "auto",
    trust: bool = False,
) -> Iterator[InputSize]:
    """Check a model of images at several sizes of its input, one after the other.

    The head of a detector is cut off in front of its decoding first, as `quantize` does. Each file is quantized with
    random samples: its operators, shapes and sizes are right, its answers are not.

    Args:
        model: a .keras, .h5, .onnx or float .tflite file, or the folder of a SavedModel.
        sizes: heights and widths.
        target: the name of a target; None for the Edge TPU.
        compiler: the version of the Edge TPU compiler; None for the newest.
        detector: the family of a detector; other models are checked as they are.
        trust: allow the model to run code that it contains.

    Yields:
        A result for each size.

    Raises:
        ModelError: the file cannot be read, or does not take images; or the family is unknown.
    """
    from compress.model.detectors.detector_model import detector_model
    from compress.model.detectors.families import refuse_unknown
    from compress.model.importers import model_file

    refuse_unknown(detector)
    loaded = model_file.load(model_file.read(Path(model)), trust=trust).model
    shape = tuple(loaded.inputs[0].shape[1:])
    if len(loaded.inputs) != 1 or len(shape) != 3:
        allowed = "one input [height, width, channels]"
        raise ModelError("the model does not take one image", where=str(model), allowed=allowed)
    detection_model = None if None in shape else detector_model(loaded, detector)
    network = loaded if detection_model is None else detection_model.model
    chosen = targets.load(target or targets.DEFAULT)
    chosen = chosen if compiler is None else chosen.compiled_by(compiler)
    for size in sizes:
        yield _checked(network, size, chosen)


def _checked(model: Any, size: int, target: Target) -> InputSize:
    """Return the result for one size; a size that the model does not take is a result too."""
    from compress.learning.procedures.trial_conversion import TrialConverter
    from compress.model.ir import keras_graph

    channels = model.inputs[0].shape[-1]
    samples = np.random.default_rng(0).random((SAMPLES, size, size, channels), np.float32)
    try:
        resized = keras_graph.with_input_shape(model, (size, size, channels))
        trial = TrialConverter(samples, target)(keras_graph.read(resized), resized)
    except CorallineError as error:
        return InputSize(size, 0, 0, f"the model does not work with this size: {error.what}", {})
    if trial.graph is None:
        return InputSize(size, 0, 0, trial.missing or "there is no 8-bit file", {})
    graph = trial.graph
    placement = target.check(graph)
    count = len(placement.ops)
    mapped = count if placement.complete else sum(row.placement != ON_CPU for row in placement.ops)
    latency = {host: hardware_costs(target).estimate(graph, host, None) for host in target.cost.hosts}
    return InputSize(size, count, mapped, placement.summary, latency)
