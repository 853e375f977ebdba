"""Runs a .tflite model on this host: float samples in, float scores out, whatever the model's own types."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from deploy.preprocessing import dequantize, quantize


class Model:
    """A loaded model with one input and one output.

    Args:
        path: the .tflite file.
        reproducible: without the accelerated kernels (XNNPACK), whose int8 results differ
            by some steps between versions; the reference kernels agree to the bit.
        threads: threads of the runtime.

    Raises:
        ModelError: the runtime refuses it, or it has several inputs or outputs.
    """

    def __init__(self, path: Path, *, reproducible: bool, threads: int = 1) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES if reproducible else OpResolverType.AUTO
        try:
            self.interpreter = Interpreter(str(path), num_threads=threads, experimental_op_resolver_type=resolver)
            self.interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"the TFLite runtime refuses it: {first}", where=str(path)) from error
        inputs, outputs = self.interpreter.get_input_details(), self.interpreter.get_output_details()
        if len(inputs) != 1 or len(outputs) != 1:
            raise ModelError(
                f"has {len(inputs)} inputs and {len(outputs)} outputs", where=str(path), allowed="one of each, so far"
            )
        self.input, self.output = inputs[0], outputs[0]
        for end, detail in (("input", self.input), ("output", self.output)):
            if np.issubdtype(detail["dtype"], np.integer) and not detail["quantization"][0]:
                raise ModelError(
                    f"its {end} is {np.dtype(detail['dtype']).name} without one scale",
                    where=str(path),
                    allowed="float, or quantized per tensor",
                )

    def feed(self, sample: NDArray[np.float32]) -> NDArray[Any]:
        """A preprocessed sample (without batch) as the model's input tensor, quantized if it is.

        Raises:
            ModelError: the sample's shape does not fit.
        """
        shape = tuple(int(side) for side in self.input["shape"])
        if (1, *sample.shape) != shape:
            raise ModelError(
                f"takes {list(shape)}, but the data gives {[1, *sample.shape]}",
                todo="add a resize step to data.preprocess, or choose another model",
            )
        dtype = self.input["dtype"]
        if np.issubdtype(dtype, np.integer):
            scale, zero_point = self.input["quantization"]
            quantized: NDArray[Any] = quantize(sample[np.newaxis], scale, zero_point, dtype)
            return quantized
        return sample[np.newaxis].astype(dtype)

    def raw(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """One inference: input tensor in, a copy of the output tensor out, in the model's own types."""
        self.interpreter.set_tensor(self.input["index"], tensor)
        self.interpreter.invoke()
        output: NDArray[Any] = self.interpreter.get_tensor(self.output["index"])
        return output

    def scores(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The output for every sample of a batch, dequantized and flattened: [n, outputs]."""
        rows = [self.raw(self.feed(sample)).reshape(-1) for sample in samples]
        stacked = np.stack(rows)
        if np.issubdtype(stacked.dtype, np.integer):
            return cast(NDArray[np.float32], dequantize(stacked, *self.output["quantization"]))
        return stacked.astype(np.float32)


def describe(detail: dict[str, Any]) -> dict[str, Any]:
    """An input or output as it stands in a bundle's manifest."""
    scale, zero_point = detail["quantization"]
    return {
        "name": str(detail["name"]),
        "shape": [int(side) for side in detail["shape"]],
        "dtype": np.dtype(detail["dtype"]).name,
        "scale": float(scale) or None,
        "zero_point": int(zero_point),
    }


def version() -> str:
    """Name and version of the runtime."""
    return f"ai-edge-litert {importlib.metadata.version('ai-edge-litert')}"
