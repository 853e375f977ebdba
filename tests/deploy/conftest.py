"""Fixtures for the tests of several files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import devices
import doctor_hosts
import pytest


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a classifier of three classes."""
    path = tmp_path_factory.mktemp("bundle") / "tiny.coralline"
    path.write_bytes(devices.packed())
    return path


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host without an Edge TPU."""
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path / "nothing"))


@pytest.fixture
def usb(tmp_path: Path) -> Path:
    """The root folder of a host with a USB Accelerator and nothing to find."""
    return doctor_hosts.sound(tmp_path / "root")


@pytest.fixture(scope="session")
def tf() -> Any:
    """Return TensorFlow, to compare with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow
    return tensorflow
