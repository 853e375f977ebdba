"""Recovery of compiled files by `inspect --explain`: `python benchmarks/explain.py`.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Every compiled file is explained without
its original model. Then the result is compared with the original: the order of the operators, kernels, strides, shapes,
and the sources of each operator. Transfers are compared with the sizes in the file, and addresses with the memory that
the file claims. Last, the prediction for the original is compared with the file. Prints a table, and writes
benchmarks/results/explain.json.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import repository

from paths import EDGETPU

from compress import targets
from compress.model.tflite import graph
from compress.model.tflite.graph import Graph, Operator
from compress.targets.edgetpu import schedule_comparison
from darwinn import compiled_file, explainer
from darwinn.cpu_part import compare_cpu_part
from darwinn.explanation import ExplainedOperator, ExplainedProgram, Explanation
from darwinn.parameter_location import locate

RESULTS = repository.RESULTS / "explain.json"
WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
POOLS = ("AVERAGE_POOL_2D", "MAX_POOL_2D", "MEAN")


def in_order(operators: Sequence[ExplainedOperator], originals: Sequence[Operator]) -> list[bool]:
    """Return for each original operator whether it is in the longest common subsequence of both lists."""
    kept = {original.index for original in schedule_comparison.align(operators, {}, originals).values()}
    return [original.index in kept for original in originals]


def dimensions(operator: ExplainedOperator, original: Operator, model: Graph) -> dict[str, bool | None]:
    """Return whether each recovered dimension of a layer with weights equals the original's; None: not recovered."""
    weights = model.tensors[original.inputs[1]].shape
    source = (1, 1, 1, *model.tensors[original.inputs[0]].shape)[-3:]
    height, width, channels = (1, 1, 1, *model.tensors[original.outputs[0]].shape)[-3:]
    kernel = weights[1:3] if len(weights) == 4 else (1, 1)
    inputs = source[2] if len(weights) == 4 else weights[1]
    strides = (original.option("strideH", 1), original.option("strideW", 1)) if len(weights) == 4 else (1, 1)
    is_flat = len(weights) == 2
    return {
        "kernel": None if operator.kernel is None else operator.kernel == kernel,
        "stride": None if operator.stride is None else operator.stride == strides,
        "input channels": None
        if operator.input_channels is None or is_flat
        else blocks(inputs) == operator.input_channels,
        "output channels": None if operator.output_channels is None else blocks(channels) == operator.output_channels,
        "height and width": None if not operator.height else (operator.height, operator.width) == (height, width),
    }


def pool_window(operator: ExplainedOperator, original: Operator, model: Graph) -> bool | None:
    """Return whether the recovered window of a pool equals the original's; None: not recovered."""
    height, width = (1, 1, 1, *model.tensors[original.inputs[0]].shape)[-3:-1]
    window = (original.option("filterHeight", height), original.option("filterWidth", width))
    return None if operator.kernel is None else operator.kernel == window


def blocks(channels: int) -> int:
    """Return a number of channels, rounded up to a multiple of 4."""
    return -(-channels // 4) * 4


def sources(program: ExplainedProgram, index: int, known: set[int]) -> set[int]:
    """Return the indices of the original operators that a recovered operator reads; -1 for inputs.

    Copies and operators without an original are skipped: their own sources count instead.
    """
    indices: set[int] = set()
    waiting = list(program.operators[index].reads)
    seen: set[int] = set()
    while waiting:
        source = waiting.pop()
        if source < 0:
            indices.add(-1)
            continue
        original = program.operators[source].original
        if original is not None and original[0] in known:
            indices.add(original[0])
        elif source not in seen:
            seen.add(source)
            waiting += program.operators[source].reads or (-1,)
    return indices


def true_sources(model: Graph, operator: Operator, known: set[int]) -> set[int]:
    """Return the indices of the operators that an operator of the model reads; -1 for inputs.

    Operators that were not recovered are skipped: their own sources count instead.
    """
    indices: set[int] = set()
    waiting = [index for index in operator.inputs if index >= 0 and not model.tensors[index].is_constant]
    while waiting:
        producer = model.producer.get(waiting.pop())
        if producer is None:
            indices.add(-1)
        elif producer.index in known:
            indices.add(producer.index)
        else:
            waiting += [index for index in producer.inputs if index >= 0 and not model.tensors[index].is_constant]
    return indices


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Explain one compiled file, and compare it with its original."""
    target = targets.load("edgetpu")
    file = compiled_file.read(folder / "compiled.tflite")
    model = graph.read(folder / "model.tflite")
    alone = explainer.explain(file, name)
    named = schedule_comparison.explain(file, name, model, target)
    cpu = compare_cpu_part(file.graph, model, {custom_operator.operator.index for custom_operator in file.operators})
    originals = [operator for operator in model.operators if operator.index not in cpu.operators]
    operators = [operator for program in alone.programs for operator in program.operators]
    recovered = in_order(operators, originals)
    assert named.comparison is not None
    return {
        "name": name,
        "bundles": sum(program.bundles for program in alone.programs),
        "understood": sum(program.understood_bundles for program in alone.programs),
        **transfers(alone),
        "regions": regions(file, model, originals, alone),
        "operators": len(originals),
        "in_order": sum(recovered),
        "not_recovered": dict(
            Counter(operator.name for operator, is_found in zip(originals, recovered, strict=True) if not is_found)
        ),
        "certainty": dict(Counter(operator.certainty for operator in operators if operator.name != "move")),
        "dimensions": all_dimensions(named, model),
        "reads": reads(named, model),
        "passes": sum(operator.passes > 1 for operator in operators),
        "memory": [memory(program) for program in alone.programs if program.operators],
        "compared": named.comparison.compared,
        "differences": dict(Counter(difference.what for difference in named.comparison.differences)),
    }


def transfers(explained: Explanation) -> dict[str, Any]:
    """Return the bytes of inputs, outputs and parameters, and how many of them the DMA hints transfer.

    Also return the number of transfers, and of those that are both in the hints and in the program.
    """
    rows = [row for program in explained.programs for row in program.coverage]
    moved = [
        transfer
        for program in explained.programs
        for transfer in program.transfers
        if transfer.kind not in ("instructions", "interrupt")
    ]
    return {
        "transfer_bytes": sum(size for _, size, _ in rows),
        "hinted_bytes": sum(covered for _, _, covered in rows),
        "transfers": len(moved),
        "transfers_in_both": sum(transfer.is_announced and transfer.step is not None for transfer in moved),
    }


def regions(
    file: compiled_file.CompiledFile, model: Graph, originals: Sequence[Operator], explained: Explanation
) -> dict[str, int]:
    """Return the number of cached regions in the program, in the original, and at the same offset in both."""
    parts = [
        (part, executable.type == "PARAMETER_CACHING")
        for part, compiled in enumerate(file.operators, 1)
        for executable in compiled.package.executables
    ]
    known = {(*parts[region.executable], region.offset) for region in locate(file, model, originals).regions}
    program_regions = {
        (program.part, parameter.is_cached, parameter.offset)
        for program in explained.programs
        for parameter in program.parameters
        if parameter.is_cached
    }
    expected = {region for region in known if region[1]}
    return {"program": len(program_regions), "original": len(expected), "equal": len(program_regions & expected)}


def all_dimensions(explained: Explanation, model: Graph) -> dict[str, dict[str, int]]:
    """Count the dimensions of layers with weights, and the windows of pools: right, wrong, and not recovered."""
    counts: dict[str, Counter[str]] = {}
    words = {True: "right", False: "wrong", None: "not recovered"}
    for program in explained.programs:
        for operator in program.operators:
            if operator.original is None or operator.passes > 1:
                continue
            original = model.operators[operator.original[0]]
            if original.name in POOLS:
                counts.setdefault("window of a pool", Counter())[words[pool_window(operator, original, model)]] += 1
            if original.name not in WEIGHTED:
                continue
            for what, is_right in dimensions(operator, original, model).items():
                counts.setdefault(what, Counter())[words[is_right]] += 1
    return {what: dict(counter) for what, counter in counts.items()}


def reads(explained: Explanation, model: Graph) -> dict[str, int]:
    """Count the operators whose sources are those of their original: right, wrong, and not recovered (an input)."""
    known = {
        recovered.original[0]
        for program in explained.programs
        for recovered in program.operators
        if recovered.original is not None
    }
    counts: Counter[str] = Counter()
    for program in explained.programs:
        for operator in program.operators:
            if operator.original is None:
                continue
            actual = sources(program, operator.index, known) if operator.reads else {-1}
            expected = true_sources(model, model.operators[operator.original[0]], known)
            if -1 in actual and actual != expected:
                counts["not recovered"] += 1
            else:
                counts["right" if actual == expected else "wrong"] += 1
    return dict(counts)


def memory(program: ExplainedProgram) -> dict[str, int]:
    """Return the end of the memory that the program writes or reads, and the memory that the file claims, in bytes."""
    return {"highest": max(buffer.stop for buffer in program.buffers), "claimed": program.memory_bytes}


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over all files."""
    plain = [
        *("bundles", "understood", "transfer_bytes", "hinted_bytes", "transfers", "transfers_in_both"),
        *("operators", "in_order", "passes"),
    ]
    result: dict[str, Any] = {key: sum(row[key] for row in rows) for key in plain}
    for key in ("regions", "not_recovered", "certainty", "reads", "compared", "differences"):
        result[key] = dict(sum((Counter(row[key]) for row in rows), Counter()))
    sums: dict[str, Counter[str]] = {}
    for row in rows:
        for what, counts in row["dimensions"].items():
            sums.setdefault(what, Counter()).update(counts)
    result["dimensions"] = {what: dict(counts) for what, counts in sums.items()}
    programs = [program for row in rows for program in row["memory"]]
    result["memory"] = {
        "programs": len(programs),
        "highest address is the claimed memory": sum(program["highest"] == program["claimed"] for program in programs),
        "below it": sum(program["highest"] < program["claimed"] for program in programs),
        "above it": sum(program["highest"] > program["claimed"] for program in programs),
    }
    result["files"] = len(rows)
    result["files with all operators"] = sum(row["operators"] == row["in_order"] for row in rows)
    result["files with all regions"] = sum(
        row["regions"]["program"] == row["regions"]["original"] == row["regions"]["equal"] for row in rows
    )
    return result


def main() -> int:
    pairs = EDGETPU / "pairs"
    if not pairs.is_dir():
        print(f"{pairs} is missing: set CORALLINE_SHARED to the shared files", file=sys.stderr)
        return 2
    names = [row["name"] for row in json.loads((pairs / "index.json").read_text())]
    rows = [measure(name, pairs / name) for name in names]
    for row in rows:
        differences = ", ".join(f"{count} {what}" for what, count in row["differences"].items()) or "none"
        recovered = f"{row['in_order']:>3} of {row['operators']:>3} operators"
        print(f"{row['name'][:44]:<44} {recovered}, differences: {differences}")
    summary = totals(rows)
    print(json.dumps(summary, indent=1))
    RESULTS.write_text(json.dumps({"totals": summary, "files": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
