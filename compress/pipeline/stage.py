"""The base classes of stages and probes, and their input.

A stage makes an artifact from another one; a probe measures artifacts. Both are models of their settings: frozen and
strict. The fields are the keys of pipeline.yaml, and their descriptions are the manual (`python -m compress stages`).
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, Self, cast, get_args

from pydantic import Field

from compress.core.artifact import Artifact, Facts, Kind
from compress.core.errors import PipelineError
from compress.core.execution import Execution
from compress.core.profiling import Profile
from compress.core.progress import Progress
from compress.core.settings import Settings
from compress.data.types import Data
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
    "augmentation",
    "rotation",
    "mixup",
    "label smoothing",
    "labels",
    "selection by classes",
    "tfmot",
    "tfmot qat",
    "package",
    "embedding",
]
"""A method that not every task has, see `Stage.uses` and `compress.tasks.base.Task.refused`."""


class Refusal(NamedTuple):
    """The reason why a stage, or one of its settings, cannot be used with the data.

    Attributes:
        what: the reason.
        allowed: the alternatives.
        hint: what to do.
    """

    what: str
    allowed: str = ""
    hint: str = ""


def refused_host(target: Target, host: str | None, clock: str | None) -> Refusal | None:
    """Return the reason why latency is not predicted for a host or a clock of a target; None if it is."""
    try:
        target.cost.host(host)
        target.cost.clock(clock)
    except PipelineError as error:
        return Refusal(error.what, error.allowed)
    return None


class Undeclared:
    """A stand-in for a part of the context that is not in `needs`. Every use of it is an error."""

    def __init__(self, need: Need) -> None:
        self.__dict__["need"] = need

    def _refuse(self, *_: object) -> NoReturn:
        need = self.__dict__["need"]
        raise AssertionError(f"the context's {need!r} is used, but is not in `needs`: the key would not depend on it")

    __getattr__ = __getitem__ = __call__ = __iter__ = __bool__ = __eq__ = __ne__ = __hash__ = _refuse
    __str__ = __repr__ = __format__ = __index__ = __int__ = __float__ = __add__ = __radd__ = __reduce_ex__ = _refuse


@dataclass(frozen=True)
class Context:
    """The input of a stage or probe in addition to its artifact.

    The key of an artifact contains what is in `needs`, and `specification`, which is a fact of the input. The other
    attributes are not in the key. `trust` decides whether an artifact is made; with another `execution`, training gives
    an equally good model, but not an equal one (`compress.core.execution`); the others change no artifact.

    Attributes:
        name: the name of the pipeline; only with "name" in `needs`.
        folder: an empty folder; the files that are written to it become the artifact.
        data: the data set; only with "data" in `needs`.
        original: the model that others are compared with; only with "original" in `needs`.
        target: the target; only with "target" in `needs`.
        seed: the seed of the run; only with "seed" in `needs`.
        trust: whether the user allows code that comes with the model.
        progress: the receiver of progress and notes.
        unfinished: a folder for the state of interrupted work, which the next attempt reads; None: nothing is kept.
        logs: a folder for TensorBoard's files; None: no logs.
        specification: how the model's outputs are read (`compress.tasks.base.Head.specification`); None if the data and
            the layers say it.
        execution: how training runs on this machine.
        profile: the receiver of the times of training steps; None if they are not measured.
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
    specification: Mapping[str, Any] | None = None
    execution: Execution = field(default_factory=Execution)
    profile: Profile | None = None

    def only(self, needs: frozenset[Need]) -> Context:
        """Return the context without what is not in `needs`."""
        undeclared = [need for need in get_args(Need) if need not in needs]
        return replace(self, **{need: cast(Any, Undeclared(need)) for need in undeclared})


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
        return self.model_dump(mode="json", exclude={"id"})


class Stage(Work):
    """A stage of the pipeline."""

    role: ClassVar[Literal["stage", "probe"]] = "stage"
    consumes: ClassVar[frozenset[Kind]]
    produces: ClassVar[Kind]

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] | None = None
    """A unique name for this stage, needed where the same stage occurs twice."""

    def with_paths_from(self, folder: Path) -> Self:
        """Return the stage with relative paths in its settings resolved from `folder`."""
        del folder
        return self

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

    def refused_by_target(self, target: Target) -> Refusal | None:
        """Return the reason why a setting cannot be used with the target, or None."""
        del target
        return None

    def refused_by_execution(self, execution: Execution) -> Refusal | None:
        """Return the reason why the stage cannot train as `execution` says, or None."""
        del execution
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
