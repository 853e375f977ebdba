"""Search for the best plan of post-training quantization: a change is measured, and kept only if it helps.

Candidates are compared with the float model, sample by sample, on held-out samples. By default a simulation computes
their outputs (`simulation`): one Keras model for all of them. With `as_file` each one is converted and run as a .tflite
file instead. Statistics of the activations are collected once; those of an equalized network follow from them, since
every channel of it is the original one divided by its factor.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.progress import SILENT, Phase, Progress
from compress.learning.quantization import (
    activation_statistics,
    adaround,
    bias_correction,
    diagnostics,
    equalization,
    export,
)
from compress.learning.quantization.activation_statistics import Statistics
from compress.learning.quantization.calibration import calibrate, planned
from compress.learning.quantization.plan import LEVELS, QuantizationPlan, nudged
from compress.learning.quantization.quantizer_placement import without_softmax
from compress.learning.quantization.ranges import MINMAX, WITHOUT_HISTOGRAMS, Range, select
from compress.learning.quantization.simulation import Simulation
from compress.model.ir.channel_groups import ChannelGroups
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.ir.passes import separate_gates
from compress.model.tflite.interpreter import LoadedModel
from compress.results.quantization import Skipped, Trial
from compress.tasks.base import Judge
from compress.tasks.classification import ByClass

Samples = NDArray[np.float32]
Outputs = NDArray[np.float32]
Step = Literal["plan", "ranges", "equalization", "gates", "bias", "rounding"]
Factors = Mapping[str, tuple[float, ...]]
Gates = tuple[str, ...]
"""The activations whose gates are separated, as in a plan."""
Energies = NDArray[np.float64]
FileOutputs = Callable[[bytes, Samples], Outputs]
"""The outputs of a .tflite file: [n, outputs]."""

MAX_OUTPUT_LOSS_DB = 0.5
"""Largest loss of one output of several, for a gain of the others."""
MIN_GAIN_DB = 0.1
"""Smallest improvement that justifies a change of the plan."""
SIGNIFICANT = 2.0
"""Standard errors that an improvement must be above zero."""
MAX_LOSS_DB = 3.0
"""The simulation is not used if the median signal-to-noise ratio of the file is lower by more than this ..."""
SUFFICIENT_DB = 30.0
"""... and lower than this: above it, the rounding inside integer operators is a visible part of the small error."""
FEW_SAMPLES = 32
"""Held-out samples that show which candidates are clearly worse."""
FIRST_SAMPLES = 128
"""Held-out samples that every other candidate is run on; if these do not decide, it is run on all."""
SHARES = (0.5, 0.8)
"""Parts of the imbalance of activations that move into the weights."""
EQUAL_RANGES = 1 / LEVELS
"""Ranges whose ends differ by no more than this part of their width, one step, count as equal."""
EQUAL_CHANNELS = 1.25
"""Factors between 1 / this and this count as 1: rounding errors change by less than 2 dB."""
MAX_GATES = 2
"""Activations whose gates are separated, one after the other."""
COARSE = 0.02
"""Least mean share of rounding in the channels in front of a SiLU for which separating its gate is tried. In YOLOX-nano
the first SiLU has 0.16, the next one 0.011; tensors with channels of similar size have 0.0001."""


@dataclass
class Search:
    """A search for the plan of one network.

    Attributes:
        network: in canonical form.
        samples: calibration samples [n, ...].
        held_out: samples that candidates are compared on [m, ...].
        io: type of the file's input and output.
        as_file: computes the outputs of a candidate's file; None compares simulations.
        judge: compares outputs.
        progress: receives the number of candidates that are done.
        trials: the candidates that were tried, in order.
        skipped: the candidates that were not tried.
        warnings: unusual activations, or a plan that may not fit.
        ordinary: calibration samples without outliers.
    """

    network: Network
    samples: Samples
    held_out: Samples
    io: export.InputType = "int8"
    as_file: FileOutputs | None = None
    judge: Judge = field(default_factory=ByClass)
    progress: Progress = SILENT
    trials: list[Trial] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ordinary = self.samples
        self._structures: dict[tuple[str, ...], _Structure] = {}
        self._float_outputs = self._with_gates(()).simulation.outputs(self.held_out)
        self._seen: _Seen | None = None
        self._best: _Candidate | None = None
        self._tried: list[_Candidate] = []
        self._statistics: dict[tuple[Any, ...], Statistics] = {}
        self._all_samples = self.samples

    def restarted(self, as_file: FileOutputs) -> Search:
        """Return the search without its trials, which compares files; the simulation and the statistics stay."""
        search = copy.copy(self)
        search.as_file = as_file
        search.samples = search.ordinary = self._all_samples
        search.trials, search._tried, search.skipped, search.warnings = [], [], [], []
        search._seen = search._best = None
        return search

    def apply(self, plan: QuantizationPlan) -> None:
        """Take a finished plan.

        Raises:
            StageError: it is for another network.
        """
        export.refuse_mismatch(self.network, plan)  # before its network is built
        self.warnings = diagnostics.about_plan(plan, self.network)
        self._try("plan", plan.method, plan, MINMAX)

    def ranges(self, methods: Sequence[str]) -> None:
        """Try methods to choose ranges, with the factors kept so far; leave out outlying samples if that is better."""
        if not methods:
            return
        factors = self._best.plan.factors if self._best else {}
        gates = self._best.plan.separated_gates if self._best else ()
        candidates = Phase("candidates", len(methods) * FIRST_SAMPLES, unit="candidate")
        self.progress.plan(replace(activation_statistics.CALIBRATION, weight=len(self.samples)), candidates)
        everything = ordinary = self._collected(gates, factors, self.samples, methods)
        outliers = activation_statistics.outliers(everything)
        if outliers:
            self.warnings = diagnostics.about_activations(everything, outliers)
            self._try_ranges(methods[0], methods[0], everything, gates, factors)
            self.ordinary = np.delete(self.samples, outliers, axis=0)
            ordinary = self._collected(gates, factors, self.ordinary, methods)
        elif not self.warnings:
            self.warnings = diagnostics.about_activations(everything, [])
        suffix = " without outliers" if outliers else ""
        kept = []
        with self.progress.phase(candidates):
            for number, method in enumerate(methods):
                kept.append(self._try_ranges(method, f"{method}{suffix}", ordinary, gates, factors))
                self.progress.update(number + 1, len(methods))
        if any(kept):
            self.samples = self.ordinary
        self._seen = _Seen(ordinary if any(kept) else everything, factors)

    def _with_gates(self, gates: Gates) -> _Structure:
        """Return the network with some gates separated, and what is computed once for it."""
        if gates not in self._structures:
            self._structures[gates] = _Structure(separate_gates.separated(self.network, gates))
        return self._structures[gates]

    def _collected(self, gates: Gates, factors: Factors, samples: Samples, methods: Sequence[str]) -> Statistics:
        """Collect what range methods and equalization need of the network with some gates and factors, once."""
        key = (gates, len(samples), tuple(sorted(factors.items())), tuple(methods))
        if key not in self._statistics:
            self._statistics[key] = self._newly_collected(gates, factors, samples, methods)
        return self._statistics[key]

    def _newly_collected(self, gates: Gates, factors: Factors, samples: Samples, methods: Sequence[str]) -> Statistics:
        structure = self._with_gates(gates)
        network = equalization.applied(structure.network, factors)
        histograms = not WITHOUT_HISTOGRAMS.issuperset(methods)
        by_channel = equalization.observed_tensors(network, structure.channels)
        return activation_statistics.collect(
            network, samples, histograms=histograms, by_channel=by_channel, progress=self.progress
        )

    def _try_ranges(self, method: str, choice: str, statistics: Statistics, gates: Gates, factors: Factors) -> bool:
        """Try the ranges of one method; return whether they are kept."""
        plan = replace(planned(statistics, method), factors=factors, separated_gates=gates)
        if self.as_file is None and self._best is not None and _are_equal(self._best.plan, plan):
            self.skipped.append(Skipped("ranges", choice, f"its ranges equal those of {self.range_method}"))
            return False
        return self._try("ranges", choice, plan, method)

    def equalization(self) -> bool:
        """Try factors from weights and from activations; return whether new ones are kept."""
        assert self._seen is not None, "`ranges` comes first"
        structure = self._with_gates(self.plan.separated_gates)
        original = self._seen.without_factors(structure.channels)
        channels, least = structure.careful_channels(original)
        if channels.pinned.all():
            self.skipped.append(Skipped("equalization", "factors", "no channel can be scaled"))
            return False
        start = replace(self.plan, factors={})
        narrowing = _narrowing(self.plan, self._seen.statistics)
        kept = []
        for choice, values in structure.factors(original, channels, least).items():
            factors = equalization.by_layer(structure.network, channels, values)
            if _are_close(factors, self.plan.factors):
                continue
            if self.as_file is None and _are_small(factors):
                reason = f"all factors are between {1 / EQUAL_CHANNELS:g} and {EQUAL_CHANNELS:g}"
                self.skipped.append(Skipped("equalization", choice, reason))
                continue
            scaled = original.divided(equalization.divisors(channels, values))
            plan = self._plan_for(scaled, replace(start, factors=factors), narrowing)
            kept.append(self._try("equalization", choice, plan, self.range_method))
        return any(kept)

    def gates(self) -> bool:
        """Try to separate gates of activations in front of which 8 bits are too coarse; return whether one is kept.

        Factors are part of it: only they make the steps of the first factor of the product finer. A plan that is good
        enough without is not worth the additional layer.
        """
        assert self._best is not None, "`ranges` comes first"
        if self._best.snr_db.mean() > SUFFICIENT_DB:
            return False
        kept = False
        for name, _ in self._coarse_activations()[:MAX_GATES]:
            if not self._separated(name):
                break
            kept = True
        return kept

    def _coarse_activations(self) -> list[tuple[str, float]]:
        """Return the activations with a gate whose input has channels that are lost in rounding, the worst one first.

        The measure is the mean over channels of the share of the rounding noise, a twelfth of the squared step, in the
        variance of the rounded channel: within the samples, where most values are in six standard deviations, and
        between them.
        """
        assert self._seen is not None, "`ranges` comes first"
        possible = separate_gates.find(self.network)
        if not possible:
            return []
        widest = select(self._seen.statistics, MINMAX)
        noise_shares = {}
        for name, activation in possible.items():
            tensor = LayerOutput(activation.source)
            lowest, highest = widest[self._seen.statistics.points[tensor]]
            noise = ((highest - lowest) / LEVELS) ** 2 / 12
            extremes = self._seen.statistics.extremes[tensor]
            low, high = (ends.astype(np.float64) for ends in (extremes.low, extremes.high))
            variance = ((high - low).mean(axis=0) / 6) ** 2 + ((low + high) / 2).var(axis=0)
            noise_shares[name] = float(np.mean(noise / (noise + variance)))
        coarse = [(name, share) for name, share in noise_shares.items() if share > COARSE]
        return sorted(coarse, key=lambda pair: -pair[1])

    def _separated(self, name: str) -> bool:
        """Try to separate the gate of one more activation; return whether that is kept."""
        gates = (*self.plan.separated_gates, name)
        structure = self._with_gates(gates)
        source = separate_gates.source_of(structure.network, name)
        original = self._collected(gates, {}, self.samples, [self.range_method])
        channels, least = structure.careful_channels(original)
        start = replace(planned(original, self.range_method), separated_gates=gates)
        narrowing = _narrowing(start, original)
        kept = []
        for choice, values in structure.factors(original, channels, least).items():
            factors = equalization.by_layer(structure.network, channels, values)
            if source not in factors:
                reason = "its channels cannot be scaled, so the two layers would be equal"
                self.skipped.append(Skipped("gates", f"of {name}", reason))
                break
            scaled = original.divided(equalization.divisors(channels, values))
            plan = self._plan_for(scaled, replace(start, factors=factors), narrowing)
            kept.append(self._try("gates", f"of {' and '.join(gates)}, factors {choice}", plan, self.range_method))
        if any(kept):
            self._seen = _Seen(original, {})
        else:
            del self._structures[gates]  # a simulation is large
        return any(kept)

    def _plan_for(
        self, scaled: Statistics, start: QuantizationPlan, narrowing: Mapping[str, Range]
    ) -> QuantizationPlan:
        """Return a plan with the ranges of a scaled network by the method of the best plan.

        The statistics of a scaled network have no histograms. For methods that need them, the simulation gets ranges
        that are narrowed as the method narrowed those of the best plan; `ranges` tries the method itself afterwards.
        """
        method = self.range_method
        if method in WITHOUT_HISTOGRAMS:
            exact = planned(scaled, method)
            return replace(start, ranges=exact.ranges, method=exact.method)
        if self.as_file is not None:
            exact = calibrate(export.edited(self.network, start), self.samples, method)
            return replace(start, ranges=exact.ranges, method=exact.method)
        ranges = {
            point: nudged(low * narrowing[point][0], high * narrowing[point][1]) if point in narrowing else (low, high)
            for point, (low, high) in select(scaled, MINMAX).items()
        }
        return replace(start, ranges=ranges)

    def bias(self) -> None:
        """Try to shift the mean of every layer's outputs back to that of the float model."""
        plan = self.plan
        shifts = bias_correction.measured_shifts(self.simulation, plan, self.ordinary, self.progress)
        self._try("bias", "measured shift", replace(plan, bias_shifts=shifts), self.range_method)

    def rounding(self) -> None:
        """Try AdaRound instead of rounding to the nearest step."""
        plan = self.plan
        network = export.edited(self._compared, plan)
        chosen = adaround.rounded_up(network, self.ordinary, self.progress)
        self._try("rounding", "adaround", replace(plan, rounding=chosen), self.range_method)

    @property
    def simulation(self) -> Simulation:
        """The simulation of the network of the best plan, without a softmax at its end."""
        return self._with_gates(self._best.plan.separated_gates if self._best else ()).simulation

    @property
    def _compared(self) -> Network:
        """The network whose outputs are compared, without separated gates."""
        return self._with_gates(()).compared

    @property
    def range_method(self) -> str:
        """The method that chose the ranges of the best plan; minmax if the plan came from a file."""
        assert self._best is not None
        return self._best.range_method

    @property
    def plan(self) -> QuantizationPlan:
        """The best plan so far."""
        assert self._best is not None
        return self._best.plan

    @property
    def content(self) -> bytes:
        """The best plan as a .tflite file."""
        assert self._best is not None
        if self._best.content is not None and self._compared is self.network:
            return self._best.content
        return export.convert(self.network, self.plan, self.io)

    def methods_left(self, methods: Sequence[str]) -> list[str]:
        """Return the range methods that were not tried with the factors of the best plan."""
        exact = self.as_file is not None or self.range_method in WITHOUT_HISTOGRAMS
        return [method for method in methods if method != self.range_method or not exact]

    def simulation_agrees(self) -> bool:
        """Convert the best plan; return whether its file is as close to the float model as the simulation said.

        Raises:
            FloatOperatorsError: an operator would stay float.
        """
        assert self._best is not None
        if self.as_file is not None:
            return True
        content = export.convert(self._compared, self.plan, self.io)
        self._best = replace(self._best, content=content)
        count = min(FEW_SAMPLES, len(self.held_out))
        ratios = self.judge.snr_db(self._float_outputs[:count], file_outputs(content, self.held_out[:count]))
        simulated = float(np.median(self._best.snr_db[:count]))
        return float(np.median(ratios)) > min(simulated - MAX_LOSS_DB, SUFFICIENT_DB)

    def to_json(self) -> list[dict[str, Any]]:
        """The trials as plain maps."""
        return [asdict(trial) for trial in self.trials]

    def _try(self, step: Step, choice: str, plan: QuantizationPlan, range_method: str) -> bool:
        """Compare a plan with the best one so far; return whether it replaces that."""
        candidate = _Candidate(plan, range_method)
        best = self._best
        if best is not None and self.as_file is None:
            candidate = self._run(candidate, FEW_SAMPLES)
        if best is None or candidate.gain(best).is_possible:
            candidate = self._run(candidate, FIRST_SAMPLES)
        kept = best is None or candidate.gain(best).is_significant
        if best is not None and not kept and candidate.gain(best).is_possible:
            candidate = self._run(candidate, len(self.held_out))
            self._best = self._run(best, len(self.held_out))
            kept = candidate.gain(self._best).is_significant
        if kept:
            self.trials = [replace(trial, kept=False) if trial.step == step else trial for trial in self.trials]
            self._best = candidate
        self._tried.append(candidate)
        measured_on: Literal["simulation", "file"] = "simulation" if self.as_file is None else "file"
        self.trials.append(Trial(step, choice, len(candidate.agreement), 0.0, 0.0, kept, measured_on))
        self._compare_trials()
        return kept

    def _compare_trials(self) -> None:
        """Give all trials their measurements on the samples that all of them were run on."""
        count = min(len(candidate.agreement) for candidate in self._tried)
        self.trials = [
            replace(
                trial,
                snr_db=round(float(candidate.snr_db[:count].mean()), 2),
                agreement=round(float(candidate.agreement[:count].mean()), 4),
            )
            for trial, candidate in zip(self.trials, self._tried, strict=True)
        ]

    def _run(self, candidate: _Candidate, count: int) -> _Candidate:
        """Run a candidate on the first `count` held-out samples; those that it ran on before are not repeated."""
        part = slice(len(candidate.agreement), count)
        if len(self.held_out[part]) == 0:
            return candidate
        content = candidate.content
        if self.as_file is None:
            simulation = self._with_gates(candidate.plan.separated_gates).simulation
            simulation.use_plan(candidate.plan)
            outputs = simulation.outputs(self.held_out[part])
        else:
            content = content or export.convert(self._compared, candidate.plan, self.io)
            outputs = self.as_file(content, self.held_out[part])
        expected = self._float_outputs[part]
        return replace(
            candidate,
            content=content,
            snr_db=np.concatenate([candidate.snr_db, self.judge.snr_db(expected, outputs)]),
            agreement=np.concatenate([candidate.agreement, self.judge.same(expected, outputs)]),
            energies=_joined(candidate.energies, self.judge.energies(expected, outputs)),
        )


class _Structure:
    """A network with some gates separated, and what is computed once for it.

    Attributes:
        network: in canonical form.
        compared: the network without a softmax at its end.
        channels: the channels that can be scaled.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.compared = without_softmax(network)
        self.channels = equalization.follow(network, relu6=True)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulation of `compared`."""
        return Simulation(self.compared)

    def careful_channels(self, original: Statistics) -> tuple[ChannelGroups, NDArray[np.float64]]:
        """Return the channels that can be scaled, and the least factor of each; from statistics without factors."""
        tops = {tensor: original.extremes[tensor].largest(100) for tensor in equalization.clipped(self.network)}
        return equalization.careful(self.channels, tops)

    def factors(
        self, original: Statistics, channels: ChannelGroups, least: NDArray[np.float64]
    ) -> dict[str, NDArray[np.float64]]:
        """Return factors to try, by channel number; `original` are statistics of the network without factors."""
        tensors = equalization.weighted_outputs(self.network)
        largest = {tensor: original.extremes[tensor].largest(99) for tensor in tensors}
        candidates = {"from weights": equalization.from_weights(self.network, channels, least)}
        for share in SHARES:
            factors = equalization.from_activations(self.network, channels, largest, share, least)
            candidates[f"from activations, {share:g}"] = factors
        return candidates


def _joined(first: Energies | None, second: Energies | None) -> Energies | None:
    return second if first is None or second is None else np.concatenate([first, second])


@dataclass(frozen=True)
class _Seen:
    """Statistics, and the factors of the network that they were collected from."""

    statistics: Statistics
    factors: Factors

    def without_factors(self, channels: ChannelGroups) -> Statistics:
        """Return the statistics of the network without the factors."""
        by_number = equalization.by_number(channels, self.factors)
        return self.statistics.divided(equalization.divisors(channels, 1 / by_number))


@dataclass(frozen=True)
class _Candidate:
    """A plan, and by held-out sample how close it is to the float model.

    Attributes:
        plan: the plan.
        range_method: the method that chose its ranges.
        content: its file, if it was converted.
        snr_db: signal-to-noise ratio of each sample.
        agreement: agreement of each sample, from 0 to 1.
        energies: the energy of the error of each sample and output [n, outputs]; None to compare by `snr_db`.
    """

    plan: QuantizationPlan
    range_method: str
    content: bytes | None = None
    snr_db: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    agreement: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    energies: Energies | None = None

    def gain(self, other: _Candidate) -> _Gain:
        """Return the gain over another candidate, on the samples that both were run on."""
        count = min(len(self.agreement), len(other.agreement))
        if count == 0:
            return _Gain(0.0, np.inf)
        if self.energies is not None and other.energies is not None:
            return _gain_of_energies(self.energies[:count], other.energies[:count])
        return _mean_gain(self.snr_db[:count] - other.snr_db[:count])


@dataclass(frozen=True)
class _Gain:
    """A mean gain in dB, and its standard error."""

    mean: float
    error: float

    @property
    def is_significant(self) -> bool:
        """Return whether it is more than chance."""
        return self.mean > max(MIN_GAIN_DB, SIGNIFICANT * self.error)

    @property
    def is_possible(self) -> bool:
        """Return whether more samples may show that it is significant."""
        return self.mean + SIGNIFICANT * self.error > MIN_GAIN_DB


def _gain_of_energies(energies: Energies, other: Energies) -> _Gain:
    """Return the mean gain in dB over samples and outputs; if an output loses in total, its loss.

    The samples decide, each with the same weight: their mean has a small standard error. But a large error in few of
    them (a detector finds something in few photos) hardly moves that mean, so the energies summed over all samples
    have to gain too, and no output may lose much: none pays for the others.
    """
    total, other_total = energies.sum(axis=0), other.sum(axis=0)
    totals = 10 * np.log10(other_total / total)
    worst = int(totals.argmin())
    if totals[worst] < -MAX_OUTPUT_LOSS_DB:
        return _gain_of_totals(energies[:, [worst]], other[:, [worst]])
    if totals.mean() < 0:
        return _gain_of_totals(energies, other)
    return _mean_gain(10 * np.log10(other / energies).mean(axis=1))


def _gain_of_totals(energies: Energies, other: Energies) -> _Gain:
    """Return the gain in the ratio of the summed energies, averaged over outputs; its error by the jackknife."""
    total, other_total = energies.sum(axis=0), other.sum(axis=0)
    gain = float(np.mean(10 * np.log10(other_total / total)))
    count = len(energies)
    if count < 2:
        return _Gain(gain, 0.0)
    # Source: Efron and Stein, The Jackknife Estimate of Variance, 1981.
    without = np.mean(10 * np.log10((other_total - other) / (total - energies)), axis=1)
    return _Gain(gain, float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())))


def _mean_gain(gains: NDArray[np.float64]) -> _Gain:
    """Return the mean of the gains of samples, and its standard error."""
    error = float(gains.std(ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else 0.0
    return _Gain(float(gains.mean()), error)


def _are_equal(first: QuantizationPlan, second: QuantizationPlan) -> bool:
    """Return whether two plans differ by less than EQUAL_RANGES in every range, and in nothing else."""
    if first.separated_gates != second.separated_gates:
        return False
    if (first.factors, first.bias_shifts, first.rounding) != (second.factors, second.bias_shifts, second.rounding):
        return False
    limits = np.array([(*first.ranges[point], *second.ranges[point]) for point in second.ranges])
    width = limits[:, 1] - limits[:, 0]
    differences = np.abs(limits[:, :2] - limits[:, 2:]).max(axis=1)
    return bool((differences <= EQUAL_RANGES * width).all())


def _are_close(first: Factors, second: Factors) -> bool:
    """Return whether two sets of factors are the same but for rounding."""
    return first.keys() == second.keys() and all(
        np.allclose(values, second[name], rtol=0.01) for name, values in first.items()
    )


def _are_small(factors: Factors) -> bool:
    """Return whether factors change no channel by more than EQUAL_CHANNELS."""
    largest = [np.abs(np.log(values)).max() for values in factors.values()]
    return bool(max(largest, default=0.0) < np.log(EQUAL_CHANNELS))


def _narrowing(plan: QuantizationPlan, statistics: Statistics) -> dict[str, Range]:
    """Return by point the ends of a plan's range, divided by those of the range of all values."""
    widest = select(statistics, MINMAX)

    def part(end: float, widest_end: float) -> float:
        return end / widest_end if widest_end else 1.0

    return {
        point: (part(low, widest[point][0]), part(high, widest[point][1]))
        for point, (low, high) in plan.ranges.items()
        if point not in statistics.prescribed
    }


def file_outputs(content: bytes, samples: Samples) -> Outputs:
    """Run a .tflite file with the default kernels, without a delegate: [n, outputs]."""
    with tempfile.TemporaryDirectory(prefix="coralline-") as folder:
        path = Path(folder) / "model.tflite"
        path.write_bytes(content)
        return LoadedModel(path, reproducible=True).scores(samples)
