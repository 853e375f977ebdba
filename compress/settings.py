"""Settings: strict, frozen models of the keys of pipeline.yaml."""

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
from compress.targets.base import Target


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
