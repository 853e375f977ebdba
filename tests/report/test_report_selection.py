"""The report's lines on less data."""

from __future__ import annotations

from typing import Any

from compress.report import html, markdown, selection

CHOSEN = {"by": "hardness, hardest", "samples": 300, "of": 1200, "seconds": 4.2}
RECORD: dict[str, Any] = {
    "stages": [
        {"id": "train", "stage": "train", "facts": {"subset": CHOSEN}},
        {"id": "prune", "stage": "prune", "facts": {"steps": [{"subset": CHOSEN}, {}]}},
        {"id": "q", "stage": "quantize", "facts": {"calibration": {**CHOSEN, "samples": 16, "by": "coverage"}}},
        {"id": "distill", "stage": "distill", "facts": None},
    ]
}
TRAIN = "train: 300 of 1,200 samples for training (75% fewer), selected by hardness, hardest; the selection took 4.2 s"


def test_one_line_for_each_choice() -> None:
    assert selection.lines(RECORD) == [
        TRAIN,
        TRAIN.replace("train:", "prune:"),
        "q: 16 of 1,200 samples for calibration (99% fewer), selected by coverage; the selection took 4.2 s",
    ]
    assert selection.lines({"stages": None}) == []
    assert selection.lines({"stages": [{"facts": {"subset": {}, "steps": [1]}}]}) == [
        "None: 0 of 0 samples for training (unknown fewer), selected by not recorded; the selection took 0.0 s"
    ]


def test_they_stand_in_both_reports() -> None:
    assert TRAIN in markdown.summary(RECORD)
    page = html.page(RECORD)
    assert TRAIN in page
