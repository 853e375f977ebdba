"""`python -m compress import`: read a model file, convert it to a Keras model, and compare the two."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress.core.artifact import MODEL_KERAS
from compress.core.errors import DataError, ModelError, PipelineError, reason_of
from compress.model.importers import model_file
from compress.model.importers.common import guarded_calls, verification
from compress.model.importers.common.verification import TOLERANCE
from compress.model.importers.keras import keras_file
from compress.model.importers.model_file import ImportedModel, ModelFile
from compress.model.importers.tflite import tflite_file
from compress.surface.cli.output import write_file

Report = dict[str, Any]
"""The plain values that --json prints."""


def run(
    path: Path,
    out: Path | None,
    *,
    trust: bool,
    signature: str | None,
    inputs: Path | None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    layers: bool = False,
) -> Report:
    """Import a file.

    Args:
        path: the file, or the folder of a SavedModel.
        out: the file for the Keras model; None: it is not written.
        trust: whether code that the model contains may run.
        signature: the signature of a SavedModel that has several.
        inputs: an .npy file with samples [n, ...] for the comparison.
        shapes: the shapes of the inputs that are dynamic in an .onnx file, by name.
        layers: whether the report lists the layers.

    Raises:
        PipelineError: the name of OUT does not end in .keras, or OUT is the model itself.
        DataError: the inputs are not samples.
        StoreError: OUT cannot be written.
    """
    if out is not None:
        _check(path, out)
    samples = _samples(inputs) if inputs else None
    report: Report = {"schema_version": 1, "status": "read", "file": str(path), "refused": []}
    try:
        model = model_file.read(path, signature, shapes)
        report |= _description(model)
        if model.becomes == "tflite" and out is None and not layers:
            return report | _quantized(model.content)
        model = model_file.in_float(model)
        imported = model_file.load(model, trust=trust, samples=samples)
        report |= {"status": "imported", "refused": [], **_model(imported.model, list(model.notes))}
        if layers:
            report["layer_list"] = _layers(imported.model)
        if imported.rounding is not None:
            report["rounding"] = asdict(imported.rounding)
        return report | _written(path, imported, out, trust=trust)
    except ModelError as error:
        error.facts = {**report, "status": "failed", **error.facts}
        raise


def _check(path: Path, out: Path) -> None:
    if out.suffix != ".keras":
        raise PipelineError(f"OUT is {out.name}", where="-o", allowed="a name that ends in .keras")
    if out.resolve() == path.resolve() or path.resolve() in out.resolve().parents:
        raise PipelineError("OUT is the model itself, or is inside it", where="-o", hint="choose another name")


def _samples(inputs: Path) -> Any:
    """Read samples for the comparison; pickled data is refused."""
    import numpy as np

    try:
        samples = np.load(inputs, mmap_mode="r", allow_pickle=False)[:100]
        if samples.dtype.kind not in "fiub" or samples.ndim < 2 or not len(samples):
            raise ValueError(f"it contains {samples.dtype} {list(samples.shape)}")
        return np.asarray(samples, np.float32)
    except (OSError, ValueError, EOFError, TypeError) as error:
        what = f"cannot be read: {reason_of(error).splitlines()[0][:200]}"
        raise DataError(what, where=str(inputs), allowed="an .npy file of samples [n, ...]") from error


def _description(model: ModelFile) -> Report:
    return {
        "format": model.format,
        "producer": model.producer or None,
        "becomes": model.becomes,
        "notes": list(model.notes),
        "refused": [asdict(problem) for problem in (*model.refused, *model.untrusted)],
    }


def _quantized(file: tflite_file.TfliteFile) -> Report:
    """Describe a quantized .tflite file, which is used without conversion."""
    graph = file.graph
    ports = [
        [{"name": tensor.name, "dtype": tensor.dtype.lower(), "shape": list(tensor.shape)} for tensor in tensors]
        for tensors in ([graph.tensors[index] for index in indices] for indices in (graph.inputs, graph.outputs))
    ]
    return {
        "inputs": ports[0],
        "outputs": ports[1],
        "operators": dict(Counter(operator.name for operator in graph.operators).most_common()),
        "uses": list(model_file.USES),
    }


def _model(model: Any, notes: list[str]) -> Report:
    """Describe inputs, outputs, layers and parameters of a Keras model; the layers of nested models are counted."""
    from compress.model.ir import keras_graph

    try:
        layers = keras_graph.read(model).layers.values()
        kinds = Counter(layer.kind for layer in layers if layer.calls)
    except ModelError as error:
        kinds = Counter(type(layer).__name__ for layer in model.layers)
        notes = [*notes, error.what]
    ports = [
        [
            {
                "name": tensor._keras_history.operation.name,
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
            }
            for tensor in tensors
        ]
        for tensors in (model.inputs, model.outputs)
    ]
    return {
        "inputs": ports[0],
        "outputs": ports[1],
        "layers": sum(kinds.values()),
        "kinds": dict(kinds.most_common()),
        "parameters": model.count_params(),
        "notes": notes,
    }


def _layers(model: Any) -> list[dict[str, Any]]:
    """Return name, kind and output shape of each layer, in order of computation; those of nested models, too."""
    from compress.model.ir import keras_graph

    network = keras_graph.read(model)
    order = {layer.name: layer for layer, _ in network.in_order()}
    return [
        {"name": name, "kind": layer.kind, "shape": list(network.shapes[keras_graph.LayerOutput(name)])}
        for name, layer in order.items()
    ]


def _written(path: Path, imported: ImportedModel, out: Path | None, *, trust: bool) -> Report:
    """Write the model, read it again, and compare its outputs with the original's."""
    from compress.pipeline.stages import working_model

    with tempfile.TemporaryDirectory() as folder:
        working_model.write_keras(imported.model, Path(folder))
        again = keras_file.load(Path(folder) / MODEL_KERAS, trust=trust)
        content = (Path(folder) / MODEL_KERAS).read_bytes()
        with guarded_calls.explained(path, "cannot be run", "check that there is memory for it"):
            reread = verification.compare_keras_models(imported.model, again)
    parity = imported.parity or reread
    if not reread.max_rel <= TOLERANCE:
        raise ModelError(f"the outputs of the written file differ by {reread.max_rel:.2g} of the largest output")
    there = out is not None and out.exists()
    if out is not None:
        write_file(out, content, "the model cannot be written")
    facts = {f"parity_{name}": value for name, value in asdict(parity).items()}
    return {**facts, "out": str(out) if out else None, "replaced": there}


def describe(report: Report) -> str:
    """Return the report as text."""
    lines = [f"{report['file']}: {report['format']}, written by {report['producer'] or 'an unknown program'}"]
    for name in ("inputs", "outputs"):
        lines += [f"{name:<11} {port['name']}: {port['dtype']} {port['shape']}" for port in report[name]]
    if report["status"] == "read":
        kinds = ", ".join(f"{count} {kind}" for kind, count in report["operators"].items())
        lines += [
            f"{'operators':<11} {kinds}",
            f"quantized already; what it can be used for: {', '.join(report['uses'])}",
            "-o OUT.keras writes it as a float Keras model, which can be trained",
        ]
        return "\n".join(lines)
    kinds = ", ".join(f"{count} {kind}" for kind, count in report["kinds"].items())
    own_difference = report["parity_own"]
    lines += [
        f"{'layers':<11} {report['layers']}: {kinds}",
        f"{'parameters':<11} {report['parameters']:,}",
        f"{'parity':<11} {report['parity_max_abs']:.2g} at most, {report['parity_max_rel']:.2g} of the largest output, "
        f"on {report['parity_samples']} samples, against {report['parity_against']}"
        + (
            f", whose own answers move by {own_difference:.2g} with the last bits of its inputs"
            if own_difference
            else ""
        ),
        *(f"{'note':<11} {note}" for note in report["notes"]),
    ]
    if "rounding" in report:
        rounding = report["rounding"]
        lines.append(
            f"{'rounding':<11} {rounding['largest_steps']:.2g} steps at most between an operator of the file and its "
            f"float form, in {rounding['operators']} operators"
        )
    for layer in report.get("layer_list", ()):
        lines.append(f"{'layer':<11} {layer['name']}: {layer['kind']} {layer['shape']}")
    if report["out"]:
        lines.append(f"{'written':<11} {report['out']}{', in place of the file that was there' * report['replaced']}")
    return "\n".join(lines)
