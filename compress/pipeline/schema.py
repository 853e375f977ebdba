"""The schema of pipeline.yaml, and `load`, which checks a file before any work.

A pipeline file has plain keys, and one-key maps that name a stage, a data source or a
preprocessing step with its settings. `compress.pipeline.runner` runs what is loaded here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, get_args

from pydantic import Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from compress import targets
from compress.core.artifact import Kind
from compress.core.errors import ModelError, PipelineError, listing, nearest, shown
from compress.core.settings import Settings
from compress.data.dataset import Dataset, Splitting
from compress.data.sources import SOURCES
from compress.learning.context import Execution
from compress.pipeline import data_section
from compress.pipeline.stage import Stage
from compress.pipeline.stages import STAGES
from compress.pipeline.stages.load import LoadTflite
from compress.pipeline.stages.origin import Origin
from compress.pipeline.yaml_file import Document, DocumentNode, Location, read
from compress.targets.base import Target
from compress.tasks import TASKS, refused_budget, task_of
from compress.tasks.base import Refusal
from deploy.contract.preprocessing import STEPS as PREPROCESSING
from deploy.contract.preprocessing import Preprocessing, PreprocessingError, fields

T = TypeVar("T", bound=Settings)
MAX_SETTINGS = 100
"""Settings of one search."""


class ModelSettings(Origin):
    """The model to start from: a builder or a file."""

    trust: bool = False
    """Allow the model to run code that it contains (your own builder, Lambda layers)."""


class LatencySettings(Settings):
    """How time is measured on this machine's CPU."""

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

    host: str | None = None
    """The host whose latency is reported and limited: for the target edgetpu usb3 (the default), usb2, pcie,
    devboard, pi4-usb3, pi5-usb3 or pi5-pcie."""
    latency: LatencySettings = LatencySettings()
    """Time on this machine's CPU."""
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
    r2_drop: Annotated[float, Field(ge=-1)] | None = None
    """Largest drop of R² of a regression model."""
    map_drop: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Largest drop of the mean average precision of a multi-label classifier, as a fraction."""
    miou_drop: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Largest drop of the mean intersection over union of a segmentation model, as a fraction."""
    pck_drop: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Largest drop of the share of keypoints that are found, as a fraction."""
    mse_increase: Annotated[float, Field(ge=-1)] | None = None
    """Largest increase of the mean squared error of an autoencoder, as a fraction of the original's error."""
    auc_drop: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Largest drop of the area under the curve of an anomaly detector, as a fraction."""
    recall_drop: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Largest drop of the share of samples whose nearest embedding has the same class, as a fraction."""
    error_increase: Annotated[float, Field(ge=0)] | None = None
    """Largest error of the outputs of a model without labels, in standard deviations of the original's outputs."""
    latency_ms: Annotated[float, Field(gt=0)] | None = None
    """Longest latency of the result, in milliseconds: predicted for `measure.host`; for the target cpu, the median
    that is measured on this machine."""
    size_bytes: Annotated[int, Field(gt=0)] | None = None
    """Largest .tflite file, in bytes."""


class SearchSettings(Settings):
    """The settings that `python -m compress search` tries. An ordinary run ignores them."""

    trials: Annotated[int, Field(ge=1, le=100_000)] = 60
    """Number of trials, failed and stopped ones included."""
    objectives: Annotated[tuple[str, ...], Field(max_length=3)] = ()
    """One to three quantities to improve: a metric of the task, latency_ms (predicted for `measure.host`),
    streamed_bytes, size_bytes, compressed_bytes, macs or parameters. By default the task's first metric, and
    latency_ms where the target predicts it, otherwise size_bytes."""
    constraints: dict[str, float | bool] = {}
    """Constraints on the result: `mapped_whole: true`, `fits_cache: true`, a limit of a cost, or the least value of a
    metric (the largest, if less is better)."""
    settings: Annotated[dict[str, Any], Field(min_length=1, max_length=MAX_SETTINGS)]
    """The settings to vary, by name (`prune.keep`, `model.width`, `stages`): a list of choices, or a range
    `{from: 0.3, to: 0.9}`, optionally with `step` or `log: true`."""


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
    execution: Execution = Execution()
    """The devices of a training, and whether its time is measured."""
    recipe: Literal["auto"] | None = None
    """auto: try recipes after the `stages`, from the cheapest to the most expensive, until one meets the budget."""
    search: SearchSettings | None = None
    """The settings that `python -m compress search` tries. An ordinary run ignores them."""

    @field_validator("schema_version", mode="before")
    @classmethod
    def _exact_integer(cls, value: object) -> object:
        if type(value) is not int:  # to Python, true and 1.0 equal 1
            raise ValueError(f"{shown(value)} should be 1")
        return value


@dataclass(frozen=True)
class StageEntry:
    """A stage of a pipeline.

    Attributes:
        id: unique name in this pipeline.
        stage: the stage with its settings.
        input_kind: kind of its input; None for the model.
        skip: the reason why it does nothing, or None.
    """

    id: str
    stage: Stage
    input_kind: Kind | None
    skip: str | None = None

    @property
    def makes(self) -> Kind | None:
        """Kind of the artifact after this step."""
        return self.input_kind if self.skip else self.stage.produces


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
        return tuple(takewhile(lambda step: not step.stage.removes_channels and step.makes in layered, self.steps))

    def profiled(self) -> Pipeline:
        """Return the pipeline with `execution: {profile: true}`."""
        execution = self.head.execution.model_copy(update={"profile": True})
        return replace(self, head=self.head.model_copy(update={"execution": execution}))


def load(path: Path, stages: Mapping[str, type[Stage]] = STAGES) -> Pipeline:
    """Read and check a pipeline file.

    Args:
        path: the YAML file. Paths in it are relative to its folder.
        stages: the known stages by name.

    Raises:
        PipelineError: with file, line, what is wrong, and what is allowed.
    """
    return check(read(path), stages)


def check(document: Document, stages: Mapping[str, type[Stage]] = STAGES) -> Pipeline:
    """Return the pipeline of a file that was read, possibly with other values.

    Raises:
        PipelineError: as `load`.
    """
    root, folder = document.root, document.path.parent
    content = _checked_map(root, KEYS, {"model": "", "stages": ""})
    plain = {key: value for key, value in content.items() if key in PipelineKeys.model_fields}
    head = _settings(PipelineKeys, DocumentNode(root.document, (), plain))
    target = _target(head.target, root)
    _check_host(head.measure.host, target, root)
    model = _settings(ModelSettings, root.child("model"))
    with _located(root.child("model")):
        loader = model.loader(folder, trust=model.trust)
    if "data" not in content:
        used = _steps(loader, root.child("stages"), target, stages, folder)[1:]
        content = {**content, "data": _random_data(loader, used, model, root)}
    data = _dataset(DocumentNode(root.document, ("data",), content["data"]), folder, model.file)
    steps = _steps(loader, root.child("stages"), target, stages, folder)
    pipeline = Pipeline(head, model, target, data, steps, content)
    _refuse_unfit(pipeline, root)
    if head.execution.strategy == "multi_worker":
        _refuse_for_workers(pipeline, root)
    return pipeline


def _checked_map(node: DocumentNode, known: Sequence[str], required: Mapping[str, str]) -> dict[str, Any]:
    """Return a map after checking its keys; `required` has the allowed values of each necessary key.

    Raises:
        PipelineError: the value is not a map, or a key is unknown or missing.
    """
    if not isinstance(node.value, dict):
        raise node.error("must be a map", allowed=listing(known))
    for key in node.value:
        if key not in known:
            raise _unknown(node, key, known)
    for key, allowed in required.items():
        if key not in node.value:
            raise node.error(f"the key {key!r} is missing", allowed=allowed)
    return node.value


def _target(name: str, root: DocumentNode) -> Target:
    try:
        return targets.load(name)
    except PipelineError as error:
        error.where = root.where("target")
        error.hint = nearest(name, targets.TARGETS)
        raise


def _check_host(name: str | None, target: Target, root: DocumentNode) -> None:
    """Check that the target has the host of `measure.host`.

    Raises:
        PipelineError: it has no such host.
    """
    try:
        target.cost.host(name)
    except PipelineError as error:
        error.where = root.where("measure", "host")
        error.hint = nearest(name or "", target.cost.hosts)
        raise


@contextmanager
def _located(node: DocumentNode) -> Iterator[None]:
    """Add the location to errors about a model's file.

    Raises:
        ModelError: the file cannot be used.
    """
    try:
        yield
    except ModelError as error:
        error.where = ": ".join(part for part in (node.where(), error.where) if part)
        raise
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=node.where(), hint="check model") from error


def _refuse_unfit(pipeline: Pipeline, root: DocumentNode) -> None:
    """Refuse stages and settings that the task of the data or the target does not support.

    Raises:
        PipelineError: one is not supported.
    """
    task = task_of(pipeline.data)
    refusals: list[tuple[Location, Refusal]] = []
    for index, step in enumerate(pipeline.steps[1:]):
        if step.skip is not None:
            continue
        if refusal := task.why_not(step.stage.uses()):
            what = f"stage {index + 1} ({step.stage.name}): {refusal.what}"
            refusals.append((("stages", index), refusal._replace(what=what)))
        if refusal := step.stage.refused_by_target(pipeline.target):
            raise root.error(refusal.what, "stages", index, step.stage.name, allowed=refusal.allowed, hint=refusal.hint)
    refusals += refused_budget(task, [*(pipeline.settings.get("budget") or {})])
    refusals += task.refused_settings(pipeline.settings)
    for location, refusal in refusals:
        what = f"{refusal.what} (the data is for {task.name})"
        raise root.error(what, *location, allowed=refusal.allowed, hint=refusal.hint)


def _refuse_for_workers(pipeline: Pipeline, root: DocumentNode) -> None:
    """Refuse what several workers cannot do together.

    Raises:
        PipelineError: the pipeline has it.
    """
    if pipeline.head.recipe is not None:
        what = "several workers train one pipeline, and a recipe tries several"
        raise root.error(what, "recipe", hint="run it with another `execution`, and then write the stages")
    for index, step in enumerate(pipeline.steps[1:]):
        if step.skip is None and {"tfmot", "tfmot qat"} & {*step.stage.uses()}:
            what = f"stage {index + 1} ({step.stage.name}): tfmot cannot train on several workers"
            raise root.error(what, "stages", index, hint="choose another stage or engine, or another `execution`")


def _random_data(
    loader: Stage, steps: Sequence[StageEntry], model: ModelSettings, root: DocumentNode
) -> dict[str, Any]:
    """Return random samples of the right shape and range, for the stages after a quantized .tflite file.

    Raises:
        PipelineError: the model or a stage needs data.
    """
    users = [step.id for step in steps if step.skip is None and step.stage.needs_samples()]
    if not isinstance(loader, LoadTflite) or users:
        hint = "data: {source: {folder: {path: photos, labels: none}}} are photos without labels"
        raise root.error(
            "the key 'data' is missing",
            allowed="a pipeline without data, if the model is a quantized .tflite file",
            hint=hint,
        )
    from compress.model.importers import model_file

    inputs = data_section.inputs_of(model_file.read(loader.path), trust=model.trust)
    return {**data_section.data_for(inputs, None), "task": "outputs"}


def _dataset(node: DocumentNode, folder: Path, model_file: str | None) -> Dataset:
    content = _checked_map(node, DATA_KEYS, {"source": listing([*SOURCES])})
    source = _one_of(SOURCES, node.child("source"), "data source").with_paths_from(folder)
    if model_file is not None:
        source = source.with_labels_beside(folder / model_file)
    task = _task(node, source.task_name())
    splitting = _settings(Splitting, node.child("split")) if "split" in content else None
    if content.get("preprocess") is None:
        return Dataset(source, Preprocessing([]), splitting, task)
    steps = node.child("preprocess")
    _check_preprocessing(steps)
    try:
        return Dataset(source, Preprocessing(steps.value), splitting, task)
    except PreprocessingError as error:
        inner = () if error.step is None else (error.step,)
        raise steps.error(str(error), *inner) from error


def _task(node: DocumentNode, default: str) -> str | None:
    """Return the task that `data.task` names; None without it.

    Raises:
        PipelineError: the name is unknown, or the samples cannot be used for it.
    """
    name = node.value.get("task")
    if name is None:
        return None
    if name not in TASKS:
        raise _no_such("task", str(name), TASKS, node.child("task"))
    possible = [task.name for task in TASKS.values() if default in (task.name, *task.instead_of)]
    if name not in possible:
        raise node.error(f"the samples cannot be used for {name}", "task", allowed=listing(possible))
    return str(name)


def _check_preprocessing(steps: DocumentNode) -> None:
    """Check the names of preprocessing steps and of their keys; `Preprocessing` checks the rest.

    Raises:
        PipelineError: a name is unknown.
    """
    entries = steps.value if isinstance(steps.value, list) else []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or len(entry) != 1:
            continue
        ((name, settings),) = entry.items()
        if name not in PREPROCESSING:
            raise _no_such("preprocessing step", name, PREPROCESSING, steps.child(index))
        if isinstance(settings, dict):
            _checked_map(steps.child(index).child(name), [*fields(PREPROCESSING[name])], {})


def _steps(
    loader: Stage, node: DocumentNode, target: Target, stages: Mapping[str, type[Stage]], folder: Path
) -> tuple[StageEntry, ...]:
    """Return the model and the stages in order, each with the kind of its input."""
    if not isinstance(node.value, list):
        raise node.error("must be a list of stages", allowed=listing([*stages]))
    steps = [StageEntry("model", loader, None)]
    for index in range(len(node.value)):
        entry = node.child(index)
        with _located(entry):
            stage = _one_of(stages, entry, "stage").with_paths_from(folder)
        kind = steps[-1].makes
        assert kind is not None  # only the first step, the model, has no input
        is_unchanged = all(step.skip or step.stage is loader for step in steps)
        skip = stage.skip(kind, from_file=is_unchanged and loader.produces is not Kind.UNTRAINED, target=target)
        if skip is None and kind not in stage.accepted_kinds():
            raise _wrong_order(stage, steps, stages, entry.where())
        steps.append(StageEntry(_unique_id(stage, steps, entry.where()), stage, kind, skip))
    return tuple(steps)


def _unique_id(stage: Stage, steps: Sequence[StageEntry], where: str) -> str:
    """Return the id of a stage: the one in the file, or its name, numbered if the stage occurs again.

    Raises:
        PipelineError: an earlier step has this id.
    """
    count = sum(step.stage.name == stage.name for step in steps)
    name = stage.id or stage.name
    if stage.id is None and count:
        name = f"{stage.name}-{count + 1}"
    if any(step.id == name for step in steps):
        raise PipelineError(f"two stages have the id {name!r}", where=where, hint="give one another id")
    return name


def _wrong_order(
    stage: Stage, steps: Sequence[StageEntry], stages: Mapping[str, type[Stage]], where: str
) -> PipelineError:
    """Return the error for a stage that cannot use the artifact of the steps before it."""
    kind = steps[-1].makes
    assert kind is not None
    allowed = " or ".join(_a(kind) for kind in sorted(stage.accepted_kinds()))
    maker = next(step for step in reversed(steps) if step.skip is None)
    return PipelineError(
        f"stage {len(steps)} ({stage.name}) needs {allowed}, but would be given {_a(kind)}",
        where=where,
        hint="; ".join(part for part in (maker.stage.kind_reason(), _how_to_get(stage, kind, stages)) if part),
    )


def _a(kind: Kind) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _how_to_get(stage: Stage, kind: Kind, stages: Mapping[str, type[Stage]]) -> str:
    """Return advice: the stage that is missing, if one would do."""
    between = [s.name for s in stages.values() if kind in s.consumes and s.produces in stage.accepted_kinds()]
    if not between:
        return "move it forward, or leave it out"
    return f"put {' or '.join(between)} before it"


def _one_of(known: Mapping[str, type[T]], node: DocumentNode, what: str) -> T:
    """Return the settings for a one-key map `{name: settings}`, or for a name alone."""
    content = {node.value: {}} if isinstance(node.value, str) else node.value
    if not isinstance(content, dict) or len(content) != 1:
        raise node.error(f"a {what} must be a map with one key", allowed=listing([*known]))
    ((name, settings),) = content.items()
    if name not in known:
        raise _no_such(what, name, known, node)
    return _settings(known[name], DocumentNode(node.document, (*node.location, name), settings or {}))


def _settings(kind: type[T], node: DocumentNode) -> T:
    """Convert plain values to settings; an error names the line."""
    if not isinstance(node.value, dict):
        raise node.error(f"must be a map, not {shown(node.value)}", allowed=listing(_keys(kind)))
    try:
        # As JSON, because strict validation accepts a list for a tuple only there.
        return kind.model_validate_json(json.dumps(node.value, allow_nan=False), strict=True)
    except ValidationError as errors:
        # An unknown key first: it may be the reason why another one is missing.
        problems = sorted(errors.errors(), key=lambda error: error["type"] != "extra_forbidden")
        raise _explain(problems[0], kind, node) from errors


def _keys(kind: type[Settings]) -> list[str]:
    return [*kind.model_fields]


def _no_such(what: str, name: str, known: Iterable[str], node: DocumentNode) -> PipelineError:
    return node.error(f"unknown {what} {name!r}", name, allowed=listing([*known]), hint=nearest(name, known))


def _unknown(node: DocumentNode, key: str, known: Sequence[str], *inner: str | int) -> PipelineError:
    return node.error(f"unknown key {key!r}", *inner, key, allowed=listing(known), hint=nearest(key, known))


def _explain(error: ErrorDetails, kind: type[Settings], node: DocumentNode) -> PipelineError:
    """Convert an error of pydantic."""
    is_missing = error["type"] == "missing"
    inner: Location = ()
    value: Any = node.value
    for part in error["loc"]:  # a part that is not in the file is pydantic's name for a member of a union
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if is_missing or is_there:
            inner = (*inner, part)
            value = value[part] if is_there else None
    if is_missing:
        return node.error(f"the key {inner[-1]!r} is missing", *inner)
    holder = _settings_at(kind, inner[:-1])
    if error["type"] == "extra_forbidden" and holder is not None:
        return _unknown(node, str(inner[-1]), _keys(holder), *inner[:-1])
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "should")
    message = message.replace("String should", "should").replace("an object", "a map")
    if error["type"] == "value_error":
        return node.error(message, *inner)
    words = re.findall(r"'([^']+)'", str(error.get("ctx", {}).get("expected", "")))  # those that a literal allows
    suggestion = nearest(error["input"], words) if isinstance(error["input"], str) else ""
    return node.error(f"{shown(error['input'])} {message}", *inner, hint=suggestion)


def _settings_at(kind: type[Settings], location: Location) -> type[Settings] | None:
    """Return the class of the settings at a location inside of others; None if they are not settings."""
    holder: object = kind
    for part in location:
        if not _is_settings(holder) or str(part) not in holder.model_fields:
            return None
        annotation: object = holder.model_fields[str(part)].annotation
        members = [member for member in get_args(annotation) if _is_settings(member)]  # `X | None`
        holder = members[0] if members else annotation
    return holder if _is_settings(holder) else None


def _is_settings(kind: object) -> TypeGuard[type[Settings]]:
    return isinstance(kind, type) and issubclass(kind, Settings)


DATA_KEYS = ["source", "task", "preprocess", "split"]
KEYS = [
    "schema_version",
    "name",
    "seed",
    "target",
    "model",
    "data",
    "stages",
    "measure",
    "budget",
    "execution",
    "search",
    "recipe",
]
