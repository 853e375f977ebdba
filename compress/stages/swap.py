"""`swap`: puts what the Edge TPU runs well in the place of what it cannot run, or runs badly."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from compress.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.distillation.settings import Teaching
from compress.ir.activations import Activation
from compress.stage import Context, Need, Stage, Use
from compress.tasks import task_of
from compress.training.loop import TrainingSettings, chosen_inputs

if TYPE_CHECKING:  # a dry run reads settings only
    from compress.ir.keras_graph import Network
    from compress.replacement.activations import Swaps


class Swap(Stage, TrainingSettings, Teaching):
    """Swaps activations, gates and kernels for what the Edge TPU runs well, then lets the model as it was teach."""

    name: ClassVar[str] = "swap"
    version: ClassVar[int] = 4
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.KERAS})
    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")

    activations: Literal["all"] | list[Activation] = "all"
    """What `by` is put in the place of; all: what a ReLU is near, whatever it is called, also where it is written as
    several operators. The Edge TPU puts silu together from two operators, hard_silu from three, gelu from six, elu,
    selu, celu, mish and softplus from 25; leaky_relu becomes a PRELU, whose slopes are sent at every
    inference. tailed: any other function near 0 below and near x above that dips below 0 between. threshold (a ReLU
    that begins elsewhere) and prelu (with a slope for every position; it gets one for each channel) stay on the CPU,
    and all behind them."""
    by: Literal["relu", "relu6"] = "relu"
    """Both are free. relu is nearest to what it replaces, keeps channels scalable (quantize: equalize), and
    quantize finds where its range should end; relu6 ends at 6 whatever the model needs."""
    squeeze_and_excite: Literal["keep", "remove"] = "keep"
    """remove: each gate becomes its mean over training samples, folded into weights where it can be. Gates run on the
    Edge TPU, but nothing behind one can start before the whole map is there."""
    depthwise_5x5: Literal["keep", "3x3"] = "keep"
    """3x3: the kernel whose outputs are nearest, on measured inputs; 9 steps of the Edge TPU instead of 25."""
    samples: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Training samples that gates and the inputs of kernels are measured on."""
    epochs: Annotated[int, Field(ge=0, le=10_000)] = 6
    """Passes over the training split afterwards, with the model before the swap as teacher; 0: none."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Adam's learning rate at the start."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        self.goes_with(self)
        return self

    def uses(self) -> tuple[Use, ...]:
        """Return healing, which is distillation, and the methods of its training."""
        if not self.epochs:
            return ()
        decoupled: tuple[Use, ...] = ("decoupled",) if self.decoupled else ()
        return ("healing by distillation", *decoupled, *self.training_uses())

    def run(self, given: Artifact, context: Context) -> Facts:
        """The swapped and healed model; what was swapped, left and not found; the accuracies on the way."""
        from compress.distillation import losses, teachers
        from compress.ir import keras_graph
        from compress.ir.tensorflow import keras
        from compress.stages import working_model
        from compress.training import healing, loop

        keras(context.seed)
        teacher = working_model.read(given, context)
        _refuse_misfit(teacher, context, heals=self.epochs > 0)
        swapped, swaps = self._swapped(keras_graph.read(teacher), context)
        facts = self._said(swaps, context)
        if not swaps.done:
            for name in (MODEL_KERAS, MODEL_TFLITE):
                shutil.copyfile(given.file(name), context.folder / name)
            return facts
        model = keras_graph.build(swapped)
        facts |= _recalibrated(model, context)
        accuracy = {"before": _accuracy(teacher, context), "swapped": _accuracy(model, context)}
        if self.epochs:
            before = teachers.of_model(teacher, context.data, "the model before")
            loss = losses.loss_of(loop.head_of(model, context.data), [before], self, self, context)
            facts |= healing.heal(model, loss, self, context)
            accuracy["healed"] = _accuracy(model, context)
        working_model.write(model, context.folder)
        return {**facts, "accuracy": accuracy}

    def _swapped(self, net: Network, context: Context) -> tuple[Network, Swaps]:
        """Gates and kernels first: what they are measured on are the activations that the model was trained with."""
        from compress.replacement import activations as swapping
        from compress.replacement import depthwise_kernels, squeeze_excite

        swaps = swapping.Swaps()
        if self.squeeze_and_excite == "remove":
            gates, left = squeeze_excite.find(net)
            net, more = squeeze_excite.removed(
                net, squeeze_excite.measure(net, gates, self._samples(context)) if gates else {}
            )
            swaps = swaps | swapping.Swaps(left=left) | more
        if self.depthwise_5x5 == "3x3":
            names, left = depthwise_kernels.find(net)
            net, more = depthwise_kernels.narrowed(
                net, depthwise_kernels.measure(net, names, self._samples(context)) if names else {}
            )
            swaps = swaps | swapping.Swaps(left=left) | more
        kinds = get_args(Activation) if self.activations == "all" else self.activations
        net, more = swapping.activations(net, kinds, self.by)
        return net, swaps | more

    def _samples(self, context: Context) -> NDArray[np.float32]:
        return chosen_inputs(context.data, self.samples, context.seed)[0]

    def _said(self, swaps: Swaps, context: Context) -> Facts:
        """What was swapped, left and not found, as plain values; shown too."""
        asked: list[str] = [] if self.activations == "all" else [*self.activations]
        asked += ["squeeze_and_excite"] if self.squeeze_and_excite == "remove" else []
        asked += ["depthwise_5x5"] if self.depthwise_5x5 == "3x3" else []
        missing = [what for what in asked if what not in swaps.done]
        for what, layers in swaps.done.items():
            context.progress.note(f"swap: {len(layers)} {what} -> {self._into(what)}")
        for what in missing:
            context.progress.note(f"swap: {what} was asked for, and there is none in the model that can be swapped")
        if not swaps.done:
            context.progress.note("swap: there is nothing to swap; the model is passed on unchanged")
        done: dict[str, Any] = {
            what: {"count": len(layers), "by": self._into(what), "layers": list(layers)}
            for what, layers in swaps.done.items()
        }
        return {
            "swapped": done,
            "unchanged": not swaps.done,
            "not_found": missing,
            "left": dict(swaps.left),
            "details": dict(swaps.notes),
        }

    def _into(self, what: str) -> str:
        others = {
            "squeeze_and_excite": "its mean, in the weights",
            "depthwise_5x5": "3x3",
            "prelu": "a slope for each channel",
        }
        return others.get(what, self.by)


def _refuse_misfit(model: Any, context: Context, *, heals: bool) -> None:
    """Healing and accuracy need a classifier of the data; a swap alone a model that takes its samples."""
    from compress.errors import ModelError
    from compress.training import loop

    try:
        loop.head_of(model, context.data)
    except ModelError:
        shape = context.data.input_shape
        sides = [tuple(each.shape[1:]) for each in model.inputs]
        takes = [
            len(each) == len(shape) and all(a in (None, b) for a, b in zip(each, shape, strict=True)) for each in sides
        ]
        if heals or takes != [True]:
            raise


def _recalibrated(model: Any, context: Context) -> Facts:
    """The result of batch norm recalibration, or why a model cannot be validated on the data."""
    from compress.errors import ModelError
    from compress.training import loop
    from compress.training.bn_recalibration import recalibrate_batch_norms

    try:
        loop.own_loss(model, context)
    except ModelError as error:
        return {"batch_norms": {"recalibrated": False, "reason": str(error)}}
    return recalibrate_batch_norms(model, context)


def _accuracy(model: Any, context: Context) -> dict[str, Any]:
    """On the validation split; never the test split, which is for the final comparison alone."""
    from compress.errors import ModelError
    from compress.ir.tensorflow import keras
    from compress.measurement import missing, proportion
    from compress.training import loop

    try:
        loop.head_of(model, context.data)
    except ModelError as error:
        return missing("fraction", f"not a classifier of this data: {error}").to_json()
    if not task_of(context.data).counts_right:
        return missing("fraction", "the data has no classes").to_json()
    inputs, labels = context.data.inputs("validation"), context.data.labels("validation")
    ops = keras().ops
    parts = [np.asarray(ops.argmax(model(inputs[i : i + 64], training=False), -1)) for i in range(0, len(inputs), 64)]
    right = int((np.concatenate(parts) == labels).sum())
    return {**proportion(right, len(labels), "validation split").to_json(), "n": len(labels)}
