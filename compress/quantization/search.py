"""Post-training quantization that does not lose silently: what is tried is measured, and kept only if it helps.

Every candidate is converted and run as the int8 file that it would be, on samples that
nothing was calibrated on, and compared with the float model sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.quantization import adaround, conversion, correction, equalization, statistics
from compress.quantization.calibration import calibrate, planned
from compress.quantization.plan import QuantizationPlan
from compress.quantization.points import without_softmax
from compress.training.network import Network, Tensor, build

LEAST_GAIN_DB = 0.1
"""An improvement that is worth a change of the plan."""
SURE = 2.0
"""Standard errors that an improvement must be above zero."""
SHARES = (0.5, 0.8)
"""Of the imbalance of activations that go into the weights."""
BEST_DB = 60.0
"""Signal-to-noise ratios above this are not told apart."""


@dataclass(frozen=True)
class Trial:
    """Something that was tried.

    Attributes:
        step: ranges, equalization or bias.
        choice: what was tried.
        snr_db: mean over the samples of the logits' signal-to-noise ratio against the float model.
        agreement: share of the samples with the same largest output.
        kept: whether it is in the plan.
    """

    step: str
    choice: str
    snr_db: float
    agreement: float
    kept: bool


@dataclass
class Search:
    """A search for the plan of one network.

    Attributes:
        network: in canonical form.
        samples: calibration samples [n, ...].
        held_back: samples that candidates are compared on [m, ...].
        io: type of the file's input and output.
        run: the outputs of a .tflite file for some samples: [m, outputs].
        trials: what was tried, in order.
        outliers: calibration samples that reach much farther than the others.
    """

    network: Network
    samples: NDArray[np.float32]
    held_back: NDArray[np.float32]
    io: conversion.InputType
    run: Callable[[bytes, NDArray[np.float32]], NDArray[np.float32]]
    trials: list[Trial] = field(default_factory=list)
    outliers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._compared = without_softmax(self.network)
        model = build(self._compared)
        self._wanted = np.asarray(model.predict(self.held_back, verbose=0)).reshape(len(self.held_back), -1)
        self._best: _Measured | None = None

    def ranges(self, methods: Sequence[str]) -> None:
        """Tries ways to choose ranges, for the factors that are kept so far."""
        factors = dict(self._best.plan.factors) if self._best else {}
        current = equalization.applied(self.network, factors)
        found = statistics.collect(current, self.samples)
        self.outliers = statistics.outliers(found)
        for method in methods:
            self._try("ranges", method, replace(planned(found, method), factors=factors))

    def equalization(self, method: str) -> bool:
        """Tries factors from weights, and from activations; whether any are kept that were not."""
        channels = equalization.follow(self.network)
        if channels.pinned.all():
            return False
        before = self.plan
        tensors = [Tensor(layer.name) for layer in self.network.layers.values() if equalization.weighted(layer)]
        seen = statistics.largest_by_channel(self.network, tensors, self.samples)
        found = {
            "from weights": equalization.from_weights(self.network, channels),
            **{
                f"from activations, {share:g}": equalization.from_activations(self.network, channels, seen, share)
                for share in SHARES
            },
        }
        for name, values in found.items():
            factors = equalization.by_layer(self.network, channels, values)
            if factors == before.factors:
                continue
            plan = calibrate(equalization.applied(self.network, factors), self.samples, method)
            self._try("equalization", name, replace(plan, factors=factors))
        return self.plan is not before

    def bias(self) -> None:
        """Tries to move the mean of every layer's outputs back to where the float model has it."""
        plan = self.plan
        network = conversion.gridded(equalization.applied(self.network, plan.factors))
        ordinary = np.delete(self.samples, self.outliers, axis=0)
        shifts = correction.measured_shifts(network, plan, ordinary)
        self._try("bias", "measured shift", replace(plan, bias_shifts=shifts))

    def rounding(self, note: Callable[[str], None]) -> None:
        """Tries rounding that is learnt instead of nearest."""
        plan = self.plan
        network = conversion.edited(self._compared, plan)
        ordinary = np.delete(self.samples, self.outliers, axis=0)
        chosen = adaround.learnt(network, ordinary, note)
        self._try("rounding", "learnt", replace(plan, rounding=chosen))

    @property
    def range_method(self) -> str:
        """The way to choose ranges that was kept."""
        return next(trial.choice for trial in self.trials if trial.step == "ranges" and trial.kept)

    @property
    def plan(self) -> QuantizationPlan:
        """The best plan so far."""
        assert self._best is not None
        return self._best.plan

    @property
    def content(self) -> bytes:
        """The best plan as a .tflite file."""
        return conversion.convert(self.network, self.plan, self.io)

    def to_json(self) -> list[dict[str, Any]]:
        """What was tried, as plain maps."""
        return [asdict(trial) for trial in self.trials]

    def _try(self, step: str, choice: str, plan: QuantizationPlan) -> None:
        outputs = self.run(conversion.convert(self._compared, plan, self.io), self.held_back)
        found = _Measured(plan, snr_db(self._wanted, outputs), _agreement(self._wanted, outputs))
        kept = self._best is None or found.better_than(self._best)
        if kept:
            self.trials = [replace(t, kept=False) if t.step == step else t for t in self.trials]
            self._best = found
        mean = float(found.snr_db.mean())
        self.trials.append(Trial(step, choice, round(mean, 2), round(found.agreement, 4), kept))


@dataclass(frozen=True)
class _Measured:
    plan: QuantizationPlan
    snr_db: NDArray[np.float64]
    agreement: float

    def better_than(self, other: _Measured) -> bool:
        """Whether the improvement, sample by sample, is more than chance."""
        gain = self.snr_db - other.snr_db
        error = float(gain.std(ddof=1)) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
        return bool(gain.mean() > max(LEAST_GAIN_DB, SURE * error))


def snr_db(wanted: NDArray[Any], found: NDArray[Any]) -> NDArray[np.float64]:
    """Signal-to-noise ratio of each row in dB; a constant signal counts as one of its own size."""
    signal, noise = (wanted**2).sum(axis=1, dtype=np.float64), ((wanted - found) ** 2).sum(axis=1, dtype=np.float64)
    ratio = np.maximum(signal, 1e-12) / np.maximum(noise, 1e-12 * np.maximum(signal, 1e-12))
    return np.asarray(np.clip(10 * np.log10(ratio), -BEST_DB, BEST_DB))


def compared(step: str, choice: str, wanted: NDArray[Any], found: NDArray[Any]) -> dict[str, Any]:
    """Something that was tried alone, as a plain map: outputs of the float model and of the quantized one."""
    ratio = round(float(snr_db(wanted, found).mean()), 2)
    return asdict(Trial(step, choice, ratio, round(_agreement(wanted, found), 4), True))


def _agreement(wanted: NDArray[Any], found: NDArray[Any]) -> float:
    return float((wanted.argmax(axis=1) == found.argmax(axis=1)).mean())
