"""The summary of a data set: counts, classes, shape. It is stored, so that an unchanged run does not load the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from compress.core.artifact import Artifact, Facts
from compress.data.types import SPLITS
from compress.learning.context import Context, Need
from compress.pipeline.stage import Probe


class DataSummary(Probe):
    """Describes the data set."""

    name: ClassVar[str] = "data"
    version: ClassVar[int] = 4
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """`classes`, `input_shape`, `preprocess`, and the data's summary (`compress.data.summary`)."""
        data = context.data
        for split in SPLITS:  # the summary compares the splits that were decoded
            data.inputs(split)
        return {
            "classes": list(data.class_names),
            "input_shape": list(data.input_shape),
            "preprocess": data.preprocessing,
            **data.summary(),
        }
