"""`check`: what the Edge TPU compiler will do with a model, in milliseconds and without the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from compress.errors import ModelError
from compress.targets.base import Target
from compress.targets.edgetpu import activation_memory
from compress.targets.edgetpu import operator_parameters as parameters
from compress.targets.edgetpu.constants import MEMORY
from compress.targets.edgetpu.parameter_memory import CacheAllocation, allocate_cache
from compress.targets.edgetpu.placement import AFTER_CPU_OPERATOR, PlacedOperator, Placement, place
from compress.tflite.graph import NONE, Graph, Operator

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Blocker:
    """An operator that keeps others on the CPU, itself not kept there by any.

    Attributes:
        index: of the operator.
        op: its kind.
        output: the tensor it makes.
        macs: multiply-accumulates that it keeps on the CPU, its own and those of what comes after it.
        reason: why it is not mapped.
    """

    index: int
    op: str
    output: str
    macs: int
    reason: str


@dataclass(frozen=True)
class Check:
    """Everything that is expected of the compiler.

    Attributes:
        placement: where each operator runs.
        subgraphs: partitions on the Edge TPU.
        blockers: what to change first, the most expensive first.
        parameters: their sizes and where they are kept; None when the model is refused.
        activation_bytes: in the fullest tile; None when the model is refused.
        tile_bytes: a tile's memory.
        plan_bytes: on-chip memory for parameters that every network can count on.
    """

    placement: Placement
    subgraphs: int
    blockers: tuple[Blocker, ...]
    parameters: CacheAllocation | None
    activation_bytes: int | None
    tile_bytes: int
    plan_bytes: int

    @property
    def doubt(self) -> str:
        """A doubt about the parameters that stay on the chip, or ""."""
        if self.parameters is None or self.parameters.report_on_chip_bytes <= self.plan_bytes:
            return ""
        return f"more than {self.plan_bytes:,} bytes on chip: some networks were given no more, and streamed the rest"

    @property
    def risk(self) -> str:
        """The risk that the compiler fails because of the model's size: low, medium or high; and why."""
        if self.activation_bytes is None:
            return "refused"
        times = self.activation_bytes / self.tile_bytes
        if times <= 1:
            return "low: activations fit on the chip"
        word = "medium" if times <= MEMORY["passes_that_compiled"] else "high"
        known = "such models were compiled, in passes" if word == "medium" else "no such model is known to compile"
        return f"{word}: activations take {times:.1f} times a tile's memory; {known}"

    @property
    def failure(self) -> str | None:
        """Why the compiler would refuse the whole model, or None."""
        return self.placement.failure

    @property
    def summary(self) -> str:
        """One line about the placement."""
        return self.placement.summary

    @property
    def complete(self) -> bool:
        """Whether every operator is mapped."""
        return self.placement.complete

    def describe(self) -> str:
        """Return the result as text for a person."""
        lines = [f"{op.index:>4} {op.placement}  {op.op:<28} {op.status}" for op in self.placement.ops]
        lines += [
            f"{op.index:>4} {op.op} ({op.output}): {op.reason} {op.advice}".rstrip()
            for op in self.placement.ops
            if op.status != AFTER_CPU_OPERATOR and op.reason
        ]
        lines.append(self.placement.summary)
        kept = self.placement.macs["cpu"]
        if self.blockers and kept and self.placement.failure is None:
            first, share = self.blockers[0], kept / sum(self.placement.macs.values())
            few = "this operator keeps" if len(self.blockers) == 1 else f"these {len(self.blockers)} operators keep"
            named = f"{first.op} {first.index} ({first.output})"
            lines.append(f"{few} {share:.0%} of the MACs on the CPU; start with {named}")
        if self.parameters is not None:
            lines.append(f"parameters   {self.parameters.cached_bytes:,} bytes cached on chip, predicted")
            lines.append(
                f"             {self.parameters.streamed_bytes:,} bytes streamed at every inference, predicted"
            )
            lines += [f"             {self.doubt}"] if self.doubt else []
            lines.append(f"activations  {self.activation_bytes:,} bytes in a tile, predicted")
            lines.append(f"risk         {self.risk}")
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """As a plain map, schema 1. Sizes are null when the model is refused."""
        sizes = self.parameters
        return {
            "schema_version": SCHEMA_VERSION,
            **self.placement.to_json(),
            "subgraphs": self.subgraphs,
            "cached_bytes": sizes.cached_bytes if sizes else None,
            "streamed_bytes": sizes.streamed_bytes if sizes else None,
            "report_on_chip_bytes": sizes.report_on_chip_bytes if sizes else None,
            "report_off_chip_bytes": sizes.report_off_chip_bytes if sizes else None,
            "activation_bytes": self.activation_bytes,
            "risk": self.risk,
            "blockers": [vars(blocker) for blocker in self.blockers],
        }


def check(graph: Graph, target: Target, *, all_subgraphs: bool = False) -> Check:
    """Predict placement and memory.

    Args:
        graph: the model.
        target: an accelerated target; `Target.compiled_by` chooses the compiler's version.
        all_subgraphs: whether the compiler is asked for several partitions.

    Raises:
        ModelError: an operator lacks something that every such operator has: a damaged file.
    """
    try:
        return _check(graph, target, all_subgraphs)
    except (IndexError, KeyError, ValueError, TypeError, ZeroDivisionError, OverflowError) as error:
        raise ModelError(f"an operator is not as its kind must be ({error}): the file is damaged") from error


def _check(graph: Graph, target: Target, all_subgraphs: bool) -> Check:
    for operator in graph.operators:
        needed = operator.inputs[: 1 if "LSTM" in operator.name else 2]  # an LSTM's first weights are optional
        if NONE in needed and operator.name in target.tables["operators"]:
            raise ValueError(f"operator {operator.index} ({operator.name}) lacks an input")
    placement = place(graph, target, all_subgraphs=all_subgraphs)
    on_tpu = {op.index for op in placement.ops if op.placement == "tpu"}
    sizes = activation_bytes = None
    if placement.failure is None:
        mapped = [operator for operator in graph.operators if operator.index in on_tpu]
        sizes = allocate_cache([parameters.count(operator, graph, target) for operator in mapped], target)
        activation_bytes = activation_memory.bytes_per_tile(graph, on_tpu)
    return Check(
        placement,
        _partitions(graph.operators, on_tpu) if placement.failure is None else 0,
        _blockers(graph.operators, placement.ops),
        sizes,
        activation_bytes,
        target.tables["memory"]["narrow_bytes_per_tile"],
        target.tables["memory"]["plan_bytes"],
    )


def _partitions(operators: Sequence[Operator], on_tpu: set[int]) -> int:
    """The number of partitions on the Edge TPU: a new partition begins after each CPU operator that follows one."""
    depth: dict[int, int] = {}  # by tensor: partitions begun on the way to it; odd while on the TPU
    entered: set[int] = set()
    for operator in operators:
        reached = max((depth.get(index, 0) for index in operator.inputs if index != NONE), default=0)
        here = operator.index in on_tpu
        if here != (reached % 2 == 1) and (here or reached):
            reached += 1
        if here:
            entered.add(reached)
        depth.update(dict.fromkeys(operator.outputs, reached))
    return len(entered)


def _blockers(operators: Sequence[Operator], placed: Sequence[PlacedOperator]) -> tuple[Blocker, ...]:
    """The first operators that are not mapped on each path, with all that they keep on the CPU."""
    behind: dict[int, int] = {}  # by tensor: a bit for each blocker on the way to it
    kept: dict[int, int] = {}  # by blockers: the MACs that they keep on the CPU together
    first: list[int] = []
    for operator, op in zip(operators, placed, strict=True):
        causes = reduce(or_, (behind.get(tensor, 0) for tensor in operator.inputs), 0)
        if op.placement == "cpu" and op.status != AFTER_CPU_OPERATOR and not causes:
            causes = 1 << len(first)
            first.append(op.index)
        if op.placement == "cpu":
            kept[causes] = kept.get(causes, 0) + op.macs
        behind.update(dict.fromkeys(operator.outputs, causes))
    macs = (sum(count for causes, count in kept.items() if causes >> bit & 1) for bit in range(len(first)))
    found = [
        Blocker(i, placed[i].op, placed[i].output, count, placed[i].reason)
        for i, count in zip(first, macs, strict=True)
    ]
    return tuple(sorted(found, key=lambda blocker: -blocker.macs))
