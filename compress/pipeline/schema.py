"""pipeline.yaml: its schema, and `load()`, which checks it before any work is done.

A pipeline file has plain keys, and one-key maps that name a stage, a data source or a
preprocessing step with its settings. `compress.pipeline.runner` executes what is loaded here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator

from compress import targets
from compress.artifact import Kind
from compress.data.dataset import SOURCES, Dataset, Splitting
from compress.errors import ModelError, PipelineError
from compress.pipeline.yaml_file import Document, Location, read
from compress.settings import Settings
from compress.stage import Stage, Unfit
from compress.stages import STAGES
from compress.stages.load import Origin
from compress.suggestions import listing, nearest, shown
from compress.targets.base import Target
from compress.tasks import task_of, unfit_budget
from deploy.contract.preprocessing import STEPS as PREPROCESSING
from deploy.contract.preprocessing import Preprocessing, PreprocessingError, fields

T = TypeVar("T", bound=Settings)


class ModelSettings(Origin):
    """The model to start from: a builder or a file."""

    trust: bool = False
    """Whether code that comes with the model (a builder of your own, Lambda layers) may be run."""


class LatencySettings(Settings):
    """How latency is measured on this host."""

    runs: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    """Timed inferences of each model."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Threads of the runtime."""


class SensitivitySettings(Settings):
    """How it is measured what removing channels would do."""

    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Training samples that importance and answers are measured with."""


class Measure(Settings):
    """What is measured, and how."""

    latency: LatencySettings = LatencySettings()
    """Latency on this host."""
    sensitivity: SensitivitySettings | None = None
    """What removing channels would do to the model before it is pruned, layer by layer; by default not measured."""


class Budget(Settings):
    """What the result may cost. A broken budget gives exit code 7."""

    accuracy_drop: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Largest loss of test accuracy against the original, as a fraction."""
    ap_drop: Annotated[float, Field(ge=-1, le=1)] | None = None
    """The same of a detector's mean average precision."""
    mae_increase: Annotated[float, Field(ge=-1)] | None = None
    """Largest increase of a regression model's mean absolute error over the original's, as a fraction of that."""
    latency_ms: Annotated[float, Field(gt=0)] | None = None
    """Longest median latency of the result on this host."""
    size_bytes: Annotated[int, Field(gt=0)] | None = None
    """Largest .tflite file."""


class PipelineKeys(Settings):
    """The plain keys of a pipeline file."""

    schema_version: Literal[1]
    """Version of this file's format."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    """Name of the run: its folder under runs/."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of everything random. Not of the test split, which is fixed."""
    target: str = targets.DEFAULT
    """What the model is made for: edgetpu or cpu."""
    measure: Measure = Measure()
    """What is measured."""
    budget: Budget = Budget()
    """What the result may cost."""

    @field_validator("schema_version", mode="before")
    @classmethod
    def _whole(cls, value: object) -> object:
        if type(value) is not int:  # to Python, true and 1.0 equal 1
            raise ValueError(f"{shown(value)} should be 1")
        return value


@dataclass(frozen=True)
class StageEntry:
    """A stage in its place.

    Attributes:
        id: unique name in this pipeline.
        stage: the stage with its settings.
        given: kind of the artifact it is given.
        skip: why it has nothing to do, or None.
    """

    id: str
    stage: Stage
    given: Kind | None
    skip: str | None = None

    @property
    def makes(self) -> Kind | None:
        """Kind of the artifact that goes on."""
        return self.given if self.skip else self.stage.produces


@dataclass(frozen=True)
class Pipeline:
    """A pipeline file, checked.

    Attributes:
        head: the plain keys.
        model: the model to start from.
        target: the target.
        data: the data set, not yet loaded.
        steps: the model and the stages, in order.
        settings: the file's content as plain values.
    """

    head: PipelineKeys
    model: ModelSettings
    target: Target
    data: Dataset
    steps: tuple[StageEntry, ...]
    settings: Mapping[str, Any]

    @property
    def unpruned(self) -> tuple[StageEntry, ...]:
        """The steps before the first that removes channels, or leaves something else than layers."""
        layered = (Kind.UNTRAINED, Kind.KERAS)
        return tuple(takewhile(lambda step: step.stage.name != "prune" and step.makes in layered, self.steps))


def load(path: Path, stages: Mapping[str, type[Stage]] = STAGES) -> Pipeline:
    """Reads and checks a pipeline file.

    Args:
        path: the YAML file. Paths in it are relative to its folder.
        stages: the stages there are, by name.

    Raises:
        PipelineError: with file, line, what is wrong, and what is allowed.
    """
    document = read(path)
    value = document.value
    if not isinstance(value, dict):
        raise PipelineError("must be a map", where=document.where(()), allowed=listing(KEYS))
    for key in value:
        if key not in KEYS:
            raise _unknown(document, (), key, KEYS)
    for key in ("model", "data", "stages"):
        if key not in value:
            raise PipelineError(f"the key {key!r} is missing", where=document.where(()))
    head = _settings(
        PipelineKeys, {key: item for key, item in value.items() if key in PipelineKeys.model_fields}, document, ()
    )
    try:
        target = targets.load(head.target)
    except PipelineError as error:
        error.where, error.todo = document.where(("target",)), nearest(head.target, targets.names())
        raise
    model = _settings(ModelSettings, value["model"], document, ("model",))
    try:
        first = model.maker(path.parent, trust=model.trust)
    except ModelError as error:
        error.where = ": ".join(part for part in (document.where(("model",)), error.where) if part)
        raise
    except OSError as error:
        where = document.where(("model",))
        raise ModelError(f"cannot be read: {error.strerror}", where=where, todo="check model") from error
    data = _dataset(value["data"], document, path.parent)
    steps = _steps(first, value["stages"], document, target, stages, path.parent)
    pipeline = Pipeline(head, model, target, data, steps, value)
    _refuse_unfit(pipeline, document)
    return pipeline


def _refuse_unfit(pipeline: Pipeline, document: Document) -> None:
    """Refuse stages and settings that do not go with the task of the data.

    Raises:
        PipelineError: one does not.
    """
    task, found = task_of(pipeline.data), list[tuple[Location, Unfit]]()
    for index, step in enumerate(pipeline.steps[1:]):
        if step.skip is None and (told := task.why_not(step.stage.uses())):
            found.append((("stages", index), told._replace(what=f"stage {index + 1} ({step.stage.name}): {told.what}")))
        _refuse_unfit_target(step, ("stages", index, step.stage.name), pipeline.target, document)
    found += unfit_budget(task, [*(pipeline.settings.get("budget") or {})])
    found += task.unfit_settings(pipeline.settings)
    for location, unfit in found:
        what = f"{unfit.what} (the data is for {task.name})"
        raise PipelineError(what, where=document.where(location), allowed=unfit.allowed, todo=unfit.todo)


def _refuse_unfit_target(step: StageEntry, location: Location, target: Target, document: Document) -> None:
    """Refuse a stage with a setting that its target does not have.

    Raises:
        PipelineError: there is one.
    """
    if step.skip is None and (unfit := step.stage.unfit_target(target)):
        raise PipelineError(unfit.what, where=document.where(location), allowed=unfit.allowed, todo=unfit.todo)


def _dataset(value: Any, document: Document, folder: Path) -> Dataset:
    if not isinstance(value, dict):
        raise PipelineError("must be a map", where=document.where(("data",)), allowed=listing(DATA_KEYS))
    for key in value:
        if key not in DATA_KEYS:
            raise _unknown(document, ("data",), key, DATA_KEYS)
    if "source" not in value:
        raise PipelineError("the key 'source' is missing", where=document.where(("data",)), allowed=listing([*SOURCES]))
    source = _one_of(SOURCES, value["source"], document, ("data", "source"), "data source").beside(folder)
    splitting = _settings(Splitting, value["split"], document, ("data", "split")) if "split" in value else None
    try:
        preprocessing = Preprocessing(_preprocess(value.get("preprocess"), document))
    except PreprocessingError as error:
        location: Location = ("data", "preprocess") if error.step is None else ("data", "preprocess", error.step)
        raise PipelineError(str(error), where=document.where(location)) from error
    return Dataset(source, preprocessing, splitting)


def _preprocess(value: Any, document: Document) -> Any:
    """The preprocessing steps, once their names and keys are known to be right."""
    if value is None:
        return []
    for index, entry in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(entry, dict) or len(entry) != 1:
            continue
        ((name, settings),) = entry.items()
        location: Location = ("data", "preprocess", index, name)
        if name not in PREPROCESSING:
            raise _no_such("preprocessing step", name, PREPROCESSING, document, location)
        known = [*fields(PREPROCESSING[name])]
        for key in settings if isinstance(settings, dict) else ():
            if key not in known:
                raise _unknown(document, location, key, known)
    return value


def _steps(
    model: Stage, value: Any, document: Document, target: Target, stages: Mapping[str, type[Stage]], folder: Path
) -> tuple[StageEntry, ...]:
    """The model and the stages, numbered, with the kind that flows between them."""
    if not isinstance(value, list):
        raise PipelineError("must be a list of stages", where=document.where(("stages",)), allowed=listing([*stages]))
    steps = [StageEntry("model", model, None)]
    for index, entry in enumerate(value):
        location: Location = ("stages", index)
        try:
            stage = _one_of(stages, entry, document, location, "stage").beside(folder)
        except ModelError as error:
            error.where = ": ".join(part for part in (document.where(location), error.where) if part)
            raise
        count = sum(step.stage.name == stage.name for step in steps)
        name = stage.id or (f"{stage.name}-{count + 1}" if count else stage.name)
        if any(step.id == name for step in steps):
            raise PipelineError(
                f"two stages have the id {name!r}", where=document.where(location), todo="give one another id"
            )
        given = steps[-1].makes
        assert given is not None  # only the first step, the model, is given nothing
        untouched = all(step.skip or step.stage is model for step in steps)
        from_file = untouched and model.produces is not Kind.UNTRAINED
        skip = stage.skip(given, from_file=from_file, target=target)
        if skip is None and given not in stage.takes():
            wanted = " or ".join(_a(kind) for kind in sorted(stage.takes()))
            maker = next(step for step in reversed(steps) if step.skip is None)
            raise PipelineError(
                f"stage {index + 1} ({stage.name}) needs {wanted}, but would be given {_a(given)}",
                where=document.where(location),
                todo="; ".join(part for part in (_how_to_get(stage, given, stages), maker.stage.because()) if part),
            )
        steps.append(StageEntry(name, stage, given, skip))
    return tuple(steps)


def _a(kind: Kind) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _how_to_get(stage: Stage, given: Kind, stages: Mapping[str, type[Stage]]) -> str:
    """Which stage would have to stand between, if one would do."""
    between = [s.name for s in stages.values() if given in s.consumes and s.produces in stage.takes()]
    return f"put {' or '.join(between)} before it" if between else "move it forward, or leave it out"


def _one_of(known: Mapping[str, type[T]], value: Any, document: Document, location: Location, what: str) -> T:
    """A one-key map `{name: settings}` as the settings class of that name; a bare name is short for it."""
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, dict) or len(value) != 1:
        raise PipelineError(
            f"a {what} must be a map with one key", where=document.where(location), allowed=listing([*known])
        )
    ((name, settings),) = value.items()
    if name not in known:
        raise _no_such(what, name, known, document, (*location, name))
    return _settings(known[name], settings if settings is not None else {}, document, (*location, name))


def _settings(kind: type[T], value: Any, document: Document, location: Location) -> T:
    """Plain values as a settings class; what is wrong is told with its line."""
    if not isinstance(value, dict):
        raise PipelineError(
            f"must be a map, not {shown(value)}", where=document.where(location), allowed=listing(_keys(kind))
        )
    try:
        # As JSON, where lists stand for tuples: strict otherwise.
        return kind.model_validate_json(json.dumps(value, allow_nan=False), strict=True)
    except ValidationError as errors:
        # An unknown key first: it may be the reason why another one is missing.
        found = sorted(errors.errors(), key=lambda error: error["type"] != "extra_forbidden")
        raise _explain(found[0], kind, document, location) from errors


def _keys(kind: type[Settings]) -> list[str]:
    return [*kind.model_fields]


def _no_such(what: str, name: str, known: Iterable[str], document: Document, location: Location) -> PipelineError:
    return PipelineError(
        f"there is no {what} {name!r}",
        where=document.where(location),
        allowed=listing([*known]),
        todo=nearest(name, known),
    )


def _unknown(document: Document, location: Location, key: str, known: list[str]) -> PipelineError:
    return PipelineError(
        f"unknown key {key!r}", where=document.where((*location, key)), allowed=listing(known), todo=nearest(key, known)
    )


def _explain(error: Any, kind: type[Settings], document: Document, location: Location) -> PipelineError:
    """One of pydantic's errors as ours."""
    inner: Location = ()
    for part in error["loc"]:  # what does not stand in the file is pydantic's name for a part of a union
        if (*location, *inner, part) in document.lines or error["type"] == "missing":
            inner = (*inner, part)
    holder: Any = kind
    for part in inner[:-1]:
        following = holder.model_fields.get(str(part)) if _is_settings(holder) else None
        holder = following.annotation if following is not None else None
    if error["type"] == "extra_forbidden" and _is_settings(holder):
        return _unknown(document, (*location, *inner[:-1]), str(inner[-1]), _keys(holder))
    where = document.where((*location, *inner))
    if error["type"] == "missing":
        return PipelineError(f"the key {inner[-1]!r} is missing", where=where)
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "should")
    message = message.replace("String should", "should").replace("an object", "a map")
    if error["type"] == "value_error":
        return PipelineError(message, where=where)
    suggestion = nearest(error["input"], _words(error)) if isinstance(error["input"], str) else ""
    return PipelineError(f"{shown(error['input'])} {message}", where=where, todo=suggestion)


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def _words(error: Any) -> list[str]:
    """The words that a literal would have accepted."""
    return re.findall(r"'([^']+)'", str(error.get("ctx", {}).get("expected", "")))


DATA_KEYS = ["source", "preprocess", "split"]
KEYS = ["schema_version", "name", "seed", "target", "model", "data", "stages", "measure", "budget"]
