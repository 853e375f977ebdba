"""`package`: the bundle that applications load."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

import compress
from compress.edgetpu.placement import newer_than_boards
from compress.errors import StageError
from compress.stage import (
    BUNDLE_FILE,
    MODEL_EDGETPU,
    MODEL_TFLITE,
    SEGMENTS,
    Artifact,
    Context,
    Facts,
    Kind,
    Need,
    Stage,
)
from compress.target import load
from compress.tflite import graph
from compress.tflite.runtime import Model, describe
from deploy import bundle
from deploy.preprocessing import VERSION, Preprocessing


class Package(Stage):
    """Writes the bundle: models, labels, preprocessing, and golden inputs with the outputs they must give."""

    name: ClassVar[str] = "package"
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.TFLITE, Kind.COMPILED})
    produces: ClassVar[Kind] = Kind.BUNDLE
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "original", "name"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert",)

    golden: Annotated[int, Field(ge=1, le=100)] = 4
    """Validation samples that travel along, with the outputs they must give."""

    def environment(self) -> dict[str, str]:
        """The manifest names our own version."""
        return {**super().environment(), "coralline": compress.__version__}

    def run(self, given: Artifact, context: Context) -> Facts:
        """Packs and verifies the bundle."""
        data = context.data
        paths = {"original": context.original.file(MODEL_TFLITE), "int8": given.file(MODEL_TFLITE)}
        models = {role: Model(path, reproducible=True) for role, path in paths.items()}
        _check(given, models["int8"])
        count = min(self.golden, len(data.labels("validation")))
        raw = data.raw("validation", np.arange(count))
        members = {f"{role}.tflite": path.read_bytes() for role, path in paths.items()}
        members.update({f"golden-input-{index}.npy": bundle.array_bytes(sample) for index, sample in enumerate(raw)})
        inputs = data.inputs("validation")[:count]
        for role, model in models.items():
            outputs = np.concatenate([model.raw(model.feed(sample)) for sample in inputs])
            members[f"golden-output-{role}.npy"] = bundle.array_bytes(outputs)
        entries: dict[str, Any] = {
            role: {"file": f"{role}.tflite", "input": describe(model.input), "output": describe(model.output)}
            for role, model in models.items()
        }
        if MODEL_EDGETPU in given.files:
            members["compiled.tflite"] = given.file(MODEL_EDGETPU).read_bytes()
            entries["compiled"] = {**entries["int8"], "file": "compiled.tflite"}
        manifest = {
            "name": context.name,
            "coralline": compress.__version__,
            "labels": list(data.class_names),
            "preprocessing": {
                "version": VERSION,
                "digest": Preprocessing(data.preprocessing).digest,
                "steps": data.preprocessing,
            },
            "models": entries,
            "golden": {
                "inputs": [f"golden-input-{index}.npy" for index in range(count)],
                "outputs": {role: f"golden-output-{role}.npy" for role in models},
            },
            "tools": self.environment(),
        }
        content = bundle.pack(manifest, members)
        (context.folder / BUNDLE_FILE).write_bytes(content)
        names = [row["name"] for row in bundle.Bundle(content).manifest["members"]]
        return {"members": names, "bytes": len(content), "original_opens": _opens(paths["original"])}


def _opens(path: Path) -> str:
    """Where the float original can be opened."""
    newer = newer_than_boards(graph.read(path), load("edgetpu"))
    return f"on hosts only: TensorFlow 2.5 has no {', '.join(newer)}" if newer else "on boards with TensorFlow 2.5 too"


def _check(given: Artifact, model: Model) -> None:
    """Refuses what no bundle can hold."""
    if model.input["dtype"] == np.float32:
        raise StageError("the model is not quantized", todo="put quantize before package")
    if any(fnmatchcase(name, SEGMENTS) for name in given.files):
        raise StageError(
            "the model was compiled in segments, and a bundle holds one compiled model",
            todo="leave out package, or compile.num_segments",
        )
