"""Changing a graph: operators taken out and put in, parts of it made into models of their own.

What an edit does not touch stays as it is in the file, buffers included: they are shared, not copied.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.tflite import graph as graphs
from compress.tflite.graph import NONE, Graph, Operator, Quantization, Tensor

EIGHT_BIT_VERSIONS = {
    "CONV_2D": 3,
    "DEPTHWISE_CONV_2D": 3,
    "FULLY_CONNECTED": 4,
    "PRELU": 1,
    "QUANTIZE": 1,
    "RESHAPE": 1,
    "TRANSPOSE_CONV": 3,
}
"""The first version of each operator that takes int8; 2 for all others. Source: TFLite's op_version.cc."""

SAME = 0
"""The value of `padding` in the schema of TFLite for output maps as large as the input."""
VALID = 1
"""The value of `padding` in the schema of TFLite for windows inside of the map only."""


class Edit:
    """One change of a graph, proposed: some operators replaced by others.

    Attributes:
        before: the graph that is changed; it stays as it is.
        removed: indices of the operators of `before` that are taken out.
        added: the operators put in, as the schema's `OperatorT`.
        inputs: what the caller of the changed graph fills.
        outputs: what the caller of the changed graph reads.
        exact: what the operators taken out stand for, without their own rounding, if the edit is to be
            compared with that: a graph with the same inputs and outputs.
    """

    def __init__(self, before: Graph) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.before = before
        self._schema = schema
        self._source = copy.copy(before.source)
        self._main = copy.copy(before.source.subgraphs[0])
        self._source.subgraphs = [self._main, *before.source.subgraphs[1:]]
        self._source.operatorCodes = list(before.source.operatorCodes)
        self._source.buffers = list(before.source.buffers)
        self._main.tensors = list(self._main.tensors)
        self.removed: set[int] = set()
        self.added: list[Any] = []
        self.exact: Graph | None = None
        self.inputs, self.outputs = list(before.inputs), list(before.outputs)

    def remove(self, *operators: Operator) -> None:
        """Takes operators out."""
        self.removed.update(operator.index for operator in operators)

    def add(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: Any = None) -> None:
        """Puts an 8-bit operator in; `options` is the schema's object, see `options()`."""
        made = self._schema.OperatorT()
        made.opcodeIndex = self._code(name, EIGHT_BIT_VERSIONS.get(name, 2))
        made.inputs, made.outputs = list(inputs), list(outputs)
        if options is not None:
            table = type(options).__name__.removesuffix("T")
            made.builtinOptionsType = getattr(self._schema.BuiltinOptions, table)
            made.builtinOptions = options
        self.added.append(made)

    def change(
        self,
        operator: Operator,
        *,
        inputs: Sequence[int] | None = None,
        outputs: Sequence[int] | None = None,
        version: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Puts an operator in the place of a like one, with some of its parts changed."""
        self.remove(operator)
        made = copy.copy(self._main.operators[operator.index])
        made.inputs = list(operator.inputs if inputs is None else inputs)
        made.outputs = list(operator.outputs if outputs is None else outputs)
        if version is not None:
            made.opcodeIndex = self._code(operator.name, version)
        if options:
            made.builtinOptions = copy.copy(made.builtinOptions)
            vars(made.builtinOptions).update(options)
        self.added.append(made)

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        quantization: Quantization | None = None,
        values: NDArray[Any] | None = None,
    ) -> int:
        """A new tensor, constant if it has values; gives its index."""
        made = self._schema.TensorT()
        made.name, made.shape = name.encode(), [int(side) for side in shape]
        made.type = getattr(self._schema.TensorType, dtype)
        made.buffer = 0
        if values is not None:
            buffer = self._schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
            made.buffer = len(self._source.buffers)
            self._source.buffers.append(buffer)
        if quantization is not None:
            made.quantization = self._schema.QuantizationParametersT()
            made.quantization.scale = list(quantization.scale)
            made.quantization.zeroPoint = list(quantization.zero_point)
            made.quantization.quantizedDimension = quantization.axis
        self._main.tensors.append(made)
        return len(self._main.tensors) - 1

    def like(self, tensor: Tensor, suffix: str, **changed: Any) -> int:
        """A new computed tensor like another one, but for what is `changed`; gives its index."""
        parts = {"shape": tensor.shape, "dtype": tensor.dtype, "quantization": tensor.quantization, **changed}
        return self.tensor(f"{tensor.name}/{suffix}", **parts)

    def integers(self, name: str, *values: int) -> int:
        """A new int32 constant (axes, a shape, ...); gives its index."""
        return self.tensor(name, (len(values),), "INT32", values=np.asarray(values, np.int32))

    def fix_shape(self, index: int, shape: Sequence[int]) -> None:
        """Gives a tensor a shape that no longer changes from call to call."""
        made = copy.copy(self._main.tensors[index])
        made.shape, made.shapeSignature = [int(side) for side in shape], None
        self._main.tensors[index] = made

    def rename(self, index: int, name: str) -> None:
        """Gives a tensor another name."""
        made = copy.copy(self._main.tensors[index])
        made.name = name.encode()
        self._main.tensors[index] = made

    def options(self, table: str, **values: Any) -> Any:
        """An options object of the schema: `options("AddOptions")`."""
        made = getattr(self._schema, f"{table}T")()
        vars(made).update(values)
        return made

    def graph(self) -> Graph:
        """The changed graph, its operators in an order in which they can be executed."""
        first = min(self.removed, default=0)
        ends = dict(zip((*self.before.inputs, *self.before.outputs), (*self.inputs, *self.outputs), strict=True))
        kept = [(i, each) for i, each in enumerate(self._main.operators) if i not in self.removed]
        placed = [*((i, 1, each) for i, each in kept), *((first, 0, each) for each in self.added)]
        main = copy.copy(self._main)
        main.operators = _in_order([each for _, _, each in sorted(placed, key=lambda item: item[:2])])
        main.inputs, main.outputs = list(self.inputs), list(self.outputs)
        source = copy.copy(self._source)
        source.subgraphs = [main, *self._source.subgraphs[1:]]
        source.signatureDefs = _with_ends(source.signatureDefs, ends)
        return graphs.from_source(source)

    def _code(self, name: str, version: int) -> int:
        codes = self._source.operatorCodes
        number = getattr(self._schema.BuiltinOperator, name)
        for index, code in enumerate(codes):
            if max(code.builtinCode, code.deprecatedBuiltinCode) == number and code.version == version:
                return index
        made = self._schema.OperatorCodeT()
        made.builtinCode, made.deprecatedBuiltinCode, made.version = number, min(number, 127), version
        codes.append(made)
        return len(codes) - 1


def _in_order(operators: Sequence[Any]) -> list[Any]:
    """Operators sorted so that each comes after those whose outputs it takes, otherwise as they stood."""
    maker = {tensor: position for position, each in enumerate(operators) for tensor in each.outputs}
    waits = [{maker[t] for t in each.inputs if t in maker and maker[t] != i} for i, each in enumerate(operators)]
    waiting: dict[int, list[int]] = {}
    for position, others in enumerate(waits):
        for other in others:
            waiting.setdefault(other, []).append(position)
    ready = [position for position, others in enumerate(waits) if not others]
    order = []
    while ready:
        position = heapq.heappop(ready)
        order.append(operators[position])
        for other in waiting.get(position, ()):
            waits[other].discard(position)
            if not waits[other]:
                heapq.heappush(ready, other)
    if len(order) != len(operators):
        raise ValueError("operators depend on each other in a circle")
    return order


def extract(graph: Graph, operators: Collection[int], inputs: Sequence[int], outputs: Sequence[int]) -> Graph:
    """Some operators of a graph as a model of their own, with nothing in it that they do not need."""
    return compact(select_operators(graph, operators, inputs, outputs))


def select_operators(graph: Graph, operators: Collection[int], inputs: Sequence[int], outputs: Sequence[int]) -> Graph:
    """The same, its tensors numbered as in the whole graph."""
    main = copy.copy(graph.source.subgraphs[0])
    main.operators = [each for index, each in enumerate(main.operators) if index in operators]
    main.inputs, main.outputs = list(inputs), list(outputs)
    source = copy.copy(graph.source)
    source.subgraphs, source.signatureDefs = [main], None
    return graphs.from_source(source)


def compact(graph: Graph) -> Graph:
    """The graph without tensors, operator codes and buffers that nothing refers to.

    A code that is left behind would still be looked for, and refused, by an old runtime.
    """
    source = copy.copy(graph.source)
    main = copy.copy(source.subgraphs[0])
    own = [each for each in source.signatureDefs or [] if each.subgraphIndex == 0]
    named = [entry.tensorIndex for each in own for entry in [*(each.inputs or []), *(each.outputs or [])]]
    used = {*main.inputs, *main.outputs, *named}
    for operator in main.operators:
        used.update(_integers(operator.inputs), _integers(operator.outputs), _integers(operator.intermediates))
    place = {old: new for new, old in enumerate(sorted(used - {NONE}))} | {NONE: NONE}
    main.tensors = [main.tensors[old] for old in place if old != NONE]
    main.inputs, main.outputs = [place[t] for t in main.inputs], [place[t] for t in main.outputs]
    main.operators = [_moved(each, place) for each in main.operators]
    source.subgraphs = [main, *source.subgraphs[1:]]
    source.signatureDefs = _with_ends(source.signatureDefs, place)
    _drop_codes(source)
    _drop_buffers(source)
    return graphs.from_source(source)


def _integers(items: Iterable[int] | None) -> list[int]:
    return [] if items is None else [int(item) for item in items]


def _moved(operator: Any, place: Mapping[int, int]) -> Any:
    made = copy.copy(operator)
    for field in ("inputs", "outputs", "intermediates"):
        if getattr(operator, field) is not None:
            setattr(made, field, [place[index] for index in _integers(getattr(operator, field))])
    return made


def _with_ends(signatures: Iterable[Any] | None, place: Mapping[int, int]) -> list[Any] | None:
    """The signatures of the main subgraph with their tensors renumbered, the others as they are."""
    result = []
    for each in signatures or ():
        made = copy.copy(each)
        for end in ("inputs", "outputs") if each.subgraphIndex == 0 else ():
            entries = [copy.copy(entry) for entry in getattr(each, end) or []]
            for entry in entries:
                entry.tensorIndex = place.get(entry.tensorIndex, entry.tensorIndex)
            setattr(made, end, entries)
        result.append(made)
    return result or None


def _drop_codes(source: Any) -> None:
    used = sorted({each.opcodeIndex for subgraph in source.subgraphs for each in subgraph.operators or []})
    place = {old: new for new, old in enumerate(used)}
    subgraphs = []
    for subgraph in source.subgraphs:
        made = copy.copy(subgraph)
        made.operators = [copy.copy(each) for each in subgraph.operators or []]
        for each in made.operators:
            each.opcodeIndex = place[each.opcodeIndex]
        subgraphs.append(made)
    source.operatorCodes = [source.operatorCodes[old] for old in used]
    source.subgraphs = subgraphs


def _drop_buffers(source: Any) -> None:
    tensors = [tensor for subgraph in source.subgraphs for tensor in subgraph.tensors or []]
    metadata = [copy.copy(each) for each in source.metadata or []]
    used = sorted({0, *(tensor.buffer for tensor in tensors), *(each.buffer for each in metadata)})
    place = {old: new for new, old in enumerate(used)}
    source.buffers = [source.buffers[old] for old in used]
    for subgraph in source.subgraphs:
        subgraph.tensors = [copy.copy(tensor) for tensor in subgraph.tensors or []]
        for tensor in subgraph.tensors:
            tensor.buffer = place[tensor.buffer]
    for each in metadata:
        each.buffer = place[each.buffer]
    source.metadata, source.metadataBuffer = metadata or None, None


def reshape(edit: Edit, source: int, target: int, shape: Sequence[int]) -> int:
    """Add a RESHAPE between two tensors; return the second."""
    sizes = edit.integers("shape", *shape)
    edit.add("RESHAPE", [source, sizes], [target], edit.options("ReshapeOptions", newShape=list(shape)))
    return target
