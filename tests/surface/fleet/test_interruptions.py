"""After every interruption of a deployment, the old or the new version runs.

`benchmarks/faults.py` does more of this.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import cuts
import pytest
import tiny
from deployments import answers, failed, left, rows
from remote_host import Host

from compress.bundling import runner_pyz
from compress.surface.cli.main import main

Write = Callable[..., Path]


def start(*arguments: object) -> subprocess.Popen[bytes]:
    environment = {**tiny.environment(), "PATH": "/usr/bin:/bin"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(tiny.command(*arguments), env=environment, stdout=quiet, stderr=quiet)


def soon(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("which", ["client", "connection", "agent"])
def test_killed_at_a_random_moment(host: Host, bundle_file: Write, tmp_path: Path, which: str, seed: int) -> None:
    there = tmp_path / "there"
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    process = start("deploy", bundle_file(2, extra_bytes=1_000_000), *host.options(there))
    assert soon(host.sessions if which == "connection" else host.agents)
    time.sleep(random.Random(seed).uniform(0, 0.8))
    for pid in {"client": lambda: [process.pid], "connection": host.sessions, "agent": host.agents}[which]():
        os.kill(pid, signal.SIGKILL)
    process.wait(60)
    assert answers(there) in (1, 2)
    assert soon(lambda: not host.agents())  # no process holds the lock
    assert main(["deploy", str(bundle_file(2, extra_bytes=1_000_000)), *host.options(there)]) == 0
    assert answers(there) == 2
    assert not left(there)


def test_interrupted_with_ctrl_c(host: Host, bundle_file: Write, tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    host.python(before="import time\ntime.sleep(30)\n")
    options = [*host.options(there), "--to", host.address(tmp_path / "other"), "--jobs", "2"]
    process = start("deploy", bundle_file(2), *options)
    assert soon(lambda: len(host.agents()) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert answers(there) == 1


def test_what_arrived_is_not_sent_again(
    host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    path = bundle_file(1, extra_bytes=2_000_000)
    host.python(before=cuts.after_bytes(1_500_000))
    assert "connection ended" in failed(capsys, ["deploy", str(path), *host.options(there)])
    assert not (there / "current").exists()
    host.python()
    assert main(["deploy", str(path), *host.options(there), "--json"]) == 0
    (row,) = rows(capsys)
    complete = path.stat().st_size + len(runner_pyz.content())
    assert complete - 1_500_000 < row["sent_bytes"] < complete - 1_400_000
    assert answers(there) == 1


def test_what_arrived_of_another_bundle_is_removed(host: Host, bundle_file: Write, tmp_path: Path) -> None:
    there = tmp_path / "there"
    host.python(before=cuts.after_bytes(500_000))
    assert main(["deploy", str(bundle_file(1, extra_bytes=1_000_000)), *host.options(there)]) == 15
    assert left(there)
    host.python()
    assert main(["deploy", str(bundle_file(2)), *host.options(there)]) == 0
    assert not left(there)


def test_spoilt_on_the_way(host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there"
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    path = bundle_file(2, extra_bytes=500_000)
    host.python(before=cuts.spoilt(1000))
    assert "not what was sent" in failed(capsys, ["deploy", str(path), *host.options(there)])
    assert answers(there) == 1
    host.python(before=cuts.spoilt(1))
    assert main(["deploy", str(path), *host.options(there), "--json"]) == 0
    (row,) = rows(capsys)
    assert row["sent_bytes"] > 900_000  # the pieces were sent twice
    assert answers(there) == 2
