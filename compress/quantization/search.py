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

from compress.ir.keras_graph import LayerOutput, Network, build
from compress.quantization import activation_statistics, adaround, bias_correction, diagnostics, equalization, export
from compress.quantization.calibration import calibrate, planned
from compress.quantization.fidelity import side_by_side
from compress.quantization.plan import QuantizationPlan
from compress.quantization.quantizer_placement import without_softmax
from compress.quantization.ranges import WITHOUT_HISTOGRAMS
from compress.tasks.base import Judge
from compress.tasks.classification import ByClass

LEAST_GAIN_DB = 0.1
"""An improvement that is worth a change of the plan."""
SURE = 2.0
"""Standard errors that an improvement must be above zero."""
FIRST = 128
"""Held-back samples that every candidate is run on; where these do not decide, it is run on all."""
SHARES = (0.5, 0.8)
"""Of the imbalance of activations that go into the weights."""


@dataclass(frozen=True)
class Trial:
    """Something that was tried.

    Attributes:
        step: plan (one that was given), ranges, equalization, bias or rounding.
        choice: what was tried.
        samples: held-back samples that it was run on.
        snr_db: mean over the samples of the logits' signal-to-noise ratio against the float model.
        agreement: share of the samples with the same largest output; of a detector, of the objects that both find.
        kept: whether it is in the plan.
    """

    step: str
    choice: str
    samples: int
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
        ordinary: calibration samples without those that reach much farther than the others.
        warnings: what is strange about the activations, or about a plan that was given.
        judge: compares outputs.
    """

    network: Network
    samples: NDArray[np.float32]
    held_back: NDArray[np.float32]
    io: export.InputType
    run: Callable[[bytes, NDArray[np.float32]], NDArray[np.float32]]
    trials: list[Trial] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    judge: Judge = field(default_factory=ByClass)

    def __post_init__(self) -> None:
        self.ordinary = self.samples
        self._compared = without_softmax(self.network)
        model = build(self._compared)
        self._wanted = side_by_side(model.predict(self.held_back, verbose=0))
        self._best: _Candidate | None = None

    def given(self, plan: QuantizationPlan) -> None:
        """Takes a plan as it is.

        Raises:
            StageError: it is for another network.
        """
        export.refuse_mismatch(self.network, plan)
        self.warnings = diagnostics.about_plan(plan, self.network)
        self._try("plan", plan.method, plan)

    def ranges(self, methods: Sequence[str]) -> None:
        """Tries ways to choose ranges for the factors kept so far; outlying samples are left out if that is better."""
        if not methods:
            return
        factors = dict(self._best.plan.factors) if self._best else {}
        current = equalization.applied(self.network, factors)
        histograms = not WITHOUT_HISTOGRAMS.issuperset(methods)
        found = activation_statistics.collect(current, self.samples, histograms=histograms)
        outliers = activation_statistics.outliers(found)
        if outliers:
            self.warnings = diagnostics.about_activations(found, outliers)
            self._try("ranges", methods[0], replace(planned(found, methods[0]), factors=factors))
            self.ordinary = np.delete(self.samples, outliers, axis=0)
            found = activation_statistics.collect(current, self.ordinary, histograms=histograms)
        elif not self.warnings:
            self.warnings = diagnostics.about_activations(found, [])
        for method in methods:
            choice = f"{method} without outliers" if outliers else method
            self._try("ranges", choice, replace(planned(found, method), factors=factors))
        if any(trial.kept for trial in self.trials[-len(methods) :]):
            self.samples = self.ordinary

    def equalization(self, method: str) -> bool:
        """Tries factors from weights, and from activations; whether any are kept that were not."""
        channels = equalization.follow(self.network, relu6=True)
        clipped = equalization.clipped(self.network)
        tops = activation_statistics.largest_by_channel(self.network, clipped, self.samples, 100) if clipped else {}
        channels, least = equalization.careful(channels, tops)
        if channels.pinned.all():
            return False
        before = self.plan
        tensors = [LayerOutput(layer.name) for layer in self.network.layers.values() if equalization.weighted(layer)]
        seen = activation_statistics.largest_by_channel(self.network, tensors, self.samples)
        found = {
            "from weights": equalization.from_weights(self.network, channels, least),
            **{
                f"from activations, {share:g}": equalization.from_activations(
                    self.network, channels, seen, share, least
                )
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
        network = export.gridded(equalization.applied(self.network, plan.factors))
        shifts = bias_correction.measured_shifts(network, plan, self.ordinary)
        self._try("bias", "measured shift", replace(plan, bias_shifts=shifts))

    def rounding(self, note: Callable[[str], None]) -> None:
        """Tries rounding that is learnt instead of nearest."""
        plan = self.plan
        network = export.edited(self._compared, plan)
        chosen = adaround.learnt(network, self.ordinary, note)
        self._try("rounding", "learnt", replace(plan, rounding=chosen))

    @property
    def range_method(self) -> str:
        """The way to choose ranges that was kept; minmax where a plan was given."""
        kept = (trial.choice.split()[0] for trial in self.trials if trial.step == "ranges" and trial.kept)
        return next(kept, "minmax")

    @property
    def plan(self) -> QuantizationPlan:
        """The best plan so far."""
        assert self._best is not None
        return self._best.plan

    @property
    def content(self) -> bytes:
        """The best plan as a .tflite file."""
        return export.convert(self.network, self.plan, self.io)

    def to_json(self) -> list[dict[str, Any]]:
        """What was tried, as plain maps."""
        return [asdict(trial) for trial in self.trials]

    def _try(self, step: str, choice: str, plan: QuantizationPlan) -> None:
        found = self._run(_Candidate(plan, export.convert(self._compared, plan, self.io)), FIRST)
        kept = self._best is None or found.gain(self._best).sure
        if self._best is not None and not kept and found.gain(self._best).possible:
            found, self._best = (self._run(each, len(self.held_back)) for each in (found, self._best))
            kept = found.gain(self._best).sure
        if kept:
            self.trials = [replace(t, kept=False) if t.step == step else t for t in self.trials]
            self._best = found
        mean, agreement = float(found.snr_db.mean()), float(found.same.mean())
        self.trials.append(Trial(step, choice, len(found.same), round(mean, 2), round(agreement, 4), kept))

    def _run(self, candidate: _Candidate, count: int) -> _Candidate:
        """The candidate run on so many held-back samples; what was run before is not run again."""
        part = slice(len(candidate.same), count)
        if len(self.held_back[part]) == 0:
            return candidate
        wanted, outputs = self._wanted[part], self.run(candidate.content, self.held_back[part])
        return replace(
            candidate,
            snr_db=np.concatenate([candidate.snr_db, self.judge.snr_db(wanted, outputs)]),
            same=np.concatenate([candidate.same, self.judge.same(wanted, outputs)]),
        )


@dataclass(frozen=True)
class _Candidate:
    """A plan, its file, and by held-back sample how near to the float model it is."""

    plan: QuantizationPlan
    content: bytes
    snr_db: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    same: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def gain(self, other: _Candidate) -> _Gain:
        """What is gained against another one, on the samples that both were run on."""
        count = min(len(self.same), len(other.same))
        each = self.snr_db[:count] - other.snr_db[:count]
        return _Gain(float(each.mean()), float(each.std(ddof=1) / np.sqrt(count)) if count > 1 else 0.0)


@dataclass(frozen=True)
class _Gain:
    """A mean gain in dB, and its standard error."""

    mean: float
    error: float

    @property
    def sure(self) -> bool:
        """Whether it is more than chance."""
        return self.mean > max(LEAST_GAIN_DB, SURE * self.error)

    @property
    def possible(self) -> bool:
        """Whether more samples may show that it is."""
        return self.mean + SURE * self.error > LEAST_GAIN_DB
