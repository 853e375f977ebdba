"""Judge a .tflite file of any tool: quality against the float model, types, size, and its predicted Edge TPU placement.

Used by benchmarks/other_tools.py: all files run in one runtime, with its kernels that are bit-exact between versions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

import compress
from compress.model.tflite import graph
from compress.model.tflite.interpreter import LoadedModel

Floats = NDArray[np.float32]
HOST = "usb3"
INTEGERS = {"INT8", "UINT8"}
ALLOWED = {*INTEGERS, "INT32", "BOOL"}
"""Types in a full-integer file; INT32 are biases, shapes and indices."""
NOT_COMPARABLE = -1e9
MOST_DB = 120.0


class NotComparableError(Exception):
    """The outputs of a file are not those of the float model; the message says how they differ."""


def sqnr_db(expected: NDArray[Any], actual: NDArray[Any]) -> float:
    """Return the ratio of signal to quantization noise in dB, at most 120."""
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    noise = float(np.square(actual - expected).sum())
    signal = float(np.square(expected).sum())
    if not np.isfinite(noise):
        return -MOST_DB
    return float(np.clip(10 * np.log10(max(signal, 1e-300) / max(noise, 1e-300)), -MOST_DB, MOST_DB))


def fed(model: LoadedModel, samples: Floats) -> Floats:
    """Return samples in the layout of a file's input: channels first or last, and some tools add a dimension of 1."""
    shape, sample_shape = tuple(model.input_layout.shapes[0]), samples.shape[1:]
    if shape == sample_shape:
        return samples
    if len(sample_shape) == 3 and shape == (sample_shape[1], sample_shape[2], sample_shape[0]):
        return np.ascontiguousarray(samples.transpose(0, 2, 3, 1))
    if len(sample_shape) == 3 and shape == (sample_shape[2], sample_shape[0], sample_shape[1]):
        return np.ascontiguousarray(samples.transpose(0, 3, 1, 2))
    if [side for side in shape if side != 1] == [side for side in sample_shape if side != 1]:
        return samples.reshape(len(samples), *shape)
    raise NotComparableError(
        f"the input of the file has the shape {list(shape)}, the samples have {list(sample_shape)}"
    )


def outputs_of(file: Path, samples: Floats) -> list[Floats]:
    """Return the outputs of a file for all samples, dequantized, in its own order and shapes."""
    model = LoadedModel(file, reproducible=True)
    rows = model.scores(fed(model, samples))
    return [np.asarray(values) for values in model.output_layout.split(rows)]


def matched(expected: Sequence[Floats], actual: Sequence[Floats]) -> list[Floats]:
    """Return the outputs of a file in the order of the float model's outputs, with the same order of axes.

    Tools reorder outputs and axes. Every output is compared with all of the same size, and the best assignment is
    used, in the same way for every tool.

    Raises:
        NotComparableError: an output has no counterpart.
    """
    choices = [[_aligned(output, one) for one in actual] for output in expected]
    ratios = np.array([[NOT_COMPARABLE if one is None else one[0] for one in row] for row in choices])
    rows, columns = linear_sum_assignment(-ratios)
    matches = [choices[row][column] for row, column in zip(rows, columns, strict=True)]
    if len(rows) < len(expected) or any(one is None for one in matches):
        shapes = [", ".join(str(list(output.shape[1:])) for output in part) for part in (actual, expected)]
        raise NotComparableError(f"the outputs of the file have the shapes {shapes[0]}, those of the model {shapes[1]}")
    return [one[1] for one in matches if one is not None]


def _aligned(expected: Floats, actual: Floats) -> tuple[float, Floats] | None:
    """Return the ratio in dB of an output with the best order of its axes, and its values; None if the sizes differ."""
    if actual.size != expected.size:
        return None
    target = [side for side in expected.shape[1:] if side != 1]
    small = actual.reshape(len(actual), *(side for side in actual.shape[1:] if side != 1))
    orders = [order for order in permutations(range(1, small.ndim)) if [small.shape[axis] for axis in order] == target]
    values = [small.transpose(0, *order).reshape(expected.shape) for order in orders]
    rated = [(sqnr_db(expected, candidate), candidate) for candidate in values]
    return max(rated, key=lambda pair: pair[0], default=None)


def quality(expected: Sequence[Floats], actual: Sequence[Floats], labels: NDArray[np.int64] | None) -> dict[str, Any]:
    """Return the ratio of each output in dB; of classifiers also the agreement with float, and the accuracy."""
    ratios = [round(sqnr_db(before, after), 2) for before, after in zip(expected, actual, strict=True)]
    metrics: dict[str, Any] = {"sqnr_db": ratios, "mean_sqnr_db": round(statistics.fmean(ratios), 2)}
    if len(expected) == 1 and expected[0].ndim == 2:
        before, after = (outputs[0].argmax(axis=1) for outputs in (expected, actual))
        metrics["agreement"] = float((before == after).mean())
        if labels is not None:
            metrics["accuracy"] = float((after == labels).mean())
            metrics["float_accuracy"] = float((before == labels).mean())
    return metrics


def types(file: Path) -> dict[str, Any]:
    """Return the types of inputs and outputs, and whether the file is full integer: no other types are computed."""
    model = graph.read(file)
    ends = [model.tensors[index].dtype for index in (*model.inputs, *model.outputs)]
    used = {
        tensor.dtype
        for operator in model.operators
        for tensor in (*model.input_tensors(operator), *model.output_tensors(operator))
    }
    return {
        "io": sorted(set(ends)),
        "other_types": sorted(used - ALLOWED),
        "full_integer": set(ends) <= INTEGERS and used <= ALLOWED,
    }


def placement(file: Path) -> dict[str, Any]:
    """Return our check's predictions: operators on the Edge TPU, reasons why the compiler rejects the file, latency."""
    result = compress.check(file)
    mapped = sum(op.placement == "tpu" for op in result.ops)
    operators = [row for row in result.to_json()["ops"] if row["placement"] == "tpu"]
    prediction: dict[str, Any] = {
        "mapped": mapped,
        "operators": len(result.ops),
        "rejected": result.failure,
        "remarks": sorted({f"{row['op']}: {row['reason']}" for row in operators if row["reason"]}),
    }
    if result.failure is None and mapped:
        expected = compress.estimate(file, HOST)
        prediction["latency_ms"] = [
            round(latency_ms, 2) for latency_ms in (expected.latency_ms, expected.low_ms, expected.high_ms)
        ]
    return prediction


def cpu_milliseconds(files: Mapping[str, Path], sample: Floats, runs: int = 30) -> dict[str, float]:
    """Return the fastest inference of each file on one thread with accelerated kernels; files take turns.

    The fastest of several runs depends least on other work of the machine.
    """
    models = {name: LoadedModel(file, reproducible=False, threads=1) for name, file in files.items()}
    feeds = {name: model.feed(fed(model, sample[np.newaxis])[0]) for name, model in models.items()}
    best = dict.fromkeys(models, float("inf"))
    for _ in range(runs):
        for name, model in models.items():
            started = time.perf_counter()
            model.raw(feeds[name])
            best[name] = min(best[name], 1000 * (time.perf_counter() - started))
    return {name: round(value, 3) for name, value in best.items()}


def judged(file: Path, samples: Floats, expected: Sequence[Floats], labels: NDArray[np.int64] | None) -> dict[str, Any]:
    """Return everything about one file; the quality is an `error` if its outputs cannot be compared."""
    judgement = {"size_bytes": file.stat().st_size, **types(file), **placement(file)}
    try:
        judgement |= quality(expected, matched(expected, outputs_of(file, samples)), labels)
    except NotComparableError as error:
        judgement["error"] = str(error)
    return judgement
