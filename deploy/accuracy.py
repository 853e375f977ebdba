"""What the models of a bundle answer here: golden vectors first, then three-way accuracy.

Golden outputs come from the host that packed the bundle, with reproducible kernels. Here they must be equal
where the kernels are the same: reproducible ones, of a runtime that they were compared on, on the same
architecture. Elsewhere a few steps between them are what other kernels do, and are told as such.

Three-way: the float original and the int8 model on this host's CPU, and the compiled model on the Edge TPU,
on the samples that the bundle brings, all through the one preprocessing of the bundle.
Runs on Python 3.7 with numpy and a TFLite runtime.
"""

from __future__ import annotations

import platform
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from deploy import runtime
from deploy.bundle import Bundle, BundleError
from deploy.errors import DeviceError, EdgeTpuError
from deploy.measurement import missing, paired_drop, proportion, told
from deploy.model import Model
from deploy.preprocessing import Array
from deploy.runtime import Options, Runtime, Session

ROLES = ("original", "int8", "compiled")
CLOSE_STEPS = 5
"""Of the output: what int8 results differ by between runtimes at most, as far as it was seen."""
CLOSE_SHARE = 1e-3
"""The same for float models, as a share of the largest golden output: the order of sums differs."""
COMPARED_SINCE = (2, 14)
"""TFLite versions whose reproducible kernels were found equal to the bit, on x86-64. (2.11 differs by one step.)"""
Progress = Callable[[str], None]


def evaluation(opened: Bundle) -> Tuple[List[str], List[int]]:
    """The members with decoded samples, and their classes. Both empty: the bundle brings none.

    Raises:
        BundleError: the manifest's `evaluation` is not what it should be.
    """
    entry = opened.manifest.get("evaluation")
    if entry is None:
        return [], []
    try:
        names, labels = list(entry["inputs"]), list(entry["labels"])
    except (KeyError, TypeError) as error:
        raise BundleError("the manifest's evaluation sample is incomplete: %r" % error)
    classes = len(opened.labels)
    sound = len(names) == len(labels) and all(isinstance(name, str) and name in opened.members for name in names)
    if not sound or not all(type(label) is int and 0 <= label < classes for label in labels):
        raise BundleError("the manifest's evaluation sample does not fit the bundle's members and labels")
    return names, labels


def golden(opened: Bundle, role: str, options: Options) -> Dict[str, Any]:
    """Runs the golden inputs through one model and compares the outputs with those of the host.

    Returns:
        `verdict` (equal, close, different, or not run), `largest_steps` (of the output's quantization) or
        `largest_difference` (float), `equal` and `same_class` of `samples`, `kernels`, and a `note`.
    """
    source = role if role in opened.manifest["golden"]["outputs"] else "int8"
    name = opened.manifest["golden"]["outputs"].get(source)
    inputs = [opened.array(each) for each in opened.manifest["golden"]["inputs"]]
    if name is None or not inputs:
        return {"verdict": "not run", "note": "the bundle has no golden outputs for it"}
    wanted = opened.array(name)
    kernels = runtime.reproducible(runtime.find())
    try:
        model = Model(opened, role, options.device, options.threads, kernels, options.library)
    except EdgeTpuError as error:
        return {"verdict": "not run", "note": str(error), "error": error.to_json()}
    with model:
        tensors = [model.prepare(image) for image in inputs]
        found = np.concatenate([model.session.run(tensor) for tensor in tensors])
        result = _verdict(found, wanted, role, model)
        if result["verdict"] != "equal" and role == "int8":
            different = int(np.flatnonzero((found != wanted).reshape(len(found), -1).any(axis=1))[0])
            result["first_layer"] = first_layer(model.session.runtime, model.content, tensors[different])
    return result


def _verdict(found: Array, wanted: Array, role: str, model: Model) -> Dict[str, Any]:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        what = "gives %s %r, and the golden output is %s %r" % (found.dtype, found.shape, wanted.dtype, wanted.shape)
        return {"verdict": "different", "note": what}
    rows, golden_rows = found.reshape(len(found), -1), wanted.reshape(len(wanted), -1)
    difference = np.abs(rows.astype(np.float64) - golden_rows.astype(np.float64))
    equal = int((rows == golden_rows).all(axis=1).sum())
    result: Dict[str, Any] = {
        "samples": len(rows),
        "equal": equal,
        "same_class": int((rows.argmax(axis=1) == golden_rows.argmax(axis=1)).sum()),
        "kernels": "Edge TPU" if role == "compiled" else model.session.options.kernels,
    }
    if np.issubdtype(found.dtype, np.integer):
        result["largest_steps"], limit = int(difference.max()), float(CLOSE_STEPS)
    else:
        result["largest_difference"] = float(difference.max())
        limit = float(np.abs(golden_rows).max()) * CLOSE_SHARE
    same = role == "int8" and _same_kernels(model)
    if equal == len(rows):
        return dict(result, verdict="equal", note="")
    if same:
        return dict(result, verdict="different", note="the kernels are the same: the outputs must be equal")
    near = bool(difference.max() <= limit)  # not for NaN
    note = "other kernels than the golden outputs come from" + ("" if near else "; but that does not explain so much")
    return dict(result, verdict="close" if near else "different", note=note)


def _same_kernels(model: Model) -> bool:
    """Whether the golden outputs come from the kernels that are used here."""
    found = model.session.runtime
    machine = model.bundle.manifest["golden"].get("machine")
    compared = found.name == "ai_edge_litert" or runtime.version_numbers(found.version)[:2] >= COMPARED_SINCE
    return model.session.options.kernels == "reproducible" and machine == platform.machine() and compared


def first_layer(found: Runtime, content: bytes, tensor: Array) -> Dict[str, Any]:
    """The first operator whose output is not the same with the reproducible and with the plain C++ kernels.

    Returns:
        `layer`: the name of its output tensor, or None; `note`: what that means, or why it cannot be known.
    """
    if not found.keeps_tensors or not {"reproducible", "reference"} <= set(found.kernels()):
        what = "%s %s keeps no intermediate tensors to look at" % (found.name, found.version)
        return {"layer": None, "note": what}
    sessions = [Session(found, content, Options(kernels=name, keep=True)) for name in ("reproducible", "reference")]
    for session in sessions:
        session.run(tensor)
    details = sessions[0].interpreter.get_tensor_details()
    for detail in details:  # converters write them in the order in which they are made
        try:
            values = [session.interpreter.get_tensor(detail["index"]) for session in sessions]
        except ValueError:  # a temporary, of one of them only
            continue
        if not np.array_equal(values[0], values[1]):
            steps = np.abs(values[0].astype(np.float64) - values[1].astype(np.float64)).max()
            note = "the optimized kernel gives other values than the plain one, by up to %g" % steps
            return {"layer": str(detail["name"]), "note": note}
    return {
        "layer": None,
        "note": "optimized and plain kernels agree in every layer: the golden outputs differ from both",
    }


def verify(opened: Bundle, options: Options) -> Dict[str, Any]:
    """Golden vectors of every model of a bundle; `ok` where none is different and one at least was run."""
    roles = [role for role in ROLES if role in opened.manifest["models"]]
    found = {}
    for role in roles:
        here = options if role == "compiled" else Options("cpu", options.threads)
        try:
            found[role] = golden(opened, role, here)
        except DeviceError as error:
            if role != "original":
                raise
            # Float originals may need operators that old boards do not have; what runs there is int8.
            found[role] = {"verdict": "not run", "note": str(error), "error": error.to_json()}
    verdicts = [each["verdict"] for each in found.values()]
    return {"golden": found, "ok": "different" not in verdicts and set(verdicts) != {"not run"}}


def compare(
    opened: Bundle, options: Options, limit: Optional[int] = None, progress: Progress = lambda text: None
) -> Dict[str, Any]:
    """Accuracy of each model on the bundle's evaluation sample, and what changes from one to another.

    Args:
        opened: a verified bundle.
        options: device, threads and library for the compiled model; the others run on the CPU.
        limit: how many samples at most, the first ones.
        progress: is told what is being done.

    Raises:
        BundleError: the evaluation sample does not fit.
        RuntimeLibraryError: there is no TFLite runtime.
    """
    names, labels = evaluation(opened)
    names, labels = names[:limit], labels[:limit]
    if not names:
        return {"accuracy": missing("fraction", "the bundle has no evaluation sample")}
    wanted = np.array(labels)
    kernels = runtime.reproducible(runtime.find())
    predictions: Dict[str, Array] = {}
    result: Dict[str, Any] = {"preprocessing": opened.preprocessing.digest, "samples": len(names), "models": {}}
    for role in [role for role in ROLES if role in opened.manifest["models"]]:
        progress("accuracy of the %s model" % role)
        device = options.device if role == "compiled" else "cpu"
        try:
            with Model(opened, role, device, options.threads, kernels, options.library) as model:
                predictions[role] = np.array([model(opened.array(name)).index for name in names])
        except DeviceError as error:
            result["models"][role] = {"accuracy": missing("fraction", str(error)), "error": error.to_json()}
            continue
        right = proportion(int((predictions[role] == wanted).sum()), len(wanted), "%s kernels" % kernels)
        result["models"][role] = {"accuracy": right, "predictions": predictions[role].tolist()}
    result["pairs"] = [
        _pair(first, second, predictions, wanted, opened.labels)
        for place, first in enumerate(ROLES)
        for second in ROLES[place + 1 :]
        if first in predictions and second in predictions
    ]
    return result


def _pair(first: str, second: str, predictions: Dict[str, Array], wanted: Array, names: List[str]) -> Dict[str, Any]:
    """What changes from one model to another, on the same samples."""
    before, after = predictions[first], predictions[second]
    classes = []
    for index, name in enumerate(names):
        members = wanted == index
        if members.any():
            right = [int((each[members] == index).sum()) for each in (before, after)]
            classes.append({"name": name, "samples": int(members.sum()), "right": right, "change": right[1] - right[0]})
    return {
        "from": first,
        "to": second,
        "agreement": proportion(int((before == after).sum()), len(wanted), "same class"),
        "accuracy_drop": paired_drop(before == wanted, after == wanted),
        "per_class": classes,
    }


def text(result: Dict[str, Any]) -> str:
    """What `compare` found, for people."""
    if "models" not in result:
        return "accuracy: %s" % told(result["accuracy"])
    lines = ["accuracy on %d samples, preprocessing %s" % (result["samples"], result["preprocessing"][:12])]
    lines += ["  %-9s %s" % (role, told(each["accuracy"])) for role, each in result["models"].items()]
    for pair in result["pairs"]:
        drop, agreement = told(pair["accuracy_drop"]), told(pair["agreement"])
        lines.append("  %s to %s: drop %s, agreement %s" % (pair["from"], pair["to"], drop, agreement))
        changed = [each for each in pair["per_class"] if each["change"]]
        for each in sorted(changed, key=lambda each: abs(each["change"]), reverse=True)[:5]:
            lines.append("    %(name)s: %(change)+d of %(samples)d" % each)
    return "\n".join(lines)


def golden_text(result: Dict[str, Any]) -> str:
    """What `verify` found, for people."""
    lines = []
    for role, each in result["golden"].items():
        line = "%-9s golden outputs: %s" % (role, each["verdict"])
        if "samples" in each:
            line += ", %d of %d equal, %d of the same class" % (each["equal"], each["samples"], each["same_class"])
            steps = each.get("largest_steps")
            line += ", by up to %d steps" % steps if steps else ""
        lines.append(line + (" (%s)" % each["note"] if each["note"] else ""))
        if "first_layer" in each:
            layer = each["first_layer"]
            lines.append("  first layer that differs: %s (%s)" % (layer["layer"] or "not known", layer["note"]))
    return "\n".join(lines)
