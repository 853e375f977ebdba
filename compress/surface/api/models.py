"""Stages as functions: train, prune, distill and quantize a Keras model in memory.

Each function checks its settings as pipeline.yaml does, runs the stage of the same name in a temporary folder, and
returns the model that the stage leaves. Nothing is written elsewhere, and nothing is shown.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress import targets
from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.errors import PipelineError
from compress.core.files import write_atomically
from compress.core.progress import SILENT
from compress.learning.context import Context
from compress.pipeline.stage import Stage
from compress.tasks import task_of

if TYPE_CHECKING:
    from compress.data.dataset import Dataset


@dataclass(frozen=True)
class ModelResult:
    """A Keras model that a stage left.

    Attributes:
        model: a `keras.Model`. The annotation is `Any` because Keras is imported when it is first used.
        facts: what the stage reports, as in report.json: plain JSON values.
    """

    model: Any
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class QuantizedModel:
    """A full-integer model.

    Attributes:
        content: the .tflite file.
        facts: what the stage reports, as in report.json: plain JSON values.
    """

    content: bytes
    facts: Mapping[str, Any]

    def save(self, path: str | Path) -> None:
        """Write the .tflite file; it is complete or not there at all.

        Raises:
            OSError: the file cannot be written.
        """
        write_atomically(Path(path), self.content)


def load_data(pipeline: str | Path) -> Dataset:
    """Return the data set of a pipeline file: its source, preprocessing and splits. Samples are read when needed.

    Args:
        pipeline: the YAML file.

    Raises:
        PipelineError: the file is wrong.
    """
    from compress.pipeline import schema

    return schema.load(Path(pipeline)).data


def train(model: Any, data: Dataset, *, seed: int = 0, **settings: Any) -> ModelResult:
    """Train a model on the training split of a data set.

    Args:
        model: a `keras.Model` with one input of the data's shape.
        data: a data set, see `Dataset.from_arrays` and `load_data`.
        seed: makes the training reproducible.
        **settings: settings of the stage `train`, such as `epochs=10`; `python -m compress stages` lists them.

    Raises:
        PipelineError: there is no such setting, or it does not fit the data.
        CorallineError: the model does not fit the data, or the training failed.
    """
    return _trained("train", model, data, seed, targets.DEFAULT, settings)


def prune(model: Any, data: Dataset, *, seed: int = 0, target: str = targets.DEFAULT, **settings: Any) -> ModelResult:
    """Remove the channels that matter least, and train the smaller model.

    Args:
        model: a trained `keras.Model`.
        data: the data set that it was trained on.
        seed: makes the result reproducible.
        target: the name of the target that costs are predicted for.
        **settings: settings of the stage `prune`, such as `keep_macs=0.5`; `python -m compress stages` lists them.

    Raises:
        PipelineError: there is no such setting or target, or it does not fit the data.
        CorallineError: the model does not fit the data, or nothing can be removed.
    """
    return _trained("prune", model, data, seed, target, settings)


def distill(model: Any, data: Dataset, *, teacher: Any, seed: int = 0, **settings: Any) -> ModelResult:
    """Train a model on the outputs of another one.

    Args:
        model: the student, a `keras.Model`.
        data: a data set.
        teacher: a trained `keras.Model` for the same data.
        seed: makes the training reproducible.
        **settings: settings of the stage `distill`, such as `temperature=4`; `python -m compress stages` lists them.

    Raises:
        PipelineError: there is no such setting, or it does not fit the data.
        CorallineError: a model does not fit the data, or the training failed.
    """
    return _trained("distill", model, data, seed, targets.DEFAULT, settings, teacher)


def quantize(
    model: Any, data: Dataset, *, seed: int = 0, target: str = targets.DEFAULT, **settings: Any
) -> QuantizedModel:
    """Quantize a model to full integer.

    Args:
        model: a trained `keras.Model`.
        data: the data set; training samples calibrate, validation samples compare.
        seed: makes the result reproducible.
        target: the name of the target.
        **settings: settings of the stage `quantize`, such as `method="qat"`; `python -m compress stages` lists them.

    Raises:
        PipelineError: there is no such setting or target, or it does not fit the data.
        CorallineError: the model does not fit the data, or cannot be quantized.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = _run(_stage("quantize", settings), model, data, seed, target, Path(folder), model)
        return QuantizedModel(result.file(MODEL_TFLITE).read_bytes(), result.facts)


def _trained(
    name: str, model: Any, data: Dataset, seed: int, target: str, settings: Mapping[str, Any], original: Any = None
) -> ModelResult:
    from compress.model.importers.keras import keras_file

    with tempfile.TemporaryDirectory() as folder:
        result = _run(_stage(name, settings), model, data, seed, target, Path(folder), original or model)
        return ModelResult(keras_file.load(result.file(MODEL_KERAS), trust=False), result.facts)


def _stage(name: str, settings: Mapping[str, Any]) -> Stage:
    """Return a stage with its settings, checked like those of a pipeline file."""
    from compress.pipeline.stages import STAGES

    try:
        return STAGES[name].model_validate_json(json.dumps(settings), strict=True)
    except ValidationError as errors:
        first = errors.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise PipelineError(
            f"{name}: {key}: {first['msg']}" if key else f"{name}: {first['msg']}",
            allowed=", ".join(STAGES[name].model_fields),
        ) from errors
    except TypeError as error:
        raise PipelineError(f"{name}: a setting is not a plain value: {error}") from error


def _run(stage: Stage, model: Any, data: Dataset, seed: int, target: str, folder: Path, original: Any) -> Artifact:
    """Run a stage on a model in memory, and return what it leaves in a folder."""
    chosen = targets.load(target)
    for problem in (task_of(data).why_not(stage.uses()), stage.refused_by_target(chosen)):
        if problem is not None:
            raise PipelineError(f"{stage.name}: {problem.what}", allowed=problem.allowed, hint=problem.hint)
    first = _written(model, folder / "model")
    reference = first if original is model else _written(original, folder / "original")
    results = folder / "result"
    results.mkdir()
    context = Context("model", results, data, reference, chosen, seed, trust=False, progress=SILENT)
    facts = stage.run(first, context.only(stage.needs))
    return _artifact(stage.produces, results, facts)


def _written(model: Any, folder: Path) -> Artifact:
    from compress.pipeline.stages import working_model

    folder.mkdir()
    working_model.write(model, folder)
    return _artifact(Kind.KERAS, folder, {})


def _artifact(kind: Kind, folder: Path, facts: Facts) -> Artifact:
    files = {path.name: "" for path in folder.iterdir()}
    return Artifact("", kind, folder, files, facts, 0.0)
