"""Procedures as functions: train, prune, distill and quantize a Keras model in memory.

Each function checks its settings as pipeline.yaml does, and works on a copy of the model. Nothing is written, and
nothing is shown.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from compress import targets
from compress.core.artifact import MODEL_TFLITE
from compress.core.errors import PipelineError
from compress.core.progress import SILENT
from compress.learning.context import Context
from compress.learning.procedures import ModelResult, QuantizedModel
from compress.pipeline.stage import NOTHING, Stage
from compress.pipeline.stages.distill import Distill
from compress.pipeline.stages.prune import Prune
from compress.pipeline.stages.quantize import Quantize
from compress.pipeline.stages.train import Train
from compress.tasks import task_of

if TYPE_CHECKING:
    from compress.data.dataset import Dataset

SomeStage = TypeVar("SomeStage", bound=Stage)
OF_FILES = ("teachers", "teacher_weights", "student")
"""The settings of `distill` that name files, which a pipeline file alone has."""


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
    from compress.learning.procedures import training

    stage, context = _stage(Train, settings, data), _context(data, seed)
    return training.train(_copied(model, seed), stage, context, is_trained=True)


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
    from compress.learning.procedures import training

    stage, context = _stage(Prune, settings, data, target), _context(data, seed, target)
    copy = _copied(model, seed)
    return training.prune(copy, stage, context, original=None if stage.distill is None else _copied(model))


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
    from compress.learning.distillation import teachers
    from compress.learning.procedures import training

    of_files = [name for name in OF_FILES if name in settings]
    if of_files:
        what = f"distill: {', '.join(of_files)}: only a pipeline file has this setting"
        raise PipelineError(what, hint="pass the models as arguments, or use a pipeline file")
    stage, context = _stage(Distill, settings, data), _context(data, seed)
    student = _copied(model, seed)
    models = [teachers.of_model(_copied(teacher), data, "the original")]
    return training.distill(student, models, stage, context, is_trained=True)


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
    from compress.learning.procedures import quantization
    from compress.learning.quantization import export

    stage, context = _stage(Quantize, settings, data, target), _context(data, seed, target)
    with tempfile.TemporaryDirectory(prefix="coralline-") as folder:
        float_file = Path(folder) / MODEL_TFLITE
        float_file.write_bytes(export.convert_float(model))
        return quantization.quantize(_copied(model, seed), float_file, stage, context)


def _stage(
    kind: type[SomeStage], settings: Mapping[str, Any], data: Dataset, target: str = targets.DEFAULT
) -> SomeStage:
    """Return a stage with its settings, checked like those of a pipeline file.

    Raises:
        PipelineError: there is no such setting or target, or it does not fit the data.
    """
    try:
        stage = kind.model_validate_json(json.dumps(settings), strict=True)
    except ValidationError as errors:
        first = errors.errors()[0]
        key = ".".join(map(str, first["loc"]))
        where = f"{kind.name}: {key}" if key else kind.name
        allowed = ", ".join(name for name in kind.model_fields if name not in OF_FILES)
        raise PipelineError(f"{where}: {first['msg']}", allowed=allowed) from errors
    except TypeError as error:
        raise PipelineError(f"{kind.name}: a setting is not a plain value: {error}") from error
    for problem in (task_of(data).why_not(stage.uses()), stage.refused_by_target(targets.load(target))):
        if problem is not None:
            raise PipelineError(f"{kind.name}: {problem.what}", allowed=problem.allowed, hint=problem.hint)
    return stage


def _context(data: Dataset, seed: int, target: str = targets.DEFAULT) -> Context:
    """Return the context of a procedure; it has no name, no folder and no original."""
    context = Context("", Path(), data, NOTHING, targets.load(target), seed, trust=False, progress=SILENT)
    return context.only(frozenset({"data", "target", "seed"}))


def _copied(model: Any, seed: int | None = None) -> Any:
    """Return a copy of a model as a pipeline would read it; with a seed, set all random generators first."""
    from compress.model.ir.tensorflow import keras
    from compress.pipeline.stages import working_model

    keras(seed)
    return working_model.copied(model)
