"""Bundles that only an attacker or a broken program writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import golden
import pytest

from deploy.contract import bundle


def refused(content: bytes, message: str | None = None) -> None:
    with pytest.raises(bundle.BundleError, match=message):
        bundle.Bundle(content)


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
