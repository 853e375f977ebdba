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

from compress.artifact import BUNDLE_FILE, MODEL_COMPILED, MODEL_TFLITE, RUNNER_FILE, SEGMENTS, Artifact, Facts, Kind
from compress.data.dataset import spread
from compress.data.types import Data
from compress.errors import StageError
from compress.export import runner_pyz
from compress.stage import Context, Need, Stage, Use
from compress.targets.base import Target
from compress.tasks import task_of
from compress.tflite import graph
from compress.tflite.interpreter import LoadedModel, describe, version
from compress.version import __version__
from deploy.contract import bundle
from deploy.contract.preprocessing import VERSION, Preprocessing

MAX_EVALUATION_BYTES = 1 << 24
"""Maximum size of the decoded evaluation samples in a bundle; if samples are large, there are fewer of them."""


class Package(Stage):
    """Write the bundle and runner.pyz. The bundle contains models, labels, preprocessing, golden inputs and outputs,
    and evaluation samples."""

    name: ClassVar[str] = "package"
    version: ClassVar[int] = 3
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.TFLITE, Kind.COMPILED})
    produces: ClassVar[Kind] = Kind.BUNDLE
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "original", "name"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert", "keras", "numpy", "tensorflow", "tf-keras")

    golden: Annotated[int, Field(ge=1, le=100)] = 4
    """Number of validation samples in the bundle, each with the expected outputs."""
    evaluation: Annotated[int, Field(ge=0, le=2000)] = 100
    """Number of test samples with labels in the bundle; the accuracy on the device is measured on them."""

    def uses(self) -> tuple[Use, ...]:
        """Return package: the device must be able to read the outputs of the task."""
        return ("package",)

    def environment(self) -> dict[str, str]:
        """Return the versions of Coralline, of the tools and of the runner: the bundle contains them."""
        return {**self._tools(), "runner": runner_pyz.digest()}

    def _tools(self) -> dict[str, str]:
        return {**super().environment(), "coralline": __version__, "python": platform.python_version()}

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write and verify the bundle."""
        data = context.data
        paths = {"original": context.original.file(MODEL_TFLITE), "int8": artifact.file(MODEL_TFLITE)}
        models = {role: LoadedModel(path, reproducible=True) for role, path in paths.items()}
        _check(artifact, models["int8"])
        members = {f"{role}.tflite": path.read_bytes() for role, path in paths.items()}
        entries: dict[str, Any] = {
            role: {"file": f"{role}.tflite", "input": describe(model.input), "output": describe(model.output)}
            | ({"boxes": describe(model.outputs[0])} if len(model.outputs) > 1 else {})
            for role, model in models.items()
        }
        tools = self._tools()
        if MODEL_COMPILED in artifact.files:
            members["compiled.tflite"] = artifact.file(MODEL_COMPILED).read_bytes()
            entries["compiled"] = {**entries["int8"], "file": "compiled.tflite"}
            versions = [report["version"] for report in artifact.facts.get("reports", ())]
            tools |= {context.target.compiler_name: versions[0] or "unknown"} if versions else {}
        golden, files = _golden(models, data, self.golden)
        evaluation, more = _evaluation(models, context, self.evaluation)
        manifest = {
            "name": context.name,
            "coralline": __version__,
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
            **({"decoding": data.decoding} if data.decoding else {}),
            **task_of(data).manifest(context.detector),
        }
        content = bundle.pack(manifest, members | files | more)
        (context.folder / BUNDLE_FILE).write_bytes(content)
        (context.folder / RUNNER_FILE).write_bytes(runner_pyz.content())
        return _facts(content, paths["original"], context.target)


def _facts(content: bytes, original: Path, target: Target) -> Facts:
    """Return the facts about a bundle."""
    manifest = bundle.Bundle(content).manifest
    return {
        "members": [row["name"] for row in manifest["members"]],
        "bytes": len(content),
        "original_opens": _opens(original, target),
        "evaluation": manifest["evaluation"] and manifest["evaluation"]["metrics"],
    }


def _opens(path: Path, target: Target) -> str:
    """Return the boards that can run the float original; "" if the target has no list of boards."""
    newer = target.newer_than_boards(graph.read(path))
    if newer is None:
        return ""
    return f"on hosts only: TensorFlow 2.5 has no {', '.join(newer)}" if newer else "on boards with TensorFlow 2.5 too"


def _golden(models: Mapping[str, LoadedModel], data: Data, count: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the first validation samples and the outputs of each model: manifest entry and members."""
    count = min(count, len(data.labels("validation")))
    raw, inputs = data.raw("validation", np.arange(count)), data.inputs("validation")[:count]
    members = {f"golden-input-{index}.npy": bundle.array_bytes(sample) for index, sample in enumerate(raw)}
    entry: dict[str, Any] = {"inputs": list(members), "machine": platform.machine()}  # kernels differ between machines
    entry["outputs"] = {role: f"golden-output-{role}.npy" for role in models}
    for role, model in models.items():
        members[f"golden-output-{role}.npy"] = bundle.array_bytes(_outputs(model, inputs))
    return entry, members


def _outputs(model: LoadedModel, inputs: NDArray[np.float32]) -> NDArray[Any]:
    """Return the outputs of a model for preprocessed samples, in the model's type: [n, ...]."""
    return np.concatenate([model.raw(model.feed(sample)) for sample in inputs])


def _evaluation(
    models: Mapping[str, LoadedModel], context: Context, count: int
) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
    """Return test samples with labels, the outputs of each model, and their metrics: manifest entry and members."""
    indices, stacks = _stacked(context.data, count)
    asked = min(count, len(context.data.labels("test")))
    if len(indices) < asked:
        context.progress.note(f"{len(indices)} of {asked} evaluation samples fit into {MAX_EVALUATION_BYTES:,} bytes")
    if not indices:
        return None, {}
    data = context.data
    members = {f"evaluation-inputs-{index}.npy": bundle.array_bytes(stack) for index, stack in enumerate(stacks)}
    entry: dict[str, Any] = {"split": "test", "inputs": list(members), "labels": "evaluation-labels.npy"}
    outputs = {role: _outputs(model, data.inputs("test")[indices]) for role, model in models.items()}
    members |= {f"evaluation-output-{role}.npy": bundle.array_bytes(each) for role, each in outputs.items()}
    entry["outputs"] = {role: f"evaluation-output-{role}.npy" for role in models}
    rows = {role: model.scores(data.inputs("test")[indices]) for role, model in models.items()}
    found = task_of(data).packaged(rows, data, indices, context.detector, _note())
    members["evaluation-labels.npy"] = bundle.array_bytes(found.targets)
    return {**entry, "metrics": found.metrics}, members


def _note() -> str:
    return f"evaluation sample, {version()}, default kernels without a delegate"


def _stacked(data: Data, count: int) -> tuple[list[int], list[NDArray[Any]]]:
    """Return test samples grouped by shape and dtype: their indices in the split, and one stack for each group."""
    groups: dict[tuple[Any, ...], list[tuple[int, NDArray[Any]]]] = {}
    free = MAX_EVALUATION_BYTES
    for index in spread(data.labels("test"))[:count]:
        (sample,) = data.raw("test", np.array([index]))
        free -= sample.nbytes
        if free < 0:
            break
        groups.setdefault((sample.shape, sample.dtype.str), []).append((int(index), sample))
    indices = [index for group in groups.values() for index, _ in group]
    return indices, [np.stack([sample for _, sample in group]) for group in groups.values()]


def _check(artifact: Artifact, model: LoadedModel) -> None:
    """Refuse models that a bundle cannot contain."""
    if model.input["dtype"] == np.float32:
        raise StageError("the model is not quantized", hint="put quantize before package")
    if any(fnmatchcase(name, SEGMENTS) for name in artifact.files):
        raise StageError(
            "the model was compiled in segments, and a bundle holds one compiled model",
            hint="leave out package, or compile.num_segments",
        )
