"""The search for the best sub-network of a model within limits: training, evolution, extraction."""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.architecture_search import training
from compress.architecture_search.calibration import calibrate
from compress.architecture_search.costs import SubNetworkCosts
from compress.architecture_search.elastic import ElasticNetwork, SubNetwork, find
from compress.architecture_search.evolution import EvaluatedSubNetwork, Evolution
from compress.architecture_search.extraction import extracted
from compress.architecture_search.network import SharedNetwork
from compress.artifact import SELECTED, Facts
from compress.data.rows import rows as rows_of
from compress.errors import StageError
from compress.files import write_atomically
from compress.ir import keras_graph
from compress.ir.keras_graph import LayerOutput, Network
from compress.ir.tensorflow import set_weights
from compress.progress import Phase, Progress
from compress.pruning.cost import Convert, CostFigures, TrialConversion
from compress.pruning.importance import produces_channels
from compress.stage import Context
from compress.tasks import task_of
from compress.tasks.base import Quality, QualityMetric
from compress.training import loop
from compress.training.bn_recalibration import recalibrate_batch_norms
from compress.training.loop import TrainingSettings
from compress.training.phases import BACKWARD, BUILD, validation_cost

WEIGHTS = "shared_network.npz"
VALUES = "sub_networks.json"
BATCH = 256
"""Number of validation samples that a sub-network processes at once."""
SAVED_EVERY = 10
"""Number of evaluated sub-networks after which their values are written, for a run that is interrupted."""
MAX_CONVERSIONS = 20
"""Trial conversions to verify the chosen sub-network; another one is chosen where its file is over a limit."""


@dataclass(frozen=True)
class Limits:
    """The largest costs of the result; None: no limit."""

    latency_ms: float | None = None
    size_bytes: int | None = None
    streamed_bytes: int | None = None

    def exceeded(self, figures: CostFigures) -> list[str]:
        """Return each limit that some costs exceed, with both values."""
        costs = figures.to_json()
        limits = self.to_json().items()
        return [f"{name} {costs[name]:,} (limit {limit:,})" for name, limit in limits if costs[name] > limit]

    def to_json(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}


@dataclass(frozen=True)
class SearchOptions:
    """The settings of a search; see the stage `search_architecture` for their meaning."""

    limits: Limits
    widths: tuple[float, ...] = (0.25, 0.5, 0.75)
    multiple: int = 8
    depth: bool = True
    kernels: bool = True
    random: int = 2
    population: int = 50
    candidates: int = 300
    samples: int = 512
    host: str | None = None
    clock: str | None = None


@dataclass(frozen=True)
class SearchResult:
    """A found model.

    Attributes:
        model: the Keras model, with the weights that it inherits from the shared network.
        facts: the facts for the report, as plain values.
    """

    model: Any
    facts: Facts


@dataclass(frozen=True)
class _Choice:
    """The chosen sub-network.

    Attributes:
        candidate: the sub-network.
        equal: what it was chosen from; empty if the values are not accuracies.
        conversion: its files.
        exceeded: the limits that the files of the best one exceed, if it is the smallest one for that reason.
    """

    candidate: EvaluatedSubNetwork
    equal: Mapping[str, float]
    conversion: TrialConversion
    exceeded: Sequence[str] = ()

    def warnings(self) -> list[str]:
        """Return what users must know of the choice."""
        result = [_unverified(self.conversion)] if self.conversion.missing is not None else []
        if self.exceeded:
            files = f"the files of the best sub-networks exceed the limits: {', '.join(self.exceeded)}"
            result.append(f"the result is the smallest sub-network, since {files}")
        return result


def search(
    model: Any, options: SearchOptions, settings: TrainingSettings, context: Context, convert: Convert
) -> SearchResult:
    """Train a model so that its sub-networks work alone, and return the best one within limits.

    An interrupted search continues where it stopped, if `context.unfinished` is the same folder.

    Args:
        model: the largest network as a Keras model.
        options: what is searched, and the limits.
        settings: the settings of the training.
        context: data, target, seed and progress.
        convert: makes the .tflite files whose costs are verified.

    Raises:
        StageError: nothing in the model can be smaller, or no sub-network is within the limits.
        ModelError: the model does not fit the data.
    """
    network = keras_graph.read(model)
    elastic = find(network, options.widths, options.multiple, blocks=options.depth, kernels=options.kernels)
    costs = SubNetworkCosts(elastic, context.target, options.host, options.clock)
    measuring = Phase("costs of sub-networks", 4 * BUILD, unit="sub-network")
    fitting = Phase("training of all sub-networks", _training_cost(settings, options, context))
    evaluating = Phase("search", BUILD + options.candidates * validation_cost(context.data) / 4, unit="sub-network")
    finish = Phase("batch norms", BUILD + 2 * validation_cost(context.data))
    context.progress.plan(measuring, fitting, evaluating, finish)
    with context.progress.phase(measuring):
        smallest = _verify(elastic, elastic.smallest, costs, convert)
        _refuse_unreachable(elastic, costs, options.limits)
        shared = SharedNetwork(elastic)  # its random seeds do not depend on the number of conversions below
        _calibrate(elastic, smallest, costs, options.limits, convert, context.progress)
    with context.progress.phase(fitting):
        history = _trained(shared, options, settings, context)
    values = _Values(shared, options.samples, context)
    with context.progress.phase(evaluating):
        ends = {"largest": elastic.largest, "smallest": elastic.smallest}
        qualities = {name: values.quality(sub_network).to_json() for name, sub_network in ends.items()}
        candidates = _evolved(elastic, costs, values, options, context)
    elastic = shared.trained()
    metric = values.quality(elastic.largest).metric
    samples = len(context.data.labels("validation")) if metric == "accuracy" else None
    last = EvaluatedSubNetwork(elastic.smallest, values.quality(elastic.smallest).score)
    choice = _chosen(elastic, candidates, last, costs, options.limits, samples, convert)
    chosen_network = extracted(elastic, choice.candidate.sub_network)
    result = keras_graph.build(chosen_network)
    with context.progress.phase(finish):
        norms = recalibrate_batch_norms(result, context)
    history.pop("batch_norms", None)  # those of the largest network
    facts = {
        "metric": metric,
        "sub_networks": float(min(elastic.count, 10**300)),
        "evaluated": len(candidates),
        "limits": options.limits.to_json(),
        **{name: {"validation": qualities[name], **costs.figures(end).to_json()} for name, end in ends.items()},
        "chosen": _point(choice.candidate, costs, metric),
        "equal": choice.equal,
        "front": _front(candidates, costs, metric),
        **_parts(elastic, choice.candidate.sub_network, chosen_network),
        SELECTED: True,
        "warnings": choice.warnings(),
    }
    return SearchResult(result, {**facts, **history, **norms})


def _point(candidate: EvaluatedSubNetwork, costs: SubNetworkCosts, metric: QualityMetric) -> dict[str, Any]:
    """Return a candidate's result on validation and its costs."""
    sign = Quality(metric, 1.0).score
    validation = sign * candidate.value if math.isfinite(candidate.value) else None
    return {"validation": validation, **costs.figures(candidate.sub_network).to_json()}


def _parts(elastic: ElasticNetwork, chosen: SubNetwork, network: Network) -> dict[str, Any]:
    """Return the channels, blocks and kernels of the found network."""
    return {
        "layers": _widths(elastic, network),
        "blocks": {block.addition: kept for block, kept in zip(elastic.blocks, chosen.blocks, strict=True)},
        "kernels": _kernel_sizes(elastic, network, chosen),
    }


def _front(
    candidates: list[EvaluatedSubNetwork], costs: SubNetworkCosts, metric: QualityMetric
) -> list[dict[str, Any]]:
    """Return the candidates that no other one beats, by cost: latency, or MACs where the target predicts no latency."""

    def cost(candidate: EvaluatedSubNetwork) -> float:
        figures = costs.figures(candidate.sub_network)
        return figures.macs if figures.latency_ms is None else figures.latency_ms

    best = -math.inf
    result = []
    for candidate in sorted(candidates, key=lambda evaluated: (cost(evaluated), -evaluated.value)):
        if candidate.value > best:
            best = candidate.value
            result.append(_point(candidate, costs, metric))
    return result


def _training_cost(settings: TrainingSettings, options: SearchOptions, context: Context) -> float:
    """Return the expected cost of the training: in each step the largest network, and smaller ones of about half."""
    networks = 1 + (options.random + 1) / 2
    samples = len(context.data.labels("train"))
    return 4 * BUILD + settings.epochs * (networks * BACKWARD * samples + validation_cost(context.data))


def _trained(
    shared: SharedNetwork, options: SearchOptions, settings: TrainingSettings, context: Context
) -> dict[str, Any]:
    """Train the shared network, or read the weights that an interrupted run left; return the facts of the training."""
    path = context.unfinished / WEIGHTS if context.unfinished else None
    saved = _read_weights(path) if path is not None else None
    if saved is not None:
        weights, facts = saved
        set_weights(shared.model, weights)
        context.progress.note("continues after the training of all sub-networks")
        return facts
    facts = dict(training.train(shared, options.random, settings, context))
    if path is not None:
        arrays = {f"w{index}": array for index, array in enumerate(shared.model.get_weights())}
        buffer = io.BytesIO()
        np.savez(buffer, facts=json.dumps(facts), **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())
    return facts


def _read_weights(path: Path) -> tuple[list[NDArray[Any]], dict[str, Any]] | None:
    """Return the weights and the facts of a finished training; None if the file is missing or damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as content:
            weights = [content[f"w{index}"] for index in range(len(content.files) - 1)]
            return weights, dict(json.loads(str(content["facts"])))
    except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None  # zipfile raises RuntimeError and its child NotImplementedError for damaged members


class _Values:
    """The quality of sub-networks on the validation split, with batch norm statistics of their own.

    Args:
        shared: the trained network.
        samples: the number of training samples for the statistics.
        context: data and seed.
    """

    def __init__(self, shared: SharedNetwork, samples: int, context: Context) -> None:
        self._shared = shared
        self._context = context
        self._samples = loop.chosen_inputs(context.data, samples, context.seed)[0]
        self._known: dict[SubNetwork, Quality] = {}

    def quality(self, sub_network: SubNetwork) -> Quality:
        """Return the quality of a sub-network."""
        if sub_network not in self._known:
            context, shared = self._context, self._shared
            choice = shared.choice(sub_network)
            statistics = shared.statistics(self._samples, choice)
            inputs = context.data.inputs("validation")

            def batches() -> Any:
                for start in range(0, len(inputs), BATCH):
                    part = slice(start, start + BATCH)
                    yield part, shared.outputs(rows_of(inputs, np.arange(len(inputs))[part]), choice, statistics)

            task = task_of(context.data)
            self._known[sub_network] = task.validation(shared.model, context.data, context.specification, batches())
        return self._known[sub_network]


def _evolved(
    elastic: ElasticNetwork, costs: SubNetworkCosts, values: _Values, options: SearchOptions, context: Context
) -> list[EvaluatedSubNetwork]:
    """Return the candidates of the evolution; those of an interrupted run are not evaluated again."""
    path = context.unfinished / VALUES if context.unfinished else None
    known = _read_values(path.read_bytes()) if path is not None and path.exists() else {}
    done = 0

    def value(sub_network: SubNetwork) -> float:
        nonlocal done
        key = " ".join(map(str, elastic.values(sub_network)))
        if key not in known:
            known[key] = values.quality(sub_network).score
            if path is not None and len(known) % SAVED_EVERY == 0:
                write_atomically(path, json.dumps(known).encode())
        done += 1
        context.progress.update(done, options.candidates)
        return known[key]

    evolution = Evolution(
        elastic,
        lambda sub_network: not options.limits.exceeded(costs.figures(sub_network)),
        options.population,
        context.seed,
    )
    return evolution.run(value, options.candidates)


def _read_values(content: bytes) -> dict[str, float]:
    """Return the values of an interrupted run; nothing if the file cannot be read."""
    try:
        return {str(key): float(value) for key, value in json.loads(content).items()}
    except (ValueError, AttributeError, TypeError):
        return {}


def _refuse_unreachable(elastic: ElasticNetwork, costs: SubNetworkCosts, limits: Limits) -> None:
    """Refuse limits that the smallest sub-network exceeds.

    Raises:
        StageError: it does.
    """
    exceeded = limits.exceeded(costs.figures(elastic.smallest))
    if exceeded:
        raise StageError(
            f"no sub-network is within the limits; the smallest one has {', '.join(exceeded)}",
            hint="raise the limit, search smaller `widths`, or start from a model with fewer layers",
        )


def _calibrate(
    elastic: ElasticNetwork,
    smallest: TrialConversion,
    costs: SubNetworkCosts,
    limits: Limits,
    convert: Convert,
    progress: Progress,
) -> None:
    """Make costs that agree with the smallest sub-network agree with larger ones, too; note it if a file is missing."""

    def convert_sub_network(sub_network: SubNetwork) -> TrialConversion:
        return _files(elastic, sub_network, convert)

    largest = calibrate(costs, elastic, convert_sub_network, ("macs", *limits.to_json()), progress)
    unverified = next((conversion for conversion in (smallest, largest) if conversion.missing is not None), None)
    if unverified is not None:
        progress.note(f"search_architecture: {_unverified(unverified)}")


def _files(elastic: ElasticNetwork, sub_network: SubNetwork, convert: Convert) -> TrialConversion:
    """Return the files of a sub-network."""
    network = extracted(elastic, sub_network)
    return convert(network, keras_graph.build(network))


def _verify(
    elastic: ElasticNetwork, sub_network: SubNetwork, costs: SubNetworkCosts, convert: Convert
) -> TrialConversion:
    """Return the files of a sub-network; all costs agree with them afterwards."""
    conversion = _files(elastic, sub_network, convert)
    costs.calibrate(sub_network, conversion)
    return conversion


def _unverified(conversion: TrialConversion) -> str:
    """Return the warning that there is no 8-bit file."""
    return (
        "the limits are not verified: size, time and memory are those of the layers that can be followed, since "
        f"there is no 8-bit file: {conversion.missing}"
    )


def _chosen(
    elastic: ElasticNetwork,
    candidates: Sequence[EvaluatedSubNetwork],
    last: EvaluatedSubNetwork,
    costs: SubNetworkCosts,
    limits: Limits,
    samples: int | None,
    convert: Convert,
) -> _Choice:
    """Return the best candidate whose files are within the limits.

    Args:
        elastic: the network and what may be smaller.
        candidates: all that were evaluated.
        last: the smallest sub-network, whose files were within the limits before the training.
        costs: the costs of sub-networks; they agree with the files afterwards.
        limits: the largest costs.
        samples: the number of samples of the accuracies; None if the values are not accuracies.
        convert: makes the files.

    Raises:
        StageError: the files of the best ones exceed the limits, and those of the last one do so now.
    """
    exceeded: list[str] = []
    left = list(candidates)
    for _ in range(MAX_CONVERSIONS):
        if not left:
            break
        fitting = [candidate for candidate in left if not limits.exceeded(costs.figures(candidate.sub_network))]
        # Where the last file was much larger than predicted, others may be within the limits although none seems to be.
        best, equal = _best(fitting, costs, samples) if fitting else (_closest(left, costs, limits), {})
        conversion = _verify(elastic, best.sub_network, costs, convert)
        over = limits.exceeded(costs.figures(best.sub_network))
        if over:
            exceeded = exceeded or over
            left.remove(best)
        elif fitting:
            return _Choice(best, equal, conversion)
        else:
            last = best
    conversion = _verify(elastic, last.sub_network, costs, convert)
    over = limits.exceeded(costs.figures(last.sub_network))
    if not over:
        return _Choice(last, {}, conversion, exceeded if last.sub_network == elastic.smallest else ())
    raise StageError(
        f"the files of the best sub-networks exceed the limits: {', '.join(exceeded or over)}",
        hint="raise the limit a little, or search more `candidates`",
    )


def _closest(candidates: Sequence[EvaluatedSubNetwork], costs: SubNetworkCosts, limits: Limits) -> EvaluatedSubNetwork:
    """Return the candidate whose costs are the least over the limits."""

    def excess(candidate: EvaluatedSubNetwork) -> float:
        figures: dict[str, float] = costs.figures(candidate.sub_network).to_json()
        return max((figures[name] - limit) / (limit or 1) for name, limit in limits.to_json().items())

    return min(candidates, key=excess)


def _best(
    fitting: Sequence[EvaluatedSubNetwork], costs: SubNetworkCosts, samples: int | None
) -> tuple[EvaluatedSubNetwork, dict[str, float]]:
    """Return the best of some candidates, and what it was chosen from.

    Accuracies within one standard error of the highest one do not tell which sub-network is better. Of these the one
    with the most operations is chosen: the limits already bound the costs, and larger networks are usually better. Of
    equal losses the one with the fewest operations.
    """

    def macs(candidate: EvaluatedSubNetwork) -> int:
        return costs.figures(candidate.sub_network).macs

    best = max(fitting, key=lambda candidate: (candidate.value, -macs(candidate)))
    if samples is None or not math.isfinite(best.value):
        return best, {}
    error = math.sqrt(best.value * (1 - best.value) / samples)
    close = [candidate for candidate in fitting if candidate.value >= best.value - error]
    equal = {"samples": samples, "best": best.value, "error": round(error, 6), "sub_networks": len(close)}
    return max(close, key=lambda candidate: (macs(candidate), candidate.value)), equal


def _widths(elastic: ElasticNetwork, network: Network) -> dict[str, dict[str, int]]:
    """Return the number of channels of each layer that makes new ones, in the largest network and in the found one."""
    result = {}
    for layer in network.layers.values():
        if layer.calls and produces_channels(layer):
            output = LayerOutput(layer.name)
            before, after = elastic.network.shapes[output][-1], network.shapes[output][-1]
            result[layer.name] = {"before": int(before or 0), "after": int(after or 0)}
    return result


def _kernel_sizes(elastic: ElasticNetwork, network: Network, chosen: SubNetwork) -> Mapping[str, dict[str, int]]:
    """Return the sizes of the elastic kernels that the found network has, in the largest network and in it."""
    pairs = zip(elastic.kernels, chosen.kernels, strict=True)
    return {
        kernel.layer: {"before": kernel.sizes[0], "after": size}
        for kernel, size in pairs
        if kernel.layer in network.layers
    }
