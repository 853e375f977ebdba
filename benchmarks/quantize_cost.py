"""CPU time and memory of `quantize`: `python benchmarks/quantize_cost.py [--side 224] [--photos 449] [--show]`.

MobileNetV2 0.35 with batch norm statistics from photos (grocery96, enlarged) is quantized by a pipeline with the stage
`quantize` alone. In a separate process, it is converted with the same number of calibration samples in two ways: as in
TensorFlow's guide (`TFLiteConverter.from_keras_model`), and by the fast path (`from_concrete_functions`). The labels
are the classes that the float model predicts. The figures are the peak resident memory of the whole run, and the CPU
seconds of the stage divided by those of each conversion, all without imports. Needs the shared files (CORALLINE_SHARED,
or ../shared next to the project). Writes benchmarks/results/quantize_cost.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import quantization_subjects as subjects

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "quantize_cost.json"
CALIBRATION_SAMPLES = 200
CLASSES = 10
PIPELINE = """
schema_version: 1
name: cost
model: {{file: model.keras}}
data:
  source: {{npz: {{file: photos.npz, split: split, classes: [{classes}]}}}}
  preprocess:
    - resize: {{size: [{side}, {side}], filter: bilinear}}
    - scale: {{from: [0, 255], to: [-1, 1]}}
stages: [quantize: {{}}]
"""
MODEL = """
import sys
import numpy as np
from compress.model.ir.tensorflow import keras
from compress.pipeline.stages.working_model import write_keras
from pathlib import Path

library = keras(0)
side, classes = int(sys.argv[1]), int(sys.argv[2])
shape = (side, side, 3)
model = library.applications.MobileNetV2(input_shape=shape, alpha=0.35, weights=None, classes=classes)
with np.load("photos.npz") as arrays:
    photos = arrays["x"].astype(np.float32)
enlarged = np.asarray(library.ops.image.resize(photos, (side, side))) / 127.5 - 1
norms = [layer for layer in model.layers if isinstance(layer, library.layers.BatchNormalization)]
batches = np.array_split(enlarged[:128], 8)
for number, batch in enumerate(batches):
    for norm in norms:
        norm.momentum = number / (number + 1)
    model(batch, training=True)
for norm in norms:
    norm.momentum = 0.99
scores = model.layers[-1]
features = library.Model(model.input, model.layers[-2].output).predict(enlarged, batch_size=16, verbose=0)
kernel = features[np.random.default_rng(0).choice(len(features), classes, replace=False)] - features.mean(axis=0)
kernel = kernel.T / np.square(kernel).sum(axis=1) * 8
scores.set_weights([kernel, -features.mean(axis=0) @ kernel])
labels = model.predict(enlarged, batch_size=16, verbose=0).argmax(axis=1)
split = np.array(["train"] * len(photos), object)
split[::5], split[1::5] = "validation", "test"
np.savez("photos.npz", x=photos.astype(np.uint8), y=labels, split=split.astype(str))
model.save("model.keras")
"""
PLAIN = """
import json, sys, time
import numpy as np
from pathlib import Path
from compress.model.importers.keras import keras_file
from compress.learning.quantization import export
import tensorflow

model = keras_file.load(Path("model.keras"))
samples = np.load("samples.npy")
export.convert_float(model)  # what the first conversion of a process loads
began = time.process_time()
export.convert_calibrated(model, samples)
fast = time.process_time() - began
began = time.process_time()
converter = tensorflow.lite.TFLiteConverter.from_keras_model(model)
converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
converter.representative_dataset = lambda: ([sample[np.newaxis]] for sample in samples)
converter.target_spec.supported_ops = [tensorflow.lite.OpsSet.TFLITE_BUILTINS_INT8]
converter.inference_input_type = converter.inference_output_type = tensorflow.int8
converter.convert()
print(json.dumps({"plain_cpu_s": time.process_time() - began, "fast_cpu_s": fast}))
"""
STAGE = """
import json, resource, sys, time
from compress.surface.cli.main import main
from compress.pipeline.stages.quantize import Quantize

run, spent = Quantize.run, []

def timed(self, given, context):
    from compress.model.importers.keras import keras_file
    from compress.learning.quantization import export
    from compress.pipeline.stages import working_model
    export.convert_float(working_model.read(given, context))
    context.data.inputs("train")
    began = time.process_time()
    result = run(self, given, context)
    spent.append(time.process_time() - began)
    return result

Quantize.run = timed
code = main(["cost.yaml"])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"exit": code, "cpu_s": sum(spent), "peak_bytes": peak}))
"""


def run(code: str, folder: Path, *arguments: object) -> dict[str, Any]:
    """Run a program; return the last line of its output, parsed as JSON, or an empty map if it prints nothing."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {}


def measured(side: int, photos: int) -> dict[str, Any]:
    """Return the memory, the times, and the settings of the measurement."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        images = np.concatenate([split_images for split_images, _ in subjects.photos(96, colour=True).values()])
        chosen = np.random.default_rng(0).choice(len(images), photos, replace=False)
        np.savez(folder / "photos.npz", x=np.rint(images[chosen] * 255).astype(np.uint8))
        run(MODEL, folder, side, CLASSES)
        names = ", ".join(f"c{index}" for index in range(CLASSES))
        (folder / "cost.yaml").write_text(PIPELINE.format(side=side, classes=names))
        stage = run(STAGE, folder)
        record = json.loads((folder / "runs" / "cost" / "report.json").read_text())
        facts = next(row["facts"] for row in record["stages"] if row["stage"] == "quantize")
        samples = np.random.default_rng(0).uniform(-1, 1, (facts["calibration_samples"], side, side, 3))
        np.save(folder / "samples.npy", samples.astype(np.float32))
        plain = run(PLAIN, folder)
    return {
        "side": side,
        "photos": photos,
        "peak_bytes": stage["peak_bytes"],
        "quantize_cpu_s": round(stage["cpu_s"], 1),
        **{name: round(seconds, 1) for name, seconds in plain.items()},
        "times_plain": round(stage["cpu_s"] / plain["plain_cpu_s"], 2),
        "times_fast": round(stage["cpu_s"] / plain["fast_cpu_s"], 2),
        "agreement": facts["agreement"],
        "tried": [f"{row['step']}: {row['choice']}" for row in facts.get("tried", [])],
    }


def main() -> int:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.split(":", 1)[0])
    parser.add_argument("--side", type=int, default=224, help="height and width of the model's input")
    parser.add_argument("--photos", type=int, default=449, help="photos of the data set")
    options = subjects.asked(parser)
    if options is None:
        return 0
    if not options.show:
        RESULTS.write_text(json.dumps(measured(options.side, options.photos), indent=1) + "\n")
    print(RESULTS.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
