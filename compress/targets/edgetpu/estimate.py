"""`estimate`: how long a model will take on the Edge TPU, without one; and what would make it shorter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.errors import ModelError, PipelineError
from compress.targets.base import Target
from compress.targets.edgetpu import latency, operator_parameters
from compress.targets.edgetpu.check import Check, check
from compress.targets.edgetpu.constants import LATENCY
from compress.targets.edgetpu.inspection import Inspection
from compress.targets.edgetpu.latency import WEIGHTED, ArrayLayer, LatencyPrediction, BusTraffic
from compress.targets.edgetpu.parameter_memory import ROW_BLOCK, round_up
from compress.targets.edgetpu.placement import COMPILED_OPERATOR
from compress.tflite import macs as arithmetic
from compress.tflite.graph import NONE, Graph, Operator, Tensor

SCHEMA_VERSION = 1
MAX_LISTED = 8
"""Number of layers that the text lists."""
_KINDS = {"CONV_2D": "conv", "TRANSPOSE_CONV": "tconv", "FULLY_CONNECTED": "fc", "DEPTHWISE_CONV_2D": "dw"}
_FREE_OPERATORS = {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "PAD"}
"""They take no time if they have no parameters."""
_MIN_SAVING = 0.005
"""The share of the whole that advice must save."""


@dataclass(frozen=True)
class Estimate:
    """The predicted latency of a model on one host.

    Attributes:
        latency: total, interval, parts; of each layer on the Edge TPU its ms.
        layers: what runs on the Edge TPU, as `latency.layers` is.
        host: of the target's table.
        host_summary: one line about the host.
        clock: of the Edge TPU.
        streamed_bytes: parameters that are sent at every inference.
        compiled: whether the streamed bytes are those of a compiled model, not predicted.
        cpu_alone_ms: the whole model on one core of that host's CPU, roughly.
        advice: what would help, the most helpful first, with the ms that it saves.
        check: placement and memory.
    """

    latency: LatencyPrediction
    layers: tuple[ArrayLayer, ...]
    host: str
    host_summary: str
    clock: str
    streamed_bytes: int
    compiled: bool
    cpu_alone_ms: float
    advice: tuple[tuple[str, float], ...]
    check: Check

    def describe(self) -> str:
        """Return the estimate as text for a person."""
        told = self.latency
        lines = [
            f"{told.total:.3g} ms on {self.host} ({self.host_summary}), {told.low:.3g} to {told.high:.3g}; "
            "predicted, not measured",
            *(f"  {name.removesuffix('_ms'):<8} {value:9.3f} ms" for name, value in told.parts.items()),
            f"clock: {self.clock} (on USB, libedgetpu1-std runs at half the clock of libedgetpu1-max)",
            self.check.placement.summary,
            f"{self.streamed_bytes:,} bytes of parameters are sent at every inference, "
            + ("as compiled" if self.compiled else "predicted"),
            *([self.check.doubt] if self.check.doubt and not self.compiled else []),
            "costliest layers:",
        ]
        rows = sorted(zip(told.layers, self.layers, strict=True), key=lambda row: -row[0])
        shape: Callable[[tuple[int, ...]], str] = lambda sides: "x".join(map(str, sides))  # noqa: E731
        lines += [
            f"  {layer.index:>4} {layer.name:<20} {each:8.3f} ms  {shape(layer.input_shape)} -> {shape(layer.output_shape)}"
            for each, layer in rows[:MAX_LISTED]
        ]
        if self.advice:
            lines.append("what would help:")
            lines += [f"  {saves:8.3f} ms  {what}" for what, saves in self.advice[:MAX_LISTED]]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As a plain map, schema 1."""
        return {
            "schema_version": SCHEMA_VERSION,
            "latency_ms": self.latency.total,
            "low_ms": self.latency.low,
            "high_ms": self.latency.high,
            "host": self.host,
            "clock": self.clock,
            "parts": dict(self.latency.parts),
            "layers": [
                {"index": layer.index, "op": layer.name, "ms": each}
                for layer, each in zip(self.layers, self.latency.layers, strict=True)
            ],
            "streamed_bytes": self.streamed_bytes,
            "compiled": self.compiled,
            "cpu_alone_ms": self.cpu_alone_ms,
            "advice": [{"what": what, "saves_ms": saves} for what, saves in self.advice],
            "placement": self.check.placement.summary,
        }


def estimate(
    graph: Graph, target: Target, host: str, clock: str = "max", compiled: Inspection | None = None
) -> Estimate:
    """Predict the latency of a model.

    Args:
        graph: the model, before it is compiled.
        target: the Edge TPU.
        host: a key of the target's `latency.hosts`.
        clock: a key of `latency.CLOCKS`.
        compiled: what the compiler made of it; its streamed bytes replace the predicted ones.

    Raises:
        PipelineError: there is no such host or clock.
        ModelError: the compiler would refuse the model, or it is damaged.
    """
    constants = target.tables["latency"]
    if host not in constants["hosts"]:
        raise PipelineError(f"there is no host {host!r}", allowed=", ".join(constants["hosts"]))
    if clock not in latency.CLOCKS:
        raise PipelineError(f"there is no clock {clock!r}", allowed=", ".join(latency.CLOCKS))
    found = check(graph, target)
    if found.placement.failure is not None:
        raise ModelError(found.placement.summary, todo=_todo(graph))
    try:
        return _estimate(graph, target, host, clock, compiled, found)
    except (IndexError, KeyError, ValueError, TypeError, ZeroDivisionError, OverflowError) as error:
        raise ModelError(f"an operator is not as its kind must be ({error}): the file is damaged") from error


def _todo(graph: Graph) -> str:
    """Return advice on a model that the compiler would refuse."""
    if any(operator.name == COMPILED_OPERATOR for operator in graph.operators):
        return "give the full-integer model that it was made from, and this one with --compiled"
    if all(tensor.quantization is None for tensor in graph.tensors):
        return "quantize it first: `quantize` in a pipeline"
    return "see `python -m compress check`, and `legalize`"


def _estimate(
    graph: Graph, target: Target, host: str, clock: str, compiled: Inspection | None, found: Check
) -> Estimate:
    constants = target.tables["latency"]
    on_tpu = {op.index for op in found.placement.ops if op.placement == "tpu"}
    layers = tuple(_layers(graph, on_tpu, target))
    sent = _bus_traffic(graph, on_tpu, layers, found, target, compiled)
    bus = constants["hosts"][host]
    told = latency.predict(layers, sent, constants, host, clock)
    if not layers:
        told = replace(told, total=0.0, low=0.0, high=0.0, parts=dict.fromkeys(told.parts, 0.0))
    cpu = sum(_cpu_ms(graph, operator, bus) for operator in graph.operators if operator.index not in on_tpu)
    alone = sum(_cpu_ms(graph, operator, bus) for operator in graph.operators)
    helps = _advice(layers, sent, constants, host, clock, cpu, alone)
    whole = _with_cpu(told, cpu, (found.activation_bytes or 0) / found.tile_bytes)
    return Estimate(
        whole, layers, host, bus["summary"], clock, sum(sent.streamed), compiled is not None, alone, helps, found
    )


def estimate_all_hosts(graph: Graph, target: Target, compiled: Inspection | None = None) -> dict[str, dict[str, Any]]:
    """Return the predictions for all hosts of the target, as plain values; empty if the compiler refuses the model.

    Args:
        graph: the model.
        target: the Edge TPU.
        compiled: what the compiler made of it.
    """
    found = {}
    for host, bus in target.tables["latency"]["hosts"].items():
        try:
            told = estimate(graph, target, host, compiled=compiled)
        except ModelError:
            return {}
        times = {"latency_ms": told.latency.total, "low_ms": told.latency.low, "high_ms": told.latency.high}
        found[host] = {"summary": bus["summary"], **times, "cpu_alone_ms": told.cpu_alone_ms}
    return found


def array_layers(graph: Graph, target: Target) -> list[ArrayLayer]:
    """Return the layers that run on the Edge TPU, with the memory of their parameters."""
    return _layers(graph, {op.index for op in check(graph, target).placement.ops if op.placement == "tpu"}, target)


def _layers(graph: Graph, on_tpu: set[int], target: Target) -> list[ArrayLayer]:
    found = []
    for operator in graph.operators:
        if operator.index in on_tpu:
            held = operator_parameters.count(operator, graph, target)
            if operator.name not in _FREE_OPERATORS or held.size_bytes:
                found.append(replace(_array_layer(operator, graph), parameters=held))
    return found


def _array_layer(operator: Operator, graph: Graph) -> ArrayLayer:
    """An operator as a layer: kind, shapes and window."""
    made, index = _map(graph.output_tensors(operator)[0]), (operator.index, operator.name)
    activations = [each for each in graph.input_tensors(operator) if not each.is_constant] or graph.input_tensors(
        operator
    )
    given = _map(activations[0]) if activations else made
    kind = _KINDS.get(operator.name)
    if kind == "fc":
        outputs, each = graph.tensors[operator.inputs[1]].shape
        return ArrayLayer(kind, (1, 1, outputs), (1, 1, each), index=index[0], name=index[1])
    if kind is not None:
        _, height, width, _ = graph.tensors[operator.inputs[1]].shape
        return ArrayLayer(kind, made, given, (height, width), index=index[0], name=index[1])
    if operator.name in ("AVERAGE_POOL_2D", "MAX_POOL_2D"):
        window = (operator.option("filterHeight", 1), operator.option("filterWidth", 1))
        return ArrayLayer("pool", made, given, window, index=index[0], name=index[1])
    if operator.name in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN") and given[2] == made[2]:
        return ArrayLayer(
            "pool", made, given, (given[0] // made[0], given[1] // made[1]), index=index[0], name=index[1]
        )
    return ArrayLayer("elt", made, given, index=index[0], name=index[1])


def _map(tensor: Tensor) -> tuple[int, int, int]:
    height, width, channels = (1, 1, 1, *tensor.shape)[-3:]
    return height, width, channels


def _bus_traffic(
    graph: Graph,
    on_tpu: set[int],
    layers: Sequence[ArrayLayer],
    found: Check,
    target: Target,
    compiled: Inspection | None,
) -> BusTraffic:
    """Return what crosses the bus: tensors, instructions, and parameters that are not cached."""
    makers = {tensor: operator.index for operator in graph.operators for tensor in operator.outputs}
    taken = {i for op in graph.operators if op.index in on_tpu for i in op.inputs if i != NONE}
    wanted = {i for op in graph.operators if op.index not in on_tpu for i in op.inputs} | set(graph.outputs)
    inputs = sum(
        graph.tensors[i].elements
        for i in taken
        if makers.get(i, NONE) not in on_tpu and not graph.tensors[i].is_constant
    )
    outputs = sum(latency.padded_map_bytes(_map(graph.tensors[i])) for i in wanted if makers.get(i, NONE) in on_tpu)
    held = latency.allocate_cache(layers, target)
    streamed = [each.parameters.size_bytes * out for each, out in zip(layers, held.streamed, strict=True)]
    instructions = latency.instruction_bytes(layers, inputs + outputs)
    if compiled is not None:
        streamed = _distribute_streamed_bytes(streamed, layers, compiled.streamed_bytes)
    # Instructions stay predicted, with which the constants were fitted: MobileNetV1 0.25 at 128 pixels has 170 kB of
    # them, and would take 0.6 ms on PCIe by their bytes; 0.36 ms were measured.
    return BusTraffic(inputs, outputs, instructions, tuple(streamed), max(found.subgraphs, 1))


def _distribute_streamed_bytes(
    predicted: Sequence[int], layers: Sequence[ArrayLayer], streamed_bytes: int
) -> list[int]:
    """The bytes that are really streamed, given to those layers that were thought to be, then to the largest."""
    left, found = streamed_bytes, [0] * len(layers)
    sizes = [layer.parameters.size_bytes for layer in layers]
    for index in sorted(range(len(layers)), key=lambda i: (predicted[i] == 0, -sizes[i])):
        found[index] = min(sizes[index], left)
        left -= found[index]
    return found


def _cpu_ms(graph: Graph, operator: Operator, bus: Mapping[str, Any]) -> float:
    """An operator on one core of the host: by its multiply-accumulates, or else by its elements."""
    macs = arithmetic.macs(graph, operator)
    if macs:
        return float(macs * bus["cpu_ns_per_mac"] / 1e6)
    if operator.name in _FREE_OPERATORS:
        return 0.0
    elements = sum(tensor.elements for tensor in graph.input_tensors(operator) if not tensor.is_constant)
    made = sum(tensor.elements for tensor in graph.output_tensors(operator))
    return float(max(elements, made) * bus["cpu_ns_per_element"] / 1e6)


def _with_cpu(told: LatencyPrediction, cpu_ms: float, fullness: float) -> LatencyPrediction:
    """The prediction with what runs on the CPU; the upper end is higher where activations do not fit the tiles."""
    over = min(max(fullness, 1.0), LATENCY["largest_factor"])
    return replace(
        told,
        total=told.total + cpu_ms,
        low=told.low + cpu_ms / LATENCY["cpu_factor"],
        high=told.high * over + cpu_ms * LATENCY["cpu_factor"],
        parts={**told.parts, "cpu_ms": cpu_ms},
    )


def _advice(
    layers: Sequence[ArrayLayer],
    sent: BusTraffic,
    constants: Mapping[str, Any],
    host: str,
    clock: str,
    cpu_ms: float,
    alone_ms: float,
) -> tuple[tuple[str, float], ...]:
    """Return changes that lower the latency, tried with the same prediction, the largest saving first."""

    def total(changed: Sequence[ArrayLayer], over_bus: BusTraffic) -> float:
        return latency.predict(changed, over_bus, constants, host, clock).total

    now = total(layers, sent)
    found = []
    if alone_ms < now + cpu_ms:
        found.append(
            (f"too small for the Edge TPU: on the CPU alone it takes about {alone_ms:.3g} ms", now + cpu_ms - alone_ms)
        )
    if any(sent.streamed):
        saves = now - total(layers, replace(sent, streamed=(0,) * len(layers)))
        found.append((f"{sum(sent.streamed) / 1e6:.2f} MB less, and no parameters are sent at every inference", saves))
    if cpu_ms:
        found.append(("let what runs on the CPU run in the application, or legalize it", cpu_ms))
    for place, layer in enumerate(layers):
        if layer.kind in WEIGHTED and layer.output_shape[2] % ROW_BLOCK and layer.output_shape[2] > ROW_BLOCK:
            less = layer.output_shape[2] % ROW_BLOCK
            smaller = [*layers[:place], _narrower(layer, less), *layers[place + 1 :]]
            free = round_up(layer.output_shape[2], ROW_BLOCK) - layer.output_shape[2]
            what = f"{layer.name} {layer.index}: {free} more output channels are free, or {less} fewer save time"
            found.append((what, now - total(smaller, sent)))
    worth = [each for each in found if each[1] > _MIN_SAVING * (now + cpu_ms)]
    return tuple(sorted(worth, key=lambda each: -each[1]))


def _narrower(layer: ArrayLayer, less: int) -> ArrayLayer:
    height, width, channels = layer.output_shape
    return replace(layer, output_shape=(height, width, channels - less))
