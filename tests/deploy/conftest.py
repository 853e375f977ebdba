"""Fixtures for the tests of several files."""

from __future__ import annotations

import warnings
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tf() -> Any:
    """Return TensorFlow, to compare with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow
    return tensorflow
