"""The base classes of stages and probes.

A stage makes an artifact from another one; a probe measures artifacts. Both are models of their settings: frozen and
strict. The fields are the keys of pipeline.yaml, and their descriptions are the manual (`python -m compress stages`).
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.core.artifact import Artifact, Facts, Kind
from compress.core.errors import PipelineError
from compress.core.settings import Settings
from compress.learning.context import Context, Need
from compress.targets.base import Target
from compress.tasks.base import Refusal, Use

NOTHING = Artifact("", Kind.UNTRAINED, Path(), {}, {}, 0.0)
"""The input of the first stage, and the original before it exists."""


def refused_host(target: Target, host: str | None, clock: str | None) -> Refusal | None:
    """Return the reason why latency is not predicted for a host or a clock of a target; None if it is."""
    try:
        target.cost.host(host)
        target.cost.clock(clock)
    except PipelineError as error:
        return Refusal(error.what, error.allowed)
    return None


class Work(Settings):
    """The common base of stages and probes: a name, a version, and the dependencies of the result."""

    name: ClassVar[str]
    role: ClassVar[Literal["stage", "probe"]]
    version: ClassVar[int] = 1
    """To be increased by every change of the result for the same settings."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """The dependencies of the result, in addition to settings, version, environment and input. The context of `run` has
    no others (`Context.only`)."""
    tools: ClassVar[tuple[str, ...]] = ()
    """The distributions whose versions matter to the result."""

    imports_tensorflow: ClassVar[bool] = False
    """Whether it always imports TensorFlow, which takes some seconds."""

    def environment(self) -> dict[str, str]:
        """Return further dependencies of the result: by default the versions of `tools`."""
        return {tool: importlib.metadata.version(tool) for tool in self.tools}

    def target_environment(self, target: Target) -> dict[str, str]:
        """Return dependencies of the result that only the target knows, such as the version of its compiler."""
        del target
        return {}

    def identity(self) -> dict[str, Any]:
        """Return the settings, for the key of the artifact."""
        return {name: value for name, value in super().identity().items() if name != "id"}


class Stage(Work):
    """A stage of the pipeline."""

    role: ClassVar[Literal["stage", "probe"]] = "stage"
    consumes: ClassVar[frozenset[Kind]]
    produces: ClassVar[Kind]

    makes_original: ClassVar[bool] = False
    """Whether its model may be the original that later models are compared with, since it loads or trains one."""
    removes_channels: ClassVar[bool] = False

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] | None = None
    """A unique name for this stage, needed where the same stage occurs twice."""

    def accepted_kinds(self) -> frozenset[Kind]:
        """Return the kinds of artifacts that the stage accepts with these settings."""
        return self.consumes

    def kind_reason(self) -> str:
        """Return the reason for the kind of the artifact, for the message of a stage that needs another kind."""
        return ""

    def uses(self) -> tuple[Use, ...]:
        """Return the methods that the stage uses with these settings; a task may refuse some."""
        return ()

    def trains(self) -> bool:
        """Return whether it trains on the devices of `execution` with these settings."""
        return False

    def changes_cost(self) -> bool:
        """Return whether it changes layers or their widths, and with them what the model costs on the target."""
        return False

    def class_names(self) -> tuple[str, ...]:
        """Return the names of the model's classes, for data without labels."""
        return ()

    def refused_by_target(self, target: Target) -> Refusal | None:
        """Return the reason why a setting cannot be used with the target, or None."""
        del target
        return None

    def needs_samples(self) -> bool:
        """Return whether samples of the real data are necessary, not only of the right shape and range."""
        return "data" in self.needs

    def skip(self, kind: Kind, *, from_file: bool, target: Target) -> str | None:
        """Return the reason why the stage does nothing with an artifact of this kind, or None.

        `from_file`: the model is from a file, and is trained.
        """
        del kind, from_file, target
        return None

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write files into `context.folder`, and return facts about them.

        Raises:
            CorallineError: with what is wrong, where, and what to do.
        """
        raise NotImplementedError


class Probe(Work):
    """A measurement of artifacts that have a MODEL_TFLITE."""

    role: ClassVar[Literal["stage", "probe"]] = "probe"

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return the facts about the subjects as plain JSON values.

        Raises:
            CorallineError: with what is wrong, where, and what to do.
        """
        raise NotImplementedError


def host() -> dict[str, str]:
    """Return the properties of this machine, which are part of the key of every latency measurement."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {"node": platform.node(), "cpu": cpu, "system": f"{platform.system()} {platform.release()}"}
