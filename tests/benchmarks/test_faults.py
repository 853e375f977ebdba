"""Some of the cases of `benchmarks/faults.py`, and tests of its judge."""

from __future__ import annotations

import os
from collections.abc import Iterator

import fault_injection
import pytest
from fault_cases import OTHER_USER, TWO_AT_ONCE, Bench, Case

MISSING = fault_injection.missing()
pytestmark = [pytest.mark.night, pytest.mark.skipif(bool(MISSING), reason=MISSING or "faults are possible")]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("faults").resolve())
    yield bench
    bench.close()


@pytest.mark.parametrize(
    "name",
    [
        "legalize/killed/3",
        "legalize/torn write/0",
        "legalize/disk full/2",
        "legalize/one error/4",
        "legalize/read-only/0",
        "legalize/network folder/0",
        "legalize/power cut/18",
        "init/unreadable/7",
        "results/lost reply/0",
        "results/power cut/26",
        "deploy/killed/150",
        "deploy/disk full/115",
        "deploy/power cut/700",
    ],
)
def test_old_or_new(bench: Bench, name: str) -> None:
    verdict = bench.judge(Case.parse(name))
    assert not verdict.wrong, verdict.errors


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user are made by root")
def test_files_of_another_user(bench: Bench) -> None:
    verdict = bench.judge(Case("legalize", OTHER_USER, 0))
    assert (verdict.state, verdict.code, verdict.wrong) == ("old", 6, ())
    assert "no permission" in verdict.errors


def test_two_at_once(bench: Bench) -> None:
    assert not bench.judge(Case("results", TWO_AT_ONCE, 1)).wrong
