"""The target `cpu`, the host's own CPU: every operator runs, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.core.artifact import Facts
from compress.core.files import digest_of
from compress.model.tflite import macs as arithmetic
from compress.model.tflite.comparison import Feed
from compress.model.tflite.graph import Graph, parse
from compress.results.placement import OperatorPlacement
from compress.targets.base import ChannelBlocks, CompilerSettings, CostModel, Target


@dataclass(frozen=True)
class CpuCheck:
    """The placement of a model on the CPU: every operator runs there."""

    ops: tuple[OperatorPlacement, ...]
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
    """The costs on a CPU, of which neither time nor memory is predicted.

    A network is pruned in the blocks of the Edge TPU [choice, 2026-11], so that a network pruned by MACs fits both
    targets; no speed was measured.
    """

    blocks = ChannelBlocks(4, 64)


@dataclass(frozen=True)
class Cpu(Target):
    """A CPU with a TFLite runtime."""

    cost = CpuCost()

    def check(self, graph: Graph, *, all_subgraphs: bool = False) -> CpuCheck:
        """Place every operator on the CPU."""
        del all_subgraphs
        ops = (
            OperatorPlacement(op.index, op.name, "cpu", arithmetic.macs(graph, op), op.version)
            for op in graph.operators
        )
        return CpuCheck(tuple(ops))

    def legalize(self, graph: Graph, inputs: Sequence[Feed] = (), *, io: str | None = None) -> Unchanged:
        """Return the model unchanged."""
        del inputs, io
        return Unchanged(graph, self.check(graph))

    def compile(self, model: bytes, settings: CompilerSettings, folder: Path, note: Callable[[str], None]) -> Facts:
        """Return the placement: a CPU runs the model as it is."""
        del settings, folder, note
        return {"placement": self.check(parse(model)).to_json(), "compiled": False}


TARGET: Target = Cpu("cpu", "CPU with a TFLite runtime", digest_of(asdict(CpuCost.blocks)))
