"""Accuracy of a bundle's models on this device, on the samples in the bundle.

The float original and the int8 model run on the CPU, the compiled model on the Edge TPU, all with the preprocessing of
the bundle. Classifiers are measured by accuracy, detectors by average precision. For a detector without labels, the
objects that the original model finds take the place of labels. For other tasks, and for other samples without labels,
the outputs are compared with the outputs of the original model on the host that packed the bundle.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.average_precision import Truth, average_precision
from deploy.contract.bundle import Bundle, BundleError
from deploy.contract.detection import SURE, Detections, agreement
from deploy.contract.errors import DeviceError
from deploy.contract.preprocessing import Array
from deploy.runner import runtime
from deploy.runner.answers import Answer
from deploy.runner.measurement import describe, finite, measured, missing, paired_drop, proportion, sqnr_db
from deploy.runner.model import Model
from deploy.runner.runtime import RuntimeOptions

CHANGED_CLASSES = 5
"""The number of classes that the text names: the classes that changed most."""
_NO_OBJECTS = "the evaluation sample has no objects"
Progress = Callable[[str], None]


def compare(
    opened: Bundle, options: RuntimeOptions, limit: Optional[int] = None, progress: Progress = lambda text: None
) -> Dict[str, Any]:
    """Measure each model on at most `limit` samples of the bundle's evaluation sample, and compare the models in pairs.

    The options are those of the compiled model; the other models run on the CPU. `progress` gets a message before each
    model.

    Raises:
        BundleError: the evaluation sample is invalid.
        RuntimeLibraryError: no TFLite runtime is installed.
    """
    entry = opened.manifest.get("evaluation")
    if entry is None:
        return {"accuracy": missing("fraction", "the bundle has no evaluation sample")}
    if opened.answers not in ("class", "objects") or entry.get("labels") is None:
        return fidelity(opened, options, limit, progress)
    samples, truth = opened.evaluation() if opened.detector is None else objects(opened)
    samples = samples[:limit]
    truth = truth[:limit]
    if not samples:
        return {"accuracy": missing("fraction", "the bundle has no evaluation sample")}
    metric = "accuracy" if opened.detector is None else "ap"
    kernels = runtime.reproducible(runtime.find())
    models: Dict[str, Any] = {}
    answers: Dict[str, List[Any]] = {}
    for role in opened.roles:
        progress("measuring the accuracy of the %s model" % role)
        try:
            with _model(opened, role, options, kernels) as model:
                # Without the shape of the samples: the boxes of the bundle are fractions of the model's input, too.
                answers[role] = [model.answer(model.prepare(sample)) for sample in samples]
        except DeviceError as error:
            models[role] = {metric: missing("fraction", str(error)), "error": error.to_json()}
            continue
        if opened.detector is None:
            predictions = _predictions(answers[role])
            correct = int((predictions == truth).sum())
            accuracy = proportion(correct, len(truth), "%s kernels" % kernels)
            models[role] = {"accuracy": accuracy, "predictions": predictions.tolist()}
        else:
            labels = " with the original's objects as labels" if entry.get("labels_from") == "original" else ""
            note = "COCO%s, %d images, %s kernels" % (labels, len(truth), kernels)
            models[role] = _precision(answers[role], truth, len(opened.labels), note)
    pairs = []
    for first, second in itertools.combinations(answers, 2):
        if opened.detector is None:
            pair = _classifier_pair(answers[first], answers[second], truth, opened.labels)
        else:
            pair = _detector_pair(answers[first], answers[second], models[first], models[second])
        pairs.append(dict({"from": first, "to": second}, **pair))
    digest = opened.preprocessing.digest
    return {"preprocessing": digest, "samples": len(samples), "models": models, "pairs": pairs}


def _model(opened: Bundle, role: str, options: RuntimeOptions, kernels: str) -> Model:
    device = options.device if role == "compiled" else "cpu"
    return Model(opened, role, device, options.threads, kernels, options.library)


# --- tasks without classes ------------------------------------------------------------


def fidelity(opened: Bundle, options: RuntimeOptions, limit: Optional[int], progress: Progress) -> Dict[str, Any]:
    """Compare the outputs of each model on the evaluation sample with those of the original model on the host.

    Arguments and exceptions as for `compare`. The outputs of the int8 model are the reference if the bundle has no
    original model.

    Returns:
        `models`: by role, the `outputs` with `name`, `sqnr_db` and `largest_difference`; `reference`: the role of the
        model that gave the reference; `samples`, `preprocessing`; and `pairs`, which is empty.
    """
    entry = opened.manifest["evaluation"]
    samples = opened.samples(entry)
    stored = entry["outputs"]
    reference = next((role for role in opened.roles if role in stored), None)
    if reference is None or not samples:
        return {"accuracy": missing("fraction", "the evaluation sample has neither labels nor outputs of the host")}
    expected = _reference(opened, reference, len(samples))
    samples = samples[:limit]
    kernels = runtime.reproducible(runtime.find())
    models: Dict[str, Any] = {}
    for role in opened.roles:
        progress("comparing the outputs of the %s model" % role)
        try:
            with _model(opened, role, options, kernels) as model:
                actual = [_real_outputs(model, sample) for sample in samples]
        except DeviceError as error:
            models[role] = {"outputs": [], "note": str(error), "error": error.to_json()}
            continue
        names = [tensor.name for tensor in opened.models[role].outputs]
        models[role] = {"outputs": _output_rows(names, expected, actual, "%s kernels" % kernels)}
    digest = opened.preprocessing.digest
    return {"preprocessing": digest, "samples": len(samples), "reference": reference, "models": models, "pairs": []}


def _reference(opened: Bundle, role: str, count: int) -> List[Array]:
    """Return the outputs of the host on the evaluation sample, dequantized: for each output [count, values]."""
    stored = opened.array(opened.manifest["evaluation"]["outputs"][role])
    model = opened.models[role]
    layout = model.output_layout
    if stored.size != count * layout.size or len(stored) != count:
        raise BundleError("the outputs of the evaluation sample are not %d rows of %d values" % (count, layout.size))
    return [tensor.real(part) for tensor, part in zip(model.outputs, layout.parts(stored.reshape(count, -1)))]


def _real_outputs(model: Model, sample: Array) -> List[Array]:
    """Return the outputs of a model for a sample, dequantized and flat."""
    stored = model.session.run_tensors(model.prepare(sample))
    return [tensor.real(output).ravel() for tensor, output in zip(model.session.outputs, stored)]


def _output_rows(
    names: Sequence[str], expected: Sequence[Array], actual: Sequence[Sequence[Array]], kernels: str
) -> List[Dict[str, Any]]:
    """Return the comparison of each output of a model with the reference."""
    rows = []
    for index, name in enumerate(names):
        values = np.stack([outputs[index] for outputs in actual])
        if index >= len(expected) or expected[index].shape[1] != values.shape[1]:
            reason = "the reference has no output of this shape"
            rows.append({"name": name, "sqnr_db": missing("dB", reason), "largest_difference": missing("", reason)})
            continue
        reference = expected[index][: len(values)]
        note = "%d samples, %s" % (len(values), kernels)
        difference = float(np.abs(values.astype(np.float64) - reference).max())
        known = finite(difference) is not None
        largest = measured(difference, "", note) if known else missing("", "an output is NaN or infinite")
        ratio = measured(sqnr_db(reference, values), "dB", note)
        rows.append({"name": name, "sqnr_db": ratio, "largest_difference": largest})
    return rows


# --- classifiers ----------------------------------------------------------------------


def _predictions(answers: Sequence[Answer]) -> Array:
    return np.array([answer.index for answer in answers])


def _classifier_pair(
    first: Sequence[Answer], second: Sequence[Answer], labels: Array, names: Sequence[str]
) -> Dict[str, Any]:
    """Return agreement, loss of accuracy and the change of each class, on the same samples."""
    before = _predictions(first)
    after = _predictions(second)
    classes = []
    for index, name in enumerate(names):
        samples = labels == index
        if samples.any():
            right = [int((before[samples] == index).sum()), int((after[samples] == index).sum())]
            classes.append({"name": name, "samples": int(samples.sum()), "right": right, "change": right[1] - right[0]})
    return {
        "agreement": proportion(int((before == after).sum()), len(labels), "same class"),
        "accuracy_drop": paired_drop(before == labels, after == labels),
        "per_class": classes,
    }


# --- detectors ------------------------------------------------------------------------


def objects(opened: Bundle) -> Tuple[List[Array], List[Truth]]:
    """Return the evaluation sample of a detector: decoded samples, and the boxes and classes of their objects.

    Raises:
        BundleError: the evaluation sample is invalid.
    """
    entry = opened.manifest.get("evaluation")
    if entry is None:
        return [], []
    samples = opened.samples(entry)
    rows = opened.array(entry["labels"])
    valid = rows.ndim == 2 and rows.shape[1] == 6 and rows.dtype == np.float32 and np.isfinite(rows).all()
    limits = (len(samples), len(opened.labels))
    if not valid or not ((rows[:, :2] >= 0) & (rows[:, :2] < limits)).all():
        raise BundleError("the evaluation sample is not %d samples with their objects" % len(samples))
    truth = []
    for index in range(len(samples)):
        of_sample = rows[rows[:, 0].astype(np.int64) == index]
        truth.append((of_sample[:, 2:], of_sample[:, 1].astype(np.int64)))
    return samples, truth


def _precision(answers: Sequence[Detections], truth: Sequence[Truth], classes: int, note: str) -> Dict[str, Any]:
    result = average_precision(answers, truth, classes)
    values: Dict[str, Any] = {"per_class": result["per_class"]}
    for name in ("ap", "ap50"):
        known = result[name] is not None
        values[name] = measured(result[name], "fraction", note) if known else missing("fraction", _NO_OBJECTS)
    return values


def _detector_pair(
    first: Sequence[Detections], second: Sequence[Detections], before: Dict[str, Any], after: Dict[str, Any]
) -> Dict[str, Any]:
    """Return agreement and loss of average precision, on the same images."""
    share, count = agreement(first, second)
    if count:
        note = "objects that both models detect, of %d that either detects with a score of %g or more"
        result = {"agreement": measured(share, "fraction", note % (count, SURE))}
    else:
        result = {"agreement": missing("fraction", "no model detects an object with a score of %g" % SURE)}
    for name in ("ap", "ap50"):
        old = before[name]["value"]
        new = after[name]["value"]
        is_known = old is not None and new is not None
        drop = measured(old - new, "fraction", "the same images") if is_known else missing("fraction", _NO_OBJECTS)
        result[name + "_drop"] = drop
    return result


# --- text -----------------------------------------------------------------------------


def text(result: Dict[str, Any]) -> str:
    """Return the result of `compare` as text."""
    if "models" not in result:
        return "accuracy: %s" % describe(result["accuracy"])
    if "reference" in result:
        return _fidelity_text(result)
    detector = any("ap" in model for model in result["models"].values())
    titles = {"ap": "AP ", "ap50": "AP50 "} if detector else {"accuracy": ""}
    heading = "average precision" if detector else "accuracy"
    lines = ["%s on %d samples, preprocessing %s" % (heading, result["samples"], result["preprocessing"][:12])]
    for role, model in result["models"].items():
        known = [name for name in titles if name in model]
        lines += ["  %-9s %s%s" % (role, titles[name], describe(model[name])) for name in known]
    for pair in result["pairs"]:
        drop = describe(pair["ap_drop" if detector else "accuracy_drop"])
        lines.append("  %(from)s to %(to)s: " % pair + "drop %s, agreement %s" % (drop, describe(pair["agreement"])))
        changed = [row for row in pair.get("per_class", ()) if row["change"]]
        for row in sorted(changed, key=lambda row: abs(row["change"]), reverse=True)[:CHANGED_CLASSES]:
            lines.append("    %(name)s: %(change)+d of %(samples)d" % row)
    return "\n".join(lines)


def _fidelity_text(result: Dict[str, Any]) -> str:
    heading = "outputs on %d samples, compared with those of the %s model on the host, preprocessing %s"
    lines = [heading % (result["samples"], result["reference"], result["preprocessing"][:12])]
    for role, model in result["models"].items():
        if not model["outputs"]:
            lines.append("  %-9s not measured: %s" % (role, model["note"]))
        for row in model["outputs"]:
            values = (role, row["name"], describe(row["sqnr_db"]), describe(row["largest_difference"]))
            lines.append("  %-9s %s: SQNR %s, largest difference %s" % values)
    return "\n".join(lines)
