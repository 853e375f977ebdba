"""Edits of a graph: remove and add operators, and extract parts of a graph as separate models.

An edit shares all unchanged parts with the original graph, including buffers.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite import graph as graphs
from compress.model.tflite import lookup
from compress.model.tflite.graph import NONE, Graph, Operator, Quantization, Tensor
from compress.model.tflite.sparse import integers

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
"""The value of `padding` in the TFLite schema for padding "same"."""
VALID = 1
"""The value of `padding` in the TFLite schema for padding "valid"."""


class Edit:
    """A proposed change of a graph: some operators are replaced by others.

    Attributes:
        before: the original graph, which is not modified.
        removed: the indices of the removed operators of `before`.
        added: the new operators, as the schema's `OperatorT`.
        exact: the function of the removed operators without rounding, as a graph with the same inputs and outputs; None
            if the edit is compared with the removed operators themselves.
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
        self.inputs = list(before.inputs)
        self.outputs = list(before.outputs)

    def remove(self, *operators: Operator) -> None:
        """Remove operators."""
        self.removed.update(operator.index for operator in operators)

    def add(
        self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: Any = None, version: int | None = None
    ) -> None:
        """Add an operator.

        `options` is the schema's object (see `options()`); the version None is the first one that takes int8.
        """
        operator = self._added(self._code(name, version or EIGHT_BIT_VERSIONS.get(name, 2)), inputs, outputs)
        if options is not None:
            table = type(options).__name__.removesuffix("T")
            operator.builtinOptionsType = getattr(self._schema.BuiltinOptions, table)
            operator.builtinOptions = options

    def add_custom(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: bytes) -> None:
        """Add a custom operator with its options as bytes."""
        operator = self._added(self._code("CUSTOM", 1, name), inputs, outputs)
        operator.customOptions = np.frombuffer(options, np.uint8)

    def _added(self, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> Any:
        operator = self._schema.OperatorT(opcodeIndex=code, inputs=list(inputs), outputs=list(outputs))
        self.added.append(operator)
        return operator

    def change(
        self,
        operator: Operator,
        *,
        inputs: Sequence[int] | None = None,
        outputs: Sequence[int] | None = None,
        version: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Replace an operator by a copy with some changed properties."""
        self.remove(operator)
        changed = copy.copy(self._main.operators[operator.index])
        changed.inputs = list(operator.inputs if inputs is None else inputs)
        changed.outputs = list(operator.outputs if outputs is None else outputs)
        if version is not None:
            changed.opcodeIndex = self._code(operator.name, version)
        if options:
            changed.builtinOptions = copy.copy(changed.builtinOptions)
            vars(changed.builtinOptions).update(options)
        self.added.append(changed)

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        quantization: Quantization | None = None,
        values: NDArray[Any] | None = None,
    ) -> int:
        """Add a tensor, which is constant if it has values, and return its index."""
        tensor = self._schema.TensorT()
        tensor.name = name.encode()
        tensor.shape = [int(size) for size in shape]
        tensor.type = getattr(self._schema.TensorType, dtype)
        tensor.buffer = 0 if values is None else self._buffer(values)
        if quantization is not None:
            tensor.quantization = self._schema.QuantizationParametersT()
            tensor.quantization.scale = list(quantization.scale)
            tensor.quantization.zeroPoint = list(quantization.zero_point)
            tensor.quantization.quantizedDimension = quantization.axis
        self._main.tensors.append(tensor)
        return len(self._main.tensors) - 1

    def like(self, tensor: Tensor, suffix: str, **changed: Any) -> int:
        """Add a tensor with the properties of another one, except those in `changed`, and return its index."""
        parts = {"shape": tensor.shape, "dtype": tensor.dtype, "quantization": tensor.quantization, **changed}
        return self.tensor(f"{tensor.name}/{suffix}", **parts)

    def integers(self, name: str, *values: int) -> int:
        """Add an int32 constant, such as axes or a shape, and return its index."""
        return self.tensor(name, (len(values),), "INT32", values=np.asarray(values, np.int32))

    def fix_shape(self, index: int, shape: Sequence[int]) -> None:
        """Set a static shape for a tensor."""
        tensor = self._copied_tensor(index)
        tensor.shape = [int(size) for size in shape]
        tensor.shapeSignature = None

    def rename(self, index: int, name: str) -> None:
        """Rename a tensor."""
        self._copied_tensor(index).name = name.encode()

    def assign(self, index: int, values: NDArray[Any]) -> None:
        """Give a constant other values of the same dtype and shape."""
        self._copied_tensor(index).buffer = self._buffer(values)

    def requantize(self, index: int, scale: Sequence[float], zero_point: int | None = None) -> None:
        """Give a quantized tensor another scale, and another zero point unless it is None."""
        tensor = self._copied_tensor(index)
        tensor.quantization = copy.copy(tensor.quantization)
        tensor.quantization.scale = np.asarray(scale, np.float32)
        if zero_point is not None:
            tensor.quantization.zeroPoint = np.array([zero_point], np.int64)

    def to_float(self, index: int, values: NDArray[Any] | None = None) -> None:
        """Make a tensor float32 without quantization; a constant gets these real values."""
        tensor = self._copied_tensor(index)
        tensor.type = self._schema.TensorType.FLOAT32
        tensor.quantization = None
        if values is not None:
            tensor.buffer = self._buffer(np.asarray(values, np.float32))

    def _copied_tensor(self, index: int) -> Any:
        """Replace a tensor, which the original graph shares, by a copy; return the copy."""
        tensor = self._main.tensors[index] = copy.copy(self._main.tensors[index])
        return tensor

    def _buffer(self, values: NDArray[Any]) -> int:
        buffer = self._schema.BufferT()
        buffer.data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        self._source.buffers.append(buffer)
        return len(self._source.buffers) - 1

    def options(self, table: str, **values: Any) -> Any:
        """Return an options object of the schema: `options("AddOptions")`."""
        table_object = getattr(self._schema, f"{table}T")()
        vars(table_object).update(values)
        return table_object

    def graph(self) -> Graph:
        """Return the changed graph, with its operators in execution order.

        Signatures are dropped if the number of inputs or outputs changes.
        """
        first = min(self.removed, default=0)
        kept = [(i, operator) for i, operator in enumerate(self._main.operators) if i not in self.removed]
        placed = [*((i, 1, operator) for i, operator in kept), *((first, 0, operator) for operator in self.added)]
        main = copy.copy(self._main)
        main.operators = _in_order([operator for _, _, operator in sorted(placed, key=lambda item: item[:2])])
        main.inputs = list(self.inputs)
        main.outputs = list(self.outputs)
        source = copy.copy(self._source)
        source.subgraphs = [main, *self._source.subgraphs[1:]]
        before, after = (*self.before.inputs, *self.before.outputs), (*self.inputs, *self.outputs)
        same_number = len(self.inputs) == len(self.before.inputs) and len(before) == len(after)
        ends = dict(zip(before, after, strict=False))
        source.signatureDefs = _with_ends(source.signatureDefs, ends) if same_number else None
        return graphs.from_source(source)

    def _code(self, name: str, version: int, custom: str | None = None) -> int:
        codes = self._source.operatorCodes
        number = getattr(self._schema.BuiltinOperator, name)
        custom_code = None if custom is None else custom.encode()
        for index, code in enumerate(codes):
            same_kind = max(code.builtinCode, code.deprecatedBuiltinCode) == number and code.customCode == custom_code
            if same_kind and code.version == version:
                return index
        new_code = self._schema.OperatorCodeT()
        new_code.customCode = custom_code
        new_code.builtinCode = number
        new_code.deprecatedBuiltinCode = min(number, 127)
        new_code.version = version
        codes.append(new_code)
        return len(codes) - 1


def _in_order(operators: Sequence[Any]) -> list[Any]:
    """Sort operators topologically; otherwise their order does not change. A cycle raises `graphlib.CycleError`."""
    producers = {tensor: position for position, operator in enumerate(operators) for tensor in operator.outputs}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for position, operator in enumerate(operators):
        used = {producers[tensor] for tensor in operator.inputs if tensor in producers}
        sorter.add(position, *(used - {position}))
    sorter.prepare()
    ready: list[int] = []
    order = []
    while sorter.is_active():
        for position in sorter.get_ready():
            heapq.heappush(ready, position)
        first = heapq.heappop(ready)
        order.append(operators[first])
        sorter.done(first)
    return order


def extract(graph: Graph, operators: Collection[int], inputs: Sequence[int], outputs: Sequence[int]) -> Graph:
    """Return some operators of a graph as a separate model with only the tensors and buffers that they need."""
    return compact(select_operators(graph, operators, inputs, outputs))


def select_operators(graph: Graph, operators: Collection[int], inputs: Sequence[int], outputs: Sequence[int]) -> Graph:
    """Return some operators of a graph as a separate model, with the tensor indices of the original graph.

    A lookup table stays only in a part with the inputs of the graph, which it is for.
    """
    main = copy.copy(graph.source.subgraphs[0])
    source = copy.copy(graph.source)
    if tuple(inputs) != graph.inputs:
        source.metadata = [entry for entry in source.metadata or [] if entry.name != lookup.NAME.encode()] or None
    main.operators = [operator for index, operator in enumerate(main.operators) if index in operators]
    main.inputs = list(inputs)
    main.outputs = list(outputs)
    source.subgraphs = [main]
    source.signatureDefs = None
    return graphs.from_source(source)


def compact(graph: Graph) -> Graph:
    """Return the graph without unused tensors, operator codes and buffers.

    An old runtime would reject the model because of an unused operator code that it does not support.
    """
    source = copy.copy(graph.source)
    main = copy.copy(source.subgraphs[0])
    signatures = [signature for signature in source.signatureDefs or [] if signature.subgraphIndex == 0]
    used = {*main.inputs, *main.outputs}
    for signature in signatures:
        used.update(entry.tensorIndex for entry in [*(signature.inputs or []), *(signature.outputs or [])])
    for operator in main.operators:
        used.update(integers(operator.inputs), integers(operator.outputs), integers(operator.intermediates))
    new_index = {old: new for new, old in enumerate(sorted(used - {NONE}))} | {NONE: NONE}
    main.tensors = [main.tensors[old] for old in new_index if old != NONE]
    main.inputs = [new_index[t] for t in main.inputs]
    main.outputs = [new_index[t] for t in main.outputs]
    main.operators = [_moved(signature, new_index) for signature in main.operators]
    source.subgraphs = [main, *source.subgraphs[1:]]
    source.signatureDefs = _with_ends(source.signatureDefs, new_index)
    _drop_codes(source)
    _drop_buffers(source)
    return graphs.from_source(source)


def _moved(operator: Any, new_index: Mapping[int, int]) -> Any:
    renumbered = copy.copy(operator)
    for field in ("inputs", "outputs", "intermediates"):
        if getattr(operator, field) is not None:
            setattr(renumbered, field, [new_index[index] for index in integers(getattr(operator, field))])
    return renumbered


def _with_ends(signatures: Iterable[Any] | None, new_index: Mapping[int, int]) -> list[Any] | None:
    """Return the signatures with renumbered tensors for the main subgraph, the others unchanged."""
    result = []
    for signature in signatures or ():
        changed = copy.copy(signature)
        if signature.subgraphIndex == 0:
            changed.inputs = _renumbered(signature.inputs, "tensorIndex", new_index)
            changed.outputs = _renumbered(signature.outputs, "tensorIndex", new_index)
        result.append(changed)
    return result or None


def _renumbered(items: Iterable[Any] | None, field: str, new_index: Mapping[int, int]) -> list[Any]:
    """Return copies of the items with new indices in a field; indices that are not in `new_index` do not change."""
    copies = [copy.copy(item) for item in items or ()]
    for item in copies:
        old = getattr(item, field)
        setattr(item, field, new_index.get(old, old))
    return copies


def _drop_codes(source: Any) -> None:
    used = sorted({operator.opcodeIndex for subgraph in source.subgraphs for operator in subgraph.operators or []})
    new_index = {old: new for new, old in enumerate(used)}
    source.operatorCodes = [source.operatorCodes[old] for old in used]
    source.subgraphs = [copy.copy(subgraph) for subgraph in source.subgraphs]
    for subgraph in source.subgraphs:
        subgraph.operators = _renumbered(subgraph.operators, "opcodeIndex", new_index)


def _drop_buffers(source: Any) -> None:
    used = {entry.buffer for entry in source.metadata or []}
    for subgraph in source.subgraphs:
        used.update(tensor.buffer for tensor in subgraph.tensors or [])
    kept = sorted({0, *used})
    new_index = {old: new for new, old in enumerate(kept)}
    source.buffers = [source.buffers[old] for old in kept]
    for subgraph in source.subgraphs:
        subgraph.tensors = _renumbered(subgraph.tensors, "buffer", new_index)
    source.metadata = _renumbered(source.metadata, "buffer", new_index) or None
    source.metadataBuffer = None


def reshape(edit: Edit, source: int, target: int, shape: Sequence[int]) -> int:
    """Add a RESHAPE between two tensors; return the second."""
    sizes = edit.integers("shape", *shape)
    edit.add("RESHAPE", [source, sizes], [target], edit.options("ReshapeOptions", newShape=list(shape)))
    return target
