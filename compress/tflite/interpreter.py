"""Run a .tflite model on this host, with float samples as inputs and float outputs for every type of model."""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.tflite.comparison import first_line
from deploy.contract.detection import ordered
from deploy.contract.preprocessing import dequantize, quantize


class LoadedModel:
    """A loaded model with one input and one output, or with the boxes and scores of a detector as outputs.

    Attributes:
        outputs: the details of the outputs; for a detector, the boxes first.
        output: the last output.

    Args:
        path: the .tflite file.
        reproducible: use the default kernels without a delegate, which are bit-exact between versions, instead of the
            accelerated ones (XNNPACK), whose int8 results differ by some steps.
        threads: the number of threads of the runtime.

    Raises:
        ModelError: the runtime rejects the model, or it has several inputs or outputs.
    """

    def __init__(self, path: Path, *, reproducible: bool, threads: int = 1) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES if reproducible else OpResolverType.AUTO
        try:
            self.interpreter = Interpreter(str(path), num_threads=threads, experimental_op_resolver_type=resolver)
            self.interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"the TFLite runtime refuses it: {first_line(error)}", where=str(path)) from error
        inputs = self.interpreter.get_input_details()
        outputs = self.interpreter.get_output_details()
        ordered_outputs = outputs if len(outputs) == 1 else ordered(outputs)
        if len(inputs) != 1 or ordered_outputs is None:
            raise ModelError(
                f"has {len(inputs)} inputs and {len(outputs)} outputs",
                where=str(path),
                allowed="one of each, or the boxes [1, anchors, 4] and scores [1, anchors, classes] of a detector",
            )
        self.input = inputs[0]
        self.outputs = ordered_outputs
        self.output = ordered_outputs[-1]
        _refuse_without_scale("input", self.input, path)
        for output in ordered_outputs:
            _refuse_without_scale("output", output, path)

    def feed(self, sample: NDArray[np.float32]) -> NDArray[Any]:
        """Return a preprocessed sample (without batch) as the model's input tensor, quantized if the input is.

        Raises:
            ModelError: the sample's shape does not fit.
        """
        shape = tuple(int(side) for side in self.input["shape"])
        if (1, *sample.shape) != shape:
            raise ModelError(
                f"takes {list(shape)}, but the data gives {[1, *sample.shape]}",
                hint="add a resize step to data.preprocess, or choose another model",
            )
        dtype = self.input["dtype"]
        if np.issubdtype(dtype, np.integer):
            scale, zero_point = self.input["quantization"]
            quantized: NDArray[Any] = quantize(sample[np.newaxis], scale, zero_point, dtype)
            return quantized
        return sample[np.newaxis].astype(dtype)

    def raw(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """Run one inference; return a copy of the output tensor in the model's type.

        The two outputs of a detector are concatenated: [1, anchors * (4 + classes)].
        """
        self.interpreter.set_tensor(self.input["index"], tensor)
        self.interpreter.invoke()
        values: list[NDArray[Any]] = [self.interpreter.get_tensor(value["index"]) for value in self.outputs]
        return values[0] if len(values) == 1 else np.concatenate([value.reshape(1, -1) for value in values], axis=1)

    def pair(self, sample: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return a detector's dequantized boxes [anchors, 4] and scores [anchors, classes] for a preprocessed sample.

        Raises:
            ModelError: the model has only one output, or the sample's shape does not fit.
        """
        if len(self.outputs) != 2:
            raise ModelError(
                "has one output", allowed="the boxes and scores of a detector", hint="choose another model"
            )
        shapes = [tuple(int(side) for side in detail["shape"][1:]) for detail in self.outputs]
        row = self.raw(self.feed(sample)).reshape(-1)
        cut = math.prod(shapes[0])
        boxes, scores = (
            _dequantized(piece, detail).reshape(shape)
            for piece, shape, detail in zip((row[:cut], row[cut:]), shapes, self.outputs, strict=True)
        )
        return boxes, scores

    def scores(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the output for every sample, dequantized and flattened: [n, outputs]; two outputs are concatenated."""
        if len(self.outputs) == 2:
            return np.stack([np.concatenate([part.reshape(-1) for part in self.pair(sample)]) for sample in samples])
        rows = [self.raw(self.feed(sample)).reshape(-1) for sample in samples]
        return _dequantized(np.stack(rows), self.output)


def _refuse_without_scale(end: str, detail: dict[str, Any], path: Path) -> None:
    if np.issubdtype(detail["dtype"], np.integer) and not detail["quantization"][0]:
        what = f"its {end} is {np.dtype(detail['dtype']).name} without one scale"
        raise ModelError(what, where=str(path), allowed="float, or quantized per tensor")


def _dequantized(stored: NDArray[Any], detail: dict[str, Any]) -> NDArray[np.float32]:
    if np.issubdtype(stored.dtype, np.integer):
        return cast(NDArray[np.float32], dequantize(stored, *detail["quantization"]))
    return stored.astype(np.float32)


def describe(detail: dict[str, Any]) -> dict[str, Any]:
    """Return an input or output in the form of a bundle's manifest."""
    scale, zero_point = detail["quantization"]
    return {
        "name": str(detail["name"]),
        "shape": [int(side) for side in detail["shape"]],
        "dtype": np.dtype(detail["dtype"]).name,
        "scale": float(scale) or None,
        "zero_point": int(zero_point),
    }


def version() -> str:
    """Return name and version of the runtime."""
    return f"ai-edge-litert {importlib.metadata.version('ai-edge-litert')}"
