"""The values of the samples, compared with what the model expects: they show a wrong preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts
from compress.data.preprocessed import alternatives
from compress.data.splits import spread
from compress.learning.context import Context, Need
from compress.model.tflite.interpreter import LoadedModel, version
from compress.pipeline.probes.original_outputs import output_rows
from compress.pipeline.stage import Probe
from compress.tasks import task_of
from deploy.contract.tensors import TensorDescription

SAMPLES = 64
"""Number of samples that are compared with the model: a wrong scale changes ranges and quality much."""


def input_range(tensor: TensorDescription, samples: NDArray[np.float32]) -> Facts | None:
    """Return how samples fill the range of a quantized input; None for an input without a scale.

    Args:
        tensor: the input.
        samples: preprocessed samples [n, ...].

    Returns:
        `low` and `high` of the input; `sample_low` and `sample_high`; `outside`: the share of values that the input
        cannot hold; `used`: the share of its range that the samples fill; `alternative`: a preprocessing that fits
        better, with `description` and `advice`, or None.
    """
    if tensor.scale is None:
        return None
    integers = np.iinfo(tensor.dtype)
    low, high = ((limit - tensor.zero_point) * tensor.scale for limit in (integers.min, integers.max))
    looked = np.asarray(samples[:SAMPLES])
    best = None
    for alternative in alternatives(looked):
        changed = alternative(looked)
        fills_a_quarter = float(np.ptp(changed)) > 0.25 * (high - low)
        if fills_a_quarter and _outside(changed, low, high) == 0:
            best = alternative
            break
    return {
        "low": low,
        "high": high,
        "sample_low": float(looked.min()),
        "sample_high": float(looked.max()),
        "outside": _outside(looked, low, high),
        "used": float(np.ptp(looked)) / (high - low),
        "alternative": {"description": best.description, "advice": best.advice} if best else None,
    }


def _outside(samples: NDArray[np.float32], low: float, high: float) -> float:
    step = (high - low) / 255
    return float(((samples < low - step) | (samples > high + step)).mean())


class InputAlternatives(Probe):
    """Run the original on samples of another range, and with another order of the channels."""

    name: ClassVar[str] = "input alternatives"
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert",)

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return `samples`; `original`: the first metric of the task; and `alternatives`: a list of `description`,
        `advice` and `value`. Nothing for a model with several inputs."""
        data, task, original = context.data, task_of(context.data), subjects["original"]
        specification = original.facts.get("specification")
        order = partial(task.output_order, specification=specification)
        model = LoadedModel(original.file(MODEL_TFLITE), reproducible=False, order=order)
        if len(model.input_layout.shapes) > 1:
            return {}
        indices = np.sort(spread(data.labels("test"))[:SAMPLES])
        samples = np.asarray(data.inputs("test")[indices])
        rows = output_rows(model, samples)
        facts: Facts = {"samples": len(indices), "alternatives": []}
        name = task.metrics[0].name
        for alternative in alternatives(samples):
            pair = {"original": rows, "int8": output_rows(model, alternative(samples))}
            metrics = task.packaged(pair, data, indices.tolist(), specification, version()).metrics
            facts["original"] = metrics[f"{name}_original"]
            value = metrics[f"{name}_int8"]
            facts["alternatives"].append(
                {"description": alternative.description, "advice": alternative.advice, "value": value}
            )
        return facts
