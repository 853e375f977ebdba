"""Verification of a bundle's models on this device, with golden vectors.

The golden outputs come from the host that packed the bundle, which runs kernels whose results are reproducible. On the
device they must be equal if the kernels are the same: reproducible kernels, of a runtime for which this was tested, on
x86-64. Other kernels may differ by a few quantization steps; the result says by how many. A larger difference is
allowed if the plain C++ kernels of the same runtime give the golden outputs.
"""

from __future__ import annotations

import dataclasses
import platform
from typing import Any, Dict, List

import numpy as np

from deploy import host, probe, runtime
from deploy.contract.bundle import Bundle
from deploy.contract.errors import DeviceError, EdgeTpuError
from deploy.contract.preprocessing import Array
from deploy.measurement import finite
from deploy.model import Model
from deploy.runtime import InferenceSession, Runtime, RuntimeOptions

CLOSE_STEPS = 7
"""The largest difference of int8 outputs, in quantization steps, between runtimes and machines that was observed."""
CLOSE_STEPS_OPTIMIZED = 16
"""The limit if the plain C++ kernels give the golden outputs. On aarch64 the optimized kernels of ai-edge-litert 2.3
differed by up to 10 steps, those of tflite-runtime 2.14 by none."""
CLOSE_SHARE = 1e-3
"""The limit for float models, as a fraction of the largest golden output: their kernels add in another order."""
EQUAL_SINCE = (2, 14)
"""The first TFLite version whose reproducible kernels gave equal outputs on EQUAL_ON. 2.11 differs by a step."""
EQUAL_ON = ("x86_64", "AMD64")
"""On aarch64 the outputs of ai-edge-litert 2.3 and of tflite-runtime 2.14 differ."""
Verdict = Dict[str, Any]


def golden(opened: Bundle, role: str, options: RuntimeOptions) -> Verdict:
    """Run the golden inputs through one model and compare the outputs with the golden outputs.

    Returns:
        `verdict` (equal, close, different, or not run), `largest_steps` (quantization steps of the output) or
        `largest_difference` (float), `equal` and `same_class` of `samples`, `kernels`, and a `note`. For the int8 model
        also `default_steps` and `default_same_class`: the same with the default kernels, which applications run.

    Raises:
        LoadError, RuntimeLibraryError: the runtime refuses the model, or crashes.
    """
    outputs = opened.manifest["golden"]["outputs"]
    name = outputs.get(role, outputs.get("int8") if role == "compiled" else None)
    inputs = [opened.array(member) for member in opened.manifest["golden"]["inputs"]]
    if name is None or not inputs:
        return {"verdict": "not run", "note": "the bundle has no golden outputs for this model"}
    expected = opened.array(name)
    kernels = runtime.reproducible(runtime.find())
    content = opened.members[opened.manifest["models"][role]["file"]]
    try:
        probe.check(content, dataclasses.replace(options, kernels=kernels))  # on the CPU too: a crash is then an error
        model = Model(opened, role, options.device, options.threads, kernels, options.library)
    except EdgeTpuError as error:
        return {"verdict": "not run", "note": str(error), "error": error.to_json()}
    with model:
        tensors = [model.prepare(sample) for sample in inputs]
        actual = _run(model.session, tensors)
        result = _verdict(actual, expected, role, model)
        if role != "int8" or "samples" not in result:
            return result
        if result["verdict"] != "equal":
            if not _same_kernels(model):
                result = _with_plain_kernels(result, model, tensors, expected)
            unequal = (actual != expected).reshape(len(actual), -1).any(axis=1)
            first = tensors[int(np.flatnonzero(unequal)[0])]
            result["first_layer"] = first_layer(model.session.runtime, model.content, first)
        if kernels != "default":
            result = _with_default_kernels(result, model, tensors, expected)
        return result


def _run(session: InferenceSession, tensors: List[Array]) -> Array:
    return np.concatenate([session.run(tensor) for tensor in tensors])


def _verdict(actual: Array, expected: Array, role: str, model: Model) -> Verdict:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        shapes = (actual.dtype, actual.shape, expected.dtype, expected.shape)
        return {"verdict": "different", "note": "the output is %s %r, and the golden output %s %r" % shapes}
    rows = actual.reshape(len(actual), -1)
    golden_rows = expected.reshape(len(expected), -1)
    difference = np.abs(rows.astype(np.float64) - golden_rows.astype(np.float64)).max()
    equal = int((rows == golden_rows).all(axis=1).sum())
    result: Verdict = {
        "samples": len(rows),
        "equal": equal,
        "same_class": _same_class(rows, golden_rows, model),
        "kernels": "Edge TPU" if role == "compiled" else model.session.options.kernels,
    }
    if np.issubdtype(actual.dtype, np.integer):
        result["largest_steps"] = int(difference)
        limit = float(CLOSE_STEPS)
    else:
        result["largest_difference"] = finite(difference)
        limit = float(np.abs(golden_rows).max()) * CLOSE_SHARE
    if equal == len(rows):
        return dict(result, verdict="equal", note="")
    if role == "int8" and _same_kernels(model):
        return dict(result, verdict="different", note="the kernels are the same, so the outputs must be equal")
    if difference <= limit:  # false for NaN
        return dict(result, verdict="close", note="the golden outputs come from other kernels")
    note = "the golden outputs come from other kernels, but that does not explain a difference of this size"
    return dict(result, verdict="different", note=note)


def _same_class(rows: Array, golden_rows: Array, model: Model) -> int:
    """Return for how many samples the highest score is that of the same class. A detector's rows begin with boxes."""
    detector = model.bundle.detector
    first = 0 if detector is None else 4 * len(detector.anchors)
    return int((rows[:, first:].argmax(axis=1) == golden_rows[:, first:].argmax(axis=1)).sum())


def _same_kernels(model: Model) -> bool:
    """Return whether the golden outputs come from the kernels that are used here."""
    library = model.session.runtime
    packed_on = model.bundle.manifest["golden"].get("machine")
    same_machine = packed_on == platform.machine() and packed_on in EQUAL_ON
    tested = library.name == "ai_edge_litert" or host.version_numbers(library.version)[:2] >= EQUAL_SINCE
    return model.session.options.kernels == "reproducible" and same_machine and tested


def _with_plain_kernels(result: Verdict, model: Model, tensors: List[Array], expected: Array) -> Verdict:
    """Return the verdict on optimized kernels, if the plain C++ kernels give the golden outputs.

    The arithmetic of plain kernels is the same on every machine. If their outputs are equal, then model, inputs and
    preprocessing are those of the host.
    """
    if "reference" not in model.session.runtime.kernels():
        return result
    session = InferenceSession(model.session.runtime, model.content, RuntimeOptions(kernels="reference"))
    if not np.array_equal(_run(session, tensors), expected):
        return result
    note = "the plain C++ kernels give the golden outputs; the optimized kernels for %s " % platform.machine()
    if result["largest_steps"] <= CLOSE_STEPS_OPTIMIZED:
        return dict(result, verdict="close", note=note + "round in another way")
    return dict(result, verdict="different", note=note + "do not work with this runtime")


def _with_default_kernels(result: Verdict, model: Model, tensors: List[Array], expected: Array) -> Verdict:
    """Return the verdict with that on the default kernels: the fastest ones, which applications run."""
    options = dataclasses.replace(model.session.options, kernels="default")
    probe.check(model.content, options)
    session = InferenceSession(model.session.runtime, model.content, options)
    golden_rows = expected.reshape(len(expected), -1)
    rows = _run(session, tensors).reshape(len(expected), -1)
    steps = int(np.abs(rows.astype(np.int64) - golden_rows.astype(np.int64)).max())
    same = _same_class(rows, golden_rows, model)
    result = dict(result, default_steps=steps, default_same_class=same)
    if steps <= CLOSE_STEPS_OPTIMIZED or same == len(rows):
        return result
    note = "the default kernels, which applications run, differ by up to %d steps, and give another class for %d of %d"
    return dict(result, verdict="different", note=note % (steps, len(rows) - same, len(rows)))


def first_layer(library: Runtime, content: bytes, tensor: Array) -> Dict[str, Any]:
    """Find the first operator whose output differs between the reproducible and the plain C++ kernels.

    Returns:
        `layer`: the name of its output tensor, or None; `note`: the difference, or the reason why no layer is named.
    """
    version = "%s %s" % (library.name, library.version)
    if not library.keeps_tensors or not {"reproducible", "reference"} <= set(library.kernels()):
        return {"layer": None, "note": "%s does not keep intermediate tensors" % version}
    optimized = InferenceSession(library, content, RuntimeOptions(kernels="reproducible", keep=True))
    plain = InferenceSession(library, content, RuntimeOptions(kernels="reference", keep=True))
    optimized.run(tensor)
    plain.run(tensor)
    if not hasattr(plain.interpreter, "_get_ops_details"):
        return {"layer": None, "note": "%s does not list the operators of a model" % version}
    names = {detail["index"]: str(detail["name"]) for detail in plain.interpreter.get_tensor_details()}
    for operator in plain.interpreter._get_ops_details():
        for index in operator["outputs"]:  # temporary tensors of kernels may have no memory: reading them can crash
            values = optimized.interpreter.get_tensor(index).astype(np.float64)
            plain_values = plain.interpreter.get_tensor(index).astype(np.float64)
            if not np.array_equal(values, plain_values):
                difference = np.abs(values - plain_values).max()
                note = "the optimized kernel and the plain one differ by up to %g" % difference
                layer = names[index].split(";")[0]  # of fused layers, the converter joins all names
                return {"layer": layer, "operator": str(operator["op_name"]), "note": note}
    note = "optimized and plain kernels agree in every layer, and both differ from the golden outputs"
    return {"layer": None, "note": note}


def verify(opened: Bundle, options: RuntimeOptions) -> Dict[str, Any]:
    """Compare the golden vectors of every model of a bundle.

    Returns:
        `golden` by role; `ok`: at least one model was run, and none is different; `blocked`: the error if the compiled
        model was not run although an Edge TPU is connected or was requested, or None.
    """
    results: Dict[str, Verdict] = {}
    for role in opened.roles:
        try:
            on_cpu = RuntimeOptions("cpu", options.threads)
            results[role] = golden(opened, role, options if role == "compiled" else on_cpu)
        except DeviceError as error:
            if role != "original":
                raise
            # A float original may need operators that the runtime of an old board does not have.
            results[role] = {"verdict": "not run", "note": str(error), "error": error.to_json()}
    verdicts = [result["verdict"] for result in results.values()]
    expects_tpu = options.device != "cpu" and (bool(options.device) or bool(host.edge_tpus()))
    return {
        "golden": results,
        "ok": "different" not in verdicts and set(verdicts) != {"not run"},
        "blocked": results.get("compiled", {}).get("error") if expects_tpu else None,
    }


def text(result: Dict[str, Any]) -> str:
    """Return the result of `verify` as text."""
    lines = []
    for role, verdict in result["golden"].items():
        line = "%-9s golden outputs: %s" % (role, verdict["verdict"])
        if "samples" in verdict:
            line += ", %(equal)d of %(samples)d equal, %(same_class)d of the same class" % verdict
        steps = verdict.get("largest_steps")
        if steps:
            line += ", by up to %d step%s" % (steps, "s" * (steps != 1))
        if verdict.get("largest_difference"):
            line += ", by up to %.2g" % verdict["largest_difference"]
        lines.append(line + (" (%s)" % verdict["note"] if verdict["note"] else ""))
        if "first_layer" in verdict:
            layer = verdict["first_layer"]
            lines.append("  first layer that differs: %s (%s)" % (layer["layer"] or "unknown", layer["note"]))
    return "\n".join(lines)
