"""What the data set is: counts, classes, shape. Kept, so that a run with nothing to do need not load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from compress.stage import SPLITS, Artifact, Context, Facts, Need, Probe


class DataSummary(Probe):
    """Describes the data set."""

    name: ClassVar[str] = "data"
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """`classes`, `samples` of each split, `input_shape` and `preprocess`."""
        data = context.data
        return {
            "classes": list(data.class_names),
            "samples": {split: len(data.labels(split)) for split in SPLITS},
            "input_shape": list(data.input_shape),
            "preprocess": data.preprocessing,
        }
