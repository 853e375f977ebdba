"""What the models of a bundle answer here: golden vectors first, then three-way accuracy.

Golden outputs come from the host that packed the bundle, with reproducible kernels. Here they must be equal
where the kernels are the same: reproducible ones, of a runtime that they were compared on, on x86-64. Elsewhere
a few steps between them are what other kernels do, and are told as such; some more are, where the plain C++
kernels of this very runtime give the golden outputs to the bit.

Three-way: the float original and the int8 model on this host's CPU, and the compiled model on the Edge TPU,
on the samples that the bundle brings, all through the one preprocessing of the bundle.
Runs on Python 3.7 with numpy and a TFLite runtime.
"""

from __future__ import annotations

import dataclasses
import platform
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from deploy import evaluation, host, probe, runtime
from deploy.contract.bundle import Bundle
from deploy.contract.errors import DeviceError, EdgeTpuError
from deploy.contract.preprocessing import Array
from deploy.measurement import finite, missing, paired_drop, proportion, told
from deploy.model import Model
from deploy.runtime import InferenceSession, Runtime, RuntimeOptions

ROLES = ("original", "int8", "compiled")
CLOSE_STEPS = 7
"""Of the output: what int8 results differ by between runtimes and machines at most, as far as it was seen."""
CLOSE_STEPS_OPTIMIZED = 16
"""The same where the plain kernels give the golden outputs: on aarch64, the optimized ones of ai-edge-litert 2.3 were
seen to differ by up to 10 steps, and those of tflite-runtime 2.14 by none."""
CLOSE_SHARE = 1e-3
"""The same for float models, as a share of the largest golden output: the order of sums differs."""
COMPARED_SINCE = (2, 14)
"""TFLite versions whose reproducible kernels were found equal to the bit on COMPARED_ON. (2.11 differs by one step.)"""
COMPARED_ON = ("x86_64", "AMD64")
"""On aarch64 they are not equal: ai-edge-litert 2.3 gives others than tflite-runtime 2.14."""
Progress = Callable[[str], None]


def golden(opened: Bundle, role: str, options: RuntimeOptions) -> Dict[str, Any]:
    """Runs the golden inputs through one model and compares the outputs with those of the host.

    Returns:
        `verdict` (equal, close, different, or not run), `largest_steps` (of the output's quantization) or
        `largest_difference` (float), `equal` and `same_class` of `samples`, `kernels`, and a `note`; for the int8 model
        also `default_steps` and `default_same_class`: the same with the default kernels, which applications run.

    Raises:
        ModelError, RuntimeLibraryError: the runtime refuses the model, or crashes.
    """
    outputs = opened.manifest["golden"]["outputs"]
    name = outputs.get(role, outputs.get("int8") if role == "compiled" else None)
    inputs = [opened.array(each) for each in opened.manifest["golden"]["inputs"]]
    if name is None or not inputs:
        return {"verdict": "not run", "note": "the bundle has no golden outputs for it"}
    wanted = opened.array(name)
    kernels = runtime.reproducible(runtime.find())
    content = opened.members[opened.manifest["models"][role]["file"]]
    try:
        probe.check(content, dataclasses.replace(options, kernels=kernels))  # on the CPU too: there is time for it here
        model = Model(opened, role, options.device, options.threads, kernels, options.library)
    except EdgeTpuError as error:
        return {"verdict": "not run", "note": str(error), "error": error.to_json()}
    with model:
        tensors = [model.prepare(image) for image in inputs]
        found = np.concatenate([model.session.run(tensor) for tensor in tensors])
        result = _verdict(found, wanted, role, model)
        if result["verdict"] != "equal" and role == "int8" and "samples" in result:
            if not _same_kernels(model):
                result = _beside_plain(result, model, tensors, wanted)
            different = int(np.flatnonzero((found != wanted).reshape(len(found), -1).any(axis=1))[0])
            result["first_layer"] = first_layer(model.session.runtime, model.content, tensors[different])
        if role == "int8" and kernels != "default" and "samples" in result:
            result = _beside_default(result, model, tensors, wanted)
    return result


def _verdict(found: Array, wanted: Array, role: str, model: Model) -> Dict[str, Any]:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        what = "gives %s %r, and the golden output is %s %r" % (found.dtype, found.shape, wanted.dtype, wanted.shape)
        return {"verdict": "different", "note": what}
    rows, golden_rows = found.reshape(len(found), -1), wanted.reshape(len(wanted), -1)
    scores = _scores(model)
    difference = np.abs(rows.astype(np.float64) - golden_rows.astype(np.float64))
    equal = int((rows == golden_rows).all(axis=1).sum())
    result: Dict[str, Any] = {
        "samples": len(rows),
        "equal": equal,
        "same_class": int((rows[:, scores].argmax(axis=1) == golden_rows[:, scores].argmax(axis=1)).sum()),
        "kernels": "Edge TPU" if role == "compiled" else model.session.options.kernels,
    }
    if np.issubdtype(found.dtype, np.integer):
        result["largest_steps"], limit = int(difference.max()), float(CLOSE_STEPS)
    else:
        result["largest_difference"] = finite(difference.max())
        limit = float(np.abs(golden_rows).max()) * CLOSE_SHARE
    same = role == "int8" and _same_kernels(model)
    if equal == len(rows):
        return dict(result, verdict="equal", note="")
    if same:
        return dict(result, verdict="different", note="the kernels are the same: the outputs must be equal")
    near = bool(difference.max() <= limit)  # not for NaN
    note = "other kernels than the golden outputs come from" + ("" if near else "; but that does not explain so much")
    return dict(result, verdict="close" if near else "different", note=note)


def _scores(model: Model) -> slice:
    """Where the scores are in a row of outputs: behind the boxes, if there are any."""
    detector = model.bundle.detector
    return slice(0 if detector is None else 4 * len(detector.anchors), None)


def _same_kernels(model: Model) -> bool:
    """Whether the golden outputs come from the kernels that are used here."""
    found = model.session.runtime
    made_on = model.bundle.manifest["golden"].get("machine")
    compared = found.name == "ai_edge_litert" or runtime.version_numbers(found.version)[:2] >= COMPARED_SINCE
    alike = made_on == platform.machine() and made_on in COMPARED_ON
    return model.session.options.kernels == "reproducible" and alike and compared


def _beside_plain(result: Dict[str, Any], model: Model, tensors: List[Array], wanted: Array) -> Dict[str, Any]:
    """The verdict on optimized kernels, once it is known whether the plain ones give the golden outputs.

    Optimized kernels round as their processor does it fastest; plain ones are the same arithmetic everywhere. If
    those are equal, model, inputs and preprocessing are what was packed.
    """
    if "reference" not in model.session.runtime.kernels():
        return result
    session = InferenceSession(model.session.runtime, model.content, RuntimeOptions(kernels="reference"))
    if not np.array_equal(np.concatenate([session.run(tensor) for tensor in tensors]), wanted):
        return result
    near = result["largest_steps"] <= CLOSE_STEPS_OPTIMIZED
    note = "all are equal with plain C++ kernels: the optimized ones for %s " % platform.machine()
    note += "round in another way" if near else "do not work with this runtime"
    return dict(result, verdict="close" if near else "different", note=note)


def _beside_default(result: Dict[str, Any], model: Model, tensors: List[Array], wanted: Array) -> Dict[str, Any]:
    """The verdict with that on the default kernels: the fastest, never equal to the bit, and what applications run."""
    options = dataclasses.replace(model.session.options, kernels="default")
    probe.check(model.content, options)
    session = InferenceSession(model.session.runtime, model.content, options)
    found = np.concatenate([session.run(tensor) for tensor in tensors]).reshape(len(wanted), -1)
    rows = wanted.reshape(len(wanted), -1)
    steps = int(np.abs(found.astype(np.int64) - rows.astype(np.int64)).max())
    scores = _scores(model)
    same = int((found[:, scores].argmax(axis=1) == rows[:, scores].argmax(axis=1)).sum())
    result = dict(result, default_steps=steps, default_same_class=same)
    if steps <= CLOSE_STEPS_OPTIMIZED or same == len(rows):
        return result
    note = "the default kernels, which applications run, answer otherwise: by up to %d steps, another class in %d of %d"
    return dict(result, verdict="different", note=note % (steps, len(rows) - same, len(rows)))


def first_layer(found: Runtime, content: bytes, tensor: Array) -> Dict[str, Any]:
    """The first operator whose output is not the same with the reproducible and with the plain C++ kernels.

    Returns:
        `layer`: the name of its output tensor, or None; `note`: what that means, or why it cannot be known.
    """
    if not found.keeps_tensors or not {"reproducible", "reference"} <= set(found.kernels()):
        what = "%s %s keeps no intermediate tensors to look at" % (found.name, found.version)
        return {"layer": None, "note": what}
    sessions = [
        InferenceSession(found, content, RuntimeOptions(kernels=name, keep=True))
        for name in ("reproducible", "reference")
    ]
    for session in sessions:
        session.run(tensor)
    if not hasattr(sessions[0].interpreter, "_get_ops_details"):
        return {"layer": None, "note": "%s %s does not tell a model's operators" % (found.name, found.version)}
    names = {detail["index"]: str(detail["name"]) for detail in sessions[0].interpreter.get_tensor_details()}
    for operator in sessions[0].interpreter._get_ops_details():
        for index in operator[
            "outputs"
        ]:  # no others: kernels' own tensors may have no memory, and reading them crashes
            values = [session.interpreter.get_tensor(index).astype(np.float64) for session in sessions]
            if not np.array_equal(values[0], values[1]):  # a converter's name is those of all layers it fused
                steps = np.abs(values[0] - values[1]).max()
                note = "the optimized kernel gives other values than the plain one, by up to %g" % steps
                return {"layer": names[index].split(";")[0], "operator": str(operator["op_name"]), "note": note}
    note = "optimized and plain kernels agree in every layer: the golden outputs differ from both"
    return {"layer": None, "note": note}


def verify(opened: Bundle, options: RuntimeOptions) -> Dict[str, Any]:
    """Golden vectors of every model of a bundle.

    Returns:
        `golden` by role; `ok`: none is different, and one at least was run; `blocked`: why the compiled model could
        not be run although an Edge TPU is here or was asked for, or None.
    """
    roles = [role for role in ROLES if role in opened.manifest["models"]]
    found = {}
    for role in roles:
        here = options if role == "compiled" else RuntimeOptions("cpu", options.threads)
        try:
            found[role] = golden(opened, role, here)
        except DeviceError as error:
            if role != "original":
                raise
            # Float originals may need operators that old boards do not have; what runs there is int8.
            found[role] = {"verdict": "not run", "note": str(error), "error": error.to_json()}
    verdicts = [each["verdict"] for each in found.values()]
    blocked = found.get("compiled", {}).get("error")
    wanted = options.device not in ("", "cpu") or (options.device == "" and bool(host.edge_tpus()))
    ok = "different" not in verdicts and set(verdicts) != {"not run"}
    return {"golden": found, "ok": ok, "blocked": blocked if wanted else None}


def compare(
    opened: Bundle, options: RuntimeOptions, limit: Optional[int] = None, progress: Progress = lambda text: None
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
    if opened.detector is not None:
        return evaluation.compare(opened, options, limit, progress)
    samples, labels = opened.evaluation()
    samples, labels = samples[:limit], labels[:limit]
    if not samples:
        return {"accuracy": missing("fraction", "the bundle has no evaluation sample")}
    wanted = labels
    kernels = runtime.reproducible(runtime.find())
    predictions: Dict[str, Array] = {}
    result: Dict[str, Any] = {"preprocessing": opened.preprocessing.digest, "samples": len(samples), "models": {}}
    for role in [role for role in ROLES if role in opened.manifest["models"]]:
        progress("accuracy of the %s model" % role)
        device = options.device if role == "compiled" else "cpu"
        try:
            with Model(opened, role, device, options.threads, kernels, options.library) as model:
                predictions[role] = np.array([model(sample).index for sample in samples])
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
    if any("ap" in each for each in result["models"].values()):
        return evaluation.text(result)
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
            line += ", by up to %d step%s" % (steps, "s" * (steps != 1)) if steps else ""
            line += ", by up to %.2g" % each["largest_difference"] if each.get("largest_difference") else ""
        lines.append(line + (" (%s)" % each["note"] if each["note"] else ""))
        if "first_layer" in each:
            layer = each["first_layer"]
            lines.append("  first layer that differs: %s (%s)" % (layer["layer"] or "not known", layer["note"]))
    return "\n".join(lines)
