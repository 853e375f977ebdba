"""Import of .tflite files: read any file, and rebuild a float or a quantized model with Keras layers.

`read` finds the unsupported operators without TensorFlow. `load` builds the Keras model and compares its outputs with
those of the file in the TFLite runtime. A quantized file is rebuilt with the real values of its weights
(`compress.model.tflite.dequantization`), if the caller asks for it with `in_float`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.importers.common import guarded_calls, verification
from compress.model.importers.common.graph_builder import NOT_MADE
from compress.model.importers.common.unsupported import Refused, unsupported
from compress.model.importers.common.verification import Arrays, Parity, Runs
from compress.model.importers.tflite.network import TfliteNetwork, build_network
from compress.model.importers.tflite.ops.layers import RULES
from compress.model.ir import keras_graph as networks
from compress.model.tflite import comparison, dequantization, detection_postprocess, dilation, float_graph, graph
from compress.model.tflite.dequantization import Dequantized, InputRange
from compress.model.tflite.detection_postprocess import PostProcess
from compress.model.tflite.edit import Edit
from compress.model.tflite.float_graph import Plain
from compress.model.tflite.graph import Graph

if TYPE_CHECKING:
    import keras


RANDOM_FEEDS = 2
"""Random inputs on which the operators of a dequantized file are compared."""
LARGEST_INTEGER = 255
"""Largest number that an input of integers is compared with."""
LARGEST_STEPS = 2.0
"""Largest difference between an operator in integers and in float, in steps of its output. Rounding makes 0.5; the
kernels round twice where they rescale. The largest difference in 27 files of several converters is 0.75
(benchmarks/results/transfer.json)."""


@dataclass(frozen=True)
class Rounding:
    """The difference between a quantized file and the float model made from it: each operator rounds its output.

    Attributes:
        largest_steps: the largest difference of an operator from the same inputs, in steps of its output.
        mean_steps: the mean of these differences over all operators.
        activations: the number of operators whose range became an activation.
        inputs: the real values of each quantized input.
    """

    operators: int
    largest_steps: float
    mean_steps: float
    activations: int
    inputs: tuple[InputRange, ...]


@dataclass(frozen=True)
class TfliteFile:
    """A parsed .tflite file.

    Attributes:
        plain: the float graph in its plain form, the reference for the rebuilt model; None if the file is quantized.
        imported: the network made from `plain`; None if the file is quantized.
        postprocess: the TFLite_Detection_PostProcess at its end; None without one. In `plain`, operators decode the
            boxes instead.
        dequantized: the quantized graph and the float graph made from it, from which `plain` is made; None if the file
            is float, or was not dequantized.
    """

    path: Path
    graph: Graph
    plain: Plain | None = None
    imported: TfliteNetwork | None = None
    postprocess: PostProcess | None = None
    dequantized: Dequantized | None = None

    @property
    def problems(self) -> tuple[Refused, ...]:
        """The unsupported operators of a float file."""
        return self.imported.problems if self.imported else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences between a float file and the network, as text."""
        if self.imported is None:
            return ()
        taken = [self.postprocess.note] if self.postprocess else []
        ranges = [
            f"the input {real.name!r} has values from {real.low:.4g} to {real.high:.4g} in steps of {real.step:.4g}"
            for real in (self.dequantized.ranges if self.dequantized else ())
        ]
        return (*taken, *ranges, *self.imported.plain.notes)

    @property
    def has_cast_input(self) -> bool:
        """Whether the network takes the numbers of an integer input as floats."""
        return self.plain is not None and any(dtype in dequantization.INTEGERS for dtype in self.plain.input_dtypes)

    @property
    def batch(self) -> int:
        """The batch size of the first input."""
        return self.graph.tensors[self.graph.inputs[0]].shape[0]


def read(path: Path) -> TfliteFile:
    """Read a file, and convert a float graph to layers, without TensorFlow.

    Raises:
        ModelError: the file is not a .tflite file, is damaged, or is invalid.
    """
    parsed = graph.read(path)
    postprocess = detection_postprocess.read(parsed, str(path))
    if not float_graph.is_float(parsed):
        return TfliteFile(path, parsed, postprocess=postprocess)
    with guarded_calls.located(path):
        plain = _plain(_with_signature_names(parsed), postprocess)
        return TfliteFile(path, parsed, plain, build_network(_with_dilated_convolutions(plain), RULES), postprocess)


def _plain(float_file: Graph, postprocess: PostProcess | None) -> Plain:
    """Return a float graph in its plain form, in which operators decode the boxes of a detector."""
    return float_graph.plain(
        float_file if postprocess is None else detection_postprocess.decoded(float_file, postprocess)
    )


def _with_signature_names(parsed: Graph) -> Graph:
    """Return the graph with the names of its signature for its outputs: layers have the names of their tensors."""
    names = parsed.named_outputs
    if not names:
        return parsed
    edit = Edit(parsed)
    for index in dict.fromkeys(parsed.outputs):
        if names.get(index) and index not in parsed.inputs:
            edit.rename(index, names[index])
    return edit.graph()


def in_float(file: TfliteFile) -> TfliteFile:
    """Return a quantized file in float, as a file that can be rebuilt with layers; a float file stays as it is.

    Raises:
        ModelError: a constant or its scales are invalid.
    """
    if file.plain is not None:
        return file
    with guarded_calls.located(file.path):
        both = dequantization.dequantize(_with_signature_names(file.graph))
        postprocess = detection_postprocess.read(both.graph)
        plain = _plain(both.graph, postprocess)
        imported = build_network(_with_dilated_convolutions(plain), RULES)
    return replace(file, plain=plain, imported=imported, postprocess=postprocess, dequantized=both)


def _with_dilated_convolutions(plain: Plain) -> Plain:
    """Merge the operators of each dilated convolution: for an open batch the converter writes three or five."""
    numbers = {op.outputs[:1]: number for op, number in zip(plain.graph.operators, plain.numbers, strict=True)}
    edited = plain.graph
    while (merged := _merge_one_dilation(edited)) is not None:
        edited = merged
    edited_numbers: list[int] = []
    number = 0
    for operator in reversed(edited.operators):  # an inserted operator has the number of the operator after it
        number = numbers.get(operator.outputs[:1], number)
        edited_numbers.append(number)
    return replace(plain, graph=edited, numbers=tuple(reversed(edited_numbers)))


def _merge_one_dilation(edited: Graph) -> Graph | None:
    """Return the graph with its first dilated convolution merged; None if it has no such convolution."""
    for operator in edited.operators:
        if operator.name == "SPACE_TO_BATCH_ND":
            for rewrite in (dilation.dilated_convolution, dilation.dilated_row):
                try:
                    for edit in rewrite(operator, edited):
                        return edit.graph()
                except (ModelError, *NOT_MADE):
                    continue  # the operator is invalid: its import rule refuses it
    return None


def load(file: TfliteFile, samples: NDArray[np.float32] | None = None) -> tuple[keras.Model, Parity]:
    """Rebuild a float file as a Keras model, and compare it with the file in the TFLite runtime.

    Args:
        file: a file without problems.
        samples: real samples [n, ...] for the comparison, in addition to random ones.

    Raises:
        ModelError: an operator is unsupported, or the outputs differ.
    """
    assert file.plain is not None  # the caller has checked that the file is float
    assert file.imported is not None
    if file.problems:
        raise unsupported(file.problems, str(file.path))
    imported = file.imported
    shapes = [imported.plain.graph.tensors[index].shape for index in imported.plain.graph.inputs]
    runs = [*verification.random_inputs(shapes), *_batches(shapes, samples)]
    runs = [list(map(_numbers, inputs, file.plain.input_dtypes)) for inputs in runs]
    with guarded_calls.located(file.path):
        model = verification.build_model(imported.network)
        parity, exceeding = _compare(model, _reference(file, file.plain), runs, len(runs) * file.batch)
    if exceeding:
        operators = (
            (float_graph.operator_title(operator, number, imported.plain.graph), operator.outputs)
            for operator, number in zip(imported.plain.graph.operators, imported.plain.numbers, strict=True)
        )
        first = verification.first_difference(operators, _intermediate_differences(imported, exceeding))
        raise verification.too_different(parity, str(file.path), first)
    return model, parity


def _reference(file: TfliteFile, plain: Plain) -> Graph:
    """Return the graph that the rebuilt model is compared with: the file, if its runtime computes in float alone."""
    rounds = file.dequantized is not None or any(
        tensor.is_constant and tensor.dtype in float_graph.EIGHT_BITS and tensor.quantization
        for tensor in file.graph.tensors
    )
    return plain.graph if rounds or file.postprocess is not None else file.graph


def _numbers(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return samples as numbers that an input of a type can have: for integers, up to their largest value."""
    if dtype not in dequantization.INTEGERS:
        return np.asarray(values, np.float32)
    limits = np.iinfo(graph.DTYPES[dtype])
    largest = min(limits.max, LARGEST_INTEGER)
    scaled = values * largest if np.abs(values).max(initial=0) <= 1 else values
    return np.asarray(np.clip(np.rint(scaled), max(limits.min, -largest), largest), np.float32)


def rounding(file: TfliteFile, samples: NDArray[np.float32] | None = None) -> Rounding:
    """Compare every operator of a dequantized file with its float form, on random and on real samples.

    Args:
        file: a file in float (`in_float`) without problems.
        samples: real samples [n, ...].

    Raises:
        ModelError: an operator differs by more than rounding does.
    """
    both = file.dequantized
    assert both is not None
    generator = np.random.default_rng(0)
    feeds = [comparison.random_feed(both.original, generator) for _ in range(RANDOM_FEEDS)]
    shapes = [both.original.tensors[index].shape for index in both.original.inputs]
    feeds += [[_codes(batch, both.original)] for (batch,) in _batches(shapes, samples)]
    differences = dequantization.operator_differences(both, feeds)
    worst = max(differences, key=lambda difference: difference.largest, default=None)
    if worst is not None and not worst.largest <= LARGEST_STEPS:
        raise ModelError(
            f"in float, {float_graph.operator_title(worst.operator, worst.operator.index, both.original)} differs by "
            f"{worst.largest:.3g} steps of its output from the file",
            where=str(file.path),
            allowed=f"{LARGEST_STEPS:g}, as by rounding",
            hint="please report it, with the file",
        )
    largest = 0.0 if worst is None else worst.largest
    mean = float(np.mean([difference.mean for difference in differences])) if differences else 0.0
    return Rounding(len(differences), largest, mean, both.activations, both.ranges)


def _codes(batch: NDArray[np.float32], original: Graph) -> NDArray[Any]:
    """Return samples in the type of the input of a quantized graph."""
    tensor = original.tensors[original.inputs[0]]
    if dequantization.is_quantized(tensor):
        return dequantization.codes(batch, tensor)
    return batch.astype(graph.DTYPES[tensor.dtype])


def _batches(shapes: list[tuple[int, ...]], samples: NDArray[np.float32] | None) -> list[list[NDArray[np.float32]]]:
    """Return the samples in batches of the file's size, if its input has their shape."""
    if samples is None or len(shapes) != 1 or samples.shape[1:] != shapes[0][1:]:
        return []
    batch = shapes[0][0]
    starts = range(0, len(samples) - batch + 1, batch)
    return [[np.asarray(samples[start : start + batch])] for start in starts]


def _compare(model: Any, original: Graph, runs: Runs, samples: int) -> tuple[Parity, list[Arrays]]:
    """Compare the outputs of the model with those of the file; return also the inputs of runs that differ too much."""
    runner = comparison.Runner(original)
    dtypes = [graph.DTYPES[original.tensors[index].dtype] for index in original.inputs]

    def computed(inputs: Arrays) -> list[NDArray[Any]]:
        return _flat(runner.run([array.astype(dtype) for array, dtype in zip(inputs, dtypes, strict=True)]))

    expected = list(map(computed, runs))
    by_run = [
        verification.compare_outputs(outputs, _flat(verification.run_model(model, inputs)))
        for inputs, outputs in zip(runs, expected, strict=True)
    ]

    def with_last_bits_changed() -> Runs:
        return list(map(computed, verification.change_last_bits(runs)))

    return verification.verified(runs, by_run, expected, with_last_bits_changed, "ai-edge-litert", samples)


def _flat(outputs: Sequence[Any]) -> list[NDArray[Any]]:
    """Return the values in order: a network may have its batch before the first dimension of the file's tensor."""
    return [np.asarray(output).reshape(-1) for output in outputs]


def _intermediate_differences(imported: TfliteNetwork, runs: Runs) -> dict[int, float]:
    """Return the largest relative difference of every intermediate tensor, by its index in the file."""
    outputs = [index for operator in imported.plain.graph.operators for index in operator.outputs]
    observed = {index: imported.values[index].tensor for index in outputs if index in imported.values}
    model = networks.build(networks.subnetwork(imported.network, list(observed.values())))
    runner = comparison.Runner(imported.plain.graph, keep=True)
    largest = dict.fromkeys(observed, 0.0)
    for inputs in runs:
        expected = runner.run(inputs, list(observed))
        actual = verification.run_model(model, inputs)
        for index, reference, array in zip(observed, expected, actual, strict=True):
            relative = verification.compare_output(reference.reshape(-1), array.reshape(-1)).relative
            largest[index] = max(largest[index], relative)
    return largest
