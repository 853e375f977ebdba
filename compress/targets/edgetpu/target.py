"""The Edge TPU behind the protocol of targets. What it needs is imported late: most commands need none of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from compress.artifact import Facts
from compress.targets.base import CostModel, Target
from compress.targets.compiler_settings import CompilerSettings
from compress.tflite.comparison import Feed
from compress.tflite.graph import Graph

if TYPE_CHECKING:
    from compress.targets.edgetpu.check import Check
    from compress.targets.edgetpu.estimate import Estimate
    from compress.targets.edgetpu.inspection import InspectionResult
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
    def cost(self) -> CostModel:
        """Time of the array and the bus, and the memory for parameters."""
        from compress.targets.edgetpu.cost import EdgeTpuCost

        return EdgeTpuCost(self)

    def compile(self, model: bytes, settings: CompilerSettings, folder: Path, note: Callable[[str], None]) -> Facts:
        """Compile a model if there is a compiler or a cached result; check it in any case."""
        from compress.targets.edgetpu import compilation

        return compilation.compile_model(model, settings, self, folder, note)

    def compiler_identity(self, settings: CompilerSettings) -> dict[str, str]:
        """Return which compiler there is; without one, which results are cached."""
        from compress.targets.edgetpu import compilation

        return compilation.identity(settings, self)

    def invalid_setting(self, settings: CompilerSettings) -> str:
        """Return why the runtime that is asked for is unknown, or ""."""
        asked = settings.min_runtime_version
        runtimes = self.tables["compiler"]["runtimes"].values()
        if asked is None or min(runtimes) <= asked <= max(runtimes):
            return ""
        return f"min_runtime_version: {asked} is not between {min(runtimes)} and {max(runtimes)}"

    def estimate(self, graph: Graph, host: str | None, clock: str | None, compiled: Path | None = None) -> Estimate:
        """Predict the latency of a model on a host, with the real streamed bytes if there is a compiled model."""
        from compress.targets.edgetpu import estimate, inspection

        opened = None
        if compiled is not None:
            opened = inspection.inspect(compiled)
            inspection.verify_same_model(opened, graph, self, str(compiled))
        return estimate.estimate(graph, self, self.cost.host(host), self.cost.clock(clock), opened)

    def inspect(self, compiled: Path, original: Path | None = None) -> InspectionResult:
        """Open a compiled model, and compare it with what is predicted for the original."""
        from compress.targets.edgetpu import inspection

        opened = inspection.inspect(compiled)
        rows = None if original is None else inspection.compare_with_prediction(opened, original, self)
        return inspection.InspectionResult(opened, rows)

    def operators_page(self) -> str:
        """Return the page on the rules, the operators and the rewrites."""
        from compress.targets.edgetpu import operators_page

        return operators_page.page(self)

    def newer_than_boards(self, graph: Graph) -> list[str]:
        """Return the operators, with versions, that the TFLite of old boards (TensorFlow 2.5) does not open."""
        from compress.targets.edgetpu import placement

        return placement.newer_than_boards(graph, self)
