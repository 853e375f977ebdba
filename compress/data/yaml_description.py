"""YAML files that come with data: `data.yaml` of YOLO data sets, and lists of class names. They are untrusted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from compress.core.errors import DataError
from compress.core.yaml_limits import MAX_BYTES, YamlLimitError, limited_events
from compress.data import class_names, files
from compress.data.labels import MAX_INDEX_DIGITS, MOST_CLASSES


class Description:
    """The content of a YAML file: a map.

    Args:
        path: the file.
        text: its content; None to read it.

    Attributes:
        path: the file.
        content: the map, as plain values.

    Raises:
        DataError: the file is missing, too large, or not a map; or it has anchors, or is nested too deeply.
    """

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self.content = _parsed(path, text)

    def where(self, key: str) -> str:
        """Return the location of a key, for messages."""
        lines = getattr(self.content, "lc", None)
        known = lines is not None and key in self.content
        return f"{self.path}, line {lines.key(key)[0] + 1}" if lines and known else str(self.path)

    def refuse(self, key: str, what: str, allowed: str = "", hint: str = "") -> NoReturn:
        """Refuse the value of a key.

        Raises:
            DataError: always.
        """
        raise DataError(f"{key}: {what}", where=self.where(key), allowed=allowed, hint=hint)

    def names(self) -> tuple[str, ...] | None:
        """Return the class names under `names` or `classes`, a list or a map from indices; or the indices below `nc`.

        None if the file has none of these keys.
        """
        names = self.names_by_index()
        if names is not None and sorted(names) != list(range(len(names))):
            self.refuse(self._key, "its indices have gaps", allowed=f"0 to {len(names) - 1}, each once")
        return None if names is None else tuple(names[index] for index in range(len(names)))

    def names_by_index(self, *, unique: bool = True) -> dict[int, str] | None:
        """Return the same, also with gaps between the indices."""
        count = self.content.get("nc")
        if count is not None and (type(count) is not int or not 1 <= count <= MOST_CLASSES):
            self.refuse("nc", f"{str(count)[:60]!r} is not a number of classes", allowed=f"1 to {MOST_CLASSES}")
        if not self._key:
            return None if count is None else {index: str(index) for index in range(count)}
        names = self._listed(self._key, unique=unique)
        if count is not None and count != len(names):
            self.refuse("nc", f"{count}, but there are {len(names)} names", hint="correct one of the two")
        return names

    @property
    def _key(self) -> str:
        """The key with the names; empty without such a key."""
        return next((key for key in ("names", "classes") if key in self.content), "")

    def _listed(self, key: str, *, unique: bool) -> dict[int, str]:
        value = self.content[key]
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = dict(enumerate(value))
        if not isinstance(value, Mapping) or not 1 <= len(value) <= MOST_CLASSES:
            self.refuse(key, "is not a list of names", allowed=f"1 to {MOST_CLASSES} names, or a map from indices")
        is_index = re.compile(rf"\d{{1,{MAX_INDEX_DIGITS}}}").fullmatch
        wrong = next((index for index in value if not is_index(str(index))), None)
        if wrong is not None:
            self.refuse(key, f"{str(wrong)[:60]!r} is not an index", allowed="whole numbers from 0")
        other = next(
            (class_name for class_name in value.values() if not isinstance(class_name, (str, int, float))), None
        )
        if other is not None:
            self.refuse(key, f"{str(other)[:60]!r} is not a name", allowed="texts")
        names = {int(index): str(name).strip() for index, name in value.items()}
        if unique:
            class_names.checked(tuple(names.values()), self.where(key))
        return dict(sorted(names.items()))


def _parsed(path: Path, text: str | None) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if text is None:
        text = files.read(path, MAX_BYTES).decode("utf-8", errors="replace")
    try:
        for _ in limited_events(YAML(typ="rt", pure=True), text):
            pass
        content = YAML(typ="rt", pure=True).load(text)
    except YamlLimitError as error:
        where = f"{path}, line {error.line}"
        raise DataError(error.what, where=where, allowed=error.allowed, hint=error.hint) from error
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DataError(f"is not YAML: {error.problem}", where=f"{path}, line {line}", hint="repair it") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"is not YAML: {error}", where=str(path), hint="repair it") from error
    if not isinstance(content, Mapping):
        raise DataError("is not a map", where=str(path), allowed="keys such as train, val and names")
    return content
