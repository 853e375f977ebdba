"""Data sets without a pipeline file."""

from __future__ import annotations

from typing import Any

from compress.data.dataset import Dataset, Splitting
from compress.data.source import Source
from deploy.contract.preprocessing import Preprocessing


def dataset(source: Source, *steps: Any, splitting: Splitting | None = None) -> Dataset:
    return Dataset(source, Preprocessing(list(steps)), splitting)
