"""The Edge TPU as a target: rules, placement, rewrites, cost, and the vendor's compiler. No TensorFlow.

The modules of this package are imported late, because most commands do not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.artifact import Facts
from compress.model.tflite.comparison import Feed
from compress.model.tflite.graph import Graph
from compress.targets.base import CompilerSettings, Target
from compress.targets.edgetpu.constants import CONSTANTS, DIGEST

if TYPE_CHECKING:
    from compress.targets.edgetpu.check import Check
    from compress.targets.edgetpu.cost import EdgeTpuCost
    from compress.targets.edgetpu.legalize import Legalized


@dataclass(frozen=True)
class EdgeTpu(Target):
    """The Coral Edge TPU with one version of its compiler."""

    def check(self, graph: Graph, *, all_subgraphs: bool = False) -> Check:
        """Predict where each operator of a model runs, and why."""
        from compress.targets.edgetpu import check

        return check.check(graph, self, all_subgraphs=all_subgraphs)

    def legalize(self, graph: Graph, inputs: Sequence[Feed] = (), *, io: str | None = None) -> Legalized:
        """Rewrite a model into operators that the compiler maps."""
        from compress.targets.edgetpu import legalize

        return legalize.legalize(graph, self, inputs, io=io)

    @cached_property
    def cost(self) -> EdgeTpuCost:
        """The costs: time of the array and the bus, and memory for parameters."""
        from compress.targets.edgetpu.cost import EdgeTpuCost

        return EdgeTpuCost(self)

    def compile(self, model: bytes, settings: CompilerSettings, folder: Path, note: Callable[[str], None]) -> Facts:
        """Check a model, and compile it if a compiler or a cached result is available."""
        from compress.targets.edgetpu import compilation

        return compilation.compile_model(model, settings, self, folder, note)

    def compiler_identity(self, settings: CompilerSettings) -> dict[str, str]:
        """Return the identity of the compiler; without one, the names of the cached results."""
        from compress.targets.edgetpu import compiler

        return compiler.identity(settings, self.compiler.name)

    def invalid_setting(self, settings: CompilerSettings) -> str:
        """Return an error message if `min_runtime_version` is unknown, otherwise ""."""
        runtime = settings.min_runtime_version
        runtimes = self.compiler.runtimes.values()
        if runtime is None or min(runtimes) <= runtime <= max(runtimes):
            return ""
        return f"min_runtime_version: {runtime} is not between {min(runtimes)} and {max(runtimes)}"

    def newer_than_boards(self, graph: Graph) -> list[str]:
        """Return the operators, with versions, that the TFLite runtime of old boards (TensorFlow 2.5) cannot load."""
        from compress.targets.edgetpu import placement

        return placement.newer_than_boards(graph)


TARGET: Target = EdgeTpu("edgetpu", CONSTANTS.summary, DIGEST, CONSTANTS.compiler)
