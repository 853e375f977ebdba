"""Bundles that only an attacker or a broken program writes."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import golden

from deploy.contract import bundle


def manifest(**changes: Any) -> dict[str, Any]:
    """The manifest of the golden bundle, complete, as plain values that a test may change."""
    return {**json.loads(json.dumps(bundle.Bundle(golden.packed()).manifest)), **changes}


def written(content: Any, members: Mapping[str, bytes] | None = None) -> bytes:
    """Return a bundle whose manifest is written as given, unchecked. The rest of the bundle is as `pack` writes it."""
    text = content if isinstance(content, bytes) else json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"
    ordered = golden.members() if members is None else members
    return bundle.archive_of({"manifest.json": text, **{name: ordered[name] for name in sorted(ordered)}})


def table(members: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"name": name, "size": len(members[name]), "sha256": hashlib.sha256(members[name]).hexdigest()}
        for name in sorted(members)
    ]


def central(content: bytes) -> list[int]:
    """Return the byte offsets of the entries in a zip's central directory."""
    count, _, _, place = struct.unpack("<HHII", content[-12 - 2 : -2])
    places = []
    for _ in range(count):
        places.append(place)
        place += 46 + sum(struct.unpack("<HHH", content[place + 28 : place + 34]))
    return places


def patched(content: bytes, place: int, form: str, *values: int) -> bytes:
    """Return the content with packed values at an offset. `form` is a little-endian `struct` format."""
    new = struct.pack("<" + form, *values)
    return content[:place] + new + content[place + len(new) :]
