"""Tampered bundles: `python benchmarks/tamper.py [--bundle FILE] [--edits 20000] [--seed 0]`.

A bundle (FILE, or a small one that is made here) is damaged everywhere: each bit of each byte flipped, the file cut at
each length, a byte inserted at each position, and random edits such as an attacker makes. All must be refused with a
BundleError, and no file may be opened, written or removed by the check (tested with Python's audit events). Writes
benchmarks/results/tamper.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import repository

import numpy as np

from deploy.contract import bundle
from deploy.contract.preprocessing import VERSION, Preprocessing

RESULTS = repository.RESULTS / "tamper.json"
PIECES = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", bytes(4), b"\xff" * 4, b"../", b"\1")
TOUCHES = ("open", "os.", "shutil.", "subprocess.", "socket.", "tempfile.")
touched: list[str] = []
watching = [False]


def small() -> bytes:
    """Return a small bundle with labels, a model, golden data and evaluation data."""
    tensor = {"name": "image", "tensor": "image", "shape": [1, 2, 2, 1], "dtype": "int8", "scale": 0.1, "zero_point": 0}
    arrays = {"golden-input-0": np.zeros((2, 2, 1), np.uint8), "golden-output-int8": np.zeros((1, 2), np.int8)}
    arrays |= {"evaluation-inputs-0": np.ones((2, 2, 2, 1), np.uint8), "evaluation-labels": np.array([0, 1])}
    arrays |= {"evaluation-output-int8": np.zeros((2, 2), np.int8)}
    manifest = {
        "name": "small",
        "coralline": "0",
        "task": "classification",
        "labels": ["tea", "coffee"],
        "preprocessing": {"version": VERSION, "digest": Preprocessing([]).digest, "steps": []},
        "models": {"int8": {"file": "int8.tflite", "inputs": [tensor], "outputs": [tensor]}},
        "golden": {"inputs": ["golden-input-0.npy"], "outputs": {"int8": "golden-output-int8.npy"}},
        "evaluation": {
            "split": "test",
            "inputs": ["evaluation-inputs-0.npy"],
            "labels": "evaluation-labels.npy",
            "outputs": {"int8": "evaluation-output-int8.npy"},
            "metrics": {},
        },
    }
    members = {f"{name}.npy": bundle.array_bytes(array) for name, array in arrays.items()}
    return bundle.pack(manifest, {**members, "int8.tflite": b"no model"})


def spoilt(content: bytes, edits: int, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield every tampered form of a bundle, with the kind of change."""
    for place, byte in enumerate(content):
        for bit in range(8):
            yield "flip", content[:place] + bytes([byte ^ 1 << bit]) + content[place + 1 :]
        yield "cut", content[:place]
        yield "insert", content[:place] + bytes([chance.randrange(256)]) + content[place:]
    for _ in range(edits):
        changed = content
        for _ in range(chance.randint(1, 4)):
            place, other = (chance.randrange(len(changed) + 1) for _ in range(2))
            piece = chance.choice((*PIECES, changed[min(place, other) : max(place, other)], chance.randbytes(8)))
            removed = chance.choice((0, len(piece), chance.randrange(40)))
            changed = changed[:place] + piece + changed[place + removed :]
        if changed != content:
            yield "edit", changed


def read(content: bytes) -> str:
    """Open a bundle; return "refused", "accepted", or "exception" with the name of another exception."""
    watching[0] = True
    try:
        bundle.Bundle(content)
    except bundle.BundleError:
        return "refused"
    except Exception as error:  # noqa: BLE001  (any other exception is a finding)
        return f"exception {type(error).__name__}"
    finally:
        watching[0] = False
    return "accepted"


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if watching[0] and event.startswith(TOUCHES):
        touched.append(f"{event} {arguments}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="a small .coralline file")
    parser.add_argument("--edits", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    content = options.bundle.read_bytes() if options.bundle else small()
    sys.addaudithook(watch)
    counts: Counter[str] = Counter()
    for way, changed in spoilt(content, options.edits, random.Random(options.seed)):
        if changed != content:
            counts[f"{way}: {read(changed)}"] += 1
    results = {
        "python": platform.python_version(),
        "bundle_bytes": len(content),
        "tampered": sum(counts.values()),
        "not_refused": sum(n for key, n in counts.items() if "accepted" in key or "exception" in key),
        "files_touched": len(touched),
        "outcomes": dict(sorted(counts.items())),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return 1 if results["not_refused"] or touched else 0


if __name__ == "__main__":
    sys.exit(main())
