"""`compile`: run the target's compiler if it is available, and predict its result."""

from __future__ import annotations

from typing import ClassVar

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.progress import Phase
from compress.learning.context import Context, Need
from compress.pipeline.stage import Stage
from compress.targets.base import CompilerSettings, Target
from compress.tasks.base import Refusal


class Compile(Stage, CompilerSettings):
    """Compile for the Edge TPU if the vendor's compiler is available. The static check runs in any case."""

    name: ClassVar[str] = "compile"
    version: ClassVar[int] = 2
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.TFLITE})
    produces: ClassVar[Kind] = Kind.COMPILED
    needs: ClassVar[frozenset[Need]] = frozenset({"target"})

    def skip(self, kind: Kind, *, from_file: bool, target: Target) -> str | None:
        """Return why a target without a compiler needs no compiled model."""
        return None if target.compiler.name else f"the target {target.name} needs no compiler"

    def refused_by_target(self, target: Target) -> Refusal | None:
        """Return the problem of a setting that the target's compiler does not have."""
        what = target.invalid_setting(self)
        return Refusal(what) if what else None

    def target_environment(self, target: Target) -> dict[str, str]:
        """Return the available compiler as part of the cache key; without one, the cached results."""
        return target.compiler_identity(self)

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Return the placement; write the compiled model if there is a compiler or a cached result."""
        content = artifact.file(MODEL_TFLITE).read_bytes()
        (context.folder / MODEL_TFLITE).write_bytes(content)
        with context.progress.phase(Phase("check and compilation")):
            return context.target.compile(content, self, context.folder, context.progress.note)
