"""The handwritten digits of scikit-learn."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError
from compress.core.resources import shipped
from compress.data import files
from compress.data.source import Samples, Source
from compress.data.splits import stratified


class Digits(Source):
    """scikit-learn's 1,797 handwritten digits, 8x8 values from 0 to 16; part of the library, no download.

    The split is fixed and stratified: 629 test, 169 validation, 999 training samples.
    """

    name: ClassVar[str] = "digits"

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of the library's file, checked against calibration_data/digits."""
        module = importlib.util.find_spec("sklearn")
        if module is None or module.origin is None:
            raise DataError(
                "scikit-learn is not installed", where="data.source.digits", hint="pip install 'scikit-learn~=1.6'"
            )
        digest = files.digest(Path(module.origin).parent / "datasets" / "data" / "digits.csv.gz")
        expected = self._manifest()["sha256"]
        if digest != expected:
            raise DataError(
                f"scikit-learn's digits.csv.gz has SHA-256 {digest}",
                where="data.source.digits",
                allowed=expected,
                hint="reinstall scikit-learn",
            )
        return {"sha256": digest, "split": self._manifest()["split"]}

    @staticmethod
    def _manifest() -> dict[str, Any]:
        return tomllib.loads((shipped("calibration_data") / "digits" / "manifest.toml").read_text())

    def load(self) -> Samples:
        """Return the digits with their fixed splits."""
        from sklearn.datasets import load_digits

        self.fingerprint()
        bunch = load_digits()
        labels = np.asarray(bunch.target, np.int64)
        split = self._manifest()["split"]
        rest, test = stratified(labels, np.arange(len(labels)), split["test"], split["seed"])
        train, validation = stratified(labels, rest, split["validation"], split["seed"])
        images: NDArray[np.float32] = bunch.images.astype(np.float32)
        return Samples(
            labels,
            tuple(str(name) for name in bunch.target_names),
            lambda index: images[index],
            {"train": train, "validation": validation, "test": test},
        )
