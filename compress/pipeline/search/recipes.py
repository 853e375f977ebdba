"""`recipe: auto`: recipes from the cheapest to the most expensive, until one meets the budget.

Each recipe is a trial of a search: the stages of the file, then those of the recipe, measured on the validation split.
Costs are predicted. The recipe that meets the budget is run completely at the end; only then the test split is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from compress.core.errors import CorallineError, PipelineError, StageError, listing
from compress.core.measurement import Metric
from compress.pipeline import schema
from compress.pipeline.schema import Pipeline
from compress.pipeline.search.goals import Goals, Limit, is_cost
from compress.pipeline.search.recommendation import budget_limits, judged_budget, limitable
from compress.pipeline.search.trial import models_of
from compress.pipeline.search.worker import WorkerProcess, WorkRequest, trial_record
from compress.pipeline.yaml_file import Document
from compress.report.wording import number, seconds
from compress.results.search import TrialRecord
from compress.tasks import task_of

Show = Callable[[str], None]
"""Shows one line to the user."""
SAME_FAILURES = 3
"""No more recipes are tried if this number of them, and no other one, ended with the same error."""
ENDING = ("compile", "package")
"""The stages after every recipe."""
ADDED = ("quantize", *ENDING)
"""The stages that every recipe adds to those of the file."""


@dataclass(frozen=True)
class Recipe:
    """Stages after those of the file.

    Attributes:
        name: what it does, for the user.
        keep: the fraction of the multiply-accumulates after pruning; 1 without pruning.
        distill: whether the original teaches the pruned model.
        quantize: the settings of `quantize`.
    """

    name: str
    keep: float = 1.0
    distill: bool = False
    quantize: Mapping[str, Any] = field(default_factory=dict)

    def stages(self) -> list[dict[str, Any]]:
        """Return the stages as in a pipeline file, without those after every recipe."""
        pruning: list[dict[str, Any]] = [{"prune": {"keep_macs": self.keep}}] if self.keep < 1 else []
        teaching: list[dict[str, Any]] = [{"distill": {}}] if self.distill else []
        return [*pruning, *teaching, {"quantize": dict(self.quantize)}]


QAT = {"method": "qat"}
KEPT = (0.7, 0.5, 0.35)
RECIPES = (
    Recipe("PTQ"),
    Recipe("PTQ with AdaRound", quantize={"rounding": "adaround"}),
    Recipe("QAT", quantize=QAT),
    *(
        recipe
        for keep in KEPT
        for recipe in (
            Recipe(f"pruned to {keep:g} of the MACs, PTQ", keep),
            Recipe(f"pruned to {keep:g} of the MACs, distilled, PTQ", keep, distill=True),
            Recipe(f"pruned to {keep:g} of the MACs, distilled, QAT", keep, distill=True, quantize=QAT),
        )
    ),
)
"""All recipes: by the pruning, and from the cheapest to the most expensive for the same pruning."""


RecipeStatus = Literal["within budget", "over budget", "failed", "skipped"]


@dataclass(frozen=True)
class RecipeResult:
    """The outcome of a recipe.

    Attributes:
        recipe: its name.
        status: the outcome; "skipped": it cannot help, see `reason`.
        values: its quality on the validation split, and its costs.
        reason: its values and their limits, or why it failed or was skipped.
        seconds: the time that it took.
    """

    recipe: str
    status: RecipeStatus
    values: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0

    def describe(self) -> str:
        """Return the result as one line."""
        text = f"{self.recipe}: {self.status}"
        text += f" ({self.reason})" if self.reason else ""
        return text if self.status == "skipped" else f"{text}; {seconds(self.seconds)}"


@dataclass(frozen=True)
class RecipeChoice:
    """The result of `recipe: auto`.

    Attributes:
        results: what became of each recipe that was tried or skipped, in order.
        chosen: the cheapest within the budget, otherwise the nearest; None if none could be measured.
        within_budget: whether it meets the budget.
        document: the pipeline file with the stages of the chosen recipe.
    """

    results: tuple[RecipeResult, ...]
    chosen: str | None
    within_budget: bool
    document: Document

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain values."""
        rows = [asdict(result) for result in self.results]
        return {"schema_version": 1, "results": rows, "chosen": self.chosen, "within_budget": self.within_budget}


@dataclass(frozen=True)
class _Tried:
    """A recipe that was measured: how far it exceeds the limits of costs, and the one of the quality."""

    recipe: Recipe
    cost: float
    quality: float


def with_recipe(document: Document, recipe: Recipe) -> Document:
    """Return a pipeline file with the stages of a recipe after its own."""
    content = {name: value for name, value in document.value.items() if name not in ("recipe", "search")}
    content["stages"] = [*content["stages"], *recipe.stages(), *({name: {}} for name in ENDING)]
    return Document(document.path, content, document.lines)


def choose(document: Document, pipeline: Pipeline, out: Path, worker: WorkerProcess, show: Show) -> RecipeChoice:
    """Try recipes until one meets the budget.

    Args:
        document: the pipeline file.
        pipeline: its pipeline: the stages that all recipes begin with.
        out: the folder for results, with the store.
        worker: the process that runs trials.
        show: shows one line.

    Raises:
        PipelineError: there is no budget, or one that cannot be judged here, or no recipe can be used.
        StageError: every recipe failed, or the first ones with the same error.
        StoreError: a file could not be written.
    """
    budget = budget_of(document, pipeline)
    metric = task_of(pipeline.data).metrics[0]
    folder = (out / pipeline.head.name).resolve()
    results: list[RecipeResult] = []
    tried: list[_Tried] = []
    for recipe in RECIPES:
        reason = _why_not(recipe, tried) or _why_invalid(document, recipe)
        if reason:
            results.append(RecipeResult(recipe.name, "skipped", reason=reason))
            continue
        began = time.monotonic()
        content = with_recipe(document, recipe).value
        path = str(document.path.resolve())
        request = WorkRequest("trial", path, content, str(out.resolve()), str(folder), recipe.name)
        record, limits = _measured(request, worker, budget, metric)
        excess = {limit: limit.excess({**record.predicted, **record.values}) for limit in limits}
        cost = max((value for limit, value in excess.items() if is_cost(limit.metric)), default=0.0)
        quality = max((value for limit, value in excess.items() if not is_cost(limit.metric)), default=0.0)
        if record.status != "failed":
            tried.append(_Tried(recipe, cost, quality))
        within_budget = record.status == "complete" and max(cost, quality) <= 0
        status: RecipeStatus = "within budget" if within_budget else "over budget"
        words = record.reason or "; ".join(_in_words(limit, record.values) for limit in limits)
        result = RecipeResult(recipe.name, "failed" if record.status == "failed" else status, record.values, words,
                              round(time.monotonic() - began, 3))  # fmt: skip
        results.append(result)
        show(result.describe())
        if within_budget:
            return RecipeChoice(tuple(results), recipe.name, True, with_recipe(document, recipe))
        failures = [result.reason for result in results if result.status == "failed"]
        if not tried and len(failures) == SAME_FAILURES and len(set(failures)) == 1:
            break  # in a stage that all recipes begin with, most likely
    if not tried:
        failed = next((result.reason for result in results if result.status == "failed"), None)
        if failed is not None:
            raise StageError(f"no recipe can be run: {failed}", where="recipe")
        raise PipelineError(f"no recipe can be used: {results[0].reason}", where=document.where(("recipe",)))
    nearest = min(tried, key=lambda attempt: max(attempt.cost, attempt.quality)).recipe
    return RecipeChoice(tuple(results), nearest.name, False, with_recipe(document, nearest))


def budget_of(document: Document, pipeline: Pipeline) -> dict[str, float]:
    """Return the limits of a budget that recipes can be judged by.

    Raises:
        PipelineError: there is none, or one that is not known before the end, or the file has a stage of the recipes.
    """
    for index, entry in enumerate(document.value["stages"]):
        name = entry if isinstance(entry, str) else next(iter(entry))
        if name in ADDED:
            what = f"`recipe: auto` adds {name} itself"
            raise document.root.error(what, "stages", index, hint="remove this stage")
    budget = judged_budget(document, pipeline, "`recipe: auto`")
    if not budget:
        allowed = f"budget: {{{listing(limitable(pipeline))}}}"
        raise document.root.error("`recipe: auto` needs a budget", "recipe", allowed=allowed)
    return budget


def _why_not(recipe: Recipe, tried: Sequence[_Tried]) -> str:
    """Return why a recipe cannot help, from those that were tried; "" if it may."""
    for attempt in tried:
        if attempt.recipe.keep == recipe.keep and attempt.cost > 0:
            return f"it has the costs of “{attempt.recipe.name}”"
        if attempt.recipe.keep > recipe.keep and attempt.cost <= 0:
            return "less pruning meets the limits of the costs, and more of it loses more"
    return ""


def _why_invalid(document: Document, recipe: Recipe) -> str:
    """Return why a pipeline with a recipe is invalid, such as a task without distillation; "" if it is valid."""
    try:
        models_of(schema.check(with_recipe(document, recipe)))
    except CorallineError as error:
        return error.what
    return ""


def _measured(
    request: WorkRequest, worker: WorkerProcess, budget: Mapping[str, float], metric: Metric
) -> tuple[TrialRecord, list[Limit]]:
    """Return the record of a recipe, and the limits that it must meet.

    A recipe whose predicted costs exceed the budget is not trained.
    """
    costs = tuple(limit for limit in budget_limits((), budget, metric) if is_cost(limit.metric))
    result = worker.run(replace(request, goals=Goals((metric,), costs, "", metric)))
    record = trial_record(0, {}, result, 0.0)
    return record, budget_limits([record], budget, metric) if record.status == "complete" else [*costs]


def _in_words(limit: Limit, values: Mapping[str, float]) -> str:
    value = values.get(limit.metric.name)
    if value is None:
        return f"{limit.metric.name} is unknown"
    if math.isinf(limit.bound):
        return f"the {limit.metric.name} of the original is unknown"
    least = "at least" if limit.metric.higher_is_better else "at most"
    unit = limit.metric.unit
    return f"{limit.metric.name} {number(value, unit)}, allowed: {least} {number(limit.bound, unit)}"
