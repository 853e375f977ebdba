"""`estimate`: predict the latency of a model on the Edge TPU, and what would reduce it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.core.errors import ModelError
from compress.model.tflite import macs as arithmetic
from compress.model.tflite.graph import NONE, Graph, Operator
from compress.results.encoding import encode
from compress.results.placement import ExpectedLatency, LatencyAdvice
from compress.targets.base import Target
from compress.targets.edgetpu import latency, operator_parameters
from compress.targets.edgetpu.check import TILE_BYTES, Check, check
from compress.targets.edgetpu.constants import CONSTANTS, HostConstants
from compress.targets.edgetpu.inspection import Inspection
from compress.targets.edgetpu.latency import WEIGHTED, ArrayLayer, BusTraffic, LatencyPrediction
from compress.targets.edgetpu.placement import COMPILED_OPERATOR, parser_rejection
from compress.targets.edgetpu.rules import refusing_damaged
from darwinn.blocks import ROW_BLOCK, position, round_up

SCHEMA_VERSION = 1
MAX_LISTED = 8
"""The number of layers, and of recommendations, that the text lists."""
_KINDS = {"CONV_2D": "conv", "TRANSPOSE_CONV": "tconv", "FULLY_CONNECTED": "fc", "DEPTHWISE_CONV_2D": "dw"}
_FREE_OPERATORS = {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "PAD"}
"""Operators that take no time if they have no parameters."""
_MIN_SAVING = 0.005
"""The smallest saving of a recommendation, as a fraction of the latency."""


@dataclass(frozen=True)
class Estimate:
    """The predicted latency of a model on one host.

    Attributes:
        latency: total, interval, parts, and ms of each layer on the Edge TPU.
        layers: the layers on the Edge TPU, in the order of `latency.layers`.
        streamed_bytes: parameters that are sent at every inference.
        compiled: whether the streamed bytes are those of a compiled model, not predicted.
        cpu_alone_ms: approximate latency of the whole model on one core of that host's CPU.
        advice: what would reduce the latency, with the ms saved, in decreasing order.
        uncounted: the operators on the Edge TPU whose multiplications the prediction does not contain.
    """

    latency: LatencyPrediction
    layers: tuple[ArrayLayer, ...]
    host: str
    clock: str
    streamed_bytes: int
    compiled: bool
    cpu_alone_ms: float
    advice: tuple[LatencyAdvice, ...]
    check: Check
    uncounted: tuple[str, ...] = ()

    @property
    def latency_ms(self) -> float:
        """The predicted latency."""
        return self.latency.total

    @property
    def low_ms(self) -> float:
        """The lower end of the interval in which measurements are expected."""
        return self.latency.low

    @property
    def high_ms(self) -> float:
        """The upper end of the interval."""
        return self.latency.high

    def describe(self) -> str:
        """Return the estimate as text for a person."""
        latency, constants = self.latency, CONSTANTS.latency.hosts[self.host]
        source = "from the compiled model" if self.compiled else "predicted"
        lines = [
            f"{latency.total:.3g} ms on {self.host} ({constants.summary}), {latency.low:.3g} to {latency.high:.3g}; "
            "predicted, not measured",
            *(f"  {name.removesuffix('_ms'):<8} {value:9.3f} ms" for name, value in latency.parts.items()),
            f"this host: {constants.basis}",
            f"clock: {self.clock} (on USB, libedgetpu1-std runs at half the clock of libedgetpu1-max)",
            self.check.summary,
            f"{self.streamed_bytes:,} bytes of parameters are sent at every inference, {source}",
        ]
        if self.check.cache_warning and not self.compiled:
            lines.append(self.check.cache_warning)
        if self.uncounted:
            names = ", ".join(self.uncounted)
            lines.append(f"at least: the multiplications of {names} are not in the prediction; no measurement is known")
        lines.append("slowest layers:")
        rows = sorted(zip(latency.layers, self.layers, strict=True), key=lambda row: -row[0])
        for layer_ms, layer in rows[:MAX_LISTED]:
            shapes = f"{_shape_text(layer.input_shape)} -> {_shape_text(layer.output_shape)}"
            lines.append(f"  {layer.index:>4} {layer.name:<20} {layer_ms:8.3f} ms  {shapes}")
        if self.advice:
            lines.append("what would reduce it:")
            lines += [f"  {change.saves_ms:8.3f} ms  {change.what}" for change in self.advice[:MAX_LISTED]]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as a plain map, schema 1."""
        constants = CONSTANTS.latency.hosts[self.host]
        return {
            "schema_version": SCHEMA_VERSION,
            "latency_ms": self.latency_ms,
            "low_ms": self.low_ms,
            "high_ms": self.high_ms,
            "host": self.host,
            "basis": constants.basis,
            "measurements": constants.measurements,
            "clock": self.clock,
            "parts": dict(self.latency.parts),
            "layers": [
                {"index": layer.index, "op": layer.name, "ms": layer_ms}
                for layer, layer_ms in zip(self.layers, self.latency.layers, strict=True)
            ],
            "streamed_bytes": self.streamed_bytes,
            "compiled": self.compiled,
            "cpu_alone_ms": self.cpu_alone_ms,
            "uncounted": list(self.uncounted),
            "advice": encode(self.advice),
            "placement": self.check.summary,
        }


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


@refusing_damaged()
def estimate(
    graph: Graph, target: Target, host: str, clock: str = "max", compiled: Inspection | None = None
) -> Estimate:
    """Predict the latency of a model on a host and with a clock that the target has.

    `compiled` is the compiled model; its streamed bytes replace the predicted ones.

    Raises:
        ModelError: the compiler will reject the model, or the model is damaged.
    """
    checked = check(graph, target)
    if checked.failure is not None:
        raise ModelError(checked.summary, hint=_rejection_advice(graph))
    return _estimate(graph, target, host, clock, compiled, checked)


def _rejection_advice(graph: Graph) -> str:
    """Return advice on a model that the compiler will reject."""
    if any(operator.name == COMPILED_OPERATOR for operator in graph.operators):
        return "give the full-integer model that it was compiled from, and this one with --compiled"
    unknown = {operator.name for operator in graph.operators if operator.custom and parser_rejection(operator)}
    if unknown:
        return f"replace the layers that became {', '.join(sorted(unknown))[:200]}, and convert the model again"
    produced = [tensor for operator in graph.operators for tensor in graph.output_tensors(operator)]
    if not any(tensor.dtype in CONSTANTS.dtypes for tensor in produced):
        return "quantize it first: `quantize` in a pipeline"
    return "see `python -m compress check`, and `legalize`"


def _estimate(
    graph: Graph, target: Target, host: str, clock: str, compiled: Inspection | None, checked: Check
) -> Estimate:
    constants = CONSTANTS.latency
    bus = constants.hosts[host]
    on_tpu = {op.index for op in checked.ops if op.placement == "tpu"}
    layers = tuple(_layers(graph, on_tpu, target))
    traffic = _bus_traffic(graph, on_tpu, layers, checked, compiled)
    prediction = latency.predict(layers, traffic, constants, host, clock)
    if not layers:
        parts = dict.fromkeys(prediction.parts, 0.0)
        prediction = replace(prediction, total=0.0, low=0.0, high=0.0, parts=parts)
    cpu_alone_ms = sum(_cpu_ms(graph, operator, bus) for operator in graph.operators)
    cpu_ms = sum(_cpu_ms(graph, operator, bus) for operator in graph.operators if operator.index not in on_tpu)
    advice = _Advisor(layers, traffic, host, clock).advice(cpu_ms, cpu_alone_ms)
    # Multiplications that the kinds of layers do not contain, such as those of an LSTM.
    element_wise = {layer.index for layer in layers if layer.kind not in _KINDS.values()}
    uncounted = [
        f"{operator.name} {operator.index}"
        for operator in graph.operators
        if operator.index in element_wise and arithmetic.macs(graph, operator)
    ]
    tile_share = (checked.activation_bytes or 0) / TILE_BYTES
    return Estimate(
        latency=_add_cpu_time(prediction, cpu_ms, tile_share, bus.cpu_factor or constants.cpu_factor),
        layers=layers,
        host=host,
        clock=clock,
        streamed_bytes=sum(traffic.streamed_bytes),
        compiled=compiled is not None,
        cpu_alone_ms=cpu_alone_ms,
        advice=advice,
        check=checked,
        uncounted=tuple(uncounted),
    )


def estimate_all_hosts(graph: Graph, target: Target, compiled: Inspection | None = None) -> dict[str, ExpectedLatency]:
    """Return the predictions for all hosts of the target; empty if the compiler will reject the model.

    With a compiled model, its streamed bytes replace the predicted ones.
    """
    predictions = {}
    for host, constants in CONSTANTS.latency.hosts.items():
        try:
            prediction = estimate(graph, target, host, compiled=compiled)
        except ModelError:
            return {}
        predictions[host] = ExpectedLatency(
            constants.summary,
            prediction.latency_ms,
            prediction.low_ms,
            prediction.high_ms,
            prediction.cpu_alone_ms,
        )
    return predictions


def array_layers(graph: Graph, target: Target) -> list[ArrayLayer]:
    """Return the layers that run on the Edge TPU, with the memory for their parameters."""
    return _layers(graph, {op.index for op in check(graph, target).ops if op.placement == "tpu"}, target)


def _layers(graph: Graph, on_tpu: set[int], target: Target) -> list[ArrayLayer]:
    layers = []
    for operator in graph.operators:
        if operator.index in on_tpu:
            parameters = operator_parameters.count(operator, graph, target)
            if operator.name not in _FREE_OPERATORS or parameters.size_bytes:
                layers.append(replace(_array_layer(operator, graph), parameters=parameters))
    return layers


def _array_layer(operator: Operator, graph: Graph) -> ArrayLayer:
    """Return an operator as a layer: kind, shapes and window."""
    output_shape = position(graph.output_tensors(operator)[0])
    inputs = graph.input_tensors(operator)
    activations = [tensor for tensor in inputs if not tensor.is_constant] or inputs
    input_shape = position(activations[0]) if activations else output_shape
    kind = _KINDS.get(operator.name, "elt")
    window = (1, 1)
    if kind == "fc":
        output_channels, input_channels = graph.tensors[operator.inputs[1]].shape
        output_shape = (1, 1, output_channels)
        input_shape = (1, 1, input_channels)
    elif kind in ("conv", "tconv", "dw"):
        _, height, width, _ = graph.tensors[operator.inputs[1]].shape
        window = (height, width)
    elif operator.name in ("AVERAGE_POOL_2D", "MAX_POOL_2D"):
        kind = "pool"
        window = (operator.option("filterHeight", 1), operator.option("filterWidth", 1))
    elif operator.name in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN") and input_shape[2] == output_shape[2]:
        kind = "pool"
        window = (input_shape[0] // output_shape[0], input_shape[1] // output_shape[1])
    return ArrayLayer(kind, output_shape, input_shape, window, index=operator.index, name=operator.name)


def transfer_sizes(graph: Graph, on_tpu: set[int]) -> tuple[list[int], list[int]]:
    """Return the bytes of each input and of each output of the Edge TPU; `on_tpu`: the indices of its operators."""
    computed_on_tpu: set[int] = set()
    read_on_tpu: set[int] = set()
    read_on_host = set(graph.outputs)
    for operator in graph.operators:
        if operator.index in on_tpu:
            computed_on_tpu.update(operator.outputs)
            read_on_tpu.update(operator.inputs)
        else:
            read_on_host.update(operator.inputs)
    sent = [graph.tensors[index] for index in read_on_tpu - computed_on_tpu - {NONE}]
    received = [graph.tensors[index] for index in read_on_host & computed_on_tpu]
    inputs = [tensor.elements for tensor in sent if not tensor.is_constant]
    return inputs, [latency.padded_map_bytes(position(tensor)) for tensor in received]


def _bus_traffic(
    graph: Graph,
    on_tpu: set[int],
    layers: Sequence[ArrayLayer],
    checked: Check,
    compiled: Inspection | None,
) -> BusTraffic:
    """Return the bytes on the bus: tensors, instructions, and parameters that are not cached."""
    inputs, outputs = transfer_sizes(graph, on_tpu)
    input_bytes, output_bytes = sum(inputs), sum(outputs)
    streamed = latency.streamed_bytes(layers)
    if compiled is not None:
        streamed = _distribute_streamed_bytes(streamed, layers, compiled.streamed_bytes)
    # Instructions are always predicted, because the constants were fitted with predicted ones: MobileNetV1 0.25 at 128
    # pixels has 170 kB of them. By their bytes it would take 0.6 ms on PCIe; 0.36 ms were measured.
    instruction_bytes = latency.instruction_bytes(layers)
    return BusTraffic(input_bytes, output_bytes, instruction_bytes, streamed, max(checked.subgraphs, 1))


def _distribute_streamed_bytes(
    predicted: Sequence[int], layers: Sequence[ArrayLayer], streamed_bytes: int
) -> tuple[int, ...]:
    """Distribute the real streamed bytes over the layers: first those predicted as streamed, then the largest."""
    remaining = streamed_bytes
    layer_bytes = [0] * len(layers)
    sizes = [layer.parameters.size_bytes for layer in layers]
    for index in sorted(range(len(layers)), key=lambda index: (predicted[index] == 0, -sizes[index])):
        layer_bytes[index] = min(sizes[index], remaining)
        remaining -= layer_bytes[index]
    return tuple(layer_bytes)


def _cpu_ms(graph: Graph, operator: Operator, bus: HostConstants) -> float:
    """Return the time of an operator on one core of the host: from its multiply-accumulates, or from its elements."""
    macs = arithmetic.macs(graph, operator)
    if macs:
        return macs * bus.cpu_ns_per_mac / 1e6
    if operator.name in _FREE_OPERATORS:
        return 0.0
    input_elements = sum(tensor.elements for tensor in graph.input_tensors(operator) if not tensor.is_constant)
    output_elements = sum(tensor.elements for tensor in graph.output_tensors(operator))
    return max(input_elements, output_elements) * bus.cpu_ns_per_element / 1e6


def _add_cpu_time(
    prediction: LatencyPrediction, cpu_ms: float, tile_share: float, cpu_factor: float
) -> LatencyPrediction:
    """Add the CPU operators. The upper limit is higher if the activations do not fit into the tiles."""
    factor = min(max(tile_share, 1.0), CONSTANTS.latency.largest_factor)
    return replace(
        prediction,
        total=prediction.total + cpu_ms,
        low=prediction.low + cpu_ms / cpu_factor,
        high=prediction.high * factor + cpu_ms * cpu_factor,
        parts={**prediction.parts, "cpu_ms": cpu_ms},
    )


@dataclass(frozen=True)
class _Advisor:
    """A network and the host that it runs on, for predictions of changed networks."""

    layers: Sequence[ArrayLayer]
    traffic: BusTraffic
    host: str
    clock: str

    def advice(self, cpu_ms: float, cpu_alone_ms: float) -> tuple[LatencyAdvice, ...]:
        """Return changes that reduce the latency by decreasing gain."""
        tpu_ms = self._total(self.layers, self.traffic)
        total_ms = tpu_ms + cpu_ms
        changes = []
        if cpu_alone_ms < total_ms:
            shown = f"about {cpu_alone_ms:.3g} ms" if cpu_alone_ms >= 0.001 else "less than 0.001 ms"
            what = f"too small for the Edge TPU: on the CPU alone it takes {shown}"
            changes.append(LatencyAdvice(what, total_ms - cpu_alone_ms))
        streamed_bytes = sum(self.traffic.streamed_bytes)
        if streamed_bytes:
            cached = replace(self.traffic, streamed_bytes=(0,) * len(self.layers))
            what = f"{streamed_bytes / 1e6:.2f} MB less, and no parameters are sent at every inference"
            changes.append(LatencyAdvice(what, tpu_ms - self._total(self.layers, cached)))
        if cpu_ms:
            what = "run the CPU operators in the application, or legalize the model"
            changes.append(LatencyAdvice(what, cpu_ms))
        for index, layer in enumerate(self.layers):
            excess = layer.output_shape[2] % ROW_BLOCK
            if layer.kind in WEIGHTED and excess and layer.output_shape[2] > ROW_BLOCK:
                changes.append(self._channel_advice(index, layer, excess, tpu_ms))
        worthwhile = [change for change in changes if change.saves_ms > _MIN_SAVING * total_ms]
        return tuple(sorted(worthwhile, key=lambda change: -change.saves_ms))

    def _channel_advice(self, index: int, layer: ArrayLayer, excess: int, tpu_ms: float) -> LatencyAdvice:
        height, width, channels = layer.output_shape
        narrower = replace(layer, output_shape=(height, width, channels - excess))
        changed = [*self.layers[:index], narrower, *self.layers[index + 1 :]]
        free = round_up(channels, ROW_BLOCK) - channels
        what = f"{layer.name} {layer.index}: {free} more output channels are free, or {excess} fewer save time"
        return LatencyAdvice(what, tpu_ms - self._total(changed, self.traffic))

    def _total(self, layers: Sequence[ArrayLayer], traffic: BusTraffic) -> float:
        return latency.predict(layers, traffic, CONSTANTS.latency, self.host, self.clock).total
