"""Progress of long work."""

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


class Progress(Protocol):
    """Where long work says how far it is."""

    def update(self, done: int, total: int, **metrics: float) -> None:
        """`done` of `total` steps are over; metrics are shown beside."""

    def note(self, text: str) -> None:
        """One line that the user should see."""
