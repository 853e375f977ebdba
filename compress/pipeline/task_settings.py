"""Which settings of a pipeline file go with what its data is for: classification or detection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.data.types import Task
from compress.pipeline.yaml_file import Location
from compress.stage import Unfit

STAYING = ("resize", "colour", "scale", "normalize", "clip")
"""Steps of preprocessing after which a box is where it was, as fractions of the image's sides."""


def unfit_settings(task: Task, settings: Mapping[str, Any]) -> list[tuple[Location, Unfit]]:
    """The settings that do not go with the task, each with its place.

    Args:
        task: of the data.
        settings: the pipeline file's content, checked.
    """
    found = _for_detection(settings) if task == "detection" else _for_classification(settings)
    return [row for row in found if row is not None]


def _for_classification(settings: Mapping[str, Any]) -> list[tuple[Location, Unfit] | None]:
    model, budget = settings["model"], settings.get("budget") or {}
    boxes = "model.detector says where boxes are, and the data has classes alone"
    return [
        (("budget", "ap_drop"), Unfit("ap_drop is of detectors", "accuracy_drop")) if "ap_drop" in budget else None,
        (("model", "detector"), Unfit(boxes, "data with boxes: voc, coco")) if model.get("detector") else None,
    ]


def _for_detection(settings: Mapping[str, Any]) -> list[tuple[Location, Unfit] | None]:
    model, budget, measure = (settings.get(key) or {} for key in ("model", "budget", "measure"))
    found: list[tuple[Location, Unfit] | None] = []
    if "accuracy_drop" in budget:
        what = "accuracy_drop is of classifiers: detectors are judged by mean average precision"
        found.append((("budget", "accuracy_drop"), Unfit(what, "ap_drop")))
    if measure.get("sensitivity") is not None:
        what = "sensitivity asks which channels the classes of samples depend on, and here they have objects"
        found.append((("measure", "sensitivity"), Unfit(what, "latency", "leave it out")))
    if "file" in model and not model.get("detector"):
        todo = "say it under model.detector: see docs/detection.md"
        found.append((("model",), Unfit("where the anchors of the model stand is not known", todo=todo)))
    for index, entry in enumerate(settings["data"].get("preprocess") or ()):
        ((name, given),) = ((entry, None),) if isinstance(entry, str) else entry.items()
        fit = (given or {}).get("fit", "stretch") if name == "resize" else "stretch"
        if name not in STAYING or fit != "stretch":
            name += f" with fit: {fit}" * (fit != "stretch")
            what = f"{name} moves what is in the image, and would not move the boxes"
            todo = "resize stretches the whole image, and its boxes with it"
            found.append((("data", "preprocess", index), Unfit(what, ", ".join(STAYING), todo)))
    return found
