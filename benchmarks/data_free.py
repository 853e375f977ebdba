"""Calibration without data against calibration on data: `python benchmarks/data_free.py [--networks A,B] [--seeds N]`.

Each network is quantized by `quantize` with 64 calibration samples and 64 held-out samples from four sources:

- real: training samples;
- synthetic: samples that fit the statistics of the batch norms (`calibration: {select: data_free}`);
- noise: uniform random numbers in the range of the inputs;
- norms: no samples. The range of the output of a batch norm is beta +- 6 gamma, through the ReLU that follows (Nagel et
  al., Data-Free Quantization, ICCV 2019); other ranges are from noise.

The figures are the accuracy of the int8 file on test data, if there are labels, and the agreement with the float model
on real test samples. The last three sources use only the lowest and the highest value of the data. Needs the shared
files (CORALLINE_SHARED, or ../shared next to the project). Prints a table, and writes
benchmarks/results/data_free.json. Networks are kept in the folder --cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import repository

import numpy as np
import quantization_subjects as subjects
from numpy.typing import NDArray
from quantization import commit, quiet

from compress.learning.quantization import calibration, post_training, quantizer_placement
from compress.learning.quantization.export import convert_float
from compress.learning.quantization.plan import QuantizationPlan, nudged
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.passes import fold
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline.probes.original_outputs import output_rows

RESULTS = repository.RESULTS / "data_free.json"
NETWORKS = {"fsdd": 3, "magic_wand": 3, "grocery_separable": 1, "vww_96": 1, "mini_xception": 1}
"""The number of seeds of each network; a network from a file has one."""
WAYS = ("real", "synthetic", "noise", "norms")
COUNT = 64
"""The number of calibration samples, and of held-out samples."""
TESTED = 1000
"""The largest number of test samples."""
DEVIATIONS = 6.0
Samples = NDArray[np.float32]


def ranges_of_norms(network: Network, noise: Samples) -> QuantizationPlan:
    """Return a plan with ranges from the parameters of batch norms where possible, and the other ranges from noise."""
    canonical = fold.canonical(network)
    plan = calibration.calibrate(canonical, noise)
    norms = fold.folded_norms(network)
    ranges = dict(plan.ranges)
    for tensor, point in quantizer_placement.find(canonical).items():
        layer = canonical.layers[tensor.layer]
        source = layer if layer.name in norms or not layer.calls else canonical.layers[layer.inputs()[0].layer]
        function = "linear" if source is layer else spec_of(layer).activation(layer)
        if source.name not in norms or function not in ("linear", "relu", "relu6"):
            continue
        gamma, beta = norms[source.name]
        low = float((beta - DEVIATIONS * np.abs(gamma)).min())
        high = float((beta + DEVIATIONS * np.abs(gamma)).max())
        if function != "linear":
            low, high = max(low, 0.0), max(high, 0.0)
        ranges[point] = nudged(low, min(high, 6.0) if function == "relu6" else high)
    return QuantizationPlan(ranges, f"beta +- {DEVIATIONS:g} gamma")


def converted(way: str, subject: subjects.Subject) -> bytes:
    """Return the int8 file of a network."""
    network = keras_graph.read(subject.model)
    real = subject.data.inputs("train")[: 2 * COUNT]
    low, high = float(real.min()), float(real.max())
    noise = np.random.default_rng(subject.seed).random(real.shape, np.float32) * np.float32(high - low) + np.float32(
        low
    )
    if way == "synthetic":
        split = calibration.without_data(network, real, COUNT, COUNT, subject.seed)
        return post_training.quantize(subject.model, split.calibration, split.held_out).content
    if way == "norms":
        plan = ranges_of_norms(network, noise[:COUNT])
        return post_training.quantize(subject.model, noise[:COUNT], noise[COUNT:], plan=plan).content
    samples = real if way == "real" else noise
    return post_training.quantize(subject.model, samples[:COUNT], samples[COUNT:]).content


def rows_of(content: bytes, inputs: Samples) -> NDArray[np.float32]:
    """Return the outputs of a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.tflite"
        file.write_bytes(content)
        return output_rows(LoadedModel(file, reproducible=True), inputs)


def one(name: str, cache: Path, seed: int) -> dict[str, Any]:
    """Return the results of each way on a network."""
    subject = subjects.SUBJECTS[name](cache, seed)
    inputs = subject.data.inputs("test")[:TESTED]
    labels = subject.data.labels("test")[:TESTED]
    expected = rows_of(convert_float(subject.model), inputs)
    results: dict[str, Any] = {"test_samples": len(inputs)}
    if subject.labelled:
        results["float"] = float((expected.argmax(axis=1) == labels).mean())
    for way in WAYS:
        started = time.perf_counter()
        with quiet():
            content = converted(way, subject)
        rows = rows_of(content, inputs)
        results[way] = {
            "agreement": float((rows.argmax(axis=1) == expected.argmax(axis=1)).mean()),
            "error": float(np.abs(rows - expected).mean()),
            "seconds": round(time.perf_counter() - started, 1),
        }
        if subject.labelled:
            results[way]["accuracy"] = float((rows.argmax(axis=1) == labels).mean())
        print(f"{name} {seed}, {way}: {results[way]}", file=sys.stderr, flush=True)
    return results


def table(networks: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return accuracy and agreement of each way, as means over seeds."""
    lines = [["network", "float", *WAYS], ["---"] * (2 + len(WAYS))]
    for name, runs in networks.items():
        for figure in ("accuracy", "agreement"):
            if figure not in runs[0]["real"]:
                continue
            first = f"{np.mean([run['float'] for run in runs]):.3f}" if figure == "accuracy" else ""
            means = [f"{np.mean([run[way][figure] for run in runs]):.3f}" for way in WAYS]
            lines.append([f"{name}, {figure} ({len(runs)} seeds)", first, *means])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run the benchmark, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS), help="some of them, with commas")
    options = subjects.asked(parser)
    if options is None:
        return
    networks = json.loads(RESULTS.read_text())["networks"] if RESULTS.exists() else {}
    for name in [] if options.show else options.networks.split(","):
        networks[name] = [one(name, options.cache, seed) for seed in range(min(options.seeds, NETWORKS[name]))]
        RESULTS.write_text(json.dumps({"commit": commit(), "networks": networks}, indent=1) + "\n")
    print(table(networks))


if __name__ == "__main__":
    main()
