"""Many devices at a time, some of which fail: `python benchmarks/fleet.py [--devices 200] [--failing 0.1] [--jobs 16]`.

One real sshd on this machine serves all devices: each is a folder with its own address. All run version 1. Version 2 is
deployed to all in parallel. In a tenth of the sessions something fails at a random moment: the process on the device is
killed, or its connection; it is killed right after the switch; its disk is full; it is slow. Then

- each device must run a complete old or new version,
- the table of the deployment must have the release that each device runs, or the word `unknown`,
- `status` must report the release that each device runs,
- the same command must finish the deployment.

Writes benchmarks/results/fleet.json, and prints the table of the deployment. The exit code is 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import repository

import bundles
import cuts
import remote_host
from paths import ROOT
from remote_host import Host

from compress.surface.fleet import remote
from deploy.contract import releases

RESULTS = repository.RESULTS / "fleet.json"


class Fleet:
    """The devices, which are folders on one host."""

    def __init__(self, host: Host, folder: Path, count: int, jobs: int) -> None:
        self.host, self._folder, self._jobs = host, folder, jobs
        self.places = [folder / f"device{number:03}" for number in range(count)]
        self._hosts = folder / "hosts.txt"
        self._hosts.write_text("".join(f"{host.address(place)}\n" for place in self.places))

    def run(self, command: str, *arguments: object) -> tuple[int, list[dict[str, Any]]]:
        """Run a command for all devices; return the exit code and the row of each device."""
        options = self.host.options("/unused")[2:]
        if command == "status":
            options = options[: options.index("--log")]
        program = [sys.executable, "-m", "compress", command, *map(str, arguments), "--hosts", str(self._hosts)]
        done = subprocess.run(
            [*program, *options, "--jobs", str(self._jobs), "--json"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            check=False,
        )
        return done.returncode, json.loads(done.stdout)["devices"]

    def install(self, version: int) -> None:
        """Install a version on every device: deploy it to the first one, and copy that folder to the others."""
        self._hosts.write_text(f"{self.host.address(self.places[0])}\n")
        code, _ = self.run("deploy", self.bundle(version))
        assert code == 0
        for place in self.places[1:]:
            shutil.copytree(self.places[0], place, symlinks=True)
        self._hosts.write_text("".join(f"{self.host.address(place)}\n" for place in self.places))

    def bundle(self, version: int) -> Path:
        """Return the bundle of a version."""
        path = self._folder / f"v{version}.coralline"
        if not path.exists():
            path.write_bytes(bundles.packed(version, extra_bytes=100_000))
        return path

    def truth(self) -> list[str | None]:
        """Return the release that each device runs, read from its folder; None if it is damaged."""
        running_releases = []
        for place in self.places:
            installed = releases.DeviceFolder(str(place), by="", create=False, lock=False)
            current = installed.current()
            running_releases.append(current if current and installed.whole(current) else None)
        return running_releases


def judged(fleet: Fleet) -> dict[str, Any]:
    """Deploy with failures, run `status`, and deploy again; return the figures."""
    (old,) = set(fleet.truth())
    began = time.monotonic()
    code, rows = fleet.run("deploy", fleet.bundle(2))
    seconds = time.monotonic() - began
    truth = fleet.truth()
    fleet.host.python()
    status_code, status_rows = fleet.run("status")
    again_code, again = fleet.run("deploy", fleet.bundle(2))
    (new,) = {row["after"] for row in again if row["result"] != "failed"}
    for row, runs in zip(rows, truth, strict=True):
        print(f"{row['address']:50} {row['result']:10} {str(row['after'])[:12]:12} {str(runs)[:12]}", file=sys.stderr)
    return {
        "seconds": round(seconds, 1),
        "exit_codes": [code, status_code, again_code],
        "results": dict(Counter(row["result"] for row in rows)),
        "unknown_in_the_table": sum(row["after"] == remote.UNKNOWN for row in rows),
        "old_after_failures": truth.count(old),
        "new_after_failures": truth.count(new),
        "neither": sum(runs not in (old, new) for runs in truth),
        "table_wrong": [
            row["address"]
            for row, runs in zip(rows, truth, strict=True)
            if row["after"] not in (runs, remote.UNKNOWN) or (row["result"] == "deployed" and runs != new)
        ],
        "status_wrong": [
            row["address"]
            for row, runs in zip(status_rows, truth, strict=True)
            if row.get("current") != runs or not row["whole"]
        ],
        "not_finished_by_the_same_command": sum(runs != new for runs in fleet.truth()),
        "results_again": dict(Counter(row["result"] for row in again)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--failing", type=float, default=0.1)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if reason := remote_host.missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as name, remote_host.running(Path(name) / "host") as host:
        fleet = Fleet(host, Path(name), options.devices, options.jobs)
        fleet.install(1)
        host.python(before=cuts.fleet(name, options.failing, options.seed))
        result = judged(fleet)
        failures = Path(name) / "failures.jsonl"
        lines = failures.read_text().splitlines() if failures.exists() else []
    result = {
        "schema_version": 1,
        "devices": options.devices,
        "jobs": options.jobs,
        "seed": options.seed,
        "injected": dict(Counter(json.loads(line)["how"] for line in lines)),
        **result,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    wrong = result["neither"] or result["table_wrong"] or result["status_wrong"]
    return 1 if wrong or result["not_finished_by_the_same_command"] else 0


if __name__ == "__main__":
    sys.exit(main())
