"""An ONNX graph as a network of Keras layers, operator by operator, without TensorFlow.

`ops.rules` has an import rule for each operator. `onnx_file` builds the Keras model and compares it with the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from compress.core.errors import ModelError
from compress.model.importers.common.graph_builder import NOT_MADE, UNKNOWN, NotImportedError, apply_rule
from compress.model.importers.common.unsupported import NO_LAYER, Refused
from compress.model.importers.onnx import layout
from compress.model.importers.onnx.layout import OnnxValue, Order, laid, natural
from compress.model.importers.onnx.network_builder import FLOAT, OnnxCall, OnnxNetworkBuilder, Rule
from compress.model.importers.onnx.onnx_graph import Node, OnnxGraph
from compress.model.ir.keras_graph import Network, without_unused_calls

MOST_COMBINED_INPUTS = 4
"""Maximum number of image inputs for which all combinations of axis orders are tried."""


@dataclass(frozen=True)
class OnnxNetwork:
    """The network made from an ONNX graph.

    Attributes:
        network: its layers; invalid if there are `problems`.
        inputs: values of the used inputs in the network, by name.
        outputs: values of the outputs in the network, in the graph's order.
        values: values in the network of the graph's tensors, by name.
        problems: every unsupported operator, with the reason.
    """

    graph: OnnxGraph
    network: Network
    inputs: Mapping[str, OnnxValue]
    outputs: Sequence[OnnxValue]
    values: Mapping[str, OnnxValue]
    problems: tuple[Refused, ...]
    notes: tuple[str, ...]


def build_network(graph: OnnxGraph, rules: Mapping[str, Rule]) -> OnnxNetwork:
    """Convert a graph to a network, with the axis order of inputs that needs the fewest transposes.

    Operators without a rule become `problems`.

    Raises:
        ModelError: an output of the graph does not depend on its inputs.
    """
    missing = [name for name in graph.outputs if name in graph.constants]
    if missing or not graph.outputs:
        raise ModelError(f"its output {''.join(missing[:1])[:80]!r} does not depend on its inputs")
    best: OnnxNetwork | None = None
    for orders in _orders(graph):
        candidate = _build_candidate(graph, rules, orders)
        if best is None or _cost(candidate) < _cost(best):
            best = candidate
    assert best is not None  # `_orders` yields at least one order
    return best


def _orders(graph: OnnxGraph) -> Iterator[Mapping[str, Order]]:
    """Yield axis orders to try: each image and sequence unchanged or channel-last; all the same if there are many."""
    usual = {name: tuple(range(len(graph.shapes[name]))) for name in graph.inputs}
    images = [name for name in graph.inputs if 3 <= len(graph.shapes[name]) <= 5]
    choices: Iterator[tuple[bool, ...]] = product((False, True), repeat=len(images))
    if len(images) > MOST_COMBINED_INPUTS:
        choices = iter([(False,) * len(images), (True,) * len(images)])
    for transposed in choices:
        names = [name for name, is_transposed in zip(images, transposed, strict=True) if is_transposed]
        yield usual | {name: layout.channel_last(len(graph.shapes[name])) for name in names}


def _cost(candidate: OnnxNetwork) -> tuple[int, int, int, int]:
    """Return the counts of problems, Permute and Reshape layers, and images whose last dimension is not the least."""
    if candidate.problems:
        return len(candidate.problems), 0, 0, 0
    kinds = Counter(layer.kind for layer in without_unused_calls(candidate.network).layers.values())
    odd = sum(
        len(value.network_shape) == 3 and value.network_shape[-1] > min(value.network_shape)
        for value in candidate.inputs.values()
    )
    return 0, kinds["Permute"], kinds["Reshape"], odd


def _build_candidate(graph: OnnxGraph, rules: Mapping[str, Rule], orders: Mapping[str, Order]) -> OnnxNetwork:
    builder = OnnxNetworkBuilder(graph)
    problems = list(graph.refused)
    used = {name: builder.input(name, orders[name]) for name in graph.inputs if builder.takers[name]}
    for name, value in used.items():
        builder.keep(name, value)
    for node in graph.nodes:
        if any(name and name not in builder.values and name not in graph.constants for name in node.inputs):
            continue  # an operator before it is refused, so its inputs are unknown
        try:
            values = _import_operator(OnnxCall(builder, node), rules)
        except NOT_MADE as error:
            problems.append(Refused(node.name, node.operator, str(error) or type(error).__name__))
            values = _unknown(graph, node)
        for name, value in zip(node.outputs, values, strict=False):
            builder.keep(name, value)
    outputs, notes = _outputs(builder) if not problems else ([], [])
    notes += _input_notes(graph, used)
    network = builder.network(list(used.values()), outputs)
    unchanged = {name: value for name, value in builder.values.items() if name not in builder.changed}
    return OnnxNetwork(graph, network, used, outputs, unchanged, tuple(problems), (*graph.notes, *notes))


def _input_notes(graph: OnnxGraph, used: Mapping[str, OnnxValue]) -> list[str]:
    """Return notes on inputs that the Keras model does not have, or has in another layout or type."""
    notes = [f"its input {name!r} is not used: it is removed" for name in graph.inputs if name not in used]
    for name, value in used.items():
        if value.network_shape != value.shape[1:]:
            notes.append(_layout_note("input", name, value))
        if graph.types[name] != FLOAT:
            notes.append(f"its input {name!r} is {graph.types[name]}; the Keras model takes it as floats")
    return notes


def _unknown(graph: OnnxGraph, node: Node) -> list[OnnxValue]:
    """Return placeholders for the outputs of an unsupported operator, so that later operators are checked too."""
    shapes = [graph.shapes[name] for name in node.outputs if name in graph.shapes]
    if len(shapes) != len(node.outputs):
        return []
    return [laid(UNKNOWN, shape, tuple(range(len(shape)))) for shape in shapes]


def _import_operator(call: OnnxCall, rules: Mapping[str, Rule]) -> list[OnnxValue]:
    node = call.node
    graph = call.builder.graph
    if node.operator not in rules:
        raise NotImportedError(NO_LAYER)
    values = apply_rule(rules[node.operator], call)
    used_outputs = [name for name in node.outputs[len(values) :] if call.builder.takers[name]]
    if used_outputs:
        raise NotImportedError(f"its additional output {used_outputs[0][:80]!r} is used")
    for value, name in zip(values, node.outputs, strict=False):
        if name and graph.shapes.get(name, value.shape) != value.shape:
            raise NotImportedError(f"it computes {list(value.shape)}, but the file has {list(graph.shapes[name])}")
    return values


def _outputs(builder: OnnxNetworkBuilder) -> tuple[list[OnnxValue], list[str]]:
    """Return the outputs, and notes: channel-last if that needs no transpose, otherwise in the graph's order."""
    outputs: list[OnnxValue] = []
    notes: list[str] = []
    for name in builder.graph.outputs:
        value = builder.values[name]
        call = OnnxCall(builder, Node("Output", name, (), (name,), {}))
        rank = len(value.shape)
        order = natural(value)
        usual = (tuple(range(rank)), layout.channel_last(rank))
        value = call.arranged(value, order if order in usual else usual[0])
        if value.tensor in [output.tensor for output in outputs]:
            value = call.layer("Identity", {}, [value], value)
        outputs.append(value)
        notes += [_layout_note("output", name, value)] if value.network_shape != value.shape[1:] else []
    return outputs, notes


def _layout_note(what: str, name: str, value: OnnxValue) -> str:
    how = "now has a batch dimension in front" if value.network_shape == value.shape else "is now channel-last"
    return f"its {what} {name!r}, {list(value.shape)}, {how}: {[1, *value.network_shape]}"
