"""Cut the lookup of an embedding off a model: what remains takes the rows of the table.

A lookup takes indices, which have no 8-bit form, and the Edge TPU's compiler does not map it. So it happens before the
quantized model (`deploy.contract.tensors`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import LayerOutput, Network, tensors_in
from compress.model.ir.layer_specs import EMBEDDING, spec_of, spec_of_live
from deploy.contract.preprocessing import quantize
from deploy.contract.tensors import TensorDescription


@dataclass(frozen=True)
class CutLookup:
    """A model in two parts.

    Attributes:
        table: the rows of the embedding: float32 [rows, width].
        network: the layers after it, with the input [..., width].
    """

    table: NDArray[np.float32]
    network: Network

    def rows(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return preprocessed samples, the indices of rows [n, ...], as the rows [n, ..., width].

        Fractions are cut off, as Keras does it.
        """
        return self.table[np.clip(np.trunc(samples), 0, len(self.table) - 1).astype(np.int64)]

    def stored(self, tensor: TensorDescription) -> NDArray[np.integer]:
        """Return the table as an input stores it: [rows, width]."""
        assert tensor.scale is not None
        stored: NDArray[np.integer] = quantize(self.table, tensor.scale, tensor.zero_point, tensor.dtype)
        return stored


def input_rows(model: Any) -> int | None:
    """Return the number of rows of the embedding that reads the only input of a Keras model; None if none does."""
    if not any(spec_of_live(layer) == EMBEDDING for layer in model.layers):
        return None
    network = keras_graph.read(model)
    inputs = list(tensors_in(network.inputs))
    if len(inputs) != 1:
        return None
    readers = [network.layers[name] for name, *_ in network.consumers().get(inputs[0], [])]
    return min((layer.config["input_dim"] for layer in readers if spec_of(layer) == EMBEDDING), default=None)


def cut(network: Network) -> CutLookup | None:
    """Return a model without the lookup at its beginning; None if it has none, or has other uses of its input.

    A lookup that marks padding (`mask_zero`) stays: later layers read the mask.
    """
    inputs = list(tensors_in(network.inputs))
    if len(inputs) != 1:
        return None
    readers = network.consumers().get(inputs[0], [])
    if len(readers) != 1 or inputs[0] in tensors_in(network.outputs):
        return None
    lookup = network.layers[readers[0][0]]
    spec = spec_of(lookup)
    output = LayerOutput(lookup.name)
    shape = network.shapes[output]
    if spec != EMBEDDING or len(lookup.calls) != 1 or spec.masks(lookup.config) or None in shape or len(shape) < 2:
        return None
    entrance = network.layers[inputs[0].layer]
    changed = replace(entrance.configured(batch_shape=[None, *shape], dtype="float32"), integers=frozenset())
    after = network.edited({lookup.name: None, entrance.name: changed}, {output: inputs[0]})
    after = replace(after, shapes={**after.shapes, inputs[0]: shape})
    return CutLookup(np.asarray(lookup.weights[0], np.float32), after)
