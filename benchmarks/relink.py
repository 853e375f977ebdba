"""Results of `relink` on real compiled models: `python benchmarks/relink.py`.

Four questions are tested. Does a relink of a model with its own compiled file change nothing? Does a relink of a model
with the compiled file of another model of the same architecture give the bytes of the real compiler? Do random weights
change only the parameters? What happens with other scales, for which no file of the compiler exists?

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Prints a table, every refusal and every
difference, and writes benchmarks/results/relink.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import repository

from paths import EDGETPU
from retrained import differing_parts, other_scales, other_weights, without_tokens

from compress.model.tflite import graph, structure
from darwinn import compiled_file
from darwinn.compiled_file import CompiledFile
from darwinn.cpu_part import compare_cpu_part
from darwinn.instruction_map import ModelChange
from darwinn.instructions import bundles, vector_instructions
from darwinn.operator_constants import is_independent
from darwinn.relink import Relinked, relink

RESULTS = repository.RESULTS / "relink.json"
SCALE_SEEDS = range(3)


@cache
def model(name: str) -> bytes:
    return (EDGETPU / "pairs" / name / "model.tflite").read_bytes()


@cache
def compiled(name: str) -> CompiledFile:
    return compiled_file.read(EDGETPU / "pairs" / name / "compiled.tflite")


def mapped(name: str) -> set[int]:
    """Return the indices of the operators of a model that run on the Edge TPU."""
    file, parsed = compiled(name), graph.parse(model(name))
    cpu = compare_cpu_part(file.graph, parsed, {custom_operator.operator.index for custom_operator in file.operators})
    return {operator.index for operator in parsed.operators} - cpu.operators


def answer(result: Relinked, expected: bytes) -> dict[str, Any]:
    """Return the outcome of a relink: refused, equal to the expected bytes (compared without tokens), or different."""
    if result.content is None:
        return {"outcome": "refused", "problems": list(result.problems)}
    equal = without_tokens(compiled_file.parse(result.content)) == expected
    return {"outcome": "equal" if equal else "different", **result.changes}


def into_itself(name: str) -> dict[str, Any]:
    file = compiled(name)
    return {"model": name, **answer(relink(model(name), model(name), file), without_tokens(file))}


def same_architecture(names: list[str]) -> Iterator[dict[str, Any]]:
    parsed = {name: graph.parse(model(name)) for name in names}
    for old, new in itertools.permutations(names, 2):
        if not structure.differences(parsed[old], parsed[new]):
            result = relink(model(new), model(old), compiled(old))
            row = {"template": old, "new": new, **answer(result, without_tokens(compiled(new)))}
            if result.content is not None and row["outcome"] == "different":
                unchanged = without_tokens(compiled_file.parse(result.content)) == without_tokens(compiled(old))
                # Both models have the same numbers. They were compiled together, for other addresses on the chip.
                row["outcome"] = "the template: equal models" if unchanged else "different"
            yield row


def with_other_weights(name: str) -> dict[str, Any]:
    result = relink(other_weights(model(name), mapped(name), 0), model(name), compiled(name))
    if result.content is None:
        return {"model": name, "outcome": "refused", "problems": list(result.problems)}
    parts = differing_parts(compiled(name), compiled_file.parse(result.content))
    return {"model": name, "outcome": "parameters alone" if parts <= {"parameters"} else "different", **result.changes}


def with_other_scales(name: str, seed: int) -> dict[str, Any]:
    """Relink with other scales, and then with the original ones: the second result must equal the template."""
    other = other_scales(model(name), seed)
    row: dict[str, Any] = {"model": name, "seed": seed}
    result = relink(other, model(name), compiled(name))
    if result.content is None:
        return {**row, "outcome": "refused", "problems": list(result.problems)}
    back = relink(model(name), other, compiled_file.parse(result.content))
    outcome = answer(back, without_tokens(compiled(name)))["outcome"]
    return {**row, "outcome": "written", "back": outcome, **result.changes}


def explained_instructions(name: str) -> Counter[str]:
    """Count the vector instructions of a file: explained by an operator's rule, independent of scales, unexplained."""
    parsed = graph.parse(model(name))
    change = ModelChange(parsed, parsed, mapped(name))
    counts: Counter[str] = Counter()
    for executable in compiled(name).executables:
        for stream in executable.instructions:
            for instruction in vector_instructions(bundles(compiled(name).bytes_at(stream))):
                explained = bool(change.candidates(instruction))
                kind = "independent" if is_independent(instruction) else "unexplained"
                counts["explained" if explained else kind] += 1
    return counts


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    index = json.loads((EDGETPU / "pairs" / "index.json").read_text())
    names = [entry["name"] for entry in index]
    instructions: Counter[str] = sum((explained_instructions(name) for name in names), Counter())
    parts: dict[str, list[dict[str, Any]]] = {
        "itself": [into_itself(name) for name in names],
        "pairs": list(same_architecture(names)),
        "weights": [with_other_weights(name) for name in names],
        "scales": [with_other_scales(name, seed) for name in names for seed in SCALE_SEEDS],
    }
    RESULTS.write_text(json.dumps({"instructions": dict(instructions), **parts}, indent=1) + "\n")
    print(f"| | outcomes |\n|---|---|\n| vector instructions | {dict(instructions)} |")
    for name, rows in parts.items():
        print(f"| {name} | {dict(Counter(row['outcome'] for row in rows))} |")
    print(f"| scales, and back | {dict(Counter(row['back'] for row in parts['scales'] if 'back' in row))} |")
    for name, rows in parts.items():
        for row in rows:
            if row["outcome"] in ("refused", "different"):
                print(name, *(row.get(key, "") for key in ("model", "new", "template", "seed", "outcome")))
                print(*(f"    {problem}" for problem in row.get("problems", [])[:3]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
