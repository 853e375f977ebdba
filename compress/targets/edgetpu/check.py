"""`check`: predict what the Edge TPU compiler does with a model, in milliseconds and without the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from compress.model.tflite import lookup
from compress.model.tflite.graph import NONE, Graph, Operator, Tensor
from compress.results.encoding import encode
from compress.results.placement import OperatorPlacement
from compress.targets.base import Target
from compress.targets.edgetpu import operator_parameters as parameters
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.parameter_memory import CacheAllocation, allocate_cache
from compress.targets.edgetpu.placement import AFTER_CPU_OPERATOR, Placement, place
from compress.targets.edgetpu.rules import refusing_damaged
from darwinn.blocks import position, round_up

SCHEMA_VERSION = 1
TILES = CONSTANTS.tiles
TILE_BYTES = CONSTANTS.memory.narrow_bytes_per_tile
_WINDOWED = {"CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV"}


@dataclass(frozen=True)
class Blocker:
    """An operator that breaks a rule and keeps later operators on the CPU.

    Attributes:
        index: the operator's index.
        op: the operator's name.
        output: the name of its output tensor.
        macs: the multiply-accumulates that stay on the CPU because of it: its own and those of the operators after it.
    """

    index: int
    op: str
    output: str
    macs: int
    reason: str


@dataclass(frozen=True)
class Check(Placement):
    """The predicted result of the compiler.

    Attributes:
        subgraphs: the number of partitions on the Edge TPU.
        blockers: the operators to change first, by decreasing MACs.
        parameters: the parameters' sizes and which of them are cached; None if the compiler rejects the model.
        activation_bytes: the activation memory of the fullest tile; None if the compiler rejects the model.
        has_repeated_constants: whether an operator with a constant vector runs on the Edge TPU.
        unconfirmed: the names of operators on the Edge TPU whose parameters are at least as many as predicted.
        lookup_table: rows and width of the table in which the CPU looks up the model's input; None without one.
    """

    subgraphs: int
    blockers: tuple[Blocker, ...]
    parameters: CacheAllocation | None
    activation_bytes: int | None
    has_repeated_constants: bool
    unconfirmed: tuple[str, ...] = ()
    lookup_table: tuple[int, ...] | None = None

    @property
    def cache_warning(self) -> str:
        """A warning if the predicted cached bytes are uncertain, or ""."""
        if self.parameters is None or self.parameters.report_on_chip_bytes <= CONSTANTS.memory.plan_bytes:
            return ""
        plan_bytes = CONSTANTS.memory.plan_bytes
        return f"more than {plan_bytes:,} bytes on chip: for some networks the compiler cached no more than that"

    @property
    def parameter_warning(self) -> str:
        """Why the compiled file can have more parameter bytes than predicted, or ""."""
        if self.unconfirmed:
            names = ", ".join(self.unconfirmed)
            return f"at least; the compiler may add more for {names}: no known compiled model confirms what it stores"
        if self.has_repeated_constants and (self.activation_bytes or 0) > TILE_BYTES:
            return "more in the file if element-wise operators run in passes: each pass stores their constants"
        return ""

    @property
    def risk(self) -> str:
        """The risk that the compiler fails or maps less, because of large activations: low, medium or high, and why."""
        if self.activation_bytes is None:
            return "refused"
        times = self.activation_bytes / TILE_BYTES
        uncertain = next((op for op in self.ops if op.risk), None)
        if times <= 1 and uncertain is not None:
            return f"medium: {uncertain.op} {uncertain.index} may stay on the CPU: {uncertain.risk}"
        if times <= 1:
            return "low: activations fit on the chip"
        size = f"activations take {times:.1f} times a tile's memory"
        if times <= CONSTANTS.memory.passes_that_compiled:
            return f"medium: {size}; such models were compiled, in several passes"
        return f"high: {size}; no such model is known to compile"

    def describe(self) -> str:
        """Return the result as text for a person."""
        ops = self.ops
        lines = [f"{op.index:>4} {op.placement}  {op.op:<28} {op.status}" for op in ops]
        lines += [
            f"{op.index:>4} {op.op} ({op.output}): {op.reason} {op.advice}".rstrip()
            for op in ops
            if op.status != AFTER_CPU_OPERATOR and op.reason
        ]
        lines.append(self.summary)
        if self.lookup_table is not None:
            rows, width = self.lookup_table
            lines.append(
                f"lookup       on the CPU, before the first operator: a table of {rows:,} rows of {width:,} values"
            )
        lines += self._describe_blockers()
        if self.parameters is not None:
            lines.append(f"parameters   {self.parameters.cached_bytes:,} bytes cached on chip, predicted")
            lines.append(
                f"             {self.parameters.streamed_bytes:,} bytes streamed at every inference, predicted"
            )
            lines += [f"             {warning}" for warning in (self.parameter_warning, self.cache_warning) if warning]
            lines.append(f"activations  {self.activation_bytes:,} bytes in a tile, predicted")
            lines.append(f"risk         {self.risk}")
        return "\n".join(lines) + "\n"

    def _describe_blockers(self) -> list[str]:
        macs = self.macs
        if not self.blockers or not macs["cpu"] or self.failure is not None:
            return []
        first = self.blockers[0]
        count = len(self.blockers)
        subject = "this operator keeps" if count == 1 else f"these {count} operators keep"
        share = macs["cpu"] / sum(macs.values())
        return [f"{subject} {share:.0%} of the MACs on the CPU; start with {first.op} {first.index} ({first.output})"]

    def to_json(self) -> dict[str, Any]:
        """Return the result as a plain map, schema 1. Sizes are null if the compiler rejects the model."""
        sizes = dict.fromkeys(("cached_bytes", "streamed_bytes", "report_on_chip_bytes", "report_off_chip_bytes"))
        if self.parameters is not None:
            sizes = {name: getattr(self.parameters, name) for name in sizes}
        return {
            "schema_version": SCHEMA_VERSION,
            **super().to_json(),
            "subgraphs": self.subgraphs,
            **sizes,
            "parameter_warning": self.parameter_warning,
            "activation_bytes": self.activation_bytes,
            "risk": self.risk,
            "blockers": encode(self.blockers),
            "lookup_table": encode(self.lookup_table),
        }


@refusing_damaged()
def check(graph: Graph, target: Target, *, all_subgraphs: bool = False) -> Check:
    """Predict placement and memory.

    See `Target.check`; `Target.compiled_by` selects the compiler's version.

    Raises:
        ModelError: an operator lacks a required input or option: the file is damaged.
    """
    _require_inputs(graph)
    table = lookup.table_of(graph)
    placement = place(graph, target, all_subgraphs=all_subgraphs)
    on_tpu = {op.index for op in placement.ops if op.placement == "tpu"}
    allocation = activation_bytes = None
    subgraphs = 0
    has_repeated_constants = False
    unconfirmed: tuple[str, ...] = ()
    if placement.failure is None:
        mapped = [operator for operator in graph.operators if operator.index in on_tpu]
        counts = [parameters.count(operator, graph, target) for operator in mapped]
        allocation = allocate_cache(counts)
        has_repeated_constants = any(
            count.size_bytes and operator.name in parameters.ELEMENTWISE
            for operator, count in zip(mapped, counts, strict=True)
        )
        uncertain = {op.name for op, count in zip(mapped, counts, strict=True) if not count.is_confirmed}
        unconfirmed = tuple(sorted(uncertain))
        activation_bytes = activation_bytes_per_tile(graph, on_tpu)
        subgraphs = _partition_count(graph.operators, on_tpu)
    return Check(
        placement.ops,
        placement.failure,
        subgraphs,
        _blockers(graph.operators, placement.ops),
        allocation,
        activation_bytes,
        has_repeated_constants,
        unconfirmed,
        None if table is None else table.shape,
    )


def _require_inputs(graph: Graph) -> None:
    for operator in graph.operators:
        required = operator.inputs[: 1 if "LSTM" in operator.name else 2]  # the first weights of an LSTM are optional
        if NONE in required and operator.name in CONSTANTS.operators:
            raise ValueError(f"operator {operator.index} ({operator.name}) lacks an input")


def _partition_count(operators: Sequence[Operator], on_tpu: set[int]) -> int:
    """Return the number of Edge TPU partitions. A new one begins after each CPU operator that depends on another."""
    depths: dict[int, int] = {}  # by tensor: changes between host and Edge TPU before it; odd on the Edge TPU
    partitions: set[int] = set()
    for operator in operators:
        depth = max((depths.get(index, 0) for index in operator.inputs if index != NONE), default=0)
        runs_on_tpu = operator.index in on_tpu
        inputs_on_tpu = depth % 2 == 1
        if runs_on_tpu != inputs_on_tpu and (runs_on_tpu or depth):
            depth += 1
        if runs_on_tpu:
            partitions.add(depth)
        depths.update(dict.fromkeys(operator.outputs, depth))
    return len(partitions)


def _blockers(operators: Sequence[Operator], placed: Sequence[OperatorPlacement]) -> tuple[Blocker, ...]:
    """Return the first unmapped operator of each path, with all MACs that stay on the CPU because of it."""
    causes_by_tensor: dict[int, int] = {}  # a bit for each blocker before the tensor
    macs_by_causes: dict[int, int] = {}
    first: list[OperatorPlacement] = []
    for operator, op in zip(operators, placed, strict=True):
        causes = reduce(or_, (causes_by_tensor.get(tensor, 0) for tensor in operator.inputs), 0)
        if op.placement == "cpu":
            if op.status != AFTER_CPU_OPERATOR and not causes:
                causes = 1 << len(first)
                first.append(op)
            macs_by_causes[causes] = macs_by_causes.get(causes, 0) + op.macs
        causes_by_tensor.update(dict.fromkeys(operator.outputs, causes))
    blockers = []
    for bit, op in enumerate(first):
        macs = sum(count for causes, count in macs_by_causes.items() if causes >> bit & 1)
        blockers.append(Blocker(op.index, op.op, op.output, macs, op.reason))
    return tuple(sorted(blockers, key=lambda blocker: -blocker.macs))


# --- activation memory ----------------------------------------------------------------


def activation_bytes_per_tile(graph: Graph, on_tpu: set[int]) -> int:
    """Return the largest sum of live activations in one tile, over all Edge TPU operators in execution order.

    Feature maps are divided into 4x4 tiles along height and width. Each tile has 192 KiB of "narrow" memory. If a model
    needs more, the compiler works in several passes or fails; the condition is unknown. Source of the formula:
    comparison with `used_narrow_memory_bytes_per_tile` in compiled models.
    """
    operators = [operator for operator in graph.operators if operator.index in on_tpu]
    last_use = {index: operator.index for operator in operators for index in (*operator.inputs, *operator.outputs)}
    tiles: dict[int, int] = {}
    alive: set[int] = set()
    live_bytes = largest = 0
    for operator in operators:
        operands = {
            tensor.index: tensor
            for tensor in (*graph.input_tensors(operator), *graph.output_tensors(operator))
            if not tensor.is_constant
        }
        for index in operands.keys() - alive:
            if index not in tiles:
                tiles[index] = _tile(operands[index], graph)
            live_bytes += tiles[index]
        alive |= operands.keys()
        largest = max(largest, live_bytes + _extra(operator, graph))
        dead = {index for index in operands if last_use[index] <= operator.index}
        alive -= dead
        live_bytes -= sum(tiles[index] for index in dead)
    return largest


def _tile(tensor: Tensor, graph: Graph) -> int:
    """Return the bytes of one tile of a tensor, with the border that its consumers read. Every tile holds a vector."""
    height, width, channels = position(tensor)
    if height * width == 1:
        return round_up(channels, 4)
    border_h, border_w = 0, 0
    for consumer in graph.consumers.get(tensor.index, ()):
        if consumer.name in _WINDOWED:
            _, kernel_h, kernel_w, _ = graph.tensors[consumer.inputs[1]].shape
            border_h = max(border_h, _border(consumer, kernel_h, "H"))
            border_w = max(border_w, _border(consumer, kernel_w, "W"))
    return (-(-height // TILES) + border_h) * (-(-width // TILES) + border_w) * round_up(channels, 4)


def _border(operator: Operator, kernel: int, letter: str) -> int:
    if operator.name == "TRANSPOSE_CONV":  # positions of the input that reach into a tile of the output
        return int(max(kernel - 1, 0) // max(operator.option(f"stride{letter}", 1), 1))
    reach = (kernel - 1) * operator.option(f"dilation{letter}Factor", 1) + 1
    return int(max(reach - operator.option(f"stride{letter}", 1), 0))


def _extra(operator: Operator, graph: Graph) -> int:
    """Return the memory that an operator needs in addition to its tensors: for a flattened map, and for a product."""
    inputs = [tensor for tensor in graph.input_tensors(operator) if not tensor.is_constant]
    if operator.name == "RESHAPE" and inputs:
        height, width, channels = position(inputs[0])
        flat = graph.output_tensors(operator)[0]
        return (
            height * width * round_up(channels, 4) if height * width > 1 and flat.shape[-1:] == (flat.elements,) else 0
        )
    if operator.name == "MUL" and len(inputs) == 2:
        return 4 * _tile(graph.output_tensors(operator)[0], graph)
    return 0
