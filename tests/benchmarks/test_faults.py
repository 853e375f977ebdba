"""Some of the cases of `benchmarks/faults.py`, and tests of its judge."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import disk_states
import fault_injection
import pytest
from fault_cases import OTHER_USER, POWER_CUT, TWO_AT_ONCE, Bench, Case, plan

MISSING = fault_injection.missing()
pytestmark = [pytest.mark.night, pytest.mark.skipif(bool(MISSING), reason=MISSING or "faults are possible")]
WRITERS = {
    "in its place": "open('file', 'wb').write(b'n' * 100)",
    "without flushing": "open('new', 'wb').write(b'n' * 100); os.replace('new', 'file')",
    "as it should be": """
with open('new', 'wb') as stream:
    stream.write(b'n' * 100), stream.flush(), os.fsync(stream.fileno())
os.replace('new', 'file')
os.fsync(os.open('.', os.O_RDONLY))
""",
}


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


def test_a_plan_has_every_fault(bench: Bench) -> None:
    cases = plan(bench, 60, only="legalize")
    assert len(cases) == len(set(cases))
    assert {case.fault for case in cases} >= {*fault_injection.FAULTS, POWER_CUT} - {
        "no links",
        "lost removal",
    }  # `legalize` makes no links and removes nothing


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_power_cut_leaves(tmp_path: Path, writer: str) -> None:
    """A power cut may leave a part of a file that is written in place or not flushed. The cases would find this."""
    before, work, trace, counter = (tmp_path / name for name in ("before", "work", "trace", "counter"))
    for folder in (before, work):
        folder.mkdir()
        (folder / "file").write_bytes(b"o" * 50)
    counter.write_bytes(bytes(8))
    settings = {"FAULT_UNDER": str(work), "FAULT_COUNTER": str(counter), "FAULT_TRACE": str(trace)}
    environment = {"LD_PRELOAD": str(fault_injection.library(tmp_path)), **settings}
    subprocess.run([sys.executable, "-c", f"import os\n{WRITERS[writer]}"], cwd=work, env=environment, check=True)
    operations = [line for line in disk_states.read(trace) if line.name != disk_states.COUNTED]
    contents = set()
    for count in range(len(operations) + 1):
        disk = disk_states.Disk(work, before)
        for operation in operations[:count]:
            disk.apply(operation)
        for how in disk_states.HOW:
            for seed in range(5):
                place = tmp_path / f"{count}-{how}-{seed}"
                disk.write(place, how, random.Random(seed))
                contents.add((place / "file").read_bytes())
    expected = {b"o" * 50, b"n" * 100}
    assert contents == expected if writer == "as it should be" else contents - expected
