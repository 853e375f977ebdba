"""The manual, from the code: stages with their settings, and the JSON schema of pipeline.yaml."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from functools import cache
from typing import Any

from compress import targets
from compress.core.settings import Settings
from compress.data.dataset import Splitting
from compress.data.sources import SOURCES
from compress.pipeline.schema import ModelSettings, PipelineKeys
from compress.pipeline.stages import STAGES
from compress.tasks import TASKS
from deploy.contract import preprocessing


@cache
def describe_settings() -> None:
    """Set the descriptions of all settings to the strings below them in the code."""
    kinds = [Settings]
    for kind in kinds:
        kinds += [subclass for subclass in kind.__subclasses__() if subclass not in kinds]
        texts = _inherited(kind)
        for name, field in kind.model_fields.items():
            field.description = texts.get(name)
    for kind in kinds * 2:  # again, for those that hold others
        kind.model_rebuild(force=True)


def _inherited(kind: type[Any]) -> dict[str, str]:
    """Return the strings below the fields of a class and of its base classes in this project."""
    ours = [base for base in reversed(kind.__mro__) if base.__module__.partition(".")[0] in ("compress", "deploy")]
    return {name: text for base in ours for name, text in _texts(base).items()}


@cache
def _texts(kind: type[Any]) -> dict[str, str]:
    """Return the strings below the fields of one class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    pairs = itertools.pairwise(body.body)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def stages() -> str:
    """Return a text of every stage: its purpose, input, output and settings."""
    describe_settings()
    parts = []
    for name, stage in STAGES.items():
        takes = " or ".join(sorted(stage.consumes))
        lines = [name, f"  {_summary(stage)}", f"  takes a {takes}; makes a {stage.produces}"]
        lines += [f"    {line}" for line in _settings(stage)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def stages_json() -> list[dict[str, Any]]:
    """Return the same as plain values."""
    describe_settings()
    return [
        {
            "name": name,
            "summary": _summary(stage),
            "consumes": sorted(stage.consumes),
            "produces": stage.produces,
            "settings": _schema(stage)["properties"],
        }
        for name, stage in STAGES.items()
    ]


def _summary(kind: type[Any]) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")


def _settings(kind: type[Settings], prefix: str = "") -> list[str]:
    """Return one line for each setting: name, default, meaning. Nested settings are named `outer.inner`."""
    lines = []
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            lines += _settings(field.annotation, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else f"= {_yaml(field.default)}"
        lines.append(f"{prefix + name:<22} {default:<12} {' '.join((field.description or '').split())}")
    return lines


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool | tuple):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


TASK_KEY = "The task of the model, if the labels do not say it. By default that of the data source."


def schema() -> dict[str, Any]:
    """Return the JSON schema of pipeline.yaml, for editors."""
    describe_settings()
    definitions: dict[str, Any] = {}
    one = {"oneOf": [{"required": [key], "properties": {key: {"type": "string"}}} for key in ("builder", "file")]}
    model = _hoisted(_schema(ModelSettings), definitions) | one
    properties = {**_hoisted(_schema(PipelineKeys), definitions)["properties"], "model": model}
    properties["target"]["enum"] = [*targets.TARGETS]
    properties["data"] = {
        "type": "object",
        "additionalProperties": False,
        "required": ["source"],
        "properties": {
            "source": _named({name: _hoisted(_schema(kind), definitions) for name, kind in SOURCES.items()}),
            "task": {"enum": [*TASKS], "description": TASK_KEY},
            "preprocess": {"type": "array", "items": _one_of({n: _step(s) for n, s in preprocessing.STEPS.items()})},
            "split": _hoisted(_schema(Splitting), definitions),
        },
    }
    entries = {name: _hoisted(_schema(kind), definitions) for name, kind in STAGES.items()}
    properties["stages"] = {"type": "array", "items": _named(entries)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Coralline pipeline",
        "type": "object",
        "additionalProperties": False,
        "required": ["schema_version", "name", "model", "stages"],
        "properties": properties,
        "$defs": definitions,
    }


def _schema(kind: type[Settings]) -> dict[str, Any]:
    return kind.model_json_schema()


def _hoisted(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Move the definitions of a schema to the common ones."""
    definitions.update(schema.pop("$defs", {}))
    return schema


def _one_of(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a map with exactly one of these keys. A value without required settings may be null."""
    return {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": {
            name: entry if entry.get("required") else {"anyOf": [entry, {"type": "null"}]}
            for name, entry in entries.items()
        },
    }


def _named(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the same, or the name alone of an entry without required settings."""
    return {
        "anyOf": [{"enum": [name for name, entry in entries.items() if not entry.get("required")]}, _one_of(entries)]
    }


def _step(step: Any) -> dict[str, Any]:
    """Return the schema of a preprocessing step."""
    fields, texts = preprocessing.fields(step), _inherited(step)
    return {
        "type": "object",
        "description": _summary(step),
        "additionalProperties": False,
        "required": preprocessing.needed(step),
        "properties": {
            name: field.metadata["kind"].schema() | {"description": texts[field.name]} for name, field in fields.items()
        },
    }
