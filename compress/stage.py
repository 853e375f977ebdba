"""The vocabulary: Kind, Artifact, Context, Stage, Probe.

A stage takes an artifact and makes another; a probe takes artifacts and measures them.
Both are their settings: frozen, strict models whose fields are the keys of pipeline.yaml
and whose field descriptions are the manual (`python -m compress stages`).
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from compress.artifact import Artifact, Facts, Kind
from compress.data.types import Data
from compress.progress import Progress
from compress.settings import Settings
from compress.targets.base import Target

Need = Literal["data", "original", "target", "seed", "name"]
Use = Literal[
    "distillation",
    "decoupled",
    "qat teacher",
    "healing by distillation",
    "channel importance",
    "measured sensitivity",
    "class weights",
    "subset",
    "rotation",
    "selection by classes",
    "tfmot",
    "tfmot qat",
    "package",
]
"""A method that not every task has, see `Stage.uses` and `compress.tasks.base.Task.refused`."""


class Unfit(NamedTuple):
    """The reason why a stage, or one of its settings, cannot be used with the data.

    Attributes:
        what: the reason.
        allowed: what would go.
        todo: what to do.
    """

    what: str
    allowed: str = ""
    todo: str = ""


@dataclass(frozen=True)
class Context:
    """The input of a stage or probe in addition to its artifact.

    Attributes:
        name: the pipeline's name.
        folder: an empty folder; the files left there become the artifact.
        data: the data set; only for those that declare `needs = {"data"}`.
        original: the model that everything is compared with; likewise.
        target: the target; likewise.
        seed: the run's seed.
        trust: whether the user vouched for code that comes with the model.
        progress: where to say how far the work is.
        unfinished: a folder whose files the next try finds if this one is interrupted; None: there is none.
        logs: a folder for TensorBoard's files; None: there is none.
        detector: how the outputs of a model that finds objects are read (`deploy.contract.detection`); None for others.
    """

    name: str
    folder: Path
    data: Data
    original: Artifact
    target: Target
    seed: int
    trust: bool
    progress: Progress
    unfinished: Path | None = None
    logs: Path | None = None
    detector: Mapping[str, Any] | None = None


class Work(Settings):
    """The common base of stages and probes: a name, a version, and what the result depends on."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised by whoever changes what the same settings produce."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """What the result depends on, beside settings, version, environment and given artifact."""
    tools: ClassVar[tuple[str, ...]] = ()
    """The distributions whose versions matter to the result."""

    def environment(self) -> dict[str, str]:
        """Return what else the result depends on: by default the versions of `tools`."""
        return {tool: importlib.metadata.version(tool) for tool in self.tools}

    def target_environment(self, target: Target) -> dict[str, str]:
        """Return what else the result depends on that only the target knows, such as the version of its compiler."""
        del target
        return {}

    def identity(self) -> dict[str, Any]:
        """The part of the key that comes from the settings."""
        return self.model_dump(mode="json", exclude={"id"})


class Stage(Work):
    """A stage of the pipeline."""

    consumes: ClassVar[frozenset[Kind]]
    produces: ClassVar[Kind]

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] | None = None
    """A unique name for this stage, needed where the same stage occurs twice."""

    def beside(self, folder: Path) -> Self:
        """The same stage with relative paths in its settings taken from `folder`."""
        del folder
        return self

    def takes(self) -> frozenset[Kind]:
        """The kinds that it can be given, with these settings."""
        return self.consumes

    def because(self) -> str:
        """Why what it makes is of its kind and no other, where that is not plain: for whoever is refused it."""
        return ""

    def uses(self) -> tuple[Use, ...]:
        """Return the methods that the stage uses with these settings; a task may refuse some."""
        return ()

    def unfit_target(self, target: Target) -> Unfit | None:
        """Return why a setting does not go with the target, or None."""
        del target
        return None

    def skip(self, given: Kind, *, from_file: bool, target: Target) -> str | None:
        """Why there is nothing to do, or None. `from_file`: the model came trained, from a file."""
        del given, from_file, target
        return None

    def run(self, given: Artifact, context: Context) -> Facts:
        """Write files into `context.folder`, and return facts about them.

        Raises:
            CorallineError: with what is wrong, where, and what to do.
        """
        raise NotImplementedError


class Probe(Work):
    """A measurement of artifacts that have a MODEL_TFLITE."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """The findings: plain JSON values, by subject.

        Raises:
            CorallineError: with what is wrong, where, and what to do.
        """
        raise NotImplementedError


def host() -> dict[str, str]:
    """The machine that measures: part of the key of everything timed."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {"node": platform.node(), "cpu": cpu, "system": f"{platform.system()} {platform.release()}"}
