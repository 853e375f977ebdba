"""Settings: strict, frozen models of the keys of pipeline.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from compress.core.errors import ModelError
from compress.core.files import content_digest


class Settings(BaseModel):
    """Strict, frozen settings: unknown keys, wrong types, NaN and infinity are refused.

    A setting of the type Path is a file or folder that is read. It is relative to the pipeline file, and the key of an
    artifact depends on its content.

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

    def with_paths_from(self, folder: Path) -> Self:
        """Return the same settings with relative paths resolved from `folder`."""
        return self.model_copy(update={name: _resolved(value, folder) for name, value in self})

    def identity(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, with the contents of files instead of their paths.

        Raises:
            ModelError: a file cannot be read.
        """
        return {name: _plain(name, value) for name, value in self}


def _resolved(value: Any, folder: Path) -> Any:
    if isinstance(value, Path):
        return folder / value
    if isinstance(value, Settings):
        return value.with_paths_from(folder)
    if isinstance(value, Mapping):
        return {name: _resolved(item, folder) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resolved(item, folder) for item in value)
    return value


def _plain(name: str, value: Any) -> Any:
    """Return a value of the setting with a name as plain JSON values."""
    if isinstance(value, Path):
        return _digest(name, value)
    if isinstance(value, Settings):
        return value.identity()
    if isinstance(value, Mapping):
        return {key: _plain(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    return value


def _digest(name: str, path: Path) -> str:
    try:
        return content_digest(path)
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ModelError(what, where=str(path), hint=f"check the setting {name}") from error
