"""Settings of the procedures: models for data, training, pruning, distillation, activation replacement, quantization.

The stages of the same names inherit these settings; the Python interface checks its arguments with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from compress.core.errors import ModelError
from compress.core.settings import Settings
from compress.learning.distillation.settings import DistillationSettings, Features
from compress.learning.quantization.settings import PostTrainingSettings, RoundedTraining
from compress.learning.training.batches import EpochSettings
from compress.learning.training.loop import TrainingSettings
from compress.learning.training.transfer import TransferSettings
from compress.model.ir.layer_specs.functions import Activation

SEARCHED = ("ranges", "equalize", "separate_gates", "correct_bias", "rounding")
"""Settings of the search, which have no effect with a plan."""


class DetectorSettings(Settings):
    """The outputs of a detector, as far as the user describes them. Other models have no such settings."""

    detector: dict[str, Any] | str | None = None
    """The specification of a detector's outputs, or the family that the model is recognized as."""
    keep_classes: tuple[int | str, ...] | None = None
    """The classes of a detector to keep, by number or by name; None for all."""
    classes: tuple[str, ...] | None = None
    """The names of the detector's classes, by which `keep_classes` names them."""

    @property
    def described(self) -> dict[str, Any] | None:
        """The complete specification of the outputs; None if the user gives none."""
        return self.detector if isinstance(self.detector, dict) and "maps" in self.detector else None

    def refuse_keep_classes(self, path: Path) -> None:
        """Refuse `keep_classes` for a model whose head is not cut.

        Raises:
            ModelError: the setting has a value.
        """
        if self.keep_classes is not None:
            what = "keep_classes cuts the head of a detector that is recognized, and this model is used as it is"
            allowed = "a .keras, .h5, .onnx or float .tflite file with model.detector: auto, or a family"
            raise ModelError(what, where=str(path), allowed=allowed, hint="remove model.keep_classes")


class HeadSettings(Settings):
    """A new head on the features of a trained model."""

    after: str | None = None
    """The layer whose output is the features: an earlier one makes a smaller and faster model. By default the last
    feature map. `python -m compress import MODEL --layers` lists the layers."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Fraction of the features that the training sets to 0."""
    restore_batch_norms: bool = True
    """If the file has no batch norms, because they were folded, put one after each convolution: the model stays the
    same, and learns much better."""


class TrainSettings(TrainingSettings, TransferSettings):
    """Training on the labels."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 30
    """Number of passes over the training split."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the label that is spread over all classes. Source: Szegedy et al., Rethinking the Inception Architecture
    for Computer Vision, 2016."""


class PruneSettings(TrainingSettings):
    """The removal of channels, and the training of the rest."""

    objective: Literal["macs", "parameters", "size", "compute", "latency", "cache"] = "macs"
    """The cost to reduce. macs, parameters; size: bytes of the 8-bit file; compute: time of the Edge TPU's arithmetic
    alone; latency: predicted on a host; cache: reduce the model until all parameters stay in on-chip memory."""
    keep: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Limit: the share of the cost that may remain. Default: 0.5."""
    at_most: Annotated[float, Field(gt=0)] | None = None
    """Limit as an absolute value: MACs, parameters, bytes or milliseconds."""
    keep_macs: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Short form of `objective: macs` with `keep`."""
    host: str | None = None
    """Host that latency is predicted for: usb3 (default), usb2, pcie, devboard, pi4-usb3, pi5-usb3 or pi5-pcie for an
    Edge TPU; see `estimate`."""
    clock: str | None = None
    """Clock of an Edge TPU on USB: max (libedgetpu1-max, default) or std (libedgetpu1-std)."""
    importance: Literal["taylor", "batch_norm", "l2", "l1"] = "taylor"
    """Measure of a channel's importance. taylor: estimated change of the loss without the channel, on training samples.
    l1, l2: norm of its weights. batch_norm: L2 norm times the scale of the batch norm that follows."""
    allocation: Literal["auto", "balanced", "sensitivity", "global", "uniform"] = "auto"
    """Distribution of the removals over layers. balanced: keeps as much of every layer's importance as possible, so
    that no layer gets too narrow. sensitivity: removes channels of one layer at a time, and measures the change of the
    outputs. global: removes the least importance in total. uniform: about the same share of every layer. auto: trains
    the results of balanced and uniform for one epoch each, and keeps the better one on validation; without training:
    balanced."""
    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Number of training samples for importance and sensitivity."""
    steps: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of pruning steps, with training after each."""
    epochs: Annotated[int, Field(ge=0, le=10_000)] = 4
    """Epochs of training after the last step; 0: no training."""
    epochs_between: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Epochs of training after each step before the last one."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Initial learning rate of Adam; low, because most weights are already trained."""
    distill: DistillationSettings | None = None
    """Also train on the outputs of the original model (knowledge distillation). Default: labels only."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.distill is not None:
            self.distill.check_training(self)
        limits = [name for name in ("keep", "at_most", "keep_macs") if getattr(self, name) is not None]
        if len(limits) > 1:
            raise ValueError(f"{limits[0]} and {limits[1]} are both limits: remove one")
        if self.keep_macs is not None and self.objective != "macs":
            raise ValueError(f"keep_macs is for objective: macs; use keep for {self.objective}")
        if self.objective == "cache" and limits:
            raise ValueError(f"{limits[0]} cannot be used with objective: cache; its limit is the Edge TPU's memory")
        return self


class DistillSettings(TrainingSettings, DistillationSettings):
    """Training on the outputs of teachers and on the labels."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Number of passes over the training split."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Initial learning rate of Adam."""
    features: Features | None = None
    """Also learn from inner layers of the first teacher; {} uses the last feature maps."""

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        self.check_training(self)
        return self


class ReplacementSettings(TrainingSettings, DistillationSettings):
    """The replacement of activations and gates, and the training of the changed model."""

    activations: Literal["all"] | list[Activation] = "all"
    """Activations to replace, also where they are written as several operators. On the Edge TPU silu becomes two
    operators, hard_silu three, gelu six; elu, selu, celu, mish and softplus 25; leaky_relu a PRELU, whose slopes are
    sent at every inference. tailed: any other function that is near 0 for low x, near x for high x and negative
    between. threshold (a ReLU that begins at another value) and prelu (with a slope for every position; it gets one for
    each channel) run on the CPU, and so do all operators after them."""
    by: Literal["relu", "relu6"] = "relu"
    """Replacement; both cost nothing. relu is the nearest, allows equalization (quantize: equalize), and quantize finds
    its output range; relu6 always ends at 6."""
    squeeze_and_excite: Literal["keep", "remove"] = "keep"
    """remove: each gate becomes its mean over training samples, folded into weights where possible. A gate runs on the
    Edge TPU, but needs the whole map before the next operator can start."""
    samples: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Number of training samples for the means of gates."""
    epochs: Annotated[int, Field(ge=0, le=10_000)] = 6
    """Epochs of training after the replacement, with the unchanged model as teacher; 0: no training."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.002
    """Initial learning rate of Adam."""

    gradual: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of the training in which each activation turns into its replacement step by step; 0: all of them before the
    training. For deep networks whose answers are lost after the replacement, such as detectors: use 0.4 and 200 epochs
    or more. It learns from the outputs of all convolutions, and sets each channel's mean and deviation to those of the
    unchanged model in every step."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        self.check_training(self)
        if self.gradual and self.early_stopping is not None:
            raise ValueError(f"gradual: {self.gradual} cannot be combined with early_stopping")
        if self.gradual and not self.epochs:
            raise ValueError(f"gradual: {self.gradual} is a part of the training, and `epochs: 0` has none")
        return self


class QatSettings(RoundedTraining):
    """The settings of quantization-aware training (QAT)."""

    distill: DistillationSettings | None = None
    """Use the float model as a teacher: {weight: 0.9, temperature: 4}, or {} for these values."""


class QuantizeSettings(TrainingSettings, PostTrainingSettings):
    """Post-training quantization, and quantization-aware training."""

    method: Literal["ptq", "qat"] = "ptq"
    """ptq: post-training quantization. qat: quantization-aware training, kept only if it is better on the validation
    split."""
    engine: Literal["coralline", "tfmot"] = "coralline"
    """The training engine of qat. coralline: Keras 3 with fake quantization. tfmot: tensorflow-model-optimization,
    which supports fewer layers."""
    calibration_samples: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Number of training samples from which activation ranges are calibrated: the same number of each class where
    possible."""
    held_out_samples: Annotated[int, Field(ge=1, le=100_000)] = 512
    """Number of other training samples (held-out samples) on which candidates are compared with the float model. All
    are used only if the first of them do not decide."""
    plan: Path | None = None
    """The quantization.json of an earlier run, possibly edited by hand. It is applied instead of a search."""
    scales_from: Path | None = None
    """A .tflite file of the same architecture, whose activation scales are used: the result can be put into its
    compiled program without a change of the instructions (`relink`). Channels are not equalized and biases not
    corrected. With `method: qat` it needs `qat: {ranges: fixed}`."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Number of passes over the training split (qat)."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.0005
    """Initial learning rate of Adam (qat)."""
    precision: Literal["float32"] = "float32"
    """QAT is done in float32 only: 16 bits would round differently from the 8-bit file."""
    qat: QatSettings = QatSettings()
    """The settings of `method: qat`."""

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine != "tfmot":
            return self
        if self.method == "ptq":
            raise ValueError("engine: tfmot trains, and can be used with `method: qat` only; this is `method: ptq`")
        ours = (TrainingSettings.model_fields.keys() - EpochSettings.model_fields.keys()) & self.model_fields_set
        if ours:
            raise ValueError(f"{', '.join(sorted(ours))}: with `engine: coralline` only; this is `engine: tfmot`")
        return self

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        searched = [name for name in SEARCHED if name in self.model_fields_set]
        if self.plan is not None and searched:
            names = ", ".join(searched)
            raise ValueError(f"{names}: a `plan` replaces the search; remove one of them")
        if self.scales_from is not None:
            self._check_scales_from()
        if self.qat.distill is not None:
            self.qat.distill.check_training(self)
        return self

    def _check_scales_from(self) -> None:
        if self.plan is not None:
            raise ValueError("scales_from: a `plan` has ranges already; remove one of them")
        if self.method == "qat" and (self.engine == "tfmot" or self.qat.ranges != "fixed"):
            raise ValueError("scales_from: training changes ranges; set `engine: coralline` and `qat: {ranges: fixed}`")
