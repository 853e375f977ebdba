"""Post-training quantization of a Keras model: from calibration samples to a full-integer .tflite file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.progress import SILENT, Phase, Progress
from compress.learning.quantization import adaround, attention_masks, debug, diagnostics, export, float_tflite
from compress.learning.quantization.export import FloatOperatorsError
from compress.learning.quantization.plan import QuantizationPlan, edited, gridded, restructured, weights_digest
from compress.learning.quantization.ranges import METHODS, MINMAX, WITHOUT_HISTOGRAMS
from compress.learning.quantization.search import FIRST_SAMPLES, Search, SearchResult, SearchState
from compress.learning.quantization.settings import PostTrainingSettings
from compress.learning.quantization.simulation import Simulation
from compress.learning.training.phases import BACKWARD, BUILD
from compress.model.ir import keras_graph, weight_sparsity
from compress.model.ir.keras_graph import Network
from compress.model.ir.passes import fold, separate_gates
from compress.model.tflite import graph, macs
from compress.results.quantization import LayerError, SeparatedGate, Skipped, Trial
from compress.tasks.base import Judge
from compress.tasks.classification import ByClass

Samples = NDArray[np.float32]
Note = Callable[[str], None]


@dataclass(frozen=True)
class QuantizationResult:
    """A full-integer .tflite file, and how it was made.

    Attributes:
        content: the file.
        method: ptq, or qat if its weights were trained with fake quantization.
        ranges: how the activation ranges were chosen, for people.
        network: the network that the plan is for, in canonical form; None if the converter chose the ranges.
        plan: the plan; None if the converter chose the ranges.
        range_method: the method that chose the ranges of the plan.
        trials: the candidates that were tried.
        skipped: the candidates that were not tried.
        layer_errors: the rounded tensors, the one that costs most first; empty without a plan.
        warnings: what is unusual about the samples, the model or the result.
        training: facts of the training with fake quantization, if there was one.
        own_scales: with `scales_from`, the network quantized with calibrated ranges, to compare; otherwise None.
    """

    content: bytes
    method: Literal["ptq", "qat"]
    ranges: str
    network: Network | None = None
    plan: QuantizationPlan | None = None
    range_method: str = MINMAX
    trials: tuple[Trial, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    layer_errors: tuple[LayerError, ...] = ()
    warnings: tuple[str, ...] = ()
    training: Facts = field(default_factory=dict)
    own_scales: bytes | None = None

    def calibrated(self) -> tuple[Network, QuantizationPlan]:
        """Return the network and its plan, where the converter did not choose the ranges."""
        assert self.network is not None
        assert self.plan is not None
        return self.network, self.plan

    def to_json(self) -> Facts:
        """Return the facts of a stage, without the file."""
        facts: Facts = {"kept": self.method, "ranges": self.ranges, "warnings": list(self.warnings)}
        if self.network is None or self.plan is None:
            return facts
        rounded = gridded(edited(self.network, self.plan), self.plan)
        return {
            **facts,
            "separated_gates": [asdict(gate) for gate in separated_gates(self.network, self.plan)],
            **self.training,
            "tried": [asdict(trial) for trial in self.trials],
            "not_tried": [asdict(skipped) for skipped in self.skipped],
            "layers": debug.to_json(list(self.layer_errors)),
            "zeros": round(weight_sparsity.zeros(weight_sparsity.by_layer(rounded)), 4),
        }


def separated_gates(network: Network, plan: QuantizationPlan) -> list[SeparatedGate]:
    """Return the activations whose gates a plan separates, the layer that it copies for each, and its MACs."""
    separated = restructured(network, plan)
    gates = []
    for name in plan.separated_gates:
        copied = separate_gates.source_of(separated, name)
        assert copied is not None  # the network was restructured by this plan
        gates.append(SeparatedGate(name, copied, separate_gates.added_macs(separated, name)))
    return gates


def quantize(
    model: Any,
    samples: Samples,
    held_out: Samples,
    settings: PostTrainingSettings | None = None,
    *,
    float_file: bytes | None = None,
    plan: QuantizationPlan | None = None,
    judge: Judge | None = None,
    note: Note = lambda text: None,
    progress: Progress = SILENT,
    are_rows: bool = False,
) -> QuantizationResult:
    """Quantize a Keras model without training.

    Args:
        model: a functional or sequential Keras 3 model.
        samples: preprocessed calibration samples [n, ...].
        held_out: further preprocessed samples [m, ...], on which candidates are compared with the float model.
        settings: what to try; None for the defaults.
        float_file: the model's float .tflite file, if there is one already.
        plan: a finished plan, which is applied instead of a search.
        judge: compares outputs; None for classifiers.
        note: receives lines of text for the user.
        progress: receives phases and steps.
        are_rows: whether the samples are rows of a lookup that was cut off the model (`ir.passes.cut_lookup`).

    Raises:
        StageError: the plan is for another model, or a value is not finite, or a layer has no 8-bit form, or the
            converter's own calibration crashes.
        ModelError: TensorFlow Lite has no operator for a layer.
    """
    settings = settings or PostTrainingSettings()
    network = keras_graph.read(model)
    about_model = diagnostics.about_model(network, samples, are_rows=are_rows)
    warnings = [*diagnostics.about_samples(samples), *about_model]
    network, limits = attention_masks.limited(network, samples)
    float_file = None if limits else float_file
    for text in (*warnings, *limits):
        note(text)
    try:
        result = _by_plan(network, samples, held_out, settings, float_file, plan, judge or ByClass(), note, progress)
    except FloatOperatorsError as error:
        if plan is not None:
            raise
        note(f"{error.what}: using the converter's own calibration instead")
        # In another process: the converter's calibrator crashes with some loops, which the canonical form has not.
        float_file = export.convert_float(keras_graph.build(fold.canonical(network)))
        content = float_tflite.convert(float_file, samples, settings.io)
        result = QuantizationResult(content, "ptq", f"chosen by the converter, because {error.what}")
    return replace(result, warnings=(*warnings, *result.warnings))


def quantize_file(content: bytes, samples: Samples, io: export.InputType = "int8") -> QuantizationResult:
    """Quantize a float .tflite file without layers; the arguments and errors are those of `float_tflite.convert`."""
    content_int8 = float_tflite.convert(content, samples, io)
    warnings = tuple(diagnostics.about_samples(samples))
    return QuantizationResult(
        content_int8, "ptq", "chosen by the converter, for a file without layers", warnings=warnings
    )


def _by_plan(
    network: Network,
    samples: Samples,
    held_out: Samples,
    settings: PostTrainingSettings,
    float_file: bytes | None,
    plan: QuantizationPlan | None,
    judge: Judge,
    note: Note,
    progress: Progress,
) -> QuantizationResult:
    """Quantize a network by the best plan, or by a finished one.

    Raises:
        FloatOperatorsError: an operator would stay float.
    """
    canonical = fold.canonical(network)
    phases = _search_phases(settings, len(samples))
    progress.plan(*(phases.values() if plan is None else ()), LAYERS)
    search = Search(canonical, samples, held_out, settings.io, float_file=float_file, judge=judge, progress=progress)
    searched = search.finished(plan) if plan is not None else _searched(search, network, settings, phases)
    for gate in separated_gates(canonical, searched.plan):
        note(f"the gate of {gate.activation} has its own copy of {gate.copied}: {gate.macs:,} more MACs")
    for warning in searched.warnings:
        note(warning)
    result = QuantizationResult(
        search.content(searched),
        "ptq",
        searched.plan.method,
        range_method=searched.best.range_method,
        trials=searched.trials,
        skipped=searched.skipped,
        warnings=searched.warnings,
    )
    with progress.phase(LAYERS):
        return described(result, canonical, searched.plan, held_out, search.simulation(searched.plan), progress)


def described(
    result: QuantizationResult,
    network: Network,
    plan: QuantizationPlan,
    held_out: Samples,
    simulation: Simulation | None = None,
    progress: Progress = SILENT,
) -> QuantizationResult:
    """Return the result with its network, its plan and the errors of its layers.

    The simulation is that of the plan's network (`plan.restructured`) without a softmax at its end; without one it is
    built.
    """
    trained = result.method == "qat"
    plan = replace(plan, weights_digest=weights_digest(network), trained_with_rounding=trained)
    count = debug.affordable_samples(macs.total_macs(graph.parse(result.content)))
    errors = debug.errors(network, plan, held_out[:count], simulation, progress)
    return replace(result, network=network, plan=plan, layer_errors=tuple(errors))


LAYERS = Phase("errors of the layers", BUILD, unit="sample")


def _search_phases(settings: PostTrainingSettings, samples: int) -> dict[str, Phase]:
    """Return the phases of the search with a number of calibration samples, by name.

    The costs are in the unit of `compress.learning.training.phases`.
    """
    candidate = float(FIRST_SAMPLES)
    methods = len(METHODS) if settings.ranges == "auto" else 1
    phases = [Phase("activation ranges", BUILD + samples + methods * candidate)]
    if settings.equalize == "auto":
        phases.append(Phase("equalization", 3 * candidate))
    if settings.equalize == "auto" and settings.separate_gates == "auto":
        phases.append(Phase("separate gates", candidate))
    if settings.ranges == "auto":
        phases.append(Phase("effects on the outputs", BUILD + candidate, unit="sample"))
    if settings.correct_bias == "auto":
        phases.append(Phase("bias correction", BUILD / 2 + candidate, unit="layer"))
    if settings.rounding == "adaround":
        cost = 2 * BUILD + BACKWARD * adaround.STEPS * adaround.BATCH
        phases.append(Phase("AdaRound", cost, unit="layer"))
    return {phase.name: phase for phase in phases}


def search_cost(settings: PostTrainingSettings, samples: int) -> float:
    """Return the expected cost of `quantize`."""
    phases = [*_search_phases(settings, samples).values(), LAYERS]
    return sum(phase.weight for phase in phases)


def _searched(
    search: Search, network: Network, settings: PostTrainingSettings, phases: Mapping[str, Phase]
) -> SearchResult:
    """Try what the settings allow, and keep what helps."""
    phase = search.progress.phase
    # Factors would give each channel of a clustered kernel other values than its neighbours'.
    clustered = any(kernel.clustered for kernel in weight_sparsity.by_layer(network).values())
    equalizes = settings.equalize == "auto" and not clustered
    methods = [*METHODS] if settings.ranges == "auto" else [settings.ranges]
    with phase(phases["activation ranges"]):
        state = search.ranges(methods)
    equalized_with: set[str] = set()
    # The best method for channels of very different sizes may not be the best one for equalized channels.
    while equalizes and state.range_method not in equalized_with:
        equalized_with.add(state.range_method)
        with phase(phases["equalization"]):
            state = _with_best_ranges(search, state, search.equalized(state), methods)
    if equalizes and settings.separate_gates == "auto":
        with phase(phases["separate gates"]):
            state = _with_best_ranges(search, state, search.with_separated_gates(state), methods)
    if settings.ranges == "auto":
        with phase(phases["effects on the outputs"]):
            state = search.with_weighted_ranges(state)
    if settings.correct_bias == "auto":
        with phase(phases["bias correction"]):
            state = search.with_corrected_biases(state)
    if settings.rounding == "adaround":
        with phase(phases["AdaRound"]):
            state = search.with_adaround(state)
    return state.result


def _with_best_ranges(search: Search, before: SearchState, state: SearchState, methods: Sequence[str]) -> SearchState:
    """After a step that changed the plan, try the range methods that were not tried with its factors."""
    if state.plan is before.plan:
        return state
    exact = state.range_method in WITHOUT_HISTOGRAMS
    left = [method for method in methods if method != state.range_method or not exact]
    return search.ranges(left, state) if left else state
