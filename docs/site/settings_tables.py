"""Tables of settings in Markdown, from the JSON schema of the settings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from compress.core.settings import Settings
from compress.surface.cli import manual

Schema = Mapping[str, Any]

COMMON = {
    "EpochSettings": "Settings of every training",
    "TrainingSettings": "Settings of every training",
    "LabelledFiles": "Labels",
    "DecodedImages": "Images",
    "InFiles": "Files",
    "Stored": "Files",
    "Stage": "",
}
"""The headings of settings that many pages have, by the class that defines them. "" is the end of the first table."""
PLURALS = {"integer": "integers", "number": "numbers", "text": "texts"}


def sections(kind: type[Settings], level: str = "##", first: str = "Settings") -> list[str]:
    """Return the tables of a class of settings: its own, those of shared base classes, and nested ones."""
    manual.describe_settings()
    schema = kind.model_json_schema()
    definitions = schema.get("$defs", {})
    groups: dict[str, dict[str, Schema]] = {first: {}}
    last: dict[str, Schema] = {}
    for name, setting in schema.get("properties", {}).items():
        heading = COMMON.get(_owner(kind, name), first)
        (groups.setdefault(heading, {}) if heading else last)[name] = setting
    groups[first].update(last)
    required = schema.get("required", ())
    lines = []
    for heading, settings in groups.items():
        if settings:
            lines += ["", f"{level} {heading}", "", *table(settings, required)]
    return [*lines, *_nested(schema.get("properties", {}), definitions, level, set())]


def _owner(kind: type[Settings], name: str) -> str:
    """Return the name of the most derived class that defines a setting."""
    return next(base.__name__ for base in kind.__mro__ if name in inspect.get_annotations(base))


def _nested(properties: Mapping[str, Schema], definitions: Schema, level: str, seen: set[str]) -> list[str]:
    """Return the tables of settings that are maps of settings."""
    lines: list[str] = []
    for name, setting in properties.items():
        inner = _reference(setting)
        if inner is None or inner in seen:
            continue
        seen.add(inner)
        definition = definitions[inner]
        text = " ".join(setting.get("description", "").split())
        lines += ["", f"{level} Settings of `{name}`", "", text, ""]
        lines += table(definition["properties"], definition.get("required", ()))
        lines += _nested(definition["properties"], definitions, level, seen)
    return lines


def _reference(setting: Schema) -> str | None:
    """Return the name of the definition that a setting refers to, or None."""
    for option in (setting, *setting.get("anyOf", ())):
        if "$ref" in option:
            return str(option["$ref"]).rpartition("/")[2]
    return None


def table(properties: Mapping[str, Schema], required: Iterable[str]) -> list[str]:
    """Return the rows of a table of settings: name, default, allowed values, meaning."""
    lines = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for name, setting in properties.items():
        default = "required" if name in required else _default(setting)
        lines.append(f"| `{name}` | {default} | {cell(allowed(setting))} | {cell(_meaning(setting))} |")
    return lines


def _meaning(setting: Schema) -> str:
    """Return the description of a setting, with a new line for each of its words that is explained."""
    text = " ".join(setting.get("description", "").split())
    words = "|".join(re.escape(str(word)) for word in _words(setting))
    explained = re.compile(rf"(^|[.:;] )((?:{words})(?:, (?:{words}))*): ")
    if not words or not explained.search(text):
        return text
    return explained.sub(_on_a_line, text)


def _on_a_line(match: re.Match[str]) -> str:
    """Return words as code, on a new line unless they are at the beginning."""
    words = ", ".join(f"`{word}`" for word in match[2].split(", "))
    return f"{match[1].rstrip()}<br>{words}: " if match[1] else f"{words}: "


def _words(setting: Schema) -> list[Any]:
    """Return the allowed words of a setting, or of the items of a list."""
    words = []
    for option in (setting, setting.get("items", {}), *setting.get("anyOf", ())):
        words += option.get("enum", ())
        words += [option["const"]] if "const" in option else []
    return words


def _default(setting: Schema) -> str:
    """Return the default of a setting, as it is written in YAML."""
    value = setting.get("default")
    if value is None:
        return "not set"
    if _reference(setting) is not None:
        return "see below"
    if isinstance(value, bool | list | dict):
        return f"`{json.dumps(value)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def allowed(setting: Schema) -> str:
    """Return the allowed values of a setting as text."""
    if "anyOf" in setting:
        options = [allowed(option) for option in setting["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    if "enum" in setting:
        return ", ".join(f"`{value}`" for value in setting["enum"])
    if "const" in setting:
        return f"`{setting['const']}`"
    if "$ref" in setting:
        return "a map (see below)"
    kind = setting.get("type")
    if kind in ("integer", "number"):
        return f"{kind}{_range(setting)}"
    if kind == "array":
        return _list(setting)
    if kind == "object":
        inner = setting.get("additionalProperties")
        return f"map of names to {allowed(inner)}" if isinstance(inner, dict) and inner else "map"
    return {"boolean": "`true`, `false`", "string": "path" if setting.get("format") == "path" else "text"}.get(
        str(kind), "any value"
    )


def _list(setting: Schema) -> str:
    """Return the items and the length of a list as text."""
    items = allowed(setting.get("items", {}))
    length = setting.get("minItems")
    count = f"{length} " if length is not None and length == setting.get("maxItems") else ""
    kind, comma, limits = items.partition(",")
    if kind in PLURALS:
        return f"a list of {count}{PLURALS[kind]}" + (f", each{limits}" if comma else "")
    return f"a list of {count}{items}"


def _range(setting: Schema) -> str:
    """Return the range of a number as text that begins with a comma; "" for a number without limits."""
    low, high = setting.get("minimum"), setting.get("maximum")
    above, below = setting.get("exclusiveMinimum"), setting.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f", {low:,} to {high:,}"
    parts = [f"at least {low:,}"] if low is not None else []
    parts += [f"above {above:,}"] if above is not None else []
    parts += [f"at most {high:,}"] if high is not None else []
    parts += [f"below {below:,}"] if below is not None else []
    return ", " + " and ".join(parts) if parts else ""


def cell(text: str) -> str:
    """Escape a text for a cell of a table."""
    return text.replace("|", "\\|")
