"""The real models, if there are any."""

from __future__ import annotations

import pytest
from paths import SHARED

MODELS = sorted([*SHARED.glob("edgetpu/pairs/*/model.tflite"), *SHARED.glob("models/**/*.tflite")])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "real_model" in metafunc.fixturenames:
        absent = pytest.mark.skip(f"no models in {SHARED}; CORALLINE_SHARED names the folder of shared files")
        parameters = [pytest.param(path, id="/".join(path.parts[-2:])) for path in MODELS]
        metafunc.parametrize("real_model", parameters or [pytest.param(None, marks=absent)])
