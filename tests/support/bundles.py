"""Bundles to deploy: the tiny classifier, in variants that differ only in what a test selects."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tiny
from devices import described

from compress.model.tflite.interpreter import LoadedModel
from deploy.contract import bundle
from deploy.contract.preprocessing import VERSION, Preprocessing


def packed(version: int = 0, extra_bytes: int = 0, wrong: bool = False, seed: int = 0) -> bytes:
    """Return a bundle of `tiny.classifier` with golden vectors.

    Args:
        version: the version in the manifest. Without `extra_bytes`, nothing else depends on it.
        extra_bytes: size of a member with random bytes, which differ from version to version.
        wrong: whether the golden outputs differ from the outputs of the model.
        seed: the seed of the model's weights.
    """
    content = tiny.classifier(seed=seed)
    with TemporaryDirectory() as folder:
        (Path(folder) / "model.tflite").write_bytes(content)
        model = LoadedModel(Path(folder) / "model.tflite", reproducible=True)
    samples = np.random.default_rng(2).random((2, 4, 4, 1), np.float32)
    outputs = np.concatenate([model.raw(model.feed(sample)) for sample in samples])
    members = {"int8.tflite": content, "golden-output-int8.npy": bundle.array_bytes(outputs + (30 if wrong else 0))}
    members |= {f"golden-input-{index}.npy": bundle.array_bytes(sample) for index, sample in enumerate(samples)}
    if extra_bytes:
        members["noise.npy"] = np.random.default_rng(version).bytes(extra_bytes)
    manifest = {
        "name": "tiny",
        "coralline": "0",
        "version": version,
        "task": "classification",
        "labels": ["a", "b", "c"],
        "preprocessing": {"version": VERSION, "digest": Preprocessing([]).digest, "steps": []},
        "models": {"int8": described(model, "int8.tflite")},
        "golden": {
            "inputs": ["golden-input-0.npy", "golden-input-1.npy"],
            "outputs": {"int8": "golden-output-int8.npy"},
        },
    }
    return bundle.pack(manifest, members)
