from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))


@pytest.fixture(scope="session")
def keras() -> Any:
    from compress.training.tensorflow import keras

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TensorFlow's own import warns of
        return keras(0)
