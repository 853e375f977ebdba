"""The order of the reasons of a verdict, and what to do about a result that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from compress.pipeline.acceptance import VerdictMaterial, judged, refusal
from compress.results.evaluation import DegeneracyRecord, Judgement
from compress.results.run import CorruptSamples, DataRecord, StageRecord
from compress.tasks.findings import VerdictReason

ORDER = VerdictReason("warning", "the order is wrong; set `classes`", "named", 0.6)
USELESS = VerdictReason("not usable", "no better than a constant answer", "model")
DESTROYED = VerdictReason("not usable", "unlike the original", "compression")


def verdict(*findings: VerdictReason, stages: Sequence[str] = ()) -> tuple[tuple[str, ...], str]:
    """Return the reasons, and the message of the error; the message is empty for a usable result."""
    records = tuple(StageRecord(stage, stage, "done") for stage in stages)
    judgement = judged(VerdictMaterial(None, findings, None, records, None, ()))
    error = refusal(judgement, (), "prune")
    return judgement.record.reasons, str(error or "")


def test_a_named_cause_comes_first_and_needs_no_further_advice() -> None:
    reasons, message = verdict(USELESS, ORDER)
    assert reasons == (ORDER.text, USELESS.text)
    assert message == ORDER.text


def test_without_a_named_cause_the_advice_is_about_the_model() -> None:
    _, message = verdict(USELESS, stages=["train", "quantize"])
    assert message.startswith(f"{USELESS.text}; train the model longer")
    _, message = verdict(USELESS, stages=["load", "quantize"])
    assert "train the model longer" not in message
    assert "set `model: {head: new}` and add `train`" in message


def test_what_the_compression_did_is_said_first() -> None:
    reasons, message = verdict(ORDER, DESTROYED, stages=["train", "prune"])
    assert reasons == (DESTROYED.text, ORDER.text)
    first = f"{DESTROYED.text} (first seen on the validation split after `prune`); "
    assert message.startswith(f"{first}compress less, or train longer")
    _, message = verdict(DESTROYED, stages=["load", "quantize"])
    assert message.startswith(f"{first}calibrate with samples of the kind that the device will see")


@pytest.mark.parametrize(("on_noise", "level"), [("holds", "not usable"), ("warning", "usable with warnings")])
def test_some_reasons_hold_for_random_samples(on_noise: Any, level: str) -> None:
    finding = replace(DESTROYED, on_noise=on_noise)
    judgement = judged(VerdictMaterial(None, [finding], data_record("random"), (), None, ()))
    assert judgement.record.level == level
    assert finding.text in judgement.record.reasons
    left_out = judged(VerdictMaterial(None, [DESTROYED], data_record("random"), (), None, ()))
    assert DESTROYED.text not in left_out.record.reasons


@pytest.mark.parametrize(("gain", "named"), [(0.55, True), (0.2, False), (None, True)])
def test_causes_that_explain_much_less_are_left_out(gain: float | None, named: bool) -> None:
    other = VerdictReason("warning", "another cause", "named", gain)
    reasons, _ = verdict(other, ORDER)
    assert reasons == ((ORDER.text, other.text) if named else (ORDER.text,))


def data_record(source: str = "npz") -> DataRecord:
    """A data set with a class without training samples."""
    counts = {"train": (40, 0), "test": (10, 10)}
    return DataRecord(
        source=source,
        classes=("normal", "anomaly"),
        input_shape=(64,),
        preprocess=(),
        samples={"train": 40, "test": 20},
        counts=counts,
        imbalance=None,
        missing=(),
        shapes=((64,),),
        range=(0.0, 1.0),
        dtypes=("float32",),
        looked_at=60,
        corrupt=CorruptSamples(0, ()),
        notes=(),
    )


def test_random_samples_are_a_warning() -> None:
    judgement = judged(VerdictMaterial(None, (), data_record("random"), (), None, ()))
    assert judgement.record.reasons[-1].startswith("the samples are random numbers: ranges from them, and all")


@pytest.mark.parametrize("needed", [True, False])
def test_a_class_without_training_samples_is_a_mistake_for_some_tasks(needed: bool) -> None:
    """An autoencoder learns from normal samples only."""
    data = data_record()
    judgement = judged(VerdictMaterial(None, (), data, (), None, (), needs_every_class=needed))
    assert (
        any("no training sample for 1 of 2 classes (anomaly)" in reason for reason in judgement.record.reasons)
        == needed
    )


def test_too_few_samples_of_other_classes_are_a_warning() -> None:
    one = Judgement("undecided", "answers 'a' to 200 of 200 test samples", None)
    judgement = judged(VerdictMaterial(DegeneracyRecord(one, one), (), None, (), None, ()))
    assert judgement.record.level == "usable with warnings"
    assert judgement.record.reasons == (f"the result {one.text}, and too few have another label to judge that",)
