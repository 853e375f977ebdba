"""`distill`: train the model, or a smaller one, on the outputs of teachers; by default of the original model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.errors import ModelError
from compress.core.progress import Phase
from compress.learning.context import Context, Need
from compress.learning.procedures.settings import DistillSettings
from compress.pipeline.stage import Stage
from compress.pipeline.stages.load import LoadKerasModel
from compress.pipeline.stages.origin import Origin, stage_for
from compress.tasks.base import Use

if TYPE_CHECKING:  # a dry run reads settings only
    from compress.learning.distillation.teachers import Teacher
    from compress.tasks.base import Head

ORIGINAL: Literal["original"] = "original"


class Distill(Stage, DistillSettings):
    """Train the model, or a separate student, on the outputs of the original model or other teachers, and on the
    labels."""

    name: ClassVar[str] = "distill"
    version: ClassVar[int] = 8
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed", "original"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras", "ai-edge-litert")
    imports_tensorflow: ClassVar[bool] = True

    teachers: tuple[Path | Literal["original"], ...] = ()
    """The teachers: model files (.keras, .h5, .onnx, .tflite, also quantized), SavedModel folders, or the word
    original, which is the default."""
    teacher_weights: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = ()
    """Weights of the teachers, in their order, when their probabilities are averaged; by default all the same."""
    student: Origin | None = None
    """Train this model instead of the current one: {builder: …} or {file: …}, as under `model`."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        count = max(len(self.teachers), 1)
        if self.teacher_weights and len(self.teacher_weights) != count:
            raise ValueError(f"teacher_weights: {len(self.teacher_weights)} weights for {count} teachers")
        return self

    def trains(self) -> bool:
        """Return True."""
        return True

    def changes_cost(self) -> bool:
        """Return whether a separate student replaces the model."""
        return self.student is not None

    def uses(self) -> tuple[Use, ...]:
        """Return distillation, and the methods of the training."""
        return ("distillation", *self.training_uses(self.weight < 1))

    def accepted_kinds(self) -> frozenset[Kind]:
        """Return also files without Keras layers if there is a separate student: then they are only teachers."""
        return self.consumes | {Kind.FLOAT_TFLITE, Kind.TFLITE} if self.student else self.consumes

    def with_paths_from(self, folder: Path) -> Self:
        """Return the stage with the paths of teachers and student relative to `folder`.

        Raises:
            ModelError: there is no such file or builder, or it is not a model.
        """
        stage = super().with_paths_from(folder)
        for teacher in stage.teachers:
            if teacher != ORIGINAL:
                _refuse_other(teacher)
        if stage.student is not None:
            loader = stage.student.loader(Path(), trust=True)  # trust is checked when the stage runs
            if loader.produces not in (Kind.KERAS, Kind.UNTRAINED):
                raise ModelError(
                    f"cannot be trained: {loader.kind_reason()}", where="student", hint="choose another student"
                )
        return stage

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Train the student; return the history, the names of the teachers, and when they ran."""
        from compress.learning.procedures import training
        from compress.learning.training import loop
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        is_trained = artifact.is_trained
        if self.student is None:
            model = working_model.read(artifact, context)
        else:
            loader = self.student.loader(Path(), trust=context.trust)
            assert isinstance(loader, LoadKerasModel)  # `with_paths_from` refuses others
            model = working_model.copied(loader.load(context).model, trust=context.trust)
            is_trained = loader.produces is not Kind.UNTRAINED
        teachers = self._teachers(context, loop.head_of(model, context.data, context.specification))
        work = Phase("distillation", training.distillation_cost(self, context.data))
        context.progress.plan(work, working_model.WRITING)
        with context.progress.phase(work):
            result = training.distill(model, teachers, self, context, is_trained=is_trained)
        working_model.write(result.model, context.folder, context.progress)
        return dict(result.facts)

    def _teachers(self, context: Context, head: Head) -> list[Teacher]:
        """Return the teachers with their weights."""
        from compress.learning.distillation import teachers
        from compress.pipeline.stages import working_model

        result = []
        for path in self.teachers or (ORIGINAL,):
            if path != ORIGINAL:
                result.append(teachers.read(path, context, head))
            elif MODEL_KERAS in context.original.files:
                model = working_model.read(context.original, context)
                result.append(teachers.of_model(model, context.data, "the original", context.specification))
            else:
                teacher = teachers.read(context.original.file(MODEL_TFLITE), context, head)
                result.append(replace(teacher, name="the original"))
        weights = self.teacher_weights or (1.0,) * len(result)
        return [replace(teacher, weight=weight) for teacher, weight in zip(result, weights, strict=True)]


def _refuse_other(path: Path) -> None:
    """Refuse a path that is not a model file or folder.

    Raises:
        ModelError: it is not.
    """
    try:
        stage_for(path)
    except ModelError as error:
        error.where = f"teachers: {error.where}" if error.where else "teachers"
        raise
