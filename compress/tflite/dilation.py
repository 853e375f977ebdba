"""Dilated convolutions that converters write as SPACE_TO_BATCH_ND, a convolution and BATCH_TO_SPACE_ND."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from compress.tflite.edit import SAME, VALID, Edit, reshape
from compress.tflite.graph import NONE, Graph, Operator, Tensor

_TO_MAP = ("EXPAND_DIMS", "RESHAPE"), ("CONV_2D", "DEPTHWISE_CONV_2D")
_FROM_MAP = ("SQUEEZE", "RESHAPE"), ("BATCH_TO_SPACE_ND",)
"""The operators between SPACE_TO_BATCH_ND and BATCH_TO_SPACE_ND for a 1-D convolution."""


def dilated_convolution(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace SPACE_TO_BATCH_ND, a convolution and BATCH_TO_SPACE_ND by one convolution with dilation."""
    convolution = only_consumer(graph, operator)
    after = only_consumer(graph, convolution) if convolution else None
    if convolution is None or after is None or after.name != "BATCH_TO_SPACE_ND":
        return
    if convolution.name not in ("CONV_2D", "DEPTHWISE_CONV_2D") or convolution.option("padding", SAME) != VALID:
        return
    x, block, pads = graph.input_tensors(operator)
    crops = graph.tensors[after.inputs[2]]
    if not (block.is_constant and pads.is_constant and crops.is_constant) or block.elements != 2:
        return
    rate, amounts = block.array().ravel().tolist(), pads.array() - crops.array()
    if convolution.option("strideH", 1) != 1 or convolution.option("strideW", 1) != 1 or (amounts < 0).any():
        return
    edit, out = Edit(graph), graph.output_tensors(after)[0]
    edit.remove(operator, after)
    kernel = graph.tensors[convolution.inputs[1]].shape[1:3]
    reach = [(side - 1) * factor for side, factor in zip(kernel, rate, strict=True)]
    same = all(int(a[0]) == r // 2 and int(a[0] + a[1]) == r for a, r in zip(amounts, reach, strict=True))
    source = x.index
    if not same and amounts.any():
        source = _padded(edit, x, x.index, x.shape, [[0, 0], *amounts.tolist(), [0, 0]])
    changed = {"padding": SAME if same else VALID, "dilationHFactor": rate[0], "dilationWFactor": rate[1]}
    edit.change(convolution, inputs=[source, *convolution.inputs[1:]], outputs=[out.index], options=changed)
    yield edit


def dilated_row(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace the operators of a dilated Conv1D by RESHAPE, one CONV_2D with dilation, and RESHAPE."""
    chain: list[Operator] = [operator]
    for names in (*_TO_MAP, *_FROM_MAP):
        after = only_consumer(graph, chain[-1])
        if after is None or after.name not in names:
            return
        chain.append(after)
    _, widened, convolution, _, last = chain
    (x, block, pads), crops = graph.input_tensors(operator), graph.tensors[last.inputs[2]]
    if not all(constant.is_constant for constant in (block, pads, crops)) or block.elements != 1 or len(x.shape) != 3:
        return
    kernel, amounts = graph.tensors[convolution.inputs[1]].shape, pads.array() - crops.array()
    batch, *sides = graph.output_tensors(operator)[0].shape  # files of any batch size do not say that it is the block's
    wide = graph.output_tensors(widened)[0].shape == (batch, 1, *sides)
    strides = convolution.option("strideH", 1), convolution.option("strideW", 1)
    if not wide or kernel[1] != 1 or strides != (1, 1) or convolution.option("padding", SAME) != VALID:
        return
    edit, out, rate = Edit(graph), graph.output_tensors(last)[0], block.array().item()
    edit.remove(*chain)
    shape = (1, *x.shape)
    source = reshape(edit, x.index, edit.like(x, "row", shape=shape), shape)
    if amounts.any():
        source = _padded(edit, x, source, shape, [[0, 0], [0, 0], *amounts.tolist(), [0, 0]])
    output_row = edit.like(out, "row", shape=(1, *out.shape))
    options = dict.fromkeys(("dilationHFactor", "dilationWFactor"), rate)
    edit.change(convolution, inputs=[source, *convolution.inputs[1:]], outputs=[output_row], options=options)
    reshape(edit, output_row, out.index, out.shape)
    yield edit


def only_consumer(graph: Graph, operator: Operator) -> Operator | None:
    """Return the only operator that uses an operator's output; None if there are several, or it is a graph output."""
    (output,) = operator.outputs if len(operator.outputs) == 1 else (NONE,)
    consumers = graph.consumers.get(output, [])
    return consumers[0] if len(consumers) == 1 and output not in graph.outputs else None


def _padded(edit: Edit, x: Tensor, source: int, shape: Sequence[int], amounts: Sequence[Sequence[int]]) -> int:
    around = np.asarray(amounts, np.int32)
    padded = edit.like(
        x, "padded", shape=[side + int(amount.sum()) for side, amount in zip(shape, around, strict=True)]
    )
    paddings = edit.tensor(f"{x.name}/paddings", around.shape, "INT32", values=around)
    edit.add("PAD", [source, paddings], [padded], edit.options("PadOptions"))
    return padded
