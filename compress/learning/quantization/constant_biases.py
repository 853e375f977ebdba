"""Biases with the same value in every channel, which TensorFlow's converter quantizes wrongly.

It stores such a bias as one number, and divides it by the scale of the first channel only. But each channel of a
convolution has a scale of its own, so all other channels get a wrong bias. Examples are biases that training left where
they started: 1 in the forget gate of an LSTM, the logarithm of a small probability in the head of a detector.
"""

from __future__ import annotations

import numpy as np

from compress.model.tflite import graph as graphs
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import Tensor


def corrected(content: bytes) -> bytes:
    """Return a .tflite file from the converter with each bias divided by the scale of its channel."""
    graph = graphs.parse(content)
    wrong = [tensor for tensor in graph.tensors if _is_wrong(tensor)]
    if not wrong:
        return content
    edit = Edit(graph)
    for tensor in wrong:
        assert tensor.quantization is not None
        scales = np.array(tensor.quantization.scale)
        stored = tensor.array()
        edit.assign(tensor.index, np.round(stored * (scales[0] / scales)).astype(stored.dtype))
    return graphs.serialize(edit.graph())


def _is_wrong(tensor: Tensor) -> bool:
    """Return whether a tensor is a bias with the same stored number for channels of different scales."""
    quantization = tensor.quantization
    if tensor.dtype != "INT32" or quantization is None or quantization.one_scale or not tensor.is_constant:
        return False
    return not tensor.is_zero and len(np.unique(tensor.array())) == 1
