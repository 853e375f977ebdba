"""Search for the best plan of post-training quantization: a change is measured, and kept only if it helps.

Candidates are compared with the float model, sample by sample, on held-out samples. Each candidate is a .tflite file:
the network is converted once, and the files of other plans follow by edits (`conversion`). Statistics of the
activations are collected once; the statistics of an equalized network follow from the collected ones, since each
channel of the equalized network is the original channel divided by a factor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.core.progress import SILENT, Phase, Progress
from compress.learning.quantization import (
    activation_statistics,
    adaround,
    bias_correction,
    diagnostics,
    equalization,
    export,
    quantizer_placement,
)
from compress.learning.quantization.activation_statistics import Statistics
from compress.learning.quantization.calibration import planned
from compress.learning.quantization.conversion import ConvertedNetwork
from compress.learning.quantization.plan import LEVELS, QuantizationPlan, edited, nudged
from compress.learning.quantization.quantizer_placement import without_softmax
from compress.learning.quantization.ranges import MINMAX, WITHOUT_HISTOGRAMS, Range, mse, select
from compress.learning.quantization.simulation import Simulation
from compress.model.ir.keras_graph import LayerOutput, Network, build
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
SUFFICIENT_DB = 30.0
"""Signal-to-noise ratio above which a plan is good enough without separated gates; chosen."""
FEW_SAMPLES = 16
"""Held-out samples that show which candidates are clearly worse."""
FIRST_SAMPLES = 128
"""Held-out samples that every other candidate is run on; if these do not decide, it is run on all."""
SHARES = (0.5, 0.8)
"""Parts of the imbalance of activations that move into the weights."""
EQUAL_RANGES = 1 / LEVELS
"""Ranges whose ends differ by no more than this part of their width, one step, count as equal."""
EQUAL_CHANNELS = 1.25
"""Factors between 1 / this and this count as 1: rounding errors change by less than 2 dB."""
EFFECT_SAMPLES = 64
"""Samples for the effects of values on the outputs, at most; chosen."""
LARGE_BATCHES = 16
"""Batches of large activations (`activation_statistics.batch_size`) for the same, since derivatives take long; chosen:
sixteen photos are enough for YOLOX-nano, eight are not."""
MAX_GATES = 2
"""Activations whose gates are separated, one after the other."""
COARSE = 0.02
"""Least mean share of rounding in the channels in front of a SiLU for which separating its gate is tried. In YOLOX-nano
the first SiLU has 0.16, the next one 0.011; tensors with channels of similar size have 0.0001."""


@dataclass(frozen=True)
class PlanCandidate:
    """A plan, and by held-out sample how close it is to the float model.

    Attributes:
        plan: the plan.
        range_method: the method that chose its ranges; minmax if the plan came from a file.
        snr_db: signal-to-noise ratio of each sample.
        agreement: agreement of each sample, from 0 to 1.
        energies: the energy of the error of each sample and output [n, outputs]; None to compare by `snr_db`.
        differences: the energy of what a user sees of the error [n, parts]; None if the judge does not know it.
    """

    plan: QuantizationPlan
    range_method: str
    snr_db: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    agreement: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    energies: Energies | None = None
    differences: Energies | None = None

    def gain(self, other: PlanCandidate) -> _Gain:
        """Return the gain over another candidate, on the samples that both were run on.

        The differences that a user sees decide if they are more than chance. Otherwise all values of the outputs
        decide: their comparison has less noise. If the values are worse, but the user seems to see a gain, the gain is
        uncertain, and more samples have to show it.
        """
        count = min(len(self.agreement), len(other.agreement))
        if count == 0:
            return _Gain(0.0, np.inf)
        gain = self._gain_of_values(other, count)
        if self.differences is None or other.differences is None:
            return gain
        seen = _mean_gain(10 * np.log10(other.differences[:count] / self.differences[:count]).mean(axis=1))
        return seen if seen.is_certain or (seen.mean > 0 and not gain.is_possible) else gain

    def _gain_of_values(self, other: PlanCandidate, count: int) -> _Gain:
        if self.energies is not None and other.energies is not None:
            return _gain_of_energies(self.energies[:count], other.energies[:count])
        return _mean_gain(self.snr_db[:count] - other.snr_db[:count])


@dataclass(frozen=True)
class _TriedPlan:
    """A candidate as it was compared, the change that it makes, and whether the change is in the plan."""

    step: Step
    choice: str
    candidate: PlanCandidate
    kept: bool


@dataclass(frozen=True)
class SearchResult:
    """The best plan so far, and the candidates that were compared with it.

    Attributes:
        best: the best candidate.
        tried: the candidates that were tried, in order.
        skipped: the candidates that were not tried.
        warnings: unusual activations, or a plan that may not fit.
    """

    best: PlanCandidate
    tried: tuple[_TriedPlan, ...]
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> QuantizationPlan:
        """The best plan."""
        return self.best.plan

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The candidates that were tried, with their measurements on the samples that all of them were run on."""
        count = min(len(tried.candidate.agreement) for tried in self.tried)
        return tuple(
            Trial(
                step=tried.step,
                choice=tried.choice,
                samples=len(tried.candidate.agreement),
                snr_db=round(float(tried.candidate.snr_db[:count].mean()), 2),
                agreement=round(float(tried.candidate.agreement[:count].mean()), 4),
                kept=tried.kept,
                difference_db=_decibels(tried.candidate.differences, count),
            )
            for tried in self.tried
        )

    def with_skipped(self, step: Step, choice: str, reason: str) -> SearchResult:
        """Return the same with one more candidate that was not tried."""
        return replace(self, skipped=(*self.skipped, Skipped(step, choice, reason)))


@dataclass(frozen=True)
class SearchState:
    """The input and the result of a step of the search.

    Attributes:
        result: the best plan so far, and the candidates.
        samples: the calibration samples that its ranges come from.
        ordinary: the calibration samples without outliers.
        statistics: activations of the network with the gates of the best plan and with `factors`.
        factors: the factors of the network that the statistics were collected from.
    """

    result: SearchResult
    samples: Samples
    ordinary: Samples
    statistics: Statistics
    factors: Factors

    @property
    def plan(self) -> QuantizationPlan:
        """The best plan so far."""
        return self.result.plan

    @property
    def range_method(self) -> str:
        """The method that chose the ranges of the best plan."""
        return self.result.best.range_method


@dataclass(frozen=True)
class Search:
    """A search for the plan of one network. `ranges` is its first step; each step takes a state and returns the next.

    Attributes:
        network: in canonical form.
        samples: calibration samples [n, ...].
        held_out: samples that candidates are compared on [m, ...].
        io: type of the file's input and output.
        outputs: computes the outputs of a file.
        float_file: the float file of the network, if there is one already.
        judge: compares outputs.
        progress: receives the number of candidates that are done.
    """

    network: Network
    samples: Samples
    held_out: Samples
    io: export.InputType = "int8"
    outputs: FileOutputs = field(default_factory=lambda: accelerated_outputs)
    float_file: bytes | None = None
    judge: Judge = field(default_factory=ByClass)
    progress: Progress = SILENT
    _structures: dict[Gates, _Structure] = field(default_factory=dict)
    _statistics: dict[tuple[Any, ...], Statistics] = field(default_factory=dict)

    def finished(self, plan: QuantizationPlan) -> SearchResult:
        """Return a finished plan as the result.

        Raises:
            StageError: the plan is for another network.
        """
        export.refuse_mismatch(self.network, plan)  # before its network is built
        result = self._first("plan", plan.method, plan, MINMAX)
        return replace(result, warnings=tuple(diagnostics.about_plan(plan, self.network)))

    def ranges(self, methods: Sequence[str], state: SearchState | None = None) -> SearchState:
        """Try methods to choose ranges, with the gates and factors so far; leave out outliers if that is better.

        Args:
            methods: one or more of `ranges.METHODS`.
            state: the state so far; None at the beginning of the search.
        """
        start = state.plan if state else QuantizationPlan({}, "")
        samples = state.samples if state else self.samples
        ordinary_samples = state.ordinary if state else self.samples
        candidates = Phase("candidates", len(methods) * FIRST_SAMPLES, unit="candidate")
        self.progress.plan(replace(activation_statistics.CALIBRATION, weight=len(samples)), candidates)
        everything = ordinary = self._collected(start, samples, methods)
        outliers = activation_statistics.outliers(everything)
        attempts = []
        if outliers:
            attempts.append((methods[0], methods[0], everything))
            ordinary_samples = np.delete(samples, outliers, axis=0)
            ordinary = self._collected(start, ordinary_samples, methods)
        suffix = " without outliers" if outliers else ""
        attempts += [(method, f"{method}{suffix}", ordinary) for method in methods]
        is_ordinary = False
        with self.progress.phase(candidates):
            if state is None:
                method, choice, statistics = attempts.pop(0)
                result = self._first("ranges", choice, planned(statistics, method), method)
            else:
                result = state.result
            for number, (method, choice, statistics) in enumerate(attempts, 1):
                better = self._try_ranges(result, method, choice, statistics, start)
                is_ordinary = is_ordinary or (better.plan is not result.plan and statistics is ordinary)
                result = better
                self.progress.update(number, len(attempts))
        if outliers or not result.warnings:
            result = replace(result, warnings=tuple(diagnostics.about_activations(everything, outliers)))
        if is_ordinary:
            return SearchState(result, ordinary_samples, ordinary_samples, ordinary, start.factors)
        return SearchState(result, samples, ordinary_samples, everything, start.factors)

    def _with_gates(self, gates: Gates) -> _Structure:
        """Return the network with some gates separated, and what is computed once for it."""
        if gates not in self._structures:
            self._structures[gates] = _Structure(self.network, gates)
        return self._structures[gates]

    def _collected(self, plan: QuantizationPlan, samples: Samples, methods: Sequence[str]) -> Statistics:
        """Collect what range methods and equalization need of the network with the gates and factors of a plan, once.

        Different samples have different numbers: outliers are left out, and no others are added.
        """
        histograms = not WITHOUT_HISTOGRAMS.issuperset(methods)
        key = (plan.separated_gates, len(samples), tuple(sorted(plan.factors.items())))
        known = self._statistics.get(key)
        if known is not None and (known.histograms or not histograms):
            return known
        structure = self._with_gates(plan.separated_gates)
        network = equalization.applied(structure.network, plan.factors)
        by_channel = equalization.observed_tensors(network, structure.channels)
        original, changed = None, set[LayerOutput]()
        if plan.separated_gates or plan.factors:
            original = self._collected(QuantizationPlan({}, ""), samples, methods)
            changed = structure.changed(plan.factors, by_channel, original)
        self._statistics[key] = activation_statistics.collect(
            network,
            samples,
            histograms=histograms,
            by_channel=by_channel,
            before=original,
            changed=changed,
            progress=self.progress,
        )
        return self._statistics[key]

    def _try_ranges(
        self, result: SearchResult, method: str, choice: str, statistics: Statistics, start: QuantizationPlan
    ) -> SearchResult:
        """Try the ranges of one method with the gates and factors of a plan."""
        plan = replace(planned(statistics, method), factors=start.factors, separated_gates=start.separated_gates)
        if _are_equal(result.plan, plan):
            return result.with_skipped("ranges", choice, f"its ranges equal those of {result.best.range_method}")
        return self._try(result, "ranges", choice, plan, method)

    def equalized(self, state: SearchState) -> SearchState:
        """Try factors from weights and from activations."""
        structure = self._with_gates(state.plan.separated_gates)
        by_number = equalization.by_number(structure.channels, state.factors)
        original = state.statistics.divided(equalization.divisors(structure.channels, 1 / by_number))
        candidates = structure.scaled(original)
        result = state.result
        if not any(factors for factors, _ in candidates.values()):
            return replace(
                state,
                result=result.with_skipped("equalization", "factors", "no channel can be scaled, or all are balanced"),
            )
        narrowing = _narrowing(state.plan, state.statistics)
        for choice, (factors, scaled) in candidates.items():
            if _are_close(factors, result.plan.factors):
                continue
            largest = max((np.abs(np.log(values)).max() for values in factors.values()), default=0.0)
            if largest < np.log(EQUAL_CHANNELS):
                reason = f"all factors are between {1 / EQUAL_CHANNELS:g} and {EQUAL_CHANNELS:g}"
                result = result.with_skipped("equalization", choice, reason)
                continue
            plan = self._plan_for(state, scaled, replace(state.plan, factors=factors), narrowing)
            result = self._try(result, "equalization", choice, plan, state.range_method)
        return replace(state, result=result)

    def with_separated_gates(self, state: SearchState) -> SearchState:
        """Try to separate gates of activations in front of which 8 bits are too coarse, one after the other.

        Factors are part of it: only they make the steps of the first factor of the product finer. A plan that is good
        enough without is not worth the additional layer.
        """
        if state.result.best.snr_db.mean() > SUFFICIENT_DB:
            return state
        for name in self._coarse_activations(state.statistics)[:MAX_GATES]:
            separated = self._with_separated_gate(state, name)
            if separated.plan is state.plan:
                return separated
            state = separated
        return state

    def _coarse_activations(self, statistics: Statistics) -> list[str]:
        """Return the activations with a gate whose input has channels that are lost in rounding, the worst one first.

        The measure is the mean over channels of the share of the rounding noise, a twelfth of the squared step, in the
        variance of the rounded channel: within the samples, where most values are in six standard deviations, and
        between them.
        """
        widest = select(statistics, MINMAX)
        noise_shares = {}
        for name, activation in separate_gates.find(self.network).items():
            tensor = LayerOutput(activation.source)
            lowest, highest = widest[statistics.points[tensor]]
            noise = ((highest - lowest) / LEVELS) ** 2 / 12
            extremes = statistics.extremes[tensor]
            low, high = (ends.astype(np.float64) for ends in (extremes.low, extremes.high))
            variance = ((high - low).mean(axis=0) / 6) ** 2 + ((low + high) / 2).var(axis=0)
            noise_shares[name] = float(np.mean(noise / (noise + variance)))
        coarse = [name for name, share in noise_shares.items() if share > COARSE]
        return sorted(coarse, key=lambda name: -noise_shares[name])

    def _with_separated_gate(self, state: SearchState, name: str) -> SearchState:
        """Try to separate the gate of one more activation."""
        gates = (*state.plan.separated_gates, name)
        structure = self._with_gates(gates)
        source = separate_gates.source_of(structure.network, name)
        method = state.range_method
        original = self._collected(QuantizationPlan({}, "", separated_gates=gates), state.samples, [method])
        start = replace(planned(original, method), separated_gates=gates)
        narrowing = _narrowing(start, original)
        result = state.result
        # In front of a gate, channels differ in their activations: the factors from activations come first.
        for choice, (factors, scaled) in reversed(structure.scaled(original).items()):
            if source not in factors:
                reason = "its channels cannot be scaled, so the two layers would be equal"
                result = result.with_skipped("gates", f"of {name}", reason)
                break
            plan = self._plan_for(state, scaled, replace(start, factors=factors), narrowing)
            result = self._try(result, "gates", f"of {' and '.join(gates)}, factors {choice}", plan, method)
        if result.plan is state.plan:
            del self._structures[gates]
            return replace(state, result=result)
        return replace(state, result=result, statistics=original, factors={})

    def _plan_for(
        self, state: SearchState, scaled: Statistics, start: QuantizationPlan, narrowing: Mapping[str, Range]
    ) -> QuantizationPlan:
        """Return a plan with the ranges of a scaled network by the method of the best plan.

        The statistics of a scaled network have no histograms. For methods that need them, the full ranges
        are narrowed as the method narrowed the ranges of the best plan; `ranges` tries the method itself afterwards.
        """
        method = state.range_method
        if method in WITHOUT_HISTOGRAMS:
            exact = planned(scaled, method)
            return replace(start, ranges=exact.ranges, method=exact.method)
        ranges = {
            point: nudged(low * narrowing[point][0], high * narrowing[point][1]) if point in narrowing else (low, high)
            for point, (low, high) in select(scaled, MINMAX).items()
        }
        return replace(start, ranges=ranges)

    def with_weighted_ranges(self, state: SearchState) -> SearchState:
        """Try ranges with the least mean squared error in which each value counts by its effect on the outputs."""
        structure = self._with_gates(state.plan.separated_gates)
        network = equalization.applied(structure.compared, state.plan.factors)
        count = min(EFFECT_SAMPLES, LARGE_BATCHES * activation_statistics.batch_size(network))
        chosen = state.ordinary[:count]
        effects = activation_statistics.effects(network, chosen, self.judge, self.progress)
        if effects is None:
            return state
        statistics = replace(self._collected(state.plan, state.samples, (MINMAX,)), histograms=effects)
        known = [point for point, effect in effects.items() if effect.counts.any()]
        ranges = {point: nudged(*mse(statistics, point)) for point in known if point not in statistics.prescribed}
        method = f"mse of {len(chosen)} samples, weighted by the effect on the outputs"
        plan = replace(state.plan, ranges={**state.plan.ranges, **ranges}, method=method)
        return replace(state, result=self._try(state.result, "ranges", "weighted mse", plan, state.range_method))

    def with_corrected_biases(self, state: SearchState) -> SearchState:
        """Try to shift the outputs of every layer back by the median of their errors."""
        simulation = self.simulation(state.plan)
        shifts = bias_correction.measured_shifts(simulation, state.plan, state.ordinary, self.progress)
        plan = replace(state.plan, bias_shifts=shifts)
        return replace(state, result=self._try(state.result, "bias", "measured shift", plan, state.range_method))

    def with_adaround(self, state: SearchState) -> SearchState:
        """Try AdaRound instead of rounding to the nearest step."""
        network = edited(self._compared, state.plan)
        chosen = adaround.rounded_up(network, state.ordinary, self.progress)
        plan = replace(state.plan, rounding=chosen)
        return replace(state, result=self._try(state.result, "rounding", "adaround", plan, state.range_method))

    def simulation(self, plan: QuantizationPlan) -> Simulation:
        """Return the simulation of the network of a plan, without a softmax at its end."""
        return self._with_gates(plan.separated_gates).simulation

    @property
    def _compared(self) -> Network:
        """The network whose outputs are compared, without separated gates."""
        return self._with_gates(()).compared

    @cached_property
    def _float_outputs(self) -> Outputs:
        is_whole = self._compared is self.network
        content = self.float_file if self.float_file is not None and is_whole else None
        return self.outputs(content or export.convert_float(build(self._compared)), self.held_out)

    def content(self, result: SearchResult) -> bytes:
        """Return the best plan as a .tflite file.

        Raises:
            FloatOperatorsError: an operator would stay float.
        """
        structure = self._with_gates(result.plan.separated_gates)
        if structure.is_whole:
            return structure.file(result.plan, self.io)
        return export.convert(self.network, result.plan, self.io)

    def _first(self, step: Step, choice: str, plan: QuantizationPlan, range_method: str) -> SearchResult:
        """Return a plan as the best one, without a comparison."""
        best = self._run(PlanCandidate(plan, range_method), FIRST_SAMPLES)
        return SearchResult(best, (_TriedPlan(step, choice, best, kept=True),))

    def _try(
        self, result: SearchResult, step: Step, choice: str, plan: QuantizationPlan, range_method: str
    ) -> SearchResult:
        """Compare a plan with the best one so far, and keep the better one."""
        best, candidate = result.best, PlanCandidate(plan, range_method)
        candidate = self._run(candidate, FEW_SAMPLES)
        if candidate.gain(best).is_possible:
            candidate = self._run(candidate, FIRST_SAMPLES)
        if not candidate.gain(best).is_significant and candidate.gain(best).is_possible:
            candidate = self._run(candidate, len(self.held_out))
            best = self._run(best, len(self.held_out))
        kept = candidate.gain(best).is_significant
        earlier = result.tried
        if kept:
            earlier = tuple(replace(tried, kept=False) if tried.step == step else tried for tried in earlier)
        tried = (*earlier, _TriedPlan(step, choice, candidate, kept))
        return replace(result, best=candidate if kept else best, tried=tried)

    def _run(self, candidate: PlanCandidate, count: int) -> PlanCandidate:
        """Run a candidate on the first `count` held-out samples; those that it ran on before are not repeated."""
        part = slice(len(candidate.agreement), count)
        if len(self.held_out[part]) == 0:
            return candidate
        expected = self._float_outputs[part]
        content = self._with_gates(candidate.plan.separated_gates).file(candidate.plan, self.io)
        outputs = self.outputs(content, self.held_out[part])
        energies = self.judge.energies(expected, outputs)
        if candidate.energies is not None and energies is not None:
            energies = np.concatenate([candidate.energies, energies])
        differences = self.judge.difference_energies(expected, outputs)
        if candidate.differences is not None and differences is not None:
            differences = np.concatenate([candidate.differences, differences])
        return replace(
            candidate,
            snr_db=np.concatenate([candidate.snr_db, self.judge.snr_db(expected, outputs)]),
            agreement=np.concatenate([candidate.agreement, self.judge.same(expected, outputs)]),
            energies=energies,
            differences=differences,
        )


class _Structure:
    """A network with some gates separated, and what is computed once for it.

    Attributes:
        gates: the activations whose gates are separated.
        network: in canonical form.
        compared: the network without a softmax at its end.
        channels: the channels that can be scaled.
        is_whole: whether `compared` is the whole network.
    """

    def __init__(self, original: Network, gates: Gates) -> None:
        self.gates = gates
        self.network = separate_gates.separated(original, gates)
        self.compared = without_softmax(self.network)
        self.channels = equalization.follow(self.network, relu6=True)
        self._original = without_softmax(original)
        self.is_whole = self._original is original
        self._converted: ConvertedNetwork | None = None
        self._last: tuple[QuantizationPlan, bytes] | None = None

    def file(self, plan: QuantizationPlan, io: export.InputType) -> bytes:
        """Return the file of a plan for `compared`; that of the last plan is kept, which often runs on more samples.

        Raises:
            FloatOperatorsError: an operator would stay float.
        """
        if self._last is None:
            self._converted = ConvertedNetwork.of(self._original, plan, io)
        if self._last is None or self._last[0] is not plan:
            content = self._converted and self._converted.file(plan)
            self._last = plan, content or export.convert(self._original, plan, io)
        return self._last[1]

    @cached_property
    def simulation(self) -> Simulation:
        """The simulation of `compared`."""
        return Simulation(self.compared)

    def changed(self, factors: Factors, by_channel: Sequence[LayerOutput], original: Statistics) -> set[LayerOutput]:
        """Return the tensors of the network, scaled by factors, for which the original statistics do not hold."""
        numbered = equalization.by_number(self.channels, factors)
        divisors = equalization.divisors(self.channels, numbered)
        tensors = {*quantizer_placement.find(self.network), *by_channel}
        sources = {separate_gates.source_of(self.network, name) for name in self.gates}
        unknown = {tensor for tensor in tensors if tensor not in original.extremes or tensor.layer in sources}
        widths = {tensor: self.network.shapes[tensor][-1] for tensor in by_channel if tensor not in unknown}
        coarse = {tensor for tensor, width in widths.items() if original.extremes[tensor].low.shape[1] != width}
        return unknown | coarse | {tensor for tensor in tensors & divisors.keys() if (divisors[tensor] != 1).any()}

    def scaled(self, original: Statistics) -> dict[str, tuple[Factors, Statistics]]:
        """Return factors to try, and the statistics of the network scaled by them.

        `original` are the statistics of the network without factors.
        """
        tops = {tensor: original.extremes[tensor].largest(100) for tensor in equalization.clipped(self.network)}
        channels, least = equalization.careful(self.channels, tops)
        tensors = equalization.weighted_outputs(self.network)
        largest = {tensor: original.extremes[tensor].largest(99) for tensor in tensors}
        factors = {"from weights": equalization.from_weights(self.network, channels, least)}
        for share in SHARES:
            values = equalization.from_activations(self.network, channels, largest, share, least)
            factors[f"from activations, {share:g}"] = values
        return {
            choice: (
                equalization.by_layer(self.network, channels, values),
                original.divided(equalization.divisors(channels, values)),
            )
            for choice, values in factors.items()
        }


def _decibels(differences: Energies | None, count: int) -> float | None:
    """Return the mean of the differences over the first samples and all parts, in dB."""
    return None if differences is None else round(float(10 * np.log10(differences[:count]).mean()), 2)


@dataclass(frozen=True)
class _Gain:
    """A mean gain in dB, and its standard error."""

    mean: float
    error: float

    @property
    def is_significant(self) -> bool:
        """Return whether it is more than chance."""
        return self.is_certain and self.mean > 0

    @property
    def is_certain(self) -> bool:
        """Return whether it is a gain or a loss by more than chance."""
        return abs(self.mean) > max(MIN_GAIN_DB, SIGNIFICANT * self.error)

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


def file_outputs(content: bytes, samples: Samples, *, reproducible: bool = True) -> Outputs:
    """Run a .tflite file: [n, outputs]. `reproducible` is that of `LoadedModel`."""
    with tempfile.TemporaryDirectory(prefix="coralline-") as folder:
        path = Path(folder) / "model.tflite"
        path.write_bytes(content)
        return LoadedModel(path, reproducible=reproducible).scores(samples)


def accelerated_outputs(content: bytes, samples: Samples) -> Outputs:
    """Run a .tflite file with accelerated kernels, in half the time: candidates differ by more than kernels do.

    A file that the accelerated kernels refuse, such as one with extreme scales, runs with the others.
    """
    try:
        return file_outputs(content, samples, reproducible=False)
    except ModelError:
        return file_outputs(content, samples)
