"""One page for each stage, and their list: purpose, input and output, example, refusals, settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from settings_tables import cell, sections

from compress.core.artifact import Kind
from compress.pipeline.stage import Stage
from compress.pipeline.stages import STAGES
from compress.tasks import TASKS
from compress.tasks.base import Refusal, Use

EXAMPLES = {
    "train": """\
stages:
  - train:
      epochs: 40
      learning_rate: 0.003
      augment: {shift: 0.1, rotate: 10}  # small random changes of the training images
      early_stopping: 8  # stop after 8 epochs without a better result
""",
    "prune": """\
stages:
  - train: {epochs: 40}
  - prune:
      keep_macs: 0.5  # half of the multiply-accumulates may remain
      epochs: 6  # training after the removal
""",
    "replace_activations": """\
stages:
  - train: {epochs: 40}
  - replace_activations:
      activations: [silu, hard_silu]
      by: relu
      epochs: 6
""",
    "distill": """\
stages:
  - train: {epochs: 40}
  - prune: {keep_macs: 0.5}
  - distill:
      epochs: 6
      temperature: 4
      weight: 0.9  # 0.9 for the teacher, 0.1 for the labels
""",
    "sparsify": """\
stages:
  - train: {epochs: 40}
  - sparsify: {sparsity: 0.5, epochs: 6}
  - quantize: {method: ptq}
""",
    "cluster": """\
stages:
  - train: {epochs: 40}
  - cluster: {clusters: 16, epochs: 4}
  - quantize: {method: ptq}
""",
    "quantize": """\
stages:
  - train: {epochs: 40}
  - quantize:
      method: ptq
      calibration_samples: 200
      io: int8
""",
    "expose_embedding": """\
stages:
  - train: {epochs: 40}
  - quantize: {}
  - expose_embedding: {}
  - compile: {}
  - package: {}
""",
    "compile": """\
stages:
  - train: {epochs: 40}
  - quantize: {}
  - compile:
      docker: our/edgetpu-compiler  # an image with the vendor's compiler
      timeout_s: 600
""",
    "package": """\
stages:
  - train: {epochs: 40}
  - quantize: {}
  - compile: {}
  - package: {golden: 4, evaluation: 100}
""",
}
"""The example of each stage; tests/docs/test_reference.py reads them as part of a pipeline."""

METHODS = {
    "train": ("training settings", "training.md#training-settings"),
    "prune": ("structured pruning", "training.md#structured-pruning"),
    "replace_activations": ("activation replacement", "training.md#activation-replacement"),
    "distill": ("knowledge distillation", "training.md#knowledge-distillation"),
    "sparsify": ("sparse and clustered weights", "training.md#sparse-and-clustered-weights"),
    "cluster": ("sparse and clustered weights", "training.md#sparse-and-clustered-weights"),
    "quantize": ("the search, and quantization-aware training", "training.md#search-of-the-quantization-plan"),
    "expose_embedding": ("new classes on the device", "device.md#confidence-unknown-and-new-classes"),
    "compile": ("compilation", "compiling.md#compilation"),
    "package": ("bundles", "bundles.md"),
}
"""The manual of each stage's method: its title and its place below docs/."""

INPUT_NOTES = {
    "distill": ["With a separate `student` it also takes TFLite models, which are only the teacher then."],
    "quantize": ["A float TFLite model without Keras layers cannot be used with `method: qat` or `plan`."],
}
"""Notes on inputs that a stage accepts only with some settings, see `Stage.accepted_kinds`."""

PROBES: tuple[dict[str, Any], ...] = (
    {"class_weights": "balanced"},
    {"augment": {"shift": 0.1}},
    {"augment": {"rotate": 10}},
    {"augment": {"mixup": 0.2}},
    {"label_smoothing": 0.1},
    {"allocation": "sensitivity"},
    {"distill": {}},
    {"method": "qat", "qat": {"distill": {}}},
    {"method": "qat", "engine": "tfmot"},
    {"weight": 0.5},
)
"""Settings that use a method which a task may refuse, see `Stage.uses`. Each is tried on every stage that has it."""


def pages() -> dict[str, str]:
    """Return the pages by name."""
    return {"reference/stages/index": index(), **{f"reference/stages/{n}": page(n, s) for n, s in STAGES.items()}}


def index() -> str:
    """Return the page with the list of the stages."""
    lines = ["# Stages", ""]
    lines += [
        "A stage is an item of the list `stages:` in a pipeline file. It takes the result of the stage before it, and",
        "makes the input of the next one. The order of the list is the order of the work. A wrong order is refused",
        "before any work. `python -m compress stages` prints the same settings in a terminal.",
        "",
        "| stage | purpose | takes | makes |",
        "|---|---|---|---|",
    ]
    for name, stage in STAGES.items():
        lines.append(f"| [`{name}`]({name}.md) | {cell(purpose(stage))} | {takes(stage)} | {proper(stage.produces)} |")
    return "\n".join(lines) + "\n"


def page(name: str, stage: type[Stage]) -> str:
    """Return the page of one stage."""
    title, place = METHODS[name]
    lines = [f"# `{name}`", "", purpose(stage), ""]
    lines += [f"- Input: {takes(stage)}.", *(f"  {line}" for line in INPUT_NOTES.get(name, ()))]
    lines += [
        f"- Output: {proper(stage.produces)}.",
        f"- How it works: [{title}](../../{place}).",
        "",
        "## Example",
        "",
    ]
    lines += ["```yaml", EXAMPLES[name].rstrip("\n"), "```"]
    return "\n".join([*lines, *sections(stage), "", "## Tasks", "", *_refusals(stage)]) + "\n"


def purpose(kind: type[Any]) -> str:
    """Return the first paragraph of the docstring of a class."""
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def takes(stage: type[Stage]) -> str:
    """Return the kinds of artifacts that a stage takes, in the order of the pipeline."""
    return " or ".join(proper(kind) for kind in Kind if kind in stage.consumes)


def proper(kind: Kind) -> str:
    """Return the name of a kind of artifacts, with the spelling of proper names."""
    return kind.replace("keras", "Keras").replace("tflite", "TFLite")


def _refusals(stage: type[Stage]) -> list[str]:
    """Return the table of the tasks that cannot use the stage or some of its settings."""
    rows = [*refusals(stage)]
    if not rows:
        return ["It works for every [task](../tasks.md)."]
    lines = ["It works for every [task](../tasks.md), with these exceptions. A run refuses them before any work.", ""]
    lines += ["| setting | refused for | reason | instead |", "|---|---|---|---|"]
    merged: dict[tuple[str, Refusal], list[str]] = {}
    for setting, task, refusal in rows:
        merged.setdefault((setting, refusal), []).append(f"`{task}`")
    for (setting, refusal), tasks in merged.items():
        instead = "; ".join(filter(None, (refusal.allowed, refusal.hint)))
        lines.append(f"| {setting} | {', '.join(tasks)} | {cell(refusal.what)} | {cell(instead)} |")
    return lines


def refusals(stage: type[Stage]) -> Iterator[tuple[str, str, Refusal]]:
    """Yield each setting of a stage with a task that refuses it, and the refusal."""
    covered: set[Use] = set()
    for settings in ({}, *PROBES):
        added = [use for use in uses(stage, settings) if use not in covered]
        covered.update(added)
        for name, task in TASKS.items():
            refusal = task.why_not(added)
            if refusal is not None:
                yield _in_words(settings), name, refusal


def uses(stage: type[Stage], settings: Mapping[str, Any]) -> tuple[Use, ...]:
    """Return the methods that a stage uses with these settings; none if it does not have the settings."""
    try:
        return stage.model_validate(settings).uses()
    except ValidationError:
        return ()


def _in_words(settings: Mapping[str, Any]) -> str:
    """Return settings as they are written in YAML; "the stage itself" without settings."""
    if not settings:
        return "the stage itself"
    text = ", ".join(f"{name}: {_flow(value)}" for name, value in settings.items())
    return f"`{text}`"


def _flow(value: Any) -> str:
    """Return a value in YAML's flow style."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(inner)}" for name, inner in value.items()) + "}"
    return str(value)


def probed() -> set[Use]:
    """Return all methods that the pages cover; tests compare them with `Use`."""
    return {use for stage in STAGES.values() for settings in ({}, *PROBES) for use in uses(stage, settings)}
