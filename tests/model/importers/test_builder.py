"""Builders that cannot be called."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.core.errors import ModelError
from compress.model.importers import builder


def test_a_parameter_without_a_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def detector(shape, anchors, scale=1):\n    return shape\n")
    with pytest.raises(ModelError, match=r"missing a required argument: 'anchors'; .*`arguments` under `model`"):
        builder.detector(tmp_path / "own.py", (8, 8, 3))
