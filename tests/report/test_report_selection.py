"""The report's lines about the selection of samples."""

from __future__ import annotations

from run_records import html_of, markdown_of, with_stages

from compress.report import training
from compress.results.run import RunRecord

CHOSEN = {"by": "hardness, hardest", "samples": 300, "of": 1200, "seconds": 4.2}
RECORD = with_stages(
    {"id": "train", "stage": "train", "facts": {"subset": CHOSEN}},
    {"id": "prune", "facts": {"steps": [{"subset": CHOSEN}, {}]}},
    {"id": "q", "stage": "quantize", "facts": {"calibration": {**CHOSEN, "samples": 16, "by": "coverage"}}},
    {"id": "distill", "stage": "distill", "facts": {}},
)
TRAIN = "train: 300 of 1,200 samples for training (75% fewer), selected by hardness, hardest; the selection took 4.2 s"


def test_one_line_for_each_choice() -> None:
    assert training.lines(RunRecord.from_json(RECORD)) == [
        TRAIN,
        TRAIN.replace("train:", "prune, step 1:"),
        "q: 16 of 1,200 samples for calibration (99% fewer), selected by coverage; the selection took 4.2 s",
    ]
    assert training.lines(RunRecord.from_json(with_stages())) == []
    nothing = {"by": "all", "samples": 0, "of": 0, "seconds": 0}
    (line,) = training.lines(RunRecord.from_json(with_stages({"id": "q", "facts": {"subset": nothing}})))
    assert line == "q: 0 of 0 samples for training (unknown fewer), selected by all; the selection took 0.0 s"


def test_both_reports_have_them() -> None:
    assert TRAIN in markdown_of(RECORD)
    assert TRAIN in html_of(RECORD)
