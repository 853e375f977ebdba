"""`package`: the bundle that applications load."""

from __future__ import annotations

import platform
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from compress.bundling import runner_pyz
from compress.bundling.packing import Packing, outputs_phase, pack
from compress.bundling.recognition import RecognitionSettings
from compress.core.artifact import (
    BUNDLE_FILE,
    MODEL_COMPILED,
    MODEL_TFLITE,
    RUNNER_FILE,
    SEGMENTS,
    Artifact,
    Facts,
    Kind,
)
from compress.core.errors import StageError
from compress.core.resources import __version__
from compress.learning.context import Context, Need
from compress.model.tflite import graph
from compress.pipeline.stage import Stage
from compress.targets.base import Target
from compress.tasks import task_of
from compress.tasks.base import Use
from deploy.contract import bundle


class Package(Stage):
    """Write the bundle and runner.pyz. The bundle contains models, labels, preprocessing, golden inputs and outputs,
    and evaluation samples."""

    name: ClassVar[str] = "package"
    version: ClassVar[int] = 8
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.TFLITE, Kind.COMPILED})
    produces: ClassVar[Kind] = Kind.BUNDLE
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "original", "target", "name"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert", "keras", "numpy", "tensorflow", "tf-keras")

    golden: Annotated[int, Field(ge=1, le=100)] = 4
    """Number of validation samples in the bundle, each with the expected outputs."""
    evaluation: Annotated[int, Field(ge=0, le=2000)] = 100
    """Number of test samples in the bundle, with labels for classifiers and detectors. On the device, the accuracy is
    measured on them; for other tasks, the difference of the outputs from those of the original model."""

    labels: tuple[str, ...] = ()
    """Names of the classes in the order of the model's output, for data without labels; the device answers with
    them."""

    recognition: RecognitionSettings = RecognitionSettings()
    """The calibrated confidence of a classifier, its answer "unknown", and what the device learns new classes from."""

    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        return self.labels

    def needs_samples(self) -> bool:
        """Return False: any samples show whether a device computes the same."""
        return False

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
        files = {"original": context.original.file(MODEL_TFLITE), "int8": artifact.file(MODEL_TFLITE)}
        _refuse_segments(artifact)
        tools = self._tools()
        if MODEL_COMPILED in artifact.files:
            files["compiled"] = artifact.file(MODEL_COMPILED)
            versions = [report["version"] for report in artifact.facts.get("reports", ())]
            tools |= {context.target.compiler.name: versions[0] or "unknown"} if versions else {}
        packing = Packing(
            name=context.name,
            files=files,
            task=task_of(context.data),
            tools=tools,
            progress=context.progress,
            data=context.data,
            specification=context.specification,
            golden=self.golden,
            evaluation=self.evaluation,
            labels=self.labels,
            recognition=self.recognition,
        )
        context.progress.plan(*(outputs_phase(role) for role in files))
        content = pack(packing)
        (context.folder / BUNDLE_FILE).write_bytes(content)
        (context.folder / RUNNER_FILE).write_bytes(runner_pyz.content())
        return _facts(content, files["original"], context.target)


def _facts(content: bytes, original: Path, target: Target) -> Facts:
    """Return the facts about a bundle."""
    manifest = bundle.Bundle(content).manifest
    return {
        "members": [row["name"] for row in manifest["members"]],
        "bytes": len(content),
        "original_opens": _opens(original, target),
        "evaluation": manifest["evaluation"] and manifest["evaluation"]["metrics"],
        "confidence": manifest.get("confidence"),
    }


def _opens(path: Path, target: Target) -> str:
    """Return the boards that can run the float original; "" if the target has no list of boards."""
    newer = target.newer_than_boards(graph.read(path))
    if newer is None:
        return ""
    return f"on hosts only: TensorFlow 2.5 has no {', '.join(newer)}" if newer else "on boards with TensorFlow 2.5 too"


def _refuse_segments(artifact: Artifact) -> None:
    if any(fnmatchcase(name, SEGMENTS) for name in artifact.files):
        raise StageError(
            "the model was compiled in segments, and a bundle holds one compiled model",
            hint="leave out package, or compile.num_segments",
        )
