"""The acceptance of a complete run's result: its answers depend on the input, and it keeps the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.errors import BudgetError, DegenerateError, ResultError
from compress.report import answers
from compress.tasks.base import Task
from compress.tasks.degeneracy import Judgement


def _first_degenerate(task: Task, findings: Mapping[str, Any]) -> str | None:
    """Return the id of the first step whose model gives one answer to nearly every validation sample."""
    for step, facts in findings.get("validation", {}).items():
        judgement = task.judge_answers(facts, findings["data"]["classes"], "model", "model")["model"]
        if judgement.verdict == "degenerate":
            return str(step)
    return None


def refusal(
    task: Task, judged: Mapping[str, Judgement], findings: Mapping[str, Any], budget: Sequence[Mapping[str, Any]]
) -> ResultError | None:
    """Return why the result is not acceptable, if it is not.

    Args:
        task: the task of the data.
        judged: the judgement of `original` and `result`.
        findings: facts of the probes: `data`, and `validation` by step.
        budget: the rows of the budget.
    """
    if judged and judged["result"].verdict == "degenerate":
        return _degenerate(judged["original"], judged["result"], _first_degenerate(task, findings))
    broken = [row for row in budget if row["holds"] is False]
    if not broken:
        return None
    texts = []
    for row in broken:
        value = row["measured"]["value"]
        excess = f"over the limit of {row['limit']:g} by {value - row['limit']:g}"
        texts.append(f"{row['name']} is {value:g} {row['unit']}, {excess}")
    return BudgetError("; ".join(texts), where="budget")


def _degenerate(original: Judgement, result: Judgement, first: str | None) -> DegenerateError:
    """Return the error for a result that gives one answer to nearly everything, with what to do."""
    told = answers.in_words({"answers": {"original": original.to_json(), "result": result.to_json()}})
    if original.verdict == "degenerate":
        return DegenerateError(
            told,
            todo="train the model longer or with a smaller learning rate, and check the labels, data.preprocess and "
            "the statistics of batch norms",
        )
    where = "" if first is None else f" (first seen on the validation split after `{first}`)"
    return DegenerateError(
        f"{told}{where}",
        todo="compress less or train longer after it, and check the statistics of batch norms; `python -m compress "
        "debug` lists the layers that quantization changed most",
    )


def result_error(record: Mapping[str, Any]) -> ResultError | None:
    """Return the error of a run that is complete but whose result is not acceptable."""
    kinds = {"degenerate": DegenerateError, "over budget": BudgetError}
    kind = kinds.get(record["status"])
    return None if kind is None else kind(record["error"]["message"])
