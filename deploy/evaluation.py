"""How well the models of a bundle find objects here: average precision on its evaluation sample, and what changes.

What `deploy.accuracy` does for classifiers: the float original and the int8 model on this host's CPU, and the compiled
model on the Edge TPU, on the samples that the bundle brings.
Runs on Python 3.7 with numpy and a TFLite runtime.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from deploy import runtime
from deploy.contract.average_precision import Truth, average_precision
from deploy.contract.bundle import Bundle, BundleError
from deploy.contract.detection import Detections, agreement
from deploy.contract.errors import DeviceError
from deploy.contract.preprocessing import Array
from deploy.measurement import measured, missing, told
from deploy.model import Model
from deploy.runtime import RuntimeOptions

SURE = 0.5
"""Objects that are found with this score are what two models are compared by."""


def objects(opened: Bundle) -> Tuple[List[Array], List[Truth]]:
    """The evaluation sample of a detector: decoded samples, and of each the boxes and classes of its objects.

    Raises:
        BundleError: it is not samples with objects.
    """
    entry = opened.manifest.get("evaluation")
    if entry is None:
        return [], []
    samples, rows = opened.samples(entry), opened.array(entry["labels"])
    good = rows.ndim == 2 and rows.shape[1] == 6 and rows.dtype == np.float32
    limits = (len(samples), len(opened.labels))
    if not good or not np.isfinite(rows).all() or not ((rows[:, :2] >= 0) & (rows[:, :2] < limits)).all():
        raise BundleError("the evaluation sample is not %d samples with their objects" % len(samples))
    own = [rows[rows[:, 0].astype(np.int64) == index] for index in range(len(samples))]
    return samples, [(each[:, 2:], each[:, 1].astype(np.int64)) for each in own]


def compare(
    opened: Bundle,
    options: RuntimeOptions,
    limit: Optional[int] = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Dict[str, Any]:
    """Average precision of each model on the bundle's evaluation sample, and what changes from one to another.

    Args:
        opened: a verified bundle of a detector.
        options: device, threads and library for the compiled model; the others run on the CPU.
        limit: how many samples at most, the first ones.
        progress: is told what is being done.

    Raises:
        BundleError: the evaluation sample does not fit.
        RuntimeLibraryError: there is no TFLite runtime.
    """
    samples, wanted = (each[:limit] for each in objects(opened))
    if not samples:
        return {"accuracy": missing("fraction", "the bundle has no evaluation sample")}
    kernels = runtime.reproducible(runtime.find())
    result: Dict[str, Any] = {"preprocessing": opened.preprocessing.digest, "samples": len(samples), "models": {}}
    answers: Dict[str, List[Detections]] = {}
    for role in [role for role in ("original", "int8", "compiled") if role in opened.manifest["models"]]:
        progress("average precision of the %s model" % role)
        device = options.device if role == "compiled" else "cpu"
        try:
            with Model(opened, role, device, options.threads, kernels, options.library) as model:
                answers[role] = [model(sample) for sample in samples]
        except DeviceError as error:
            result["models"][role] = {"ap": missing("fraction", str(error)), "error": error.to_json()}
            continue
        found = average_precision(answers[role], wanted, len(opened.labels))
        note = "COCO, %d images, %s kernels" % (len(samples), kernels)
        result["models"][role] = dict(_measured(found, note), per_class=found["per_class"])
    roles = list(answers)
    pairs = [(first, second) for place, first in enumerate(roles) for second in roles[place + 1 :]]
    result["pairs"] = [_pair(first, second, answers, result["models"]) for first, second in pairs]
    return result


def _measured(found: Dict[str, Any], note: str) -> Dict[str, Any]:
    none = missing("fraction", "there are no objects in the evaluation sample")
    return {name: none if found[name] is None else measured(found[name], "fraction", note) for name in ("ap", "ap50")}


def _pair(first: str, second: str, answers: Dict[str, List[Detections]], models: Dict[str, Any]) -> Dict[str, Any]:
    """What changes from one model to another, on the same samples."""
    share, count = agreement(answers[first], answers[second], SURE)
    pair: Dict[str, Any] = {"from": first, "to": second}
    for name in ("ap", "ap50"):
        values = [models[role][name]["value"] for role in (first, second)]
        drop = missing("fraction", "there are no objects in the evaluation sample")
        if None not in values:
            drop = measured(values[0] - values[1], "fraction", "the same images")
        pair[name + "_drop"] = drop
    note = "of %d objects that either finds with a score of %g or more, those that both find" % (count, SURE)
    nothing = missing("fraction", "neither finds anything with a score of %g" % SURE)
    pair["agreement"] = measured(share, "fraction", note) if count else nothing
    return pair


def text(result: Dict[str, Any]) -> str:
    """What `compare` found, for people."""
    lines = ["average precision on %d samples, preprocessing %s" % (result["samples"], result["preprocessing"][:12])]
    for role, each in result["models"].items():
        lines.append("  %-9s AP %s" % (role, told(each["ap"])))
        if "ap50" in each:
            lines.append("  %-9s AP50 %s" % ("", told(each["ap50"])))
    for pair in result["pairs"]:
        drop, same = told(pair["ap_drop"]), told(pair["agreement"])
        lines.append("  %s to %s: drop %s, agreement %s" % (pair["from"], pair["to"], drop, same))
    return "\n".join(lines)
