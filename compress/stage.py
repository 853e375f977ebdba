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
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from compress.target import Target

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
Task = Literal["classification", "detection"]
Need = Literal["data", "original", "target", "seed", "name"]
Facts = dict[str, Any]


class Kind(StrEnum):
    """What an artifact is, and so which stages can take it."""

    UNTRAINED = "untrained keras model"
    KERAS = "keras model"
    FLOAT_TFLITE = "float tflite model"
    TFLITE = "tflite model"
    COMPILED = "checked tflite model"
    BUNDLE = "bundle"
    FINDINGS = "findings of a probe"


#: The files in an artifact. Every kind from KERAS to COMPILED has a MODEL_TFLITE, so that
#: every probe works on every one of them, without TensorFlow.
MODEL_KERAS = "model.keras"
MODEL_TFLITE = "model.tflite"
MODEL_EDGETPU = "model_edgetpu.tflite"
SEGMENT_EDGETPU = "model_segment_{}_of_{}_edgetpu.tflite"
SEGMENTS = SEGMENT_EDGETPU.format("*", "*")
"""Where the model is compiled in parts, for several Edge TPUs: there is no MODEL_EDGETPU then."""
BUNDLE_FILE = "bundle.coralline"
PLAN_FILE = "quantization.json"
"""By which plan a model was quantized: `quantize: {plan: …}` takes it again, edited or not."""
RUNNER_FILE = "runner.pyz"


@dataclass(frozen=True)
class Artifact:
    """Something made, complete and never changed again.

    Attributes:
        digest: SHA-256 over kind, files and facts.
        kind: what it is.
        folder: where its files are.
        files: SHA-256 of each file, by name.
        facts: what the maker says of it (plain JSON values).
        seconds: how long making it took.
    """

    digest: str
    kind: Kind
    folder: Path
    files: Mapping[str, str]
    facts: Facts
    seconds: float

    def file(self, name: str) -> Path:
        """The path of one of its files."""
        if name not in self.files:
            raise KeyError(f"a {self.kind} has no {name}; it has {', '.join(self.files)}")
        return self.folder / name


class Objects(NamedTuple):
    """What is to be found in one image.

    Attributes:
        boxes: float32 [k, 4]: ymin, xmin, ymax, xmax, fractions of the image's height and width.
        classes: int64 [k], indices into the class names.
    """

    boxes: NDArray[np.float32]
    classes: NDArray[np.int64]


class Unfit(NamedTuple):
    """Why a stage, or one of its settings, does not go with the data.

    Attributes:
        what: the reason.
        allowed: what would go.
        todo: what to do.
    """

    what: str
    allowed: str = ""
    todo: str = ""


DETECTOR_STAGES = "train, swap, quantize, compile, package"
"""The stages that go with data for detection."""
UNFIT_THROUGH_TFMOT = Unfit("it trains through tfmot, which is set up for classifiers only", DETECTOR_STAGES)


class Data(Protocol):
    """What stages and probes see of a data set (`compress.data.Dataset`)."""

    @property
    def task(self) -> Task:
        """What the samples are for."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into it."""

    @property
    def preprocessing(self) -> list[dict[str, Any]]:
        """The preprocessing steps, as they stand in pipeline.yaml."""

    @property
    def decoding(self) -> dict[str, Any]:
        """How files become such samples on the device (`deploy.decoding`)."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed sample, without the batch."""

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """All samples of a split, preprocessed: [n, *input_shape]. Large ones are a memory map: take slices."""

    def raw(self, split: Split, indices: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Some samples of a split as they came, before preprocessing."""

    def labels(self, split: Split) -> NDArray[np.int64]:
        """The label of every sample of a split: [n]. For detection, what images are divided by."""

    def objects(self, split: Split) -> list[Objects]:
        """The objects of every sample of a split, for detection."""

    def summary(self) -> Facts:
        """Counts, shapes, ranges, and what was left out, as plain values."""


class Progress(Protocol):
    """Where long work says how far it is."""

    def update(self, done: int, total: int, **metrics: float) -> None:
        """`done` of `total` steps are over; metrics are shown beside."""

    def note(self, text: str) -> None:
        """One line that the user should see."""


@dataclass(frozen=True)
class Context:
    """What a stage or probe is given beside its artifact.

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
        detector: how the outputs of a model that finds objects are read (`deploy.detection`); None for others.
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


class Settings(BaseModel):
    """Strict, frozen settings: unknown keys, wrong types, NaN and infinity are refused.

    The text below a field is its description; `manual` reads it from the code, since that takes
    longer than all else at start-up.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # most settings are not used in most runs, and building costs start-up time
    )


class Work(Settings):
    """What stages and probes have in common: a name, a version, and what the result depends on."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised by whoever changes what the same settings produce."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """What the result depends on, beside settings, version, environment and given artifact."""
    tools: ClassVar[tuple[str, ...]] = ()
    """The distributions whose versions matter to the result."""

    def environment(self) -> dict[str, str]:
        """What else the result depends on: by default the versions of `tools`."""
        return {tool: importlib.metadata.version(tool) for tool in self.tools}

    def identity(self) -> dict[str, Any]:
        """The part of the key that comes from the settings."""
        return self.model_dump(mode="json", exclude={"id"})


class Stage(Work):
    """A stage of the pipeline."""

    consumes: ClassVar[frozenset[Kind]]
    produces: ClassVar[Kind]
    for_objects: ClassVar[Unfit | None] = None
    """Why it does not go with data for detection, if it doesn't."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] | None = None
    """A name of its own for this stage, where the same stage stands twice."""

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

    def unfit(self, task: Task) -> Unfit | None:
        """Why it does not go with data for `task`, or None."""
        return None if task == "classification" else self.for_objects

    def skip(self, given: Kind, *, from_file: bool, target: Target) -> str | None:
        """Why there is nothing to do, or None. `from_file`: the model came trained, from a file."""
        del given, from_file, target
        return None

    def run(self, given: Artifact, context: Context) -> Facts:
        """Writes files into `context.folder` and returns what is to be said of them.

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
