"""Answers of `verify-compiled`: `python benchmarks/verify_compiled.py [--changes 20]`.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Every model is compared with every compiled
file. Then one number of a model is changed at a time (a weight or a bias by one, the scale of a channel or of an
activation by 1%, a zero point by one), and the model is compared with its own compiled file: `verify-compiled` must
find the change, and name its operator and index. At last, a model gets other weights with the same scales: in all
layers, in the last one, and the same weights in another order. Prints tables and the changes
that are not named, and writes benchmarks/results/verify_compiled.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

import repository

import numpy as np
from paths import EDGETPU
from retrained import WEIGHTED, changed, other_weights

from compress.model.tflite import graph
from compress.model.tflite.graph import Graph
from darwinn import compiled_file
from darwinn.compiled_file import CompiledFile
from darwinn.cpu_part import compare_cpu_part
from darwinn.operator_constants import is_activation
from darwinn.verification import Verification, verify

RESULTS = repository.RESULTS / "verify_compiled.json"
KINDS = ("weight", "bias", "channel scale", "scale", "zero point")
ANSWERS = {True: "yes", False: "no", None: "undecided"}


def all_pairs(models: dict[str, bytes], files: dict[str, CompiledFile]) -> list[dict[str, Any]]:
    """Compare every model with every compiled file; return a row with the answer for each pair."""
    rows = []
    for name, content in models.items():
        parsed = graph.parse(content)
        for other, file in files.items():
            holds = verify(file, parsed).holds
            rows.append({"model": name, "file": other, "answer": ANSWERS[holds], "same": content == models[other]})
    return rows


def one_change(content: bytes, file: CompiledFile, kind: str, draw: np.random.Generator) -> tuple[bytes, int, Any]:
    """Change one number of a model at random.

    Returns:
        The changed model; the index of the operator, -1 if the model has no number of this kind; the index of the
        number in its tensor, None for scales and zero points.
    """
    parsed = graph.parse(content)
    cpu = compare_cpu_part(file.graph, parsed, {custom_operator.operator.index for custom_operator in file.operators})
    operators = [op for op in parsed.operators if op.index not in cpu.operators]
    weighted = [op for op in operators if op.name in WEIGHTED and parsed.tensors[op.inputs[1]].is_constant]
    if kind in ("scale", "zero point"):
        candidates = [
            (op.index, index) for op in operators for index in op.outputs if is_activation(parsed.tensors[index])
        ]
    elif kind == "bias":
        candidates = [
            (op.index, op.inputs[2])
            for op in weighted
            if op.inputs[2:3] and op.inputs[2] >= 0 and not parsed.tensors[op.inputs[2]].is_zero
        ]
    else:
        candidates = [(op.index, op.inputs[1]) for op in weighted]
    if not candidates:
        return content, -1, None
    operator, tensor_index = candidates[draw.integers(len(candidates))]
    tensor = parsed.tensors[tensor_index]
    place = int(draw.integers(tensor.elements)) if kind in ("weight", "bias") else 0

    def change(model: Graph) -> None:
        stored = model.source.subgraphs[0].tensors[tensor_index]
        if kind in ("weight", "bias"):
            values = tensor.array().ravel().copy()
            values[place] = int(values[place]) + (1 if values[place] < 100 else -1)
            model.source.buffers[stored.buffer].data = values.view(np.uint8)
        elif kind == "zero point":
            stored.quantization.zeroPoint = np.asarray(stored.quantization.zeroPoint).copy()
            stored.quantization.zeroPoint[0] += 1 if stored.quantization.zeroPoint[0] < 100 else -1
        else:
            stored.quantization.scale = np.asarray(stored.quantization.scale).copy()
            at = int(draw.integers(len(stored.quantization.scale)))
            stored.quantization.scale[at] *= np.float32(1.01)

    index = tuple(int(coordinate) for coordinate in np.unravel_index(place, tensor.shape or (1,)))
    return changed(content, change), operator, index if kind in ("weight", "bias") else None


def retrained(content: bytes, draw: np.random.Generator) -> dict[str, bytes]:
    """Return a model with other weights and the same scales, by what was changed."""
    parsed = graph.parse(content)
    weighted = [op for op in parsed.operators if op.name in WEIGHTED and parsed.tensors[op.inputs[1]].is_constant]
    if not weighted:
        return {}

    def shuffle(model: Graph) -> None:
        for operator in weighted:
            number = model.source.subgraphs[0].tensors[operator.inputs[1]].buffer
            values = parsed.tensors[operator.inputs[1]].array().ravel()
            model.source.buffers[number].data = draw.permutation(values).view(np.uint8)

    seed = int(draw.integers(1 << 31))
    return {
        "all weights": other_weights(content, [operator.index for operator in weighted], seed),
        "weights of the last layer": other_weights(content, [weighted[-1].index], seed),
        "the order of all weights": changed(content, shuffle),
    }


def outcome(result: Verification, operator: int, index: Any) -> str:
    """Return how a change was answered: "named", "found", "undecided" or "missed".

    "named": a difference has its operator and index. "found": differences were found, but only at other places.
    """
    if result.holds is not False:
        return "undecided" if result.holds is None else "missed"
    for difference in result.differences:
        if difference.operator == operator and (index is None or index in [number[0] for number in difference.numbers]):
            return "named"
    return "found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=20, help="of each kind and model")
    options = parser.parse_args()
    if not EDGETPU.exists():
        sys.exit(f"{EDGETPU} does not exist; set CORALLINE_SHARED to the folder of shared files")
    folders = sorted(path for path in (EDGETPU / "pairs").iterdir() if path.is_dir())
    models = {folder.name: (folder / "model.tflite").read_bytes() for folder in folders}
    files = {folder.name: compiled_file.read(folder / "compiled.tflite") for folder in folders}
    began = time.monotonic()
    rows = all_pairs(models, files)
    counts = Counter((row["same"], row["answer"]) for row in rows)
    print("| models | answer | pairs |\n|---|---|---|")
    for (same, answer), count in sorted(counts.items()):
        print(f"| {'the same' if same else 'another'} | {answer} | {count} |")
    unexpected = [row for row in rows if row["answer"] != ANSWERS[row["same"]]]
    for row in unexpected:
        print(row)
    draw = np.random.default_rng(0)
    changes: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    missed = []
    for name, content in models.items():
        for kind in KINDS:
            for _ in range(options.changes):
                model, operator, index = one_change(content, files[name], kind, draw)
                if operator < 0:
                    break
                verdict = outcome(verify(files[name], graph.parse(model)), operator, index)
                changes[kind][verdict] += 1
                if verdict != "named":
                    missed.append({"model": name, "kind": kind, "operator": operator, "outcome": verdict})
    print("| changed | named | found | undecided | missed |\n|---|---|---|---|---|")
    for kind, counter in changes.items():
        print(f"| {kind} | {' | '.join(str(counter[key]) for key in ('named', 'found', 'undecided', 'missed'))} |")
    print(Counter((row["model"], row["kind"], row["outcome"]) for row in missed))
    answers: dict[str, Counter[str]] = {}
    for name, content in models.items():
        for what, model in retrained(content, draw).items():
            answer = ANSWERS[verify(files[name], graph.parse(model)).holds]
            answers.setdefault(what, Counter())[answer] += 1
            if answer != "no":
                print(f"{name}, {what}: {answer}")
    print("| retrained | answers |\n|---|---|")
    for what, counter in answers.items():
        print(f"| {what} | {', '.join(f'{count} {answer}' for answer, count in counter.items())} |")
    result = {
        "pairs": len(rows),
        "answers": {f"{'same' if same else 'other'}: {answer}": count for (same, answer), count in counts.items()},
        "unexpected": unexpected,
        "changes": {kind: dict(counter) for kind, counter in changes.items()},
        "not_named": missed,
        "retrained": {what: dict(counter) for what, counter in answers.items()},
        "seconds": round(time.monotonic() - began),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
