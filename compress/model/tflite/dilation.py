"""Dilated convolutions that converters write as SPACE_TO_BATCH_ND, a convolution and BATCH_TO_SPACE_ND."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.edit import SAME, VALID, Edit, reshape
from compress.model.tflite.graph import NONE, Graph, Operator, Tensor

_CONVOLUTIONS = ("CONV_2D", "DEPTHWISE_CONV_2D")
_FROM_BATCH = ("BATCH_TO_SPACE_ND",)
_TO_MAP = ("EXPAND_DIMS", "RESHAPE")
"""The operators that make a map [batch, 1, length, channels] before a 1-D convolution."""
_FROM_MAP = ("SQUEEZE", "RESHAPE")
"""The operators that remove that axis after a 1-D convolution."""


def dilated_convolution(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace SPACE_TO_BATCH_ND, a convolution and BATCH_TO_SPACE_ND by one convolution with dilation."""
    chain = _chain(operator, (_CONVOLUTIONS, _FROM_BATCH), graph)
    dilation = _dilation(operator, chain[-1], graph) if chain else None
    if dilation is None or len(dilation.rates) != 2:
        return
    _, convolution, last = chain
    if not _is_unpadded_with_unit_stride(convolution):
        return
    x = graph.input_tensors(operator)[0]
    out = graph.output_tensors(last)[0]
    edit = Edit(graph)
    edit.remove(operator, last)
    kernel = graph.tensors[convolution.inputs[1]].shape[1:3]
    reach = (np.asarray(kernel) - 1) * dilation.rates
    before, after = dilation.padding.T
    same = np.array_equal(before, reach // 2) and np.array_equal(before + after, reach)
    source = x.index
    if not same and dilation.padding.any():
        source = _padded(edit, x, x.index, x.shape, [[0, 0], *dilation.padding.tolist(), [0, 0]])
    height, width = dilation.rates
    changed = {"padding": SAME if same else VALID, "dilationHFactor": height, "dilationWFactor": width}
    edit.change(convolution, inputs=[source, *convolution.inputs[1:]], outputs=[out.index], options=changed)
    yield edit


def dilated_row(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace the operators of a dilated Conv1D by RESHAPE, one CONV_2D with dilation, and RESHAPE."""
    chain = _chain(operator, (_TO_MAP, _CONVOLUTIONS, _FROM_MAP, _FROM_BATCH), graph)
    dilation = _dilation(operator, chain[-1], graph) if chain else None
    x = graph.input_tensors(operator)[0]
    if dilation is None or len(dilation.rates) != 1 or len(x.shape) != 3:
        return
    _, widened, convolution, _, last = chain
    # Files of any batch size do not say that it is the block's.
    batch, *dimensions = graph.output_tensors(operator)[0].shape
    is_row = graph.output_tensors(widened)[0].shape == (batch, 1, *dimensions)
    kernel = graph.tensors[convolution.inputs[1]].shape
    if not is_row or kernel[1] != 1 or not _is_unpadded_with_unit_stride(convolution):
        return
    out = graph.output_tensors(last)[0]
    edit = Edit(graph)
    edit.remove(*chain)
    shape = (1, *x.shape)
    source = reshape(edit, x.index, edit.like(x, "row", shape=shape), shape)
    if dilation.padding.any():
        source = _padded(edit, x, source, shape, [[0, 0], [0, 0], *dilation.padding.tolist(), [0, 0]])
    output_row = edit.like(out, "row", shape=(1, *out.shape))
    options = dict.fromkeys(("dilationHFactor", "dilationWFactor"), dilation.rates[0])
    edit.change(convolution, inputs=[source, *convolution.inputs[1:]], outputs=[output_row], options=options)
    reshape(edit, output_row, out.index, out.shape)
    yield edit


@dataclass(frozen=True)
class _Dilation:
    """The dilation of a convolution between SPACE_TO_BATCH_ND and BATCH_TO_SPACE_ND.

    Attributes:
        padding: the padding before and after each of these axes, without what BATCH_TO_SPACE_ND crops, [axes, 2].
    """

    rates: list[int]
    padding: NDArray[np.int32]


def _dilation(to_batch: Operator, from_batch: Operator, graph: Graph) -> _Dilation | None:
    """Return the dilation; None if a parameter is not constant, or an axis is cropped."""
    _, block, pads = graph.input_tensors(to_batch)
    crops = graph.tensors[from_batch.inputs[2]]
    if not (block.is_constant and pads.is_constant and crops.is_constant):
        return None
    padding = pads.array() - crops.array()
    return None if (padding < 0).any() else _Dilation(block.array().ravel().tolist(), padding)


def _chain(first: Operator, names: Sequence[Collection[str]], graph: Graph) -> list[Operator]:
    """Return an operator and the only consumers that follow it, with these names; empty if a name differs."""
    chain = [first]
    for allowed in names:
        consumer = only_consumer(graph, chain[-1])
        if consumer is None or consumer.name not in allowed:
            return []
        chain.append(consumer)
    return chain


def _is_unpadded_with_unit_stride(convolution: Operator) -> bool:
    strides = (convolution.option("strideH", 1), convolution.option("strideW", 1))
    return strides == (1, 1) and bool(convolution.option("padding", SAME) == VALID)


def only_consumer(graph: Graph, operator: Operator) -> Operator | None:
    """Return the only operator that uses an operator's output; None if there are several, or it is a graph output."""
    (output,) = operator.outputs if len(operator.outputs) == 1 else (NONE,)
    consumers = graph.consumers.get(output, [])
    return consumers[0] if len(consumers) == 1 and output not in graph.outputs else None


def _padded(edit: Edit, x: Tensor, source: int, shape: Sequence[int], amounts: Sequence[Sequence[int]]) -> int:
    around = np.asarray(amounts, np.int32)
    padded = edit.like(
        x, "padded", shape=[size + int(amount.sum()) for size, amount in zip(shape, around, strict=True)]
    )
    paddings = edit.tensor(f"{x.name}/paddings", around.shape, "INT32", values=around)
    edit.add("PAD", [source, paddings], [padded], edit.options("PadOptions"))
    return padded
