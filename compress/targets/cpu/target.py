"""The CPU as a target: every operator runs, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Never

from compress.core.artifact import Facts
from compress.core.errors import StageError
from compress.model.tflite import macs as arithmetic
from compress.model.tflite.comparison import Feed
from compress.model.tflite.graph import Graph
from compress.targets.base import ChannelBlocks, CostModel, OperatorShape, Target
from compress.targets.compiler_settings import CompilerSettings


@dataclass(frozen=True)
class CpuOperator:
    """An operator in the TFLite runtime."""

    index: int
    op: str
    version: int
    macs: int
    placement: str = "cpu"


@dataclass(frozen=True)
class CpuCheck:
    """The placement of a model on the CPU: every operator runs there."""

    ops: tuple[CpuOperator, ...]
    failure: None = None
    complete: bool = True

    @property
    def summary(self) -> str:
        """One line about the placement."""
        return f"all {len(self.ops)} operators run on the CPU"

    def describe(self) -> str:
        """Return the placement as text."""
        return "\n".join([*(f"{op.index:>4} {op.placement}  {op.op}" for op in self.ops), self.summary]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the placement as a plain map."""
        macs = sum(op.macs for op in self.ops)
        return {"summary": self.summary, "macs": {"cpu": macs}, "ops": [asdict(op) for op in self.ops]}


@dataclass(frozen=True)
class Unchanged:
    """A model that needs no rewriting."""

    graph: Graph
    after: CpuCheck

    def describe(self) -> str:
        """Return the result as text."""
        return f"nothing to rewrite: {self.after.summary}\n"

    def to_json(self) -> dict[str, Any]:
        """Return the result as a plain map."""
        return {"changes": [], "after": self.after.to_json()}


class CpuCost(CostModel):
    """No costs: time and memory are not predicted for a CPU. The pruner itself counts MACs, parameters and bytes.

    Args:
        blocks: the block sizes in which the pruner removes channels.
    """

    objectives = frozenset[str]()
    hosts: ClassVar[Mapping[str, str]] = {}
    clocks = ()
    blocks = ChannelBlocks(1, 1)

    def __init__(self, blocks: ChannelBlocks) -> None:
        self.blocks = blocks

    def operator(self, shape: OperatorShape) -> OperatorShape:
        """Return the operator."""
        return shape

    def input_bytes(self, shape: Sequence[int]) -> int:
        """Return 0: a CPU has no bus."""
        del shape
        return 0

    def output_bytes(self, shape: Sequence[int]) -> int:
        """Return 0: a CPU has no bus."""
        del shape
        return 0

    def of_operators(self, operators: Sequence[Any], input_bytes: int, output_bytes: int) -> Never:
        """Refuse."""
        raise _no_prediction()

    def of_file(self, graph: Graph) -> Never:
        """Refuse."""
        raise _no_prediction()

    def cache_bytes(self) -> Never:
        """Refuse."""
        raise _no_prediction()

    def cache_limit_bytes(self, smallest: object) -> Never:
        """Refuse."""
        raise _no_prediction()


def _no_prediction() -> StageError:
    return StageError("time and memory are not predicted for the target cpu", hint="use macs, parameters or size")


@dataclass(frozen=True)
class Cpu(Target):
    """A CPU with a TFLite runtime."""

    def check(self, graph: Graph, *, all_subgraphs: bool = False) -> CpuCheck:
        """Place every operator on the CPU."""
        del all_subgraphs
        ops = (CpuOperator(op.index, op.name, op.version, arithmetic.macs(graph, op)) for op in graph.operators)
        return CpuCheck(tuple(ops))

    def legalize(self, graph: Graph, inputs: Sequence[Feed] = (), *, io: str | None = None) -> Unchanged:
        """Return the model unchanged."""
        del inputs, io
        return Unchanged(graph, self.check(graph))

    @cached_property
    def cost(self) -> CpuCost:
        """The costs, without time and memory."""
        blocks = self.tables["blocks"]
        return CpuCost(ChannelBlocks(blocks["input_channels"], blocks["output_channels"]))

    def compile(self, model: bytes, settings: CompilerSettings, folder: Path, note: Callable[[str], None]) -> Facts:
        """Refuse: the compile stage is skipped for a CPU."""
        raise StageError(f"the target {self.name} has no compiler", hint="remove `compile`")
