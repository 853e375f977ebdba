"""The results of pruning, of the measurement of sensitivity, and of the replacement of activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compress.core.artifact import Facts
from compress.core.measurement import Measurement
from compress.results.encoding import encode


@dataclass(frozen=True)
class SensitivityCurve:
    """The effect of the width of one layer group on the network's outputs.

    Attributes:
        layers: the layers of the group.
        kept: the widths that were measured, from all channels down.
        divergence: for each width the distance from the outputs with all channels (`Head.divergence`); for classifiers
            the Kullback-Leibler divergence in nats.
        accuracy: for each width the accuracy, a fraction; empty if the samples have no classes.
    """

    layers: tuple[str, ...]
    kept: tuple[int, ...]
    divergence: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class SensitivityRecord:
    """The sensitivity of layers to pruning, or the reason why it is missing."""

    samples: int = 0
    importance: str = ""
    curves: tuple[SensitivityCurve, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class CostFigures:
    """The costs of a network at some widths; time and memory only where the target predicts them."""

    macs: int
    parameters: int
    size_bytes: int
    compute_ms: float | None = None
    latency_ms: float | None = None
    streamed_bytes: int | None = None


@dataclass(frozen=True)
class CostChange:
    """The costs before and after a step.

    Attributes:
        before: the cost of the objective before the step.
        after: the same after it.
        figures_before: all costs before the step.
        figures_after: all costs after it.
    """

    before: float
    after: float
    figures_before: CostFigures
    figures_after: CostFigures


@dataclass(frozen=True)
class LayerWidths:
    """The number of channels of a layer before and after a step."""

    before: int
    after: int


@dataclass(frozen=True)
class PruningStep:
    """One step of pruning.

    Attributes:
        importance: the method that importance was measured with.
        allocation: the method that chose the widths.
        cost: the costs before and after the step.
        layers: the layers that have fewer channels.
        unsupported: layers that kept all channels because their use of them is not known.
        done: whether no further step is needed.
        trials: by allocation method the validation accuracy after one epoch of training, where methods were compared.
        sensitivity: the curves that the `sensitivity` allocation measured.
        warnings: sentences about what may be wrong with the model or the result.
        recalibration: the facts of batch norm recalibration before the training.
        training: the facts of the training.
    """

    importance: str
    allocation: str
    cost: CostChange
    layers: Mapping[str, LayerWidths]
    unsupported: tuple[str, ...]
    done: bool
    trials: Mapping[str, float] = field(default_factory=dict)
    sensitivity: tuple[SensitivityCurve, ...] = ()
    warnings: tuple[str, ...] = ()
    recalibration: Facts = field(default_factory=dict)
    training: Facts = field(default_factory=dict)

    def to_json(self) -> Facts:
        """Return the step as plain values, with the facts about its training among them, as a stage has them."""
        facts: Facts = encode(self)
        of_training = {**facts.pop("recalibration"), **facts.pop("training")}
        return {**facts, **of_training}


@dataclass(frozen=True)
class PruningRecord:
    """What `prune` reports: its objective, and its steps."""

    objective: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[PruningStep, ...] = ()


@dataclass(frozen=True)
class ReplacedLayers:
    """The layers of one kind that were replaced, and by what."""

    count: int
    by: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplacementRecord:
    """What `replace_activations` reports.

    Attributes:
        replaced: the layers that were replaced, by the kind of activation.
        accuracy: the validation accuracy `before`, with the activations `replaced`, and `healed` by training.
        not_found: the kinds that were requested, and that the model does not have.
        skipped: by layer the reason why it was not replaced.
        details: by layer a remark on its replacement.
    """

    replaced: Mapping[str, ReplacedLayers] = field(default_factory=dict)
    accuracy: Mapping[str, Measurement] = field(default_factory=dict)
    not_found: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
