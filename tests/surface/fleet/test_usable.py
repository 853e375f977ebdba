"""A bundle whose run ended with a result that is not usable is not deployed."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_records

from compress.core.errors import NotUsableError
from compress.surface.fleet import release


def write_report(bundle: Path, **changes: Any) -> None:
    """Write the report of the run that made a bundle."""
    record = copy.deepcopy(run_records.FULL)
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    record["outputs"] = {bundle.name: {"sha256": digest, "size_bytes": bundle.stat().st_size}}
    record["verdict"] = {"level": "not usable", "reasons": ["the order of the classes is wrong"]}
    record["status"] = "not usable"
    (bundle.parent / "report.json").write_text(json.dumps(record | changes))


def test_the_bundle_of_a_result_that_cannot_be_used(bundle_file: Callable[..., Path]) -> None:
    path = bundle_file()
    assert release.load(path).title
    write_report(path)
    with pytest.raises(NotUsableError, match="the bundle is not usable: the order of the classes is wrong"):
        release.load(path)


@pytest.mark.parametrize("case", ["usable", "another bundle", "another program"])
def test_other_reports_do_not_matter(bundle_file: Callable[..., Path], case: str) -> None:
    path = bundle_file()
    write_report(path)
    if case == "usable":
        write_report(path, status="ok", verdict={"level": "usable", "reasons": []})
    elif case == "another bundle":
        bundle_file(1).replace(path)
    else:
        (path.parent / "report.json").write_text("{}")
    assert release.load(path).title
