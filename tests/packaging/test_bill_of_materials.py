"""constraints.txt, the bill of materials of a release, and docs/dependencies.md."""

from __future__ import annotations

import json
import sys
from importlib import metadata

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "packaging"))
import bill_of_materials as bills

PINS = bills.pins((ROOT / "constraints.txt").read_text())


@pytest.fixture(scope="module")
def packages() -> dict[str, bills.Package]:
    dependencies = bills.dependencies(*bills.RELEASE)
    other = [name for name, package in dependencies.items() if PINS.get(name, (package.version,))[0] != package.version]
    if other:
        pytest.skip(f"these are not installed in the versions of constraints.txt: {', '.join(other)}")
    return dependencies


def test_every_line_of_the_constraints_has_a_version_and_hashes() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert len(PINS) == text.count("==") == len([line for line in text.splitlines() if line[:1].isalnum()])
    assert all(hashes for _, hashes in PINS.values())
    assert sum(len(hashes) for _, hashes in PINS.values()) == text.count("--hash=sha256:") == text.count("--hash")
    assert "://" not in text


def test_the_bill_is_valid_and_complete(packages: dict[str, bills.Package]) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = bills.bill(packages, PINS)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = {row["name"]: row for row in json.loads(text)["components"]}
    assert components.keys() == packages.keys() - {"coralline"}
    assert {"tensorflow", "numpy", "cryptography", "ai-edge-litert"} <= components.keys()
    assert "pytest" not in components
    for name, row in components.items():
        assert row["version"] == metadata.version(name) == PINS[name][0]
        assert {digest["content"] for digest in row["hashes"]} == {*PINS[name][1]}
        assert row["licenses"]
    edges = {row["ref"].partition("@")[0]: row.get("dependsOn", []) for row in json.loads(text)["dependencies"]}
    assert any(reference.startswith("tensorflow@") for reference in edges["coralline"])
    assert any(reference.startswith("numpy@") for reference in edges["tensorflow"])


def test_the_bill_is_the_same_again(packages: dict[str, bills.Package]) -> None:
    assert bills.bill(bills.dependencies(*bills.RELEASE), PINS) == bills.bill(packages, PINS)


def test_another_version_than_the_pinned_one_is_refused(packages: dict[str, bills.Package]) -> None:
    with pytest.raises(ValueError, match=r"numpy .* is installed; constraints\.txt has 0\.1"):
        bills.bill(packages, {**PINS, "numpy": ("0.1", ("0" * 64,))})


def test_the_page_is_that_of_the_constraints(packages: dict[str, bills.Package]) -> None:
    """After a change, run `python packaging/bill_of_materials.py --page`."""
    assert (ROOT / "docs" / "dependencies.md").read_text() == bills.page(packages)
