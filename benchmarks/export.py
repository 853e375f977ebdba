"""`export` of every shared model file, against TFLiteConverter on the same samples.

    python benchmarks/export.py [--only NAME] [--work FOLDER]

For each file of ../shared/models (or CORALLINE_SHARED): `compress.export` with the samples below, and the float model
through TFLiteConverter's full-integer quantization, calibrated on the same samples. Both files and the float file run
on the same test samples; the table has the signal-to-quantization-noise ratio of each output in dB. Without --only, the
results are written to benchmarks/results/export.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from compress.core.artifact import MODEL_KERAS
from compress.learning.quantization import calibration
from compress.learning.quantization import export as conversion
from compress.model.importers.keras import keras_file
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline import schema
from compress.pipeline.probes.original_outputs import output_rows
from compress.pipeline.probes.output_fidelity import compare_outputs
from compress.pipeline.stages.quantize import Quantize
from compress.surface.api.exports import export

SHARED = Path(os.environ.get("CORALLINE_SHARED", Path(__file__).parent.parent.parent / "shared"))
SUFFIXES = (".h5", ".hdf5", ".onnx", ".tflite")
PHOTOS = ("ultraface", "yunet", "yolox", "mobilenet", "vww")
"""Parts of the names of models of photos; the others get random samples."""
RESULTS = Path(__file__).parent / "results" / "export.json"


def main() -> None:
    """Run the benchmark, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--work", type=Path, default=Path("/tmp/coralline-export"))
    options = parser.parse_args()
    photos = _photos(options.work / "photos")
    rows = []
    for path in sorted((SHARED / "models").rglob("*")):
        if path.suffix.lower() in SUFFIXES and options.only in path.name:
            rows.append(_row(path, photos, options.work))
            _show(rows[-1])
    known = [row for row in rows if "error" not in row]
    means = [np.mean([output[tool] for row in known for output in row["outputs"]]) for tool in ("ours", "converter")]
    print(f"{len(known)} of {len(rows)} files; mean SQNR {means[0]:.1f} dB, TFLiteConverter {means[1]:.1f} dB")
    if not options.only:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def _photos(folder: Path) -> Path:
    """Unpack the photos of coco128 once."""
    if not folder.exists():
        with tarfile.open(SHARED / "data" / "coco128.tar") as archive:
            members = [member for member in archive if member.name.lower().endswith(".jpg")]
            archive.extractall(folder, members=members, filter="data")
    return folder


def _row(path: Path, photos: Path, work: Path) -> dict[str, Any]:
    """Return the result for one file."""
    began = time.monotonic()
    calibrate = photos if any(part in path.name for part in PHOTOS) else None
    out = work / path.stem
    try:
        result = export(path, calibrate=calibrate, out=out)
    except Exception as error:  # noqa: BLE001 - the table lists it
        text = str(error).replace(str(path), path.name)  # without the folder, which differs between machines
        return {"model": path.name, "error": f"{type(error).__name__}: {text}"}
    facts = result.facts
    row = {
        "model": path.name,
        "samples": "photos" if calibrate else "random",
        "seconds": round(time.monotonic() - began, 1),
        "placement": facts["placement"],
        "verdict": facts["verdict"],
    }
    theirs = _converter(out, result.run.folder)
    ours = [output["sqnr_db"] for output in facts["outputs"]]
    names = [output["name"] for output in facts["outputs"]]
    outputs = zip(names, ours, theirs or ours, strict=True)
    return {**row, "outputs": [{"name": n, "ours": a, "converter": b} for n, a, b in outputs]}


def _converter(out: Path, run: Path) -> list[float] | None:
    """Return the ratio of each output of TFLiteConverter's file; None for a file that is not rebuilt with layers."""
    pipeline = schema.load(out / "pipeline.yaml")
    keras_path = run / MODEL_KERAS
    if not keras_path.exists():
        return None
    model = keras_file.load(keras_path)
    data = pipeline.data
    quantize = next(step.stage for step in pipeline.steps if isinstance(step.stage, Quantize))
    samples = calibration.split(data, "balanced", quantize.calibration_samples, 1)
    content = conversion.convert_calibrated(model, samples.calibration)
    float_content = conversion.convert_float(model)
    rows = []
    for name, file_content in (("float", float_content), ("int8", content)):
        path = run / f"converter-{name}.tflite"
        path.write_bytes(file_content)
        loaded = LoadedModel(path, reproducible=True)
        rows.append(output_rows(loaded, data.inputs("test")))
    return [output.sqnr_db for output in compare_outputs(loaded.output_layout, rows[0], rows[1])]


def _show(row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['model']}: {row['error'][:300]}", flush=True)
        return
    placement = row["placement"]
    print(
        f"{row['model']} ({row['samples']}, {row['seconds']} s): {placement['mapped']} of {placement['total']} mapped"
    )
    for output in row["outputs"]:
        difference = output["ours"] - output["converter"]
        print(f"  {output['name']:<24} {output['ours']:6.1f} {output['converter']:6.1f} {difference:+6.1f}", flush=True)


if __name__ == "__main__":
    main()
