"""model.keras between stages."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import h5py
import pytest

from compress.core.artifact import MODEL_KERAS
from compress.pipeline.stages import working_model


@pytest.mark.tensorflow
def test_no_name_makes_the_archive_an_hdf5_file_too(keras: Any, tmp_path: Path) -> None:
    """HDF5 looks for its signature at 512 bytes and at every doubling; the weights must not begin there."""
    starts = []
    for length in range(1, 200, 33):
        values = keras.Input((2,))
        model = keras.Model(values, keras.layers.Dense(1)(values), name="m" * length)
        working_model.write_keras(model, tmp_path)
        assert not h5py.is_hdf5(tmp_path / MODEL_KERAS)
        with zipfile.ZipFile(tmp_path / MODEL_KERAS) as archive:
            starts += [info.header_offset for info in archive.infolist() if info.filename.endswith(".h5")]
    assert starts == [0] * 7
