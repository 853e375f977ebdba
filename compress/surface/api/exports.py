"""`export`: a model file to a bundle for the target, without a pipeline file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress import targets
from compress.core.artifact import MODEL_KERAS
from compress.core.errors import DataError, ModelError
from compress.core.progress import RunStep
from compress.core.resources import manual
from compress.data import class_names, label_files
from compress.model.detectors.families import COCO_CLASSES, refuse_unknown
from compress.pipeline.data_section import ModelInputs, data_for, inputs_of, with_range
from compress.results.run import RunRecord
from compress.surface.api.files import FilePath
from compress.surface.api.pipelines import RunResult, SilentMonitor
from compress.tasks.unlabelled_detection import UnlabelledDetection
from deploy.contract.detection import BOX_FORMAT
from deploy.contract.durable_files import write_atomically

if TYPE_CHECKING:
    from compress.core.progress import Progress
    from compress.model.importers.model_file import ModelFile
    from compress.pipeline.execution import Monitor

PIPELINE = "pipeline.yaml"
QUANTIZE: dict[str, Any] = {"quantize": {"calibration_samples": 200}}
BORDER = 114
"""Value around letterboxed photos, as in the training of the YOLO families."""


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        run: the run of the pipeline that was written.
        facts: the summary as plain values: the output of `export --json`.
    """

    run: RunResult
    facts: Mapping[str, Any]


def export(
    model: FilePath,
    *,
    calibrate: FilePath | None = None,
    out: FilePath | None = None,
    target: str | None = None,
    signature: str | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    detector: str | None = None,
    value_range: tuple[float, float] | None = None,
    labels: FilePath | None = None,
    trust: bool = False,
    monitor: Monitor | None = None,
) -> ExportResult:
    """Quantize a model file, check it for the target, compare it with the original, and pack a bundle.

    The pipeline file that does this is written to `out`, where it can be edited and run again.

    Args:
        model: a .keras, .h5, .onnx or .tflite file, or the folder of a SavedModel; a quantized .tflite file is checked,
            compiled and packed as it is.
        calibrate: samples without labels: a folder of photos or of WAV files, .npz or .npy; None for random samples.
        out: the folder for the results; None for MODEL-export in the working directory.
        target: the name of a target; None for the Edge TPU.
        signature: the signature of a SavedModel that has several.
        shapes: the shapes of the dynamic inputs of an .onnx file, by name.
        detector: the family of a detector whose file does not decode its boxes, such as "yolov5"; None to recognize
            detectors by their heads.
        value_range: the values of a black and of a white pixel, or of the lowest and the highest sample of a recording,
            in the input of the model; None to find them.
        labels: a file with the names of the model's classes; None for the one in the folder of the model, if it fits.
        trust: allow the model to run code that it contains.
        monitor: receives the progress of the run.

    Returns:
        The run, and the summary.

    Raises:
        ModelError: the model cannot be read, or is not a detector of this family.
        DataError: the samples cannot be read, or do not fit the model; the labels do not fit the model; or the values
            that a quantized input expects are not known.
        CorallineError: a stage failed.
    """
    from compress.model.importers import model_file
    from compress.pipeline import runner, schema
    from compress.pipeline.execution import LOG

    if detector is not None:
        refuse_unknown(detector)
    path = Path(model)
    name = run_name(path)
    folder = export_folder(path, out)
    monitor = monitor or SilentMonitor(folder / name / LOG)
    with monitor.working(RunStep("reading the model")) as progress:
        read = model_file.read(path, signature, shapes)
        file = _with_layers(read, folder, trust=trust)
        inputs = with_range(inputs_of(file, trust=trust), value_range)
        content = _pipeline(file.path, name, inputs, None if calibrate is None else Path(calibrate))
        if "wav" in content["data"]["source"]:
            rate = content["data"]["source"]["wav"]["rate"]
            progress.note(
                f"assumed, because the file does not say it: sounds of {rate:,} samples per second, the rate "
                "of the first recording; otherwise change data.source"
            )
        sizes = _detector_classes(content, path, inputs, detector, progress) or inputs.output_sizes
        if labels is not None:
            _name_classes(content, _labels_of(Path(labels), sizes))
        else:
            _add_labels_beside(content, path, sizes, progress)
    if file is read:
        content["model"] |= _options(signature, shapes, trust=trust)
    content["target"] = target or content["target"]
    text = _as_yaml(content, path, calibrate)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PIPELINE, text.encode())
    checked = schema.load(folder / PIPELINE)
    record = runner.run(checked, folder, monitor)
    run = RunResult.of(record, folder / name)
    return ExportResult(run, _summary(path, run, content))


def export_folder(model: FilePath, out: FilePath | None) -> Path:
    """Return the folder for the results: by default in the working directory, named after the model."""
    return Path(f"{Path(model).stem}-export") if out is None else Path(out)


def run_name(path: Path) -> str:
    """Return the file's name as the name of a run."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-_")[:64]
    return name or "model"


def _with_layers(file: ModelFile, folder: Path, *, trust: bool) -> ModelFile:
    """Return the model as a Keras file in `folder`, if it is the graph of a SavedModel that can be rebuilt with layers:
    a file without layers is quantized with the ranges of the converter, which are worse."""
    from compress.model.importers import model_file
    from compress.pipeline.stages import working_model

    if file.kind != "saved_model" or file.becomes == "keras":
        return file
    try:
        model = model_file.load(file, trust=trust).model
    except ModelError:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    working_model.write_keras(model, folder)
    return model_file.read(folder / MODEL_KERAS)


def _detector_classes(
    content: dict[str, Any], path: Path, inputs: ModelInputs, family: str | None, progress: Progress
) -> tuple[int] | None:
    """Return the number of classes of a detector, whose pipeline then ends in front of the decoding; None for others.

    Raises:
        ModelError: a family is named, and the model is not a detector of it.
    """
    form = _classes_and_code(content, path, inputs, family)
    if form is None and family is not None:
        raise ModelError(
            f"it is not recognized as a detector of the family {family}",
            where=str(path),
            allowed="models of one image whose outputs are boxes and scores",
            hint="leave --detector out to see how it is read, or describe its outputs in a pipeline: "
            + manual("detection.md"),
        )
    if form is None:
        return None
    classes, code = form
    content["model"]["detector"] = family or "auto"
    content["data"]["task"] = UnlabelledDetection.name
    what = f"a detector of {classes} classes, with boxes in the code {code}"
    progress.note(f"the model is {what}: {manual('detection.md')}")
    _fit_photos(content["data"], code, inputs.shapes[0][-1], progress)
    if classes == len(COCO_CLASSES):
        progress.note(f"assumed: the names of the {classes} classes are those of COCO; otherwise use --labels FILE")
        _name_classes(content, COCO_CLASSES)
    return (classes,)


def _classes_and_code(
    content: dict[str, Any], path: Path, inputs: ModelInputs, family: str | None
) -> tuple[int, str] | None:
    """Return the number of classes of a detector and the code of its boxes; None if the model is not a detector.

    A quantized file whose decoding cannot be cut off in integers is quantized again.
    """
    from compress.learning.procedures.importing import quantized_detector
    from compress.model.detectors.detector_model import detector_model

    if not inputs.is_image:
        return None
    if inputs.postprocess is not None:
        return inputs.postprocess.classes, "ssd"
    if inputs.model is not None:
        detector = detector_model(inputs.model, family or "auto")
        return None if detector is None else (detector.classes, detector.specification["code"])
    quantized = quantized_detector(path, family or "auto") if path.suffix.lower() == ".tflite" else None
    if quantized is None:
        return None
    if quantized.model is None:
        content["model"]["dequantize"] = True
        content["stages"].insert(0, QUANTIZE)
    return quantized.classes, quantized.specification["code"]


def _fit_photos(data: dict[str, Any], code: str, channels: int, progress: Progress) -> None:
    """Resize photos as the families with a code of boxes do: a file does not say it."""
    steps = data.get("preprocess", [])
    if "folder" not in data["source"] or code == "ssd":  # SSD models stretch their photos
        return
    steps[0]["resize"] |= {"fit": "letterbox", "fill": BORDER}
    assumed = "photos keep their proportions, with a border"
    if code == "yolox" and channels == 3:
        steps[0]["resize"]["align"] = "top_left"
        steps.insert(1, {"colour": {"to": "bgr"}})
        assumed += " at the right or below, and are BGR, as YOLOX takes them"
    progress.note(f"assumed, because the file does not say it: {assumed}; otherwise change data.preprocess")


def _name_classes(content: dict[str, Any], names: Sequence[str]) -> None:
    for stage in content["stages"]:
        if "package" in stage:
            stage["package"]["labels"] = list(names)


def _labels_of(file: Path, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the names in a labels file: one for each value of the only output; two also for one probability.

    Args:
        file: the file.
        sizes: the number of values of each output; of a detector the number of classes.

    Raises:
        DataError: the file cannot be read, or has names for another number of classes.
    """
    if len(sizes) != 1:
        outputs = ", ".join(map(str, sizes))
        raise DataError(f"cannot name the values of {len(sizes)} outputs ({outputs})", where=str(file))
    label_file = label_files.read(file)
    if sizes[0] == 1 and len(label_file.listed()) == 2:
        return label_file.listed()
    return label_file.listed(sizes[0])


def _add_labels_beside(content: dict[str, Any], path: Path, sizes: Sequence[int], progress: Progress) -> None:
    """Name the classes as in the labels file in the folder of the model; note why if the file does not fit."""
    file = class_names.beside(path)
    if file is None:
        return
    try:
        names = _labels_of(file, sizes)
    except DataError as error:
        progress.note(f"{file.name} is not used: it {error.what}" + (f"; {error.hint}" if error.hint else ""))
        return
    _name_classes(content, names)


def _options(signature: str | None, shapes: Mapping[str, Sequence[int]] | None, *, trust: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if signature is not None:
        options["signature"] = signature
    if shapes:
        options["shape"] = {name: list(sizes) for name, sizes in shapes.items()}
    if trust:
        options["trust"] = True
    return options


def _pipeline(path: Path, name: str, inputs: ModelInputs, calibrate: Path | None) -> dict[str, Any]:
    """Return the pipeline as plain values."""
    data = data_for(inputs, calibrate)
    stages: list[dict[str, Any]] = [{"compile": {}}, {"package": {}}]
    if inputs.becomes != "tflite":
        stages.insert(0, QUANTIZE)
    return {
        "schema_version": 1,
        "name": name,
        "target": targets.DEFAULT,
        "model": {"file": str(path.resolve())},
        "data": {**data, "task": "outputs"},
        "stages": stages,
        "measure": {"latency": {"runs": 50}},
    }


def _as_yaml(content: Mapping[str, Any], model: Path, calibrate: FilePath | None) -> str:
    """Return the pipeline as YAML with one key on a line; the values are JSON, which YAML 1.2 contains."""
    samples = "random samples" if calibrate is None else json.dumps(str(calibrate))
    source = f"{json.dumps(model.name)}, {samples}"
    lines = [f"# Written by `python -m compress export` for {source}. Edit it, and run it again."]
    for key, value in content.items():
        if key in ("data", "stages"):
            lines.append(f"{key}:")
            rows = value.items() if isinstance(value, Mapping) else (next(iter(stage.items())) for stage in value)
            lead = "  " if key == "data" else "  - "
            lines += [f"{lead}{name}: {json.dumps(settings)}" for name, settings in rows]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _summary(path: Path, run: RunResult, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary as plain values."""
    record = run.record
    comparison = record.comparison
    outputs = () if comparison is None else comparison.outputs
    verdict = record.verdict
    data = content["data"]
    finds_boxes = data["task"] == UnlabelledDetection.name
    return {
        "schema_version": 1,
        "model": str(path),
        "task": data["task"],
        **({"box_format": BOX_FORMAT, "found": _found(record)} if finds_boxes else {}),
        "preprocess": [] if "random" in data["source"] else data.get("preprocess", []),
        "outputs": [
            {
                "name": output.name,
                "shape": list(output.shape),
                "sqnr_db": output.sqnr_db,
                "max_abs_error": output.max_abs_error,
                "agreement": output.agreement,
            }
            for output in outputs
        ],
        "placement": _placement(record),
        "latency_ms": _latencies(record),
        "verdict": None if verdict is None else verdict.level,
        "warnings": [] if verdict is None else list(verdict.reasons),
        "files": {name: str(run.folder / name) for name in (*record.outputs, "report.html")},
    }


def _found(record: RunRecord) -> dict[str, Any] | None:
    """Return the average precision of a detector with the objects of the original as labels, and how many there are;
    None without objects."""
    precision = record.models.result.measurements.get("ap") if record.models else None
    if precision is None or precision.value is None or record.comparison is None:
        return None
    return {"ap": precision.to_json(), "objects": sum(row.samples for row in record.comparison.per_class)}


def _placement(record: RunRecord) -> dict[str, Any] | None:
    """Return how many operators run on the accelerator; None for a target without one."""
    placement = record.placement
    if placement is None:
        return None
    counts = {"mapped": sum(op.on_tpu for op in placement.ops), "total": len(placement.ops)}
    return {**counts, "summary": placement.summary}


def _latencies(record: RunRecord) -> dict[str, Any]:
    """Return the predicted latency on each host of the target in ms, with its interval."""
    expected = {} if record.placement is None else record.placement.expected_latency
    return {
        host: {"value": latency.latency_ms, "low": latency.low_ms, "high": latency.high_ms}
        for host, latency in expected.items()
    }
