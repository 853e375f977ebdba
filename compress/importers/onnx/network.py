"""An ONNX graph as a network of Keras layers, operator by operator, without TensorFlow.

`onnx_rules` has a rule for each operator; whether what it makes computes the same is found out
when it is loaded (`onnx_file`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from compress.errors import ModelError
from compress.importers.common.graph_builder import UNKNOWN, apply_rule
from compress.importers.common.layer_calls import NOT_MADE, NotImportedError
from compress.importers.common.unsupported import NO_LAYER, Refused
from compress.importers.onnx import layout
from compress.importers.onnx.layout import OnnxValue, Order, laid, natural
from compress.importers.onnx.network_builder import FLOAT, OnnxCall, OnnxNetworkBuilder, Rule
from compress.importers.onnx.onnx_graph import Node, OnnxGraph
from compress.ir.keras_graph import Network, without_unused_calls

MOST_TRIED = 4
"""Inputs of which both orders are tried."""


@dataclass(frozen=True)
class OnnxNetwork:
    """What a graph became.

    Attributes:
        graph: the graph.
        network: its layers; nothing to be used where there are `problems`.
        inputs: by name how the network has them; those that nothing depends on are not there.
        outputs: likewise, in the graph's order.
        values: by tensor of the graph where the network has it, and how.
        problems: every operator that has no counterpart, and why.
        notes: what is not as it was, in words.
    """

    graph: OnnxGraph
    network: Network
    inputs: Mapping[str, OnnxValue]
    outputs: Sequence[OnnxValue]
    values: Mapping[str, OnnxValue]
    problems: tuple[Refused, ...]
    notes: tuple[str, ...]


def build_network(graph: OnnxGraph, rules: Mapping[str, Rule]) -> OnnxNetwork:
    """Makes a network of a graph, as far as there are rules for it; inputs in the order that moves fewest numbers.

    Raises:
        ModelError: its inputs or outputs make no sense.
    """
    missing = [name for name in graph.outputs if name in graph.constants]
    if missing or not graph.outputs:
        raise ModelError(f"its output {''.join(missing[:1])[:80]!r} does not depend on its inputs")
    best: OnnxNetwork | None = None
    for orders in _orders(graph):
        found = _drafted(graph, rules, orders)
        if best is None or _cost(found) < _cost(best):
            best = found
    assert best is not None  # there is one order at least
    return best


def _orders(graph: OnnxGraph) -> Iterator[Mapping[str, Order]]:
    """Orders to try: each image and sequence as it is, and channel-last; all of them alike where there are many."""
    usual = {name: tuple(range(len(graph.shapes[name]))) for name in graph.inputs}
    images = [name for name in graph.inputs if 3 <= len(graph.shapes[name]) <= 5]
    choices = product((False, True), repeat=len(images))
    for turned in choices if len(images) <= MOST_TRIED else ([each] * len(images) for each in (False, True)):
        last = {
            name: layout.channel_last(len(graph.shapes[name]))
            for name, turn in zip(images, turned, strict=True)
            if turn
        }
        yield usual | last


def _cost(found: OnnxNetwork) -> tuple[int, int, int, int]:
    """Problems, layers that move numbers, layers that only change shapes, images whose last side is not the least."""
    if found.problems:
        return len(found.problems), 0, 0, 0
    kinds = Counter(layer.kind for layer in without_unused_calls(found.network).layers.values())
    odd = sum(len(value.sides) == 3 and value.sides[-1] > min(value.sides) for value in found.inputs.values())
    return 0, kinds["Permute"], kinds["Reshape"], odd


def _drafted(graph: OnnxGraph, rules: Mapping[str, Rule], orders: Mapping[str, Order]) -> OnnxNetwork:
    builder, problems = OnnxNetworkBuilder(graph), list(graph.refused)
    used = {name: builder.input(name, orders[name]) for name in graph.inputs if builder.takers[name]}
    for name, value in used.items():
        builder.keep(name, value)
    for node in graph.nodes:
        if any(name and name not in builder.values and name not in graph.constants for name in node.inputs):
            continue  # what stands before it is refused, and its result is not known
        try:
            made = _made(OnnxCall(builder, node), rules)
        except NOT_MADE as error:
            problems.append(Refused(node.name, node.operator, str(error) or type(error).__name__))
            made = _unknown(graph, node)
        for name, value in zip(node.outputs, made, strict=False):
            builder.keep(name, value)
    places = {node.name: node.number for node in graph.nodes}
    problems.sort(key=lambda problem: places.get(problem.node, 0))
    outputs, notes = _outputs(builder) if not problems else ([], [])
    notes += [f"its input {name!r} is not used: it is removed" for name in graph.inputs if name not in used]
    notes += [_turned("input", name, value) for name, value in used.items() if value.sides != value.shape[1:]]
    notes += [
        f"its input {n!r} is {graph.types[n]}; the Keras model takes it as floats"
        for n in used
        if graph.types[n] != FLOAT
    ]
    network = builder.network(list(used.values()), outputs)
    values = {name: value for name, value in builder.values.items() if name not in builder.changed}
    return OnnxNetwork(graph, network, used, outputs, values, tuple(problems), (*graph.notes, *notes))


def _unknown(graph: OnnxGraph, node: Node) -> list[OnnxValue]:
    """What stands for the results of an operator without a counterpart, so that those behind it are looked at too."""
    shapes = [graph.shapes[name] for name in node.outputs if name in graph.shapes]
    made = [laid(UNKNOWN, shape, tuple(range(len(shape)))) for shape in shapes]
    return made if len(made) == len(node.outputs) else []


def _made(call: OnnxCall, rules: Mapping[str, Rule]) -> list[OnnxValue]:
    """What the rule for an operator makes of it, in the order of its outputs."""
    node, graph = call.node, call.builder.graph
    if node.operator not in rules:
        raise NotImportedError(NO_LAYER)
    values = apply_rule(rules[node.operator], call)
    asked = [name for name in node.outputs[len(values) :] if call.builder.takers[name]]
    if asked:
        raise NotImportedError(f"its additional output {asked[0][:80]!r} is used")
    for value, name in zip(values, node.outputs, strict=False):
        if name and graph.shapes.get(name, value.shape) != value.shape:
            raise NotImportedError(f"it computes {list(value.shape)}, but the file has {list(graph.shapes[name])}")
    return values


def _outputs(builder: OnnxNetworkBuilder) -> tuple[list[OnnxValue], list[str]]:
    """The outputs as the network shows them: channel-last where that moves no numbers, else as in the graph."""
    outputs: list[OnnxValue] = []
    notes: list[str] = []
    for name in builder.graph.outputs:
        value = builder.values[name]
        call = OnnxCall(builder, Node("Output", name, 0, (), (name,), {}))
        rank = len(value.shape)
        order = natural(value)
        usual = (tuple(range(rank)), layout.channel_last(rank))
        value = call.arranged(value, order if order in usual else usual[0])
        if value.tensor in [each.tensor for each in outputs]:
            value = call.layer("Identity", {}, [value], value)
        outputs.append(value)
        notes += [_turned("output", name, value)] if value.sides != value.shape[1:] else []
    return outputs, notes


def _turned(what: str, name: str, value: OnnxValue) -> str:
    how = "now has a batch dimension in front" if value.sides == value.shape else "is now channel-last"
    return f"its {what} {name!r}, {list(value.shape)}, {how}: {[1, *value.sides]}"
