"""The acceptance of a complete run's result: its outputs depend on the input, and it keeps the budget."""

from __future__ import annotations

from collections.abc import Sequence

from compress.errors import BudgetError, DegenerateError, ResultError
from compress.report import degeneracy
from compress.report.record import BudgetRecord, DegeneracyRecord, RunRecord


def refusal(
    verdicts: DegeneracyRecord | None, budget: Sequence[BudgetRecord], first_degenerate: str | None
) -> ResultError | None:
    """Return why the result is not acceptable, if it is not.

    Args:
        verdicts: the verdicts on the outputs of original and result.
        budget: the limits with their measurements.
        first_degenerate: the id of the first stage whose model gives one answer to nearly everything.
    """
    if verdicts is not None and verdicts.result.verdict == "degenerate":
        return _degenerate(verdicts, first_degenerate)
    texts = [_excess(row) for row in budget if row.holds is False]
    if not texts:
        return None
    return BudgetError("; ".join(texts), where="budget")


def _excess(row: BudgetRecord) -> str:
    value = row.measured.value
    assert value is not None  # a missing measurement is not over the limit
    text = f"{row.name} is {value:g} {row.unit}, over the limit of {row.limit:g} by {value - row.limit:g}"
    if row.is_uncertain:
        text += f"; the limit is within the interval {row.measured.low:.3g} to {row.measured.high:.3g}: "
        text += "measure on the device"
    return text


def _degenerate(verdicts: DegeneracyRecord, first: str | None) -> DegenerateError:
    """Return the error for a result that gives one answer to nearly everything, with what to do."""
    text = degeneracy.in_words(verdicts)
    if verdicts.original.verdict == "degenerate":
        return DegenerateError(
            text,
            hint="train the model longer or with a smaller learning rate, and check the labels, data.preprocess and "
            "the statistics of batch norms",
        )
    if first is not None:
        text += f" (first seen on the validation split after `{first}`)"
    return DegenerateError(
        text,
        hint="compress less or train longer after it, and check the statistics of batch norms; `python -m compress "
        "debug` lists the layers that quantization changed most",
    )


def result_error(record: RunRecord) -> ResultError | None:
    """Return the error of a run that is complete but whose result is not acceptable."""
    kinds = {"degenerate": DegenerateError, "over budget": BudgetError}
    if record.error is None or record.status not in kinds:
        return None
    return kinds[record.status](record.error.message)
