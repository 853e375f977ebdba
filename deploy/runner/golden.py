"""Verification of a bundle's models on this device, with golden vectors.

The golden outputs come from the host that packed the bundle, which runs kernels whose results are reproducible. On the
device they must be equal if the kernels are the same: reproducible kernels, of a runtime for which this was tested, on
x86-64. Other kernels may differ by a few quantization steps; the result says by how many. A larger difference is
allowed if the plain C++ kernels of the same runtime give the golden outputs.
"""

from __future__ import annotations

import dataclasses
import platform
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.bundle import ARRAYS_IN_IMAGE, Bundle
from deploy.contract.detection import agreement
from deploy.contract.embedding import alike
from deploy.contract.errors import DeviceError, EdgeTpuError
from deploy.contract.preprocessing import Array
from deploy.contract.shapes import class_at
from deploy.contract.tensors import TensorDescription, TensorLayout
from deploy.runner import host, probe, runtime
from deploy.runner.measurement import finite, sqnr_db
from deploy.runner.model import Model
from deploy.runner.runtime import InferenceSession, Runtime, RuntimeOptions

CLOSE_STEPS = 7
"""The largest difference of int8 outputs, in quantization steps, between runtimes and machines that was observed."""
CLOSE_STEPS_OPTIMIZED = 16
"""The limit if the plain C++ kernels give the golden outputs. On aarch64 the optimized kernels of ai-edge-litert 2.3
differed by up to 10 steps, those of tflite-runtime 2.14 by none."""
CLOSE_SHARE = 1e-3
"""The limit for float models, as a fraction of the largest golden output: their kernels add in another order."""
ROUNDING_SHARE = 1e-6
"""The limit for float outputs of int8 models with the same kernels, as a fraction of the largest golden output:
`DEQUANTIZE` of tflite-runtime 2.14 and of ai-edge-litert 2.3 differ in the last bit."""
CLOSE_DB = 20.0
"""The smallest ratio of signal to error with other kernels, if the outputs are not classes or objects."""
SAME_SHARE = 0.99
"""The smallest share of equal answers with other kernels: a pixel at an edge, or an object of a hundred, may differ."""
MOST_SAMPLES = 20
"""The number of evaluation samples in which objects are looked for, if the golden inputs have none."""
MANY = 256
MANY_CLOSE_DB = 28.0
"""The smallest ratio of signal to error for outputs of MANY values or more, of which a few differ by more steps. With
tflite-runtime 2.11, 17,680 values of a face detector differed by up to 10 steps, at 31.4 dB; 16,000 of another by 8, at
32.7 dB."""
EQUAL_SINCE = (2, 14)
"""The first TFLite version whose reproducible kernels gave equal outputs on EQUAL_ON. 2.11 differs by a step."""
EQUAL_ON = ("x86_64", "AMD64")
"""On aarch64 the outputs of ai-edge-litert 2.3 and of tflite-runtime 2.14 differ."""
Verdict = Dict[str, Any]
Tensors = Sequence[Array]
"""The input tensors of one sample."""


class GoldenDifference(NamedTuple):
    """The difference of one output from its golden output.

    Attributes:
        steps: the largest difference in quantization steps; None if the output is not quantized.
        difference: the largest difference of the stored values.
        share: `difference` as a fraction of the largest golden value.
        size: the number of values of a sample.
        sqnr_db: the ratio of the golden values to their differences, in dB.
    """

    name: str
    steps: Optional[int]
    difference: float
    share: float
    size: int
    sqnr_db: float

    def is_close(self, steps: int, share: float) -> bool:
        """Return whether the difference is within a limit: of steps, or of a fraction; False for NaN."""
        return self.steps <= steps if self.steps is not None else self.share <= share

    def to_json(self) -> Dict[str, Any]:
        """Return `name`, and `largest_steps` or `largest_difference`."""
        if self.steps is not None:
            return {"name": self.name, "largest_steps": self.steps}
        return {"name": self.name, "largest_difference": finite(self.difference)}


class SameAnswers(NamedTuple):
    """The fraction of equal answers of two models, and the number of all answers."""

    share: float
    total: int


def golden(opened: Bundle, role: str, options: RuntimeOptions) -> Verdict:
    """Run the golden inputs through one model and compare the outputs with the golden outputs.

    Returns:
        `verdict` (equal, close, different, or not run), `largest_steps` (quantization steps, of quantized outputs) and
        `largest_difference` (of others), `outputs` (the same for each of several outputs), `equal` of `samples`,
        `kernels`, and a `note`. If the answers are classes, labels, objects, masks or embeddings, also `same_answers`:
        `share`, and `total`. For the int8 model also `default_steps` and `default_same_answers`: the same with the
        default kernels, which applications run.

    Raises:
        LoadError, RuntimeLibraryError: the runtime refuses the model, or crashes.
    """
    inputs = [opened.array(member) for member in opened.manifest["golden"]["inputs"]]
    if not inputs:
        return _tried(opened, role, options)
    outputs = opened.manifest["golden"]["outputs"]
    name = outputs.get(role, outputs.get("int8") if role == "compiled" else None)
    if name is None:
        return {"verdict": "not run", "note": "the bundle has no golden outputs for this model"}
    expected = opened.array(name)
    kernels = runtime.reproducible(runtime.find())
    content = opened.content(role)
    try:
        probe.check(content, dataclasses.replace(options, kernels=kernels))  # on the CPU too: a crash is then an error
        model = Model(opened, role, options.device, options.threads, kernels, options.library)
    except EdgeTpuError as error:
        return {"verdict": "not run", "note": str(error), "error": error.to_json()}
    with model:
        samples = [model.prepare(sample) for sample in inputs]
        actual = _run(model.session, samples)
        result = _verdict(actual, expected, role, model)
        if role != "int8" or "samples" not in result:
            return result
        if result["verdict"] != "equal":
            if not _same_kernels(model):
                result = _with_plain_kernels(result, model, samples, expected)
            unequal = (actual != expected).reshape(len(actual), -1).any(axis=1)
            first = samples[int(np.flatnonzero(unequal)[0])]
            result["first_layer"] = first_layer(model.session.runtime, model.content, first)
        if kernels != "default":
            result = _with_default_kernels(result, model, samples, expected)
        return result


def _tried(opened: Bundle, role: str, options: RuntimeOptions) -> Verdict:
    """Return the verdict for a bundle without golden inputs: the model is loaded and run once, on zeros."""
    try:
        probe.check(opened.content(role), options)
    except EdgeTpuError as error:
        return {"verdict": "not run", "note": str(error), "error": error.to_json()}
    return {"verdict": "not run", "note": "the bundle has no golden inputs; the model loads and runs"}


def _run(session: InferenceSession, samples: Sequence[Tensors]) -> Array:
    return np.concatenate([session.run(tensors) for tensors in samples])


def _verdict(actual: Array, expected: Array, role: str, model: Model) -> Verdict:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        shapes = (actual.dtype, actual.shape, expected.dtype, expected.shape)
        return {"verdict": "different", "note": "the output is %s %r, and the golden output %s %r" % shapes}
    rows = actual.reshape(len(actual), -1)
    golden_rows = expected.reshape(len(expected), -1)
    differences = _differences(rows, golden_rows, model.session.outputs)
    equal = int((rows == golden_rows).all(axis=1).sum())
    result: Verdict = {
        "samples": len(rows),
        "equal": equal,
        "kernels": "Edge TPU" if role == "compiled" else model.session.options.kernels,
    }
    same = _same_answers(actual, expected, model)
    if same.total:
        result["same_answers"] = same._asdict()
    steps = [difference.steps for difference in differences if difference.steps is not None]
    others = [difference.difference for difference in differences if difference.steps is None]
    if steps:
        result["largest_steps"] = max(steps)
    if others:
        result["largest_difference"] = finite(float(np.max(others)))
    if len(differences) > 1:
        result["outputs"] = [difference.to_json() for difference in differences]
    if equal == len(rows):
        return dict(result, verdict="equal", note="")
    if role == "int8" and _same_kernels(model):
        if all(difference.is_close(0, ROUNDING_SHARE) for difference in differences):
            return dict(result, verdict="close", note="the runtimes round float outputs in another way")
        return dict(result, verdict="different", note="the kernels are the same, so the outputs must be equal")
    if _are_close(differences, CLOSE_STEPS, role):
        return dict(result, verdict="close", note="the golden outputs come from other kernels")
    note = "the golden outputs come from other kernels, but that does not explain a difference of this size"
    return dict(result, verdict="different", note=note)


def _differences(rows: Array, golden_rows: Array, tensors: Sequence[TensorDescription]) -> List[GoldenDifference]:
    """Return the differences of each output from golden outputs, both as rows [n, values]."""
    layout = TensorLayout.of(tensors)
    differences = []
    for tensor, part, golden_part in zip(tensors, layout.parts(rows), layout.parts(golden_rows)):
        actual = part.astype(np.float64)
        expected = golden_part.astype(np.float64)
        difference = float(np.abs(actual - expected).max())
        share = difference / max(float(np.abs(expected).max()), 1e-30)
        steps = int(difference) if tensor.is_quantized else None
        ratio = sqnr_db(tensor.real(golden_part), tensor.real(part))
        differences.append(GoldenDifference(tensor.name, steps, difference, share, part.shape[1], ratio))
    return differences


def _are_close(differences: Sequence[GoldenDifference], steps: int, role: str) -> bool:
    """Return whether all differences are within the limits of other kernels."""
    share = CLOSE_SHARE if role == "original" else steps / 255  # float outputs of a quantized model
    for difference in differences:
        many_are_close = role != "original" and difference.size >= MANY and difference.sqnr_db >= MANY_CLOSE_DB
        if not difference.is_close(steps, share) and not many_are_close:
            return False
    return True


def _same_answers(actual: Array, expected: Array, model: Model) -> SameAnswers:
    """Return how many answers are equal, by the rules of the host's reports.

    Classes and labels are equal or not; objects as in `agreement`; a mask has an answer for each pixel; embeddings
    are equal if their directions nearly are. Other answers are numbers, and the total is 0.
    """
    first, second = _answers(actual, model), _answers(expected, model)
    opened = model.bundle
    if opened.answers == "objects":
        return SameAnswers(*agreement(first, second))
    pairs = list(zip(first, second))
    if opened.answers == "class":
        equal = [np.array([one.index == other.index]) for one, other in pairs]
    elif opened.answers == "labels":
        equal = [(one.scores > 0.5) == (other.scores > 0.5) for one, other in pairs]
    elif ARRAYS_IN_IMAGE.get(opened.task) == "mask":
        equal = [(class_at(one.first) == class_at(other.first)).ravel() for one, other in pairs]
    elif opened.gives_embedding:
        equal = [alike(one.first.reshape(1, -1), other.first.reshape(1, -1)) for one, other in pairs]
    else:
        return SameAnswers(0.0, 0)
    together = np.concatenate(equal)
    return SameAnswers(float(together.mean()), together.size)


def _answers(outputs: Array, model: Model) -> List[Any]:
    tensors = model.session.outputs
    layout = TensorLayout.of(tensors)
    answers = []
    for row in outputs.reshape(len(outputs), 1, -1):
        parts = zip(layout.parts(row), tensors)  # the parts of a row have one dtype
        answers.append(model.decode([part.astype(tensor.dtype) for part, tensor in parts]))
    return answers


def _judged(actual: Array, expected: Array, model: Model, same: SameAnswers) -> Tuple[bool, str]:
    """Return whether the outputs of other kernels answer like the golden outputs, and how they differ."""
    differences = _differences(
        actual.reshape(len(actual), -1), expected.reshape(len(expected), -1), model.session.outputs
    )
    least = min(difference.sqnr_db for difference in differences)
    ratio = "have a ratio of signal to error of %.1f dB" % least
    if _are_close(differences, CLOSE_STEPS_OPTIMIZED, model.role):
        return True, ratio
    is_decided = same.total and model.bundle.answers in ("class", "objects")
    is_close = (same.total and same.share >= SAME_SHARE) or (not is_decided and least >= CLOSE_DB)
    if not same.total:
        return bool(is_close), ratio
    return bool(is_close), "give the same answer for %.3g of %d, and %s" % (same.share, same.total, ratio)


def _same_kernels(model: Model) -> bool:
    """Return whether the golden outputs come from the kernels that are used here."""
    library = model.session.runtime
    packed_on = model.bundle.manifest["golden"].get("machine")
    same_machine = packed_on == platform.machine() and packed_on in EQUAL_ON
    tested = library.name == "ai_edge_litert" or host.version_numbers(library.version)[:2] >= EQUAL_SINCE
    return model.session.options.kernels == "reproducible" and same_machine and tested


def _session(model: Model, kernels: str) -> InferenceSession:
    """Return the model on other kernels, with its tensors in the same order."""
    options = dataclasses.replace(model.session.options, kernels=kernels)
    session = InferenceSession(model.session.runtime, model.content, options)
    session.arrange(model.session.inputs, model.session.outputs)
    return session


def _with_plain_kernels(result: Verdict, model: Model, samples: Sequence[Tensors], expected: Array) -> Verdict:
    """Return the verdict on optimized kernels, if the plain C++ kernels give the golden outputs.

    The arithmetic of plain kernels is the same on every machine. If their outputs are equal, then model, inputs and
    preprocessing are those of the host.
    """
    if "reference" not in model.session.runtime.kernels():
        return result
    if not np.array_equal(_run(_session(model, "reference"), samples), expected):
        return result
    actual = _run(model.session, samples)
    note = "the plain C++ kernels give the golden outputs; the optimized kernels for %s " % platform.machine()
    is_close, effect = _judged(actual, expected, model, _same_answers(actual, expected, model))
    if is_close:
        return dict(result, verdict="close", note=note + "round in another way")
    return dict(result, verdict="different", note=note + "do not work with this runtime: they " + effect)


def _with_default_kernels(result: Verdict, model: Model, samples: Sequence[Tensors], expected: Array) -> Verdict:
    """Return the verdict with that on the default kernels: the fastest ones, which applications run."""
    probe.check(model.content, dataclasses.replace(model.session.options, kernels="default"))
    session = _session(model, "default")
    actual = _run(session, samples)
    rows, golden_rows = actual.reshape(len(actual), -1), expected.reshape(len(actual), -1)
    differences = _differences(rows, golden_rows, session.outputs)
    steps = max((difference.steps for difference in differences if difference.steps is not None), default=None)
    same = _same_answers(actual, expected, model)
    if model.bundle.answers == "objects" and not same.total:
        same = _same_objects_in_evaluation(model, session)
    is_close, effect = _judged(actual, expected, model, same)
    result = dict(result, default_steps=steps)
    if same.total:
        result["default_same_answers"] = same._asdict()
    if is_close:
        return result
    by = "" if steps is None else " by up to %d steps" % steps
    note = "the default kernels, which applications run, differ%s, and %s" % (by, effect)
    return dict(result, verdict="different", note=note)


def _same_objects_in_evaluation(model: Model, session: InferenceSession) -> SameAnswers:
    """Return how many objects of the evaluation sample two sessions of a detector both find."""
    entry = model.bundle.manifest.get("evaluation")
    if entry is None:
        return SameAnswers(0.0, 0)
    samples = [model.prepare(sample) for sample in model.bundle.samples(entry)[:MOST_SAMPLES]]
    return _same_answers(_run(session, samples), _run(model.session, samples), model)


def first_layer(library: Runtime, content: bytes, tensors: Tensors) -> Dict[str, Any]:
    """Find the first operator whose output differs between the reproducible and the plain C++ kernels.

    Returns:
        `layer`: the name of its output tensor, or None; `note`: the difference, or the reason why no layer is named.
    """
    version = "%s %s" % (library.name, library.version)
    if not library.keeps_tensors or not {"reproducible", "reference"} <= set(library.kernels()):
        return {"layer": None, "note": "%s does not keep intermediate tensors" % version}
    optimized = InferenceSession(library, content, RuntimeOptions(kernels="reproducible", keep=True))
    plain = InferenceSession(library, content, RuntimeOptions(kernels="reference", keep=True))
    optimized.run_tensors(tensors)
    plain.run_tensors(tensors)
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
        `golden` by role; `ok`: no model is different, and at least one was run if the bundle has golden inputs;
        `blocked`: the error if the compiled model was not run although an Edge TPU is connected or was requested.
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
        "ok": "different" not in verdicts and (set(verdicts) != {"not run"} or not opened.manifest["golden"]["inputs"]),
        "blocked": results.get("compiled", {}).get("error") if expects_tpu else None,
    }


def text(result: Dict[str, Any]) -> str:
    """Return the result of `verify` as text."""
    lines = []
    for role, verdict in result["golden"].items():
        line = "%-9s golden outputs: %s" % (role, verdict["verdict"])
        if "samples" in verdict:
            line += ", %(equal)d of %(samples)d equal" % verdict
        if "same_answers" in verdict:
            line += ", %(share).3g of %(total)d answers the same" % verdict["same_answers"]
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
