"""Bundles to deploy: the tiny classifier, in variants that differ only in what a test selects."""

from __future__ import annotations

import devices
import numpy as np
import tiny

from deploy.contract import bundle


def packed(version: int = 0, extra_bytes: int = 0, wrong: bool = False, seed: int = 0) -> bytes:
    """Return a bundle of `tiny.classifier` with golden vectors.

    Args:
        version: the version in the manifest. Without `extra_bytes`, nothing else depends on it.
        extra_bytes: size of a member with random bytes, which differ from version to version.
        wrong: whether the golden outputs differ from the outputs of the model.
        seed: the seed of the model's weights.
    """
    more = {}
    if extra_bytes:
        more["noise.npy"] = np.random.default_rng(version).bytes(extra_bytes)
    if wrong:
        more["golden-output-int8.npy"] = bundle.array_bytes(np.full((3, 3), 100, np.int8))
    return devices.packed({"int8": tiny.classifier(seed=seed)}, samples=0, more=more, version=version)
