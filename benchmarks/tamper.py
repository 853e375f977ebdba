"""Tampered bundles: `python benchmarks/tamper.py [--bundle FILE] [--edits 20000] [--seed 0]`.

A bundle (FILE, or a small one that is made here) is damaged everywhere: each bit of each byte flipped, the file cut at
each length, a byte inserted at each position, and random edits such as an attacker makes; and the same with a bundle
that an earlier version signed. All must be refused with a BundleError, and no file may be opened, written or removed
by the check (tested with Python's audit events). Signatures are verified in plain Python, or by the package
cryptography with `--cryptography`. Writes benchmarks/results/tamper.json.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import repository

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deploy.contract import bundle, signature
from deploy.contract.preprocessing import VERSION, Preprocessing

RESULTS = repository.RESULTS / "tamper.json"
PRIVATE = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"benchmark").digest())
KEY = PRIVATE.public_key().public_bytes_raw()
PIECES = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", bundle.TRAILER_MAGIC, KEY, bytes(4), b"\xff" * 4, b"../", b"\1")
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


def timed(verify: object, count: int = 50) -> float:
    """Return the median milliseconds of one verification."""
    assert callable(verify)
    message_signature, times = PRIVATE.sign(b"message"), []
    for _ in range(count):
        start = time.perf_counter()
        assert verify(KEY, message_signature, b"message")
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="a small .coralline file")
    parser.add_argument("--edits", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cryptography", action="store_true")
    options = parser.parse_args()
    signature_ms = {"plain": timed(signature.verify_plainly), "cryptography": timed(signature.verify)}
    verify = signature.verify if options.cryptography else signature.verify_plainly
    signature.verify = functools.cache(verify)
    unsigned = options.bundle.read_bytes() if options.bundle else small()
    message = bundle.TRAILER_MAGIC + hashlib.sha256(unsigned).digest()
    signed = unsigned + message + KEY + PRIVATE.sign(message)
    good = {unsigned, signed}
    sys.addaudithook(watch)
    outcomes: dict[str, Counter[str]] = {}
    for name, content in (("unsigned", unsigned), ("signed", signed)):
        chance = random.Random(options.seed)
        counts = outcomes[name] = Counter()
        for way, changed in spoilt(content, options.edits, chance):
            if changed not in good:  # a signed bundle without its trailer is the unsigned bundle
                counts[f"{way}: {read(changed)}"] += 1
        print(f"{name}: {dict(counts)}", file=sys.stderr)
    bad = {
        name: {key: n for key, n in c.items() if "accepted" in key or "exception" in key}
        for name, c in outcomes.items()
    }
    results = {
        "python": platform.python_version(),
        "bundle_bytes": {"unsigned": len(unsigned), "signed": len(signed)},
        "tampered": {name: sum(counts.values()) for name, counts in outcomes.items()},
        "not_refused": sum(sum(counts.values()) for counts in bad.values()),
        "files_touched": len(touched),
        "outcomes": {name: dict(sorted(counts.items())) for name, counts in outcomes.items()},
        "verification_ms_median": signature_ms,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return 1 if results["not_refused"] or touched else 0


if __name__ == "__main__":
    sys.exit(main())
