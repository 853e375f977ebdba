"""Run a .tflite model on this host, with float samples as inputs and float outputs for every type of model."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite import graph, limits
from compress.model.tflite import lookup as lookup_tables
from compress.model.tflite.runtime import IsolatedInterpreter
from deploy.contract.tensors import Lookup, TensorDescription, TensorLayout, as_row

SAMPLES_TOGETHER = 16
"""Samples in one request to the process of the runtime."""
Order = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""A function that puts the details of outputs into another order."""


class LoadedModel:
    """A loaded model.

    Attributes:
        inputs: the runtime's details of the inputs.
        outputs: the runtime's details of the outputs, in the order of the model or of `order`.
        input_tensors: the same as in the manifest of a bundle.
        output_tensors: the same as in the manifest of a bundle.
        lookup: the lookup of an embedding in front of the model; None: samples have the values of the inputs.
        input_layout: the inputs as a row; with a lookup, a sample.
        output_layout: the outputs as a row.

    Args:
        reproducible: use the kernels of the runtime without a delegate, which are bit-exact between versions, instead
            of the accelerated ones (XNNPACK), whose int8 results differ by some steps.
        order: puts the details of the outputs into the order that a task needs.

    Raises:
        ModelError: the runtime rejects the model, or an input or output has no single scale.
    """

    def __init__(
        self, path: Path, *, reproducible: bool, threads: int = 1, order: Order = lambda outputs: outputs
    ) -> None:
        try:
            self._runtime = IsolatedInterpreter(path, reproducible=reproducible, threads=threads)
        except ModelError as error:
            _refuse_custom(path)
            error.where = str(path)
            raise
        self._path = path
        self.inputs: list[dict[str, Any]] = self._runtime.inputs
        self.outputs: list[dict[str, Any]] = order(self._runtime.outputs)
        for end, details in (("input", self.inputs), ("output", self.outputs)):
            for detail in details:
                if len(detail["quantization_parameters"]["scales"]) > 1:
                    what = f"its {end} is {np.dtype(detail['dtype']).name} with a scale for each channel"
                    raise ModelError(what, where=str(path), allowed="float, integers, or quantized per tensor")
        self._settle_shapes()
        self.input_tensors = TensorDescription.of(self.inputs)
        parsed = graph.read(path)
        named = parsed.named_outputs
        self.output_tensors = [
            tensor._replace(name=named.get(detail["index"], tensor.name))
            for tensor, detail in zip(TensorDescription.of(self.outputs), self.outputs, strict=True)
        ]
        self.lookup = self._lookup(parsed)
        self.input_layout = TensorLayout.of(self.input_tensors)
        if self.lookup is not None:
            self.input_layout = TensorLayout([self.input_tensors[0].name], [self.lookup.shape])
        self.output_layout = TensorLayout.of(self.output_tensors)

    def _lookup(self, parsed: graph.Graph) -> Lookup | None:
        try:
            table = lookup_tables.table_of(parsed)
            if table is None:
                return None
            if len(self.input_tensors) != 1:
                raise ValueError(f"it has {len(self.input_tensors)} inputs")
            return Lookup(table, self.input_tensors[0])
        except ValueError as error:
            raise ModelError(f"its lookup table cannot be used: {error}", where=str(self._path)) from error
        except ModelError as error:
            error.where = str(self._path)
            raise

    def _settle_shapes(self) -> None:
        """Run the model once if the shapes of its outputs are only known afterwards."""
        if all((detail["shape_signature"] > 0).all() for detail in self.outputs):
            return
        try:
            limits.check_runnable([detail["shape"].tolist() for detail in self.inputs])
        except ValueError as error:
            raise ModelError(str(error), where=str(self._path)) from error
        zeros = [np.zeros(detail["shape"], detail["dtype"]) for detail in self.inputs]
        for detail, value in zip(self.outputs, self._run(zeros), strict=True):
            detail["shape"] = np.array(value.shape, np.int32)

    def _run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return self._run_all([tensors])[0]

    def _run_all(self, feeds: Sequence[Sequence[NDArray[Any]]]) -> list[list[NDArray[Any]]]:
        indices = [detail["index"] for detail in self.inputs]
        by_index = [dict(zip(indices, tensors, strict=True)) for tensors in feeds]
        try:
            return self._runtime.run_all(by_index, [detail["index"] for detail in self.outputs])
        except ModelError as error:
            error.where = str(self._path)
            raise

    @property
    def floating(self) -> bool:
        """Whether all outputs are floating-point numbers."""
        return all(np.issubdtype(detail["dtype"], np.floating) for detail in self.outputs)

    def feed(self, sample: NDArray[np.float32]) -> list[NDArray[Any]]:
        """Return a preprocessed sample (without batch) as the model's input tensors, quantized if an input is.

        Args:
            sample: of the shape of the input; for several inputs, a row.

        Raises:
            ModelError: the sample's shape does not fit.
        """
        shapes = self.input_layout.shapes
        if len(shapes) > 1:
            if sample.shape != (self.input_layout.size,):
                sizes = ", ".join(str(list(shape)) for shape in shapes)
                raise ModelError(
                    f"has {len(shapes)} inputs ({sizes}), but the data gives {list(sample.shape)}",
                    allowed=f"one row of {self.input_layout.size} values for each sample",
                    hint="use a data source that names one array for each input",
                )
            values = self.input_layout.split(sample[np.newaxis])
        elif sample.shape != shapes[0]:
            raise ModelError(
                f"takes {[1, *shapes[0]]}, but the data gives {[1, *sample.shape]}",
                hint=shape_hint(shapes[0], sample.shape),
            )
        else:
            values = [sample[np.newaxis]]
        if self.lookup is not None:
            try:
                return [self.lookup(sample)]
            except ValueError as error:
                raise ModelError(
                    f"the samples cannot be looked up: {error}",
                    where=str(self._path),
                    hint="use the preprocessing of its training: as many buckets as the table has rows, without the 0",
                ) from error
        pairs = zip(values, self.input_tensors, strict=True)
        return [tensor.stored(value).reshape(tensor.shape) for value, tensor in pairs]

    def raw(self, tensors: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Run one inference; return a copy of the output in the model's type and shape.

        Several outputs are returned as one row [1, values], in a type that holds the values of all of them.

        Raises:
            ModelError: the runtime cannot run the model.
        """
        result: NDArray[Any] = as_row(self._run(tensors))
        return result

    def duration_ms(self, tensors: Sequence[NDArray[Any]]) -> float:
        """Run one inference, and return its time: inputs set, invoked, outputs read."""
        self._run(tensors)
        return self._runtime.duration_ns / 1e6

    def scores(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the outputs for every sample as rows, dequantized: [n, values].

        Raises:
            ModelError: the samples do not fit, or the runtime cannot run the model.
        """
        rows = []
        for start in range(0, len(samples), SAMPLES_TOGETHER):
            feeds = [self.feed(sample) for sample in samples[start : start + SAMPLES_TOGETHER]]
            rows += [as_row(outputs) for outputs in self._run_all(feeds)]
        return self.dequantized(np.concatenate(rows))

    def dequantized(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Return results of `raw` for samples [n, ...] as rows [n, values], dequantized."""
        parts = zip(self.output_layout.parts(stored.reshape(len(stored), -1)), self.output_tensors, strict=True)
        rows: NDArray[np.float32] = np.concatenate([tensor.real(part) for part, tensor in parts], axis=1)
        return rows


FLEX = "Flex"
"""The beginning of the names of operators that the converter takes from TensorFlow (SELECT_TF_OPS)."""
COLOUR_STEPS = {(3, 1): "`colour: {to: grey}`", (1, 3): "`colour: {from: grey, to: rgb}`"}
"""The preprocessing step from a number of channels to another."""


def shape_hint(expected: Sequence[int | None], actual: Sequence[int]) -> str:
    """Return what to do about samples of another shape than a model's input."""
    if tuple(actual) == (*expected, 1):
        return "add `squeeze: {axis: -1}` to data.preprocess"
    if [size for size in actual if size != 1] == [size for size in expected if size != 1]:
        return f"add `reshape: {{shape: {list(expected)}}}` to data.preprocess"
    if len(expected) == len(actual) == 3:
        return _image_hint(tuple(expected), tuple(actual))
    return "choose a model for samples of this shape, or change data.source"


def _image_hint(expected: tuple[Any, ...], actual: tuple[int, ...]) -> str:
    """Return what to do about images whose size or channels are not those of a model's input."""
    if actual[-2:] == expected[:2] and actual[0] == expected[2]:
        return "the samples are channels-first: store them channels-last, with `x.transpose(0, 2, 3, 1)` in numpy"
    if actual[2] == 4 and expected[2] == 3:
        return "remove the fourth channel (transparency) of the samples, with `x[..., :3]` in numpy"
    to_colour = COLOUR_STEPS.get((actual[2], expected[2]))
    steps = [] if to_colour is None else [to_colour]
    if actual[:2] != expected[:2] and None not in expected[:2]:
        steps.append(f"`resize: {{size: {list(expected[:2])}}}`")
    if not steps or (to_colour is None and expected[2] not in (None, actual[2])):
        return "choose another model, or change data.source"
    return f"add {' and '.join(steps)} to data.preprocess, or choose another model"


def _refuse_custom(path: Path) -> None:
    """Refuse a file that the runtime does not load, and that has custom operators."""
    refuse_flex(path)
    operators = _custom_operators(path)
    if operators:
        raise ModelError(
            f"the TFLite runtime of this host lacks its custom operators: {', '.join(operators)}",
            where=str(path),
            allowed="built-in operators of TensorFlow Lite",
            hint="if it is compiled for an accelerator already, give the .tflite file that it was compiled from",
        )


def refuse_flex(path: Path) -> None:
    """Raise a ModelError for a file with operators of TensorFlow, which no TFLite runtime for the Edge TPU has."""
    operators = [name for name in _custom_operators(path) if name.startswith(FLEX)]
    if operators:
        raise ModelError(
            f"contains operators of TensorFlow (Flex): {', '.join(operators)}",
            where=str(path),
            allowed="built-in operators of TensorFlow Lite",
            hint="replace the layers that became these operators, and convert without SELECT_TF_OPS",
        )


def _custom_operators(path: Path) -> list[str]:
    try:
        return sorted({operator.name for operator in graph.read(path).operators if operator.custom})
    except ModelError:  # reported by the runtime
        return []


def version() -> str:
    """Return name and version of the runtime."""
    return f"ai-edge-litert {importlib.metadata.version('ai-edge-litert')}"
