"""The size probe and the summary of the data."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from compress.core.errors import ModelError
from compress.pipeline.probes import DataSummary, Size

Make = Callable[..., Any]


def test_numbers(artifact: Make, context: Make) -> None:
    subjects = {"int8": artifact(), "float": artifact(int8=False), "larger": artifact(filters=8)}
    facts = Size().run(subjects, context())
    assert list(facts) == ["int8", "float", "larger"]
    values = {name: {key: row["value"] for key, row in facts[name].items()} for name in facts}
    weights = 4 * 9 + 4 + 64 * 3 + 3
    assert values["int8"] == {
        "size_bytes": len(tiny.classifier()),
        "compressed_bytes": len(zlib.compress(tiny.classifier(), 9)),
        "parameters": weights,
        "macs": tiny.macs(),
    }
    assert values["float"] == {
        "size_bytes": len(tiny.classifier(int8=False)),
        "compressed_bytes": len(zlib.compress(tiny.classifier(int8=False), 9)),
        "parameters": weights,
        "macs": tiny.macs(),
    }
    assert values["larger"]["macs"] == 2 * tiny.macs()
    units = {key: (row["unit"], row["how"]) for key, row in facts["int8"].items()}
    assert units == {
        "size_bytes": ("bytes", "measured"),
        "compressed_bytes": ("bytes", "measured"),
        "parameters": ("parameters", "measured"),
        "macs": ("MACs", "measured"),
    }


def test_a_file_that_is_no_model(artifact: Make, context: Make) -> None:
    with pytest.raises(ModelError, match=r"is not a \.tflite file"):
        Size().run({"broken": artifact(b"no model")}, context())


def test_summary() -> None:
    data = SimpleNamespace(
        class_names=("a", "b"),
        inputs=lambda split: np.zeros((2, 4, 6, 3), np.float32),
        input_shape=(4, 6, 3),
        preprocessing=[{"resize": {"size": [4, 6]}}],
        summary=lambda: {"samples": {"train": 5, "validation": 2, "test": 3}},
    )
    facts = DataSummary().run({}, SimpleNamespace(data=data))  # type: ignore[arg-type]
    assert facts == {
        "classes": ["a", "b"],
        "samples": {"train": 5, "validation": 2, "test": 3},
        "input_shape": [4, 6, 3],
        "preprocess": [{"resize": {"size": [4, 6]}}],
    }
