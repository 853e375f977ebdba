"""COCO's mean average precision of detectors, and the comparison of two detectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.measurement import Measurement, missing
from compress.tasks import degeneracy
from deploy.contract.average_precision import Truth, average_precision
from deploy.contract.detection import SURE, Detections
from deploy.contract.suppression import overlaps

SAME_PLACE = 0.9
"""Overlap above which two boxes count as the same position."""
FITTING = 0.5
"""Overlap above which a box counts as that of an object."""
NO_AP50 = 1e-3
"""AP50 below which a detector finds objects only by chance."""


def judge_outputs(
    facts: Mapping[str, Any], names: Sequence[str], original: str, result: str
) -> dict[str, degeneracy.Judgement]:
    """Decide for two detectors whether they find the same, or nothing, in nearly every image, or no object at all;
    arguments as in `Task.compare`."""
    del names
    before = degeneracy.Spread(**facts[original]["spread"])
    return {original: _judge(facts[original], None), result: _judge(facts[result], before)}


def _judge(facts: Mapping[str, Any], original: degeneracy.Spread | None) -> degeneracy.Judgement:
    judgement = degeneracy.judge(degeneracy.Spread(**facts["spread"]), original)
    objects = sum(row["objects"] for row in facts["per_class"])
    ap50 = facts["ap50"]["value"]
    if judgement.verdict == "degenerate" or objects < degeneracy.ENOUGH or ap50 >= NO_AP50:
        return judgement
    text = f"finds none of {objects:,} objects where they are (average precision at half overlap {ap50:.4f})"
    return degeneracy.Judgement("degenerate", text, judgement.spread)


def spread(
    answers: Sequence[Detections], truth: Sequence[Truth], names: Sequence[str], split: str
) -> degeneracy.Spread:
    """Count the most frequent output of a detector: its best detection, by class and position, or nothing."""
    best = [int(detections.classes[0]) if len(detections) else -1 for detections in answers]
    classes, counts = np.unique(best, return_counts=True)
    answer = int(classes[counts.argmax()])
    if answer < 0:
        same = np.array([not len(detections) for detections in answers])
        fitting = np.array([not len(labels) for _, labels in truth])
        what = "finds nothing in"
    else:
        same, fitting = _same_detection(answers, truth, answer)
        name = names[answer] if answer < len(names) else f"class {answer}"
        what = f"finds {name!r} first, in the same place, in"
    return degeneracy.Spread(
        text=f"{what} {same.sum():,} of {len(same):,} {split} images",
        samples=len(same),
        same=int(same.sum()),
        others=int((~fitting).sum()),
        told_apart=int((~fitting & ~same).sum()),
    )


def _same_detection(
    answers: Sequence[Detections], truth: Sequence[Truth], answer: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return for each image whether its best detection is the usual one of a class, and whether an object is there."""
    firsts = [detections.boxes[0] for detections in answers if _finds_first(detections, answer)]
    box = np.median(firsts, axis=0)
    same = [
        _finds_first(detections, answer) and _is_there(box, detections.boxes[:1], SAME_PLACE) for detections in answers
    ]
    fitting = [_is_there(box, boxes[labels == answer], FITTING) for boxes, labels in truth]
    return np.array(same), np.array(fitting)


def _finds_first(answer: Detections, label: int) -> bool:
    return bool(len(answer)) and int(answer.classes[0]) == label


def _is_there(box: NDArray[Any], others: NDArray[Any], overlap: float) -> bool:
    """Return True if one of the boxes [k, 4] overlaps a box [4] by at least `overlap`."""
    return bool((overlaps(box, others) >= overlap).any())


def evaluate(answers: Sequence[Detections], truth: Sequence[Truth], classes: int, note: str) -> dict[str, Any]:
    """Return `ap` and `ap50` as measurements, and `per_class` as plain numbers."""
    result = average_precision(answers, truth, classes)
    shown = {name: _measurement(result[name], note).to_json() for name in ("ap", "ap50")}
    return {**shown, "per_class": result["per_class"]}


def _measurement(value: float | None, note: str) -> Measurement:
    if value is None:
        return missing("fraction", "there are no objects to find")
    return Measurement(value, "fraction", "measured", note=note)


def compare(facts: Mapping[str, Any], names: Sequence[str], original: str, result: str) -> dict[str, Any]:
    """Return the difference of two detectors: drop of average precision, agreement, figures per class; arguments as in
    `Task.compare`."""
    measurements = {
        f"{name}_drop": _drop(facts[original][name], facts[result][name]).to_json() for name in ("ap", "ap50")
    }
    share, count = facts["agreement"]
    if count:
        note = f"of {count} objects that either finds with a score of {SURE:g} or more, those that both find"
        measurements["agreement"] = Measurement(share, "fraction", "measured", note=note).to_json()
    else:
        measurements["agreement"] = missing("fraction", f"neither finds anything with a score of {SURE:g}").to_json()
    rows = zip(names, facts[original]["per_class"], facts[result]["per_class"], strict=True)
    per_class = [
        {
            "name": name,
            "samples": before["objects"],
            "original": _measurement(before["ap"], "COCO").to_json(),
            "result": _measurement(after["ap"], "COCO").to_json(),
            "ap50": {"original": before["ap50"], "result": after["ap50"]},
        }
        for name, before, after in rows
    ]
    return {"measurements": measurements, "per_class": per_class}


def _drop(before: Mapping[str, Any], after: Mapping[str, Any]) -> Measurement:
    if before["value"] is None or after["value"] is None:
        return missing("fraction", "there are no objects to find")
    return Measurement(before["value"] - after["value"], "fraction", "measured", note="the same images")
