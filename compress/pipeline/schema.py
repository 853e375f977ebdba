"""The schema of pipeline.yaml, and `load`, which checks a file before any work.

A pipeline file has plain keys, and one-key maps that name a stage, a data source or a
preprocessing step with its settings. `compress.pipeline.runner` executes what is loaded here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
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
    """Allow the model to run code that it contains (your own builder, Lambda layers)."""


class LatencySettings(Settings):
    """How latency is measured on this host."""

    runs: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    """Number of timed inferences of each model."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of threads of the runtime."""


class SensitivitySettings(Settings):
    """How the sensitivity of each layer to pruning is measured."""

    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Number of training samples on which importance and outputs are measured."""


class Measure(Settings):
    """Settings of the measurements."""

    latency: LatencySettings = LatencySettings()
    """Latency on this host."""
    sensitivity: SensitivitySettings | None = None
    """The effect of removing channels, layer by layer, before the model is pruned; by default not measured."""


class Budget(Settings):
    """Limits for the result. A result over the budget gives exit code 7."""

    accuracy_drop: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Largest drop of test accuracy from the original, as a fraction."""
    ap_drop: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Largest drop of the mean average precision of a detector, as a fraction."""
    mae_increase: Annotated[float, Field(ge=-1)] | None = None
    """Largest increase of the mean absolute error of a regression model, as a fraction of the original's error."""
    latency_ms: Annotated[float, Field(gt=0)] | None = None
    """Longest median latency of the result on this host, in milliseconds."""
    size_bytes: Annotated[int, Field(gt=0)] | None = None
    """Largest .tflite file, in bytes."""


class PipelineKeys(Settings):
    """The plain keys of a pipeline file."""

    schema_version: Literal[1]
    """Version of the format of the pipeline file."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    """Name of the run, and of its folder in runs/."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of all random choices, except the division into splits, which has its own."""
    target: str = targets.DEFAULT
    """The target: edgetpu or cpu."""
    measure: Measure = Measure()
    """Measurements in addition to accuracy and size."""
    budget: Budget = Budget()
    """Limits for the result."""

    @field_validator("schema_version", mode="before")
    @classmethod
    def _whole(cls, value: object) -> object:
        if type(value) is not int:  # to Python, true and 1.0 equal 1
            raise ValueError(f"{shown(value)} should be 1")
        return value


@dataclass(frozen=True)
class StageEntry:
    """A stage of a pipeline.

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
        """Kind of the artifact after this step."""
        return self.given if self.skip else self.stage.produces


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline file.

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
        """The steps before the first that removes channels, or whose result has no layers."""
        layered = (Kind.UNTRAINED, Kind.KERAS)
        return tuple(takewhile(lambda step: step.stage.name != "prune" and step.makes in layered, self.steps))


def load(path: Path, stages: Mapping[str, type[Stage]] = STAGES) -> Pipeline:
    """Read and check a pipeline file.

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
    """Refuse stages and settings that do not support the task of the data.

    Raises:
        PipelineError: one does not.
    """
    task = task_of(pipeline.data)
    refusals: list[tuple[Location, Unfit]] = []
    for index, step in enumerate(pipeline.steps[1:]):
        reason = task.why_not(step.stage.uses()) if step.skip is None else None
        if reason is not None:
            what = f"stage {index + 1} ({step.stage.name}): {reason.what}"
            refusals.append((("stages", index), reason._replace(what=what)))
        _refuse_unfit_target(step, ("stages", index, step.stage.name), pipeline.target, document)
    refusals += unfit_budget(task, [*(pipeline.settings.get("budget") or {})])
    refusals += task.unfit_settings(pipeline.settings)
    for location, unfit in refusals:
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
    """Return the preprocessing steps after checking their names and keys."""
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
    """Return the model and the stages in order, each with the kind of its input."""
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
        untouched = all(step.skip or step.stage is model for step in steps)
        from_file = untouched and model.produces is not Kind.UNTRAINED
        kind = steps[-1].makes
        assert kind is not None  # only the first step, the model, has no input
        skip = stage.skip(kind, from_file=from_file, target=target)
        if skip is None and kind not in stage.takes():
            raise _wrong_order(stage, steps, stages, document.where(location))
        steps.append(StageEntry(_unique_id(stage, steps, document.where(location)), stage, kind, skip))
    return tuple(steps)


def _unique_id(stage: Stage, steps: Sequence[StageEntry], where: str) -> str:
    """Return the id of a stage: the one in the file, or its name, numbered if the stage occurs again.

    Raises:
        PipelineError: an earlier step has this id.
    """
    count = sum(step.stage.name == stage.name for step in steps)
    name = stage.id or (f"{stage.name}-{count + 1}" if count else stage.name)
    if any(step.id == name for step in steps):
        raise PipelineError(f"two stages have the id {name!r}", where=where, todo="give one another id")
    return name


def _wrong_order(
    stage: Stage, steps: Sequence[StageEntry], stages: Mapping[str, type[Stage]], where: str
) -> PipelineError:
    """Return the error for a stage that cannot use the artifact of the steps before it."""
    kind = steps[-1].makes
    assert kind is not None
    allowed = " or ".join(_a(kind) for kind in sorted(stage.takes()))
    maker = next(step for step in reversed(steps) if step.skip is None)
    return PipelineError(
        f"stage {len(steps)} ({stage.name}) needs {allowed}, but would be given {_a(kind)}",
        where=where,
        todo="; ".join(part for part in (_how_to_get(stage, kind, stages), maker.stage.because()) if part),
    )


def _a(kind: Kind) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _how_to_get(stage: Stage, kind: Kind, stages: Mapping[str, type[Stage]]) -> str:
    """Return advice: the stage that is missing, if one would do."""
    between = [s.name for s in stages.values() if kind in s.consumes and s.produces in stage.takes()]
    return f"put {' or '.join(between)} before it" if between else "move it forward, or leave it out"


def _one_of(known: Mapping[str, type[T]], value: Any, document: Document, location: Location, what: str) -> T:
    """Return the settings for a one-key map `{name: settings}`, or for a name alone."""
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
    """Convert plain values to settings; an error names the line."""
    if not isinstance(value, dict):
        raise PipelineError(
            f"must be a map, not {shown(value)}", where=document.where(location), allowed=listing(_keys(kind))
        )
    try:
        # As JSON, because strict validation accepts a list for a tuple only there.
        return kind.model_validate_json(json.dumps(value, allow_nan=False), strict=True)
    except ValidationError as errors:
        # An unknown key first: it may be the reason why another one is missing.
        problems = sorted(errors.errors(), key=lambda error: error["type"] != "extra_forbidden")
        raise _explain(problems[0], kind, document, location) from errors


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
    """Convert an error of pydantic."""
    inner: Location = ()
    for part in error["loc"]:  # a part that is not in the file is pydantic's name for a member of a union
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
    """Return the words that a literal allows."""
    return re.findall(r"'([^']+)'", str(error.get("ctx", {}).get("expected", "")))


DATA_KEYS = ["source", "preprocess", "split"]
KEYS = ["schema_version", "name", "seed", "target", "model", "data", "stages", "measure", "budget"]
