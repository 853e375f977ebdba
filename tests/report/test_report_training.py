"""The report's sentences on batch norm recalibration and healing."""

from __future__ import annotations

from run_records import html_of, markdown_of, with_stages

from compress.report import training
from compress.results.run import RunRecord

BETTER = {"metric": "accuracy", "validation_before": 0.702, "validation_after": 0.764}
WORSE = {"metric": "loss", "validation_before": 0.5, "validation_after": None}
NOT_KEPT = {"kept": False, "metric": "accuracy", "validation_before": 0.529, "validation_after": 0.451}
RECORD = with_stages(
    {"id": "load", "facts": {}},
    {"id": "train", "facts": {"batch_norms": {"kept": True, **BETTER}}},
    {"id": "finder", "facts": {"batch_norms": {"kept": False, **WORSE}, "healing": {"kept": True, **BETTER}}},
    {
        "id": "prune",
        "facts": {
            "steps": [
                {"healing": NOT_KEPT},
                {"batch_norms": {"kept": False, "reason": "the model has 2 outputs"}},
            ]
        },
    },
)
HISTORY = [{"loss": 1.284, "accuracy": 0.7}, {"loss": 0.0141, "val_loss": 0.0522}]
LOSS = {"name": "cross-entropy in nats", "guessing": 2.3026}
LINES = [
    "train: batch norms are recalibrated, which changed validation accuracy from 0.702 to 0.764",
    "finder: batch norms are not recalibrated, because that changed validation loss from 0.5 to not finite",
    "prune, step 1: the training is not kept, because it changed validation accuracy from 0.529 to 0.451",
    "prune, step 2: batch norms are not recalibrated: the model has 2 outputs",
]


def test_one_sentence_for_each_fact() -> None:
    assert training.lines(RunRecord.from_json(RECORD)) == LINES
    assert training.lines(RunRecord.from_json(with_stages())) == []


def test_losses_are_next_to_that_of_guessing() -> None:
    record = with_stages(
        {"id": "train", "facts": {"history": HISTORY, "loss": LOSS}},
        {"id": "detect", "facts": {"history": HISTORY[:1], "loss": {"name": "", "guessing": None}}},
        {"id": "prune", "facts": {"steps": [{"history": [{"loss": None}] * 2, "loss": LOSS}]}},
        {"id": "old", "facts": {"history": HISTORY}},
    )
    assert training.lines(RunRecord.from_json(record)) == [
        "train: 2 epochs; the loss (cross-entropy in nats) was 1.28 in the first and 0.0141 in the last, and 0.0522 on "
        "the validation split; guessing gives 2.3",
        "detect: 1 epoch; the loss was 1.28",
        "prune, step 1: 2 epochs; the loss (cross-entropy in nats) was not finite in the first and not finite in the "
        "last; guessing gives 2.3",
    ]


def test_both_reports_have_them() -> None:
    text, page = markdown_of(RECORD), html_of(RECORD)
    for line in LINES:
        assert line in text
        assert f"{line} (measured).</p>" in page
