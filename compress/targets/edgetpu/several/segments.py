"""A .tflite file as a network of `cuts`, and its segments as .tflite files.

Several tensors may cross a cut. A tensor that any later segment needs is an output of the segment that computes it. The
runner keeps it until then, as the vendor's runner does; it is not an input of the segments between.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from compress.core.errors import ModelError
from compress.core.resources import manual
from compress.model.tflite import edit
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import DTYPES, NONE, Graph, Operator
from compress.targets.base import Target
from compress.targets.edgetpu import estimate
from compress.targets.edgetpu.cost import EdgeTpuCost
from compress.targets.edgetpu.estimate import Estimate
from compress.targets.edgetpu.latency import ArrayLayer
from compress.targets.edgetpu.placement import place
from compress.targets.edgetpu.several.cuts import FITS, STREAMS, UNCERTAIN, Cuts, OperatorSequence, SegmentCost

MAX_OPERATORS = 2000
"""The largest model that is split. The largest published one for the Edge TPU has less than 1,000 operators."""
DESCRIPTION_OF_WHOLE = b"TFLITE_METADATA"
"""The metadata that describe inputs, outputs and labels of the whole model: wrong for a segment."""
_STATE = {"VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE", "CALL_ONCE", "IF", "WHILE"}


@dataclass(frozen=True)
class Segment:
    """The operators of a model from `start` up to `stop`, not included, and the prediction for them.

    Attributes:
        inputs: the tensors that it reads and does not compute.
        outputs: the tensors that it computes, and a later segment or the application reads.
        estimate: the predicted latency and placement of the segment as a separate model.
        risk: FITS, UNCERTAIN or STREAMS.
    """

    start: int
    stop: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    estimate: Estimate
    risk: int

    @property
    def latency_ms(self) -> float:
        """The predicted latency."""
        return self.estimate.latency_ms

    @property
    def on_cpu(self) -> list[int]:
        """The operators that run on the CPU."""
        return [op.index for op in self.estimate.check.ops if op.placement == "cpu"]


@dataclass(frozen=True)
class _Cost:
    latency_ms: float
    risk: int


@dataclass(frozen=True)
class SplitGraph:
    """A model that can be split.

    Attributes:
        graph: the model; tensors that can cross have different names.
    """

    graph: Graph
    target: Target
    host: str
    clock: str

    @cached_property
    def network(self) -> OperatorSequence:
        """The network for the search of cuts."""
        sizes = [tensor.elements * np.dtype(DTYPES.get(tensor.dtype, "int8")).itemsize for tensor in self.graph.tensors]
        crossing_bytes = [sum(sizes[index] for index in crossing) for crossing in self._crossing]
        return OperatorSequence(self._positions, self._operator_ms, crossing_bytes, self._predict, self._at_least)

    @cached_property
    def parameter_bytes(self) -> list[int]:
        """The bytes of the parameters of each operator on the Edge TPU."""
        sizes = [0] * len(self.graph.operators)
        for layer in self._layers:
            sizes[layer.index] = layer.parameters.size_bytes
        return sizes

    @cached_property
    def _last_use(self) -> dict[int, int]:
        """For each tensor, the position after the last operator that reads it."""
        return {index: operator.index + 1 for operator in self.graph.operators for index in operator.inputs}

    @cached_property
    def _crossing(self) -> list[list[int]]:
        """For each position, the tensors that are computed or given before it and read after it."""
        operators = self.graph.operators
        crossing: list[list[int]] = [[] for _ in range(len(operators) + 1)]
        sources = [(index, 0) for index in dict.fromkeys(self.graph.inputs)]
        sources += [(index, operator.index + 1) for operator in operators for index in operator.outputs]
        for tensor, first in sources:
            for position in range(max(first, 1), self._last_use.get(tensor, 0)):
                crossing[position].append(tensor)
        return crossing

    @cached_property
    def _positions(self) -> list[int]:
        """The positions where the model can be cut."""
        count = len(self.graph.operators)
        inside: set[int] = set()  # a cut would divide the users of a variable
        for variable in (tensor.index for tensor in self.graph.tensors if tensor.is_variable):
            users = [
                operator.index for operator in self.graph.operators if variable in (*operator.inputs, *operator.outputs)
            ]
            inside.update(range(min(users, default=0) + 1, max(users, default=0) + 1))
        tensors = self.graph.tensors
        positions = [0, count]
        for position in range(1, count):
            crosses = [tensors[index] for index in self._crossing[position]]
            if position not in inside and all(tensor.dtype in DTYPES and not tensor.dynamic for tensor in crosses):
                positions.append(position)
        return sorted(positions)

    @cached_property
    def _able(self) -> list[Operator]:
        """The operators that the Edge TPU can run, in some segment."""
        ops = place(self.graph, self.target, all_subgraphs=True).ops
        return [self.graph.operators[op.index] for op in ops if op.placement == "tpu"]

    @cached_property
    def _layers(self) -> list[ArrayLayer]:
        """The layers of these operators."""
        able = {operator.index for operator in self._able}
        computed_on_cpu = [
            index for operator in self.graph.operators if operator.index not in able for index in operator.outputs
        ]
        inputs = (*self.graph.inputs, *computed_on_cpu)
        return estimate.array_layers(replace(self.graph, operators=tuple(self._able), inputs=inputs), self.target)

    @cached_property
    def _costs(self) -> EdgeTpuCost:
        return EdgeTpuCost(self.target)

    @cached_property
    def _operator_ms(self) -> list[float]:
        """The time that each operator takes in every segment: on the array, or on the CPU."""
        able = {operator.index for operator in self._able}
        times = [0.0] * len(self.graph.operators)
        for layer in self._layers:
            times[layer.index] = self._costs.of_operators([layer], 0, 0).compute_ms(self.clock)
        for operator in self.graph.operators:
            if able and operator.index not in able:
                pair = replace(self.graph, operators=(self._able[0], operator))
                times[operator.index] = self._estimate(pair).latency.parts["cpu_ms"]
        return times

    def _predict(self, start: int, stop: int) -> SegmentCost | None:
        """Return the cost of a segment: from its layers if all of it runs on the Edge TPU, which is fast."""
        if self._unable_before[stop] > self._unable_before[start]:
            return self.segment(start, stop)
        inputs, outputs = self._ends(start, stop)
        tensors = self.graph.tensors
        input_bytes = sum(tensors[index].elements for index in inputs)
        output_bytes = sum(self._costs.output_bytes(tensors[index].shape) for index in outputs)
        cost = self._costs.of_operators(self._layers_of(start, stop), input_bytes, output_bytes)
        unavoidable = sum(cost.never_cached.values())
        risk = STREAMS if cost.streamed_bytes > unavoidable else FITS
        if risk == FITS and cost.cached_bytes(cost.never_cached) > self._costs.cache_bytes():
            risk = UNCERTAIN
        return _Cost(cost.latency_ms(self.host, self.clock), risk)

    def _at_least(self, start: int, stop: int) -> float:
        """Return a lower bound of the latency of a segment with operators that the Edge TPU cannot run."""
        if self._unable_before[stop] == self._unable_before[start]:
            return 0.0
        layers = self._layers_of(start, stop)
        array_ms = self._costs.of_operators(layers, 0, 0).latency_ms(self.host, self.clock) if layers else 0.0
        return array_ms + self._unable_ms[stop] - self._unable_ms[start]

    @cached_property
    def _unable_ms(self) -> list[float]:
        """For each position, the time on the CPU of the operators before it that the Edge TPU cannot run."""
        able = {operator.index for operator in self._able}
        return [0.0, *accumulate(0.0 if i in able else ms for i, ms in enumerate(self._operator_ms))]

    @cached_property
    def _unable_before(self) -> list[int]:
        """For each position, the number of operators before it that the Edge TPU cannot run."""
        able = {operator.index for operator in self._able}
        return [0, *accumulate(int(operator.index not in able) for operator in self.graph.operators)]

    def _layers_of(self, start: int, stop: int) -> list[ArrayLayer]:
        return self._layers[bisect_left(self._layer_indices, start) : bisect_left(self._layer_indices, stop)]

    @cached_property
    def _layer_indices(self) -> list[int]:
        return [layer.index for layer in self._layers]

    def _estimate(self, part: Graph) -> Estimate:
        return estimate.estimate(part, self.target, self.host, self.clock)

    def segment(self, start: int, stop: int) -> Segment | None:
        """Return a part of the model; None if the compiler would refuse it, because nothing runs on the Edge TPU."""
        inputs, outputs = self._ends(start, stop)
        part = replace(self.graph, operators=self.graph.operators[start:stop], inputs=inputs, outputs=outputs)
        try:
            predicted = self._estimate(part)
        except ModelError:
            return None
        return Segment(start, stop, inputs, outputs, predicted, _risk(predicted))

    def segments(self, cuts: Cuts) -> list[Segment]:
        """Return the segments between cuts."""
        parts = [self.segment(start, stop) for start, stop in pairwise(cuts)]
        return [part for part in parts if part is not None]

    def _ends(self, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tensors that a segment reads from outside, and those that it computes for others."""
        graph = self.graph
        produced: dict[int, None] = {}
        read: dict[int, None] = {}
        for operator in graph.operators[start:stop]:
            read.update(dict.fromkeys(index for index in operator.inputs if index != NONE and index not in produced))
            produced.update(dict.fromkeys(operator.outputs))
        computed = graph.producer.keys() | set(graph.inputs)
        inputs = tuple(index for index in _in_order(read, graph.inputs) if index in computed)
        needed = [index for index in produced if index in graph.outputs or self._last_use.get(index, 0) > stop]
        return inputs, tuple(_in_order(needed, graph.outputs))

    def file(self, segment: Segment) -> Graph:
        """Return a segment as a separate model, with the metadata that remain true."""
        chosen = range(segment.start, segment.stop)
        source = copy.copy(self.graph.source)
        source.metadata = [entry for entry in source.metadata or [] if entry.name != DESCRIPTION_OF_WHOLE] or None
        part = edit.select_operators(replace(self.graph, source=source), chosen, segment.inputs, segment.outputs)
        part.source.signatureDefs = self._signatures(segment)
        return edit.compact(part)

    def _signatures(self, segment: Segment) -> list[Any] | None:
        """Return the model's signature for a segment: its names for inputs and outputs, tensor names for the rest."""
        signatures = [signature for signature in self.graph.source.signatureDefs or [] if signature.subgraphIndex == 0]
        if len(signatures) != 1:
            return None
        result = copy.copy(signatures[0])
        for end, tensors in (("inputs", segment.inputs), ("outputs", segment.outputs)):
            known = {entry.tensorIndex: entry for entry in getattr(signatures[0], end) or []}
            setattr(result, end, [known.get(index) or self._named(index) for index in tensors])
        return [result]

    def _named(self, index: int) -> Any:
        from ai_edge_litert import schema_py_generated as schema

        entry = schema.TensorMapT()
        entry.name = self.graph.tensors[index].name.encode()
        entry.tensorIndex = index
        return entry


def prepare(graph: Graph, target: Target, host: str, clock: str) -> SplitGraph:
    """Return a model for splitting.

    Raises:
        ModelError: the model is too large, or has control flow or resources.
    """
    if len(graph.operators) > MAX_OPERATORS:
        raise ModelError(f"has {len(graph.operators)} operators", allowed=f"at most {MAX_OPERATORS}")
    keeping = next((operator.name for operator in graph.operators if operator.name in _STATE), None)
    if graph.subgraphs > 1 or keeping:
        what = f"contains {keeping}" if keeping else f"has {graph.subgraphs} subgraphs"
        hint = f"unroll loops, and make states inputs and outputs: {manual('streaming.md')}"
        raise ModelError(f"{what}, and a model with control flow or resources cannot be split", hint=hint)
    return SplitGraph(_with_names(graph), target, host, clock)


def _with_names(graph: Graph) -> Graph:
    """Return a graph in which all tensors that operators compute, and all inputs, have different names."""
    taken: set[str] = set()
    renamed: dict[int, str] = {}
    for index in dict.fromkeys((*graph.inputs, *graph.outputs, *graph.producer)):
        name = graph.tensors[index].name
        if not name or name in taken:
            name = f"{name[:200]}#{index}"
            renamed[index] = name
        taken.add(name)
    if not renamed:
        return graph
    changed = Edit(graph)
    for index, name in renamed.items():
        changed.rename(index, name)
    return changed.graph()


def _in_order(tensors: Sequence[int] | dict[int, None], first: Sequence[int]) -> list[int]:
    """Return tensors: those of `first` in its order, then the others."""
    known = [index for index in dict.fromkeys(first) if index in tensors]
    return known + [index for index in tensors if index not in known]


def _risk(predicted: Estimate) -> int:
    """Return whether parameters are streamed that a smaller segment could cache."""
    unavoidable = sum(layer.parameters.size_bytes for layer in predicted.layers if layer.parameters.always_streamed)
    if predicted.streamed_bytes > unavoidable:
        return STREAMS
    return UNCERTAIN if predicted.check.cache_warning else FITS
