"""`package`: the bundle that applications load."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

import compress
from compress import runner
from compress.data import spread
from compress.edgetpu.placement import newer_than_boards
from compress.errors import ModelError, StageError
from compress.measurement import drop, proportion
from compress.stage import (
    BUNDLE_FILE,
    MODEL_EDGETPU,
    MODEL_TFLITE,
    RUNNER_FILE,
    SEGMENTS,
    Artifact,
    Context,
    Data,
    Facts,
    Kind,
    Need,
    Stage,
)
from compress.target import load
from compress.tflite import graph
from compress.tflite.runtime import Model, describe, version
from deploy import bundle
from deploy.preprocessing import VERSION, Preprocessing


class Package(Stage):
    """Writes runner.pyz and the bundle: models, labels, preprocessing, golden inputs and outputs, evaluation sample."""

    name: ClassVar[str] = "package"
    version: ClassVar[int] = 2
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.TFLITE, Kind.COMPILED})
    produces: ClassVar[Kind] = Kind.BUNDLE
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "original", "name"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert", "keras", "numpy", "tensorflow", "tf-keras")

    golden: Annotated[int, Field(ge=1, le=100)] = 4
    """Validation samples that travel along, with the outputs they must give."""
    evaluation: Annotated[int, Field(ge=0, le=2000)] = 100
    """Test samples that travel along with their labels: the accuracy on the device is measured on them."""
    evaluation_bytes: Annotated[int, Field(ge=0, le=1 << 28)] = 1 << 24
    """What these samples may take at most, decoded; with larger ones there are fewer."""

    def environment(self) -> dict[str, str]:
        """The manifest names our own version and those of the tools; the runner is packed beside."""
        return {**self._tools(), "runner": runner.digest()}

    def _tools(self) -> dict[str, str]:
        return {**super().environment(), "coralline": compress.__version__, "python": platform.python_version()}

    def run(self, given: Artifact, context: Context) -> Facts:
        """Packs and verifies the bundle."""
        data = context.data
        paths = {"original": context.original.file(MODEL_TFLITE), "int8": given.file(MODEL_TFLITE)}
        models = {role: Model(path, reproducible=True) for role, path in paths.items()}
        _check(given, models["int8"])
        members = {f"{role}.tflite": path.read_bytes() for role, path in paths.items()}
        entries: dict[str, Any] = {
            role: {"file": f"{role}.tflite", "input": describe(model.input), "output": describe(model.output)}
            for role, model in models.items()
        }
        tools = self._tools()
        if MODEL_EDGETPU in given.files:
            members["compiled.tflite"] = given.file(MODEL_EDGETPU).read_bytes()
            entries["compiled"] = {**entries["int8"], "file": "compiled.tflite"}
            versions = [report["version"] for report in given.facts.get("reports", ())]
            tools |= {"edgetpu_compiler": versions[0] or "unknown"} if versions else {}
        golden, files = _golden(models, data, self.golden)
        evaluation, more = _evaluation(models, context, self.evaluation, self.evaluation_bytes)
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
            "golden": golden,
            "evaluation": evaluation,
            "tools": tools,
        }
        content = bundle.pack(manifest, members | files | more)
        (context.folder / BUNDLE_FILE).write_bytes(content)
        (context.folder / RUNNER_FILE).write_bytes(runner.content())
        return _facts(content, paths["original"])


def _facts(content: bytes, original: Path) -> Facts:
    """What is to be said of a bundle."""
    manifest = bundle.Bundle(content).manifest
    newer = newer_than_boards(graph.read(original), load("edgetpu"))
    opens = f"on hosts only: TensorFlow 2.5 has no {', '.join(newer)}" if newer else "on boards with TensorFlow 2.5 too"
    return {
        "members": [row["name"] for row in manifest["members"]],
        "bytes": len(content),
        "original_opens": opens,
        "evaluation": manifest["evaluation"] and manifest["evaluation"]["metrics"],
    }


def _golden(models: Mapping[str, Model], data: Data, count: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The first validation samples, and what each model gives for them: manifest entry and members."""
    count = min(count, len(data.labels("validation")))
    raw, inputs = data.raw("validation", np.arange(count)), data.inputs("validation")[:count]
    members = {f"golden-input-{index}.npy": bundle.array_bytes(sample) for index, sample in enumerate(raw)}
    entry = {"inputs": list(members), "outputs": {role: f"golden-output-{role}.npy" for role in models}}
    for role, model in models.items():
        members[f"golden-output-{role}.npy"] = bundle.array_bytes(_outputs(model, inputs))
    return entry, members


def _outputs(model: Model, inputs: NDArray[np.float32]) -> NDArray[Any]:
    """What a model gives for preprocessed samples, in its own type: [n, ...]."""
    return np.concatenate([model.raw(model.feed(sample)) for sample in inputs])


def _evaluation(
    models: Mapping[str, Model], context: Context, count: int, limit: int
) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
    """Test samples with their labels, what each model gives for them, and how right that is."""
    indices, stacks = _stacked(context.data, count, limit)
    asked = min(count, len(context.data.labels("test")))
    if len(indices) < asked:
        context.progress.note(f"{len(indices)} of {asked} evaluation samples fit into {limit:,} bytes")
    if not indices:
        return None, {}
    data, labels = context.data, context.data.labels("test")[indices]
    members = {f"evaluation-inputs-{index}.npy": bundle.array_bytes(stack) for index, stack in enumerate(stacks)}
    entry: dict[str, Any] = {"split": "test", "inputs": list(members), "labels": "evaluation-labels.npy"}
    members["evaluation-labels.npy"] = bundle.array_bytes(labels.astype(np.int64))
    right, predicted, classes = {}, [], len(data.class_names)
    for role, model in models.items():
        outputs = _outputs(model, data.inputs("test")[indices])
        scores = outputs.reshape(len(indices), -1)
        if scores.shape[1] != classes:
            todo = "check data.source and the model's last layer"
            raise ModelError(f"gives {scores.shape[1]} scores, but the data has {classes} classes", todo=todo)
        members[f"evaluation-output-{role}.npy"] = bundle.array_bytes(outputs)
        predicted.append(scores.argmax(axis=1))
        right[role] = predicted[-1] == labels
    entry["outputs"] = {role: f"evaluation-output-{role}.npy" for role in models}
    note = f"evaluation sample, {version()}, reference kernels"
    found = {f"accuracy_{role}": proportion(int(row.sum()), len(row), note) for role, row in right.items()}
    same = proportion(int((predicted[0] == predicted[1]).sum()), len(labels), "same predicted class")
    found |= {"accuracy_drop": drop(right["original"], right["int8"]), "agreement": same}
    return {**entry, "metrics": {name: value.to_json() for name, value in found.items()}}, members


def _stacked(data: Data, count: int, limit: int) -> tuple[list[int], list[NDArray[Any]]]:
    """Test samples by shape and dtype: their indices in the split, and one stack for each kind."""
    groups: dict[tuple[Any, ...], list[tuple[int, NDArray[Any]]]] = {}
    for index in spread(data.labels("test"))[:count]:
        (sample,) = data.raw("test", np.array([index]))
        limit -= sample.nbytes
        if limit < 0:
            break
        groups.setdefault((sample.shape, sample.dtype.str), []).append((int(index), sample))
    indices = [index for group in groups.values() for index, _ in group]
    return indices, [np.stack([sample for _, sample in group]) for group in groups.values()]


def _check(given: Artifact, model: Model) -> None:
    """Refuses what no bundle can hold."""
    if model.input["dtype"] == np.float32:
        raise StageError("the model is not quantized", todo="put quantize before package")
    if any(fnmatchcase(name, SEGMENTS) for name in given.files):
        raise StageError(
            "the model was compiled in segments, and a bundle holds one compiled model",
            todo="leave out package, or compile.num_segments",
        )
