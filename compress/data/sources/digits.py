"""The handwritten digits of calibration_data/digits."""

from __future__ import annotations

import tomllib
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError
from compress.core.resources import shipped
from compress.data import files
from compress.data.source import Samples, Source
from compress.data.splits import stratified


class Digits(Source):
    """The 1,797 handwritten digits that Coralline ships, 8x8 values from 0 to 16: no download.

    The split is fixed and stratified: 629 test, 169 validation, 999 training samples.
    """

    name: ClassVar[str] = "digits"

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of digits.npz, checked against the manifest beside the file."""
        path = shipped("calibration_data") / "digits" / "digits.npz"
        digest, expected = files.digest(path), self._manifest()["sha256"]
        if digest != expected:
            raise DataError(f"{path} has SHA-256 {digest}", allowed=expected, hint="install coralline again")
        return {"sha256": digest, "split": self._manifest()["split"]}

    @staticmethod
    def _manifest() -> dict[str, Any]:
        return tomllib.loads((shipped("calibration_data") / "digits" / "manifest.toml").read_text())

    def load(self) -> Samples:
        """Return the digits with their fixed splits."""
        self.fingerprint()
        with np.load(shipped("calibration_data") / "digits" / "digits.npz", allow_pickle=False) as archive:
            images: NDArray[np.float32] = archive["images"].astype(np.float32)
            labels: NDArray[np.int64] = archive["labels"].astype(np.int64)
        split = self._manifest()["split"]
        rest, test = stratified(labels, np.arange(len(labels)), split["test"], split["seed"])
        train, validation = stratified(labels, rest, split["validation"], split["seed"])
        return Samples(
            labels,
            tuple("0123456789"),
            lambda index: images[index],
            {"train": train, "validation": validation, "test": test},
        )
