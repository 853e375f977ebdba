"""Malicious Keras files and SavedModel folders: the scan refuses them."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path
from typing import Any

import malicious_models
import pytest

from compress.core.errors import ModelError
from compress.model.importers import model_file
from compress.model.importers.common import guarded_calls

#: Cases that are found only when the model is built.
BUILT = ("units of 1e9", "large image", "huge image", "kernel of", "by 4000", "negative", "lead out", "text for")
LATER = (*BUILT, "100 levels", "code", "tf.", "tiled", "padded by", "cyclic")


@pytest.mark.parametrize("case", malicious_models.CASES)
def test_a_case_is_refused_at_a_look(tmp_path: Path, case: str) -> None:
    path = malicious_models.CASES[case](tmp_path)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    if any(word in case for word in LATER) and not case.startswith("path"):
        file = model_file.read(path)
        assert file.refused or file.untrusted or not case.startswith(("code", "tf."))
    else:
        with pytest.raises(ModelError, match=re.escape(str(path))) as caught:
            model_file.read(path)
        assert len(str(caught.value)) < 1000
    assert time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


@pytest.mark.tensorflow
def test_no_more_variables_than_a_file_can_hold(keras: Any, tf_keras: Any) -> None:
    for library_of in (keras, tf_keras):
        layers = library_of.layers
        with pytest.raises(ValueError, match=r"more than 536,870,912"), guarded_calls.bounded():
            layers.Dense(10**9)(library_of.Input((1000,)))
        with guarded_calls.bounded():
            assert library_of.Sequential([library_of.Input((4,)), layers.Dense(3)]).count_params() == 15


@pytest.mark.tensorflow
def test_no_larger_tensors_than_a_model_has(keras: Any) -> None:
    inner = keras.Sequential([keras.Input((80, 80, 3)), keras.layers.UpSampling2D(400, name="up")])
    outer = keras.Sequential([keras.Input((80, 80, 3)), inner, keras.layers.GlobalAveragePooling2D()])
    for model in (inner, outer):
        with pytest.raises(ValueError, match="makes 3,072,000,000 values of one sample"):
            guarded_calls.check_tensors(model)
