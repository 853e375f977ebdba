"""The working model on disk: model.keras for the next stage, model.tflite for measurements."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts
from compress.core.progress import SILENT, Phase, Progress
from compress.learning.context import Context
from compress.learning.quantization import export
from compress.learning.training.phases import BUILD
from compress.model.importers.keras import keras_file
from compress.model.ir import keras_graph, weight_sparsity
from compress.model.tflite.macs import compressed_bytes

WRITING = Phase("converting", BUILD)
"""The phase of `write`."""
MEANING = "A smaller download; the Edge TPU stores and computes every weight, so no memory or time is saved there."


def read(artifact: Artifact, context: Context) -> Any:
    """Load the Keras model of an artifact.

    Raises:
        ModelError: it cannot be loaded.
    """
    return keras_file.load(artifact.file(MODEL_KERAS), trust=context.trust)


def write(model: Any, folder: Path, progress: Progress = SILENT) -> None:
    """Write a trained model as model.keras and model.tflite; the same model gives the same bytes."""
    with progress.phase(WRITING):
        write_keras(model, folder)
        (folder / MODEL_TFLITE).write_bytes(export.convert_float(model))


def copied(model: Any, *, trust: bool = False) -> Any:
    """Return a copy of a model as a later stage would read it from its file.

    Raises:
        ModelError: the model cannot be read again.
    """
    with tempfile.TemporaryDirectory(prefix="coralline-") as folder:
        write_keras(model, Path(folder))
        return keras_file.load(Path(folder) / MODEL_KERAS, trust=trust)


def write_redundant(network: keras_graph.Network, artifact: Artifact, context: Context) -> Facts:
    """Write a model with sparse or clustered weights; return the compressed size before and after."""
    write(keras_graph.build(network), context.folder, context.progress)
    kernels = weight_sparsity.by_layer(network)
    before, after = (
        compressed_bytes(path.read_bytes()) for path in (artifact.file(MODEL_TFLITE), context.folder / MODEL_TFLITE)
    )
    share = weight_sparsity.zeros(kernels)
    context.progress.note(
        f"{share:.0%} of the weights are 0; the float file compressed: {before:,} -> {after:,} bytes. {MEANING}"
    )
    return {
        "zeros": round(share, 4),
        "kernels": weight_sparsity.to_json(kernels),
        "compressed_bytes": {"before": before, "after": after},
        "meaning": MEANING,
    }


def write_keras(model: Any, folder: Path) -> None:
    """Write model.keras without the date that Keras would store in it."""
    path = folder / MODEL_KERAS
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    metadata = json.loads(members["metadata.json"])
    metadata["date_saved"] = ""
    members["metadata.json"] = json.dumps(metadata, sort_keys=True).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        # First the weights: at a multiple of 512 bytes, they would make the archive an HDF5 file, too.
        for name in sorted(members, key=lambda name: (not name.endswith(".h5"), name)):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), members[name])
