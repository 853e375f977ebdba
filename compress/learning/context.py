"""The input of a stage or probe in addition to its artifact, with the settings for the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

from compress.core.artifact import Artifact
from compress.core.profiling import Profile
from compress.core.progress import Progress
from compress.core.settings import Settings
from compress.data.types import Data
from compress.targets.base import Target

Need = Literal["data", "original", "target", "seed", "name"]


class Execution(Settings):
    """How training runs on this machine. It is not part of the cache key: results differ by rounding, and on several
    devices by the batch norms and the random numbers of layers such as dropout."""

    strategy: Literal["one", "mirrored", "multi_worker", "tpu"] = "one"
    """The devices of a training. one: one device. mirrored: all GPUs of this machine, each with a copy of the model and
    a part of every batch. multi_worker: the devices of several processes, usually on several machines, whose addresses
    are in the environment variable TF_CONFIG. tpu: the cores of a Cloud TPU."""
    profile: bool = False
    """Measure where the time of each stage goes, and write a trace of some training steps, which TensorBoard's profiler
    opens, to runs/NAME/profile. The same as `--profile`."""


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
    an equally good model, but not an equal one (`Execution`); the others change no artifact.

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
