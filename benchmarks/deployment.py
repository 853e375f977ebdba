"""Deployments cut at random moments: `python benchmarks/deployment.py [--cuts 100] [--seed 0] [--operations]`.

A real sshd on this machine is the device. Each deployment brings a bundle with three new megabytes, and is cut at a
random moment: the client, the connection or the device's end of it is killed (SIGKILL), or the device's disk is
filled. Then what runs there must be the old or the new version, whole, as its own runner verifies it.
`--operations`: also killed before the first operation on files that the device's end does, before the second, and so
on, until none is left. Writes benchmarks/results/deployment.json.

What this does not show: a power cut also loses what the system had not written to the disk yet. Files and folders
are synchronized before anything is renamed, but no power was cut here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import repository

import bundles
import cuts
import remote_host
from paths import ROOT
from remote_host import Host

from deploy.contract import bundle

RESULTS = repository.RESULTS / "deployment.json"
NOISE_BYTES = 3_000_000


@dataclass
class Device:
    """A folder on the host, the version that runs there, and the last one that was deployed."""

    host: Host
    folder: Path
    work: Path
    version: int = 1
    last: int = 1

    def next(self) -> int:
        """A version that nothing has arrived of yet."""
        self.last += 1
        return self.last

    def deploy(self, version: int, noise: int = NOISE_BYTES) -> subprocess.Popen[bytes]:
        """Begins to deploy a version."""
        path = self.work / "bundle.coralline"
        path.write_bytes(bundles.packed(version, extra_bytes=noise))
        command = [
            sys.executable,
            "-m",
            "compress",
            "deploy",
            str(path),
            *self.host.options(self.folder),
            "--keep",
            "1",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        quiet = subprocess.DEVNULL
        return subprocess.Popen([*command, "--keep", "1"], env=environment, stdout=quiet, stderr=quiet)

    def runs(self) -> int | None:
        """The version that runs, if one does."""
        command = [sys.executable, "current/runner.pyz", "verify", "current/bundle.coralline", "--json"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, check=False)
        if done.returncode != 0:
            return None
        content = (self.folder / "current" / "bundle.coralline").read_bytes()
        return int(bundle.Bundle(content).manifest["version"])

    def judge(self, new: int) -> str:
        """What runs after a deployment of `new` was cut; what does is the old version of the next one."""
        found = self.runs()
        kind = {self.version: "old", new: "new"}.get(found or 0, "neither")
        self.version = found or self.version
        return kind


def wait_for(found: Any, process: subprocess.Popen[bytes]) -> None:
    while not found() and process.poll() is None:
        time.sleep(0.01)


def cut(device: Device, new: int, how: str, moment: float) -> bool:
    """Deploys a version, and cuts that after a while; whether it was still under way."""
    process = device.deploy(new)
    wait_for({"connection": device.host.sessions}.get(how, device.host.agents), process)
    time.sleep(moment)
    running = process.poll() is None
    pids = {"client": [process.pid], "connection": device.host.sessions(), "agent": device.host.agents()}
    if how == "disk":
        with (device.folder.parent / "filler").open("wb", buffering=0) as stream, suppress(OSError):
            while True:
                stream.write(bytes(1 << 16))
    for pid in pids.get(how, []):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    while device.host.agents():
        time.sleep(0.01)
    return running


def random_cuts(device: Device, kinds: list[str], count: int, seed: int) -> dict[str, Any]:
    """Cuts at moments between the beginning of the connection and the end of a whole deployment."""
    chance = random.Random(seed)
    seconds = whole_seconds(device)
    found = {kind: Counter[str]() for kind in kinds}
    late = done = 0
    while done < count:
        how = kinds[done % len(kinds)]
        new = device.next()
        running = cut(device, new, how, chance.uniform(0, seconds))
        kind = device.judge(new)
        (device.folder.parent / "filler").unlink(missing_ok=True)
        if kind == "neither" or running:
            found[how][kind] += 1
            done += 1
        late += not running
        print(f"{done}/{count} {how}: {kind if running else 'was done before'}", file=sys.stderr)
    return {
        "connection_s": round(seconds, 3),
        "cuts": {how: {kind: each[kind] for kind in ("old", "new", "neither")} for how, each in found.items()},
        "not_counted_since_done_before": late,
    }


def whole_seconds(device: Device) -> float:
    """From the beginning of a connection to the end of a deployment."""
    new = device.next()
    process = device.deploy(new)
    wait_for(device.host.agents, process)
    began = time.monotonic()
    process.wait()
    assert device.judge(new) == "new"
    return time.monotonic() - began


def operations(device: Device) -> dict[str, int]:
    """The device's end, killed before each of its operations on files."""
    found: Counter[str] = Counter()
    for number in range(10_000):
        new = device.next()
        device.host.python(before=cuts.at_operation(number, device.folder))
        code = device.deploy(new, noise=20_000).wait()
        kind = device.judge(new)
        print(f"operation {number}: {kind}", file=sys.stderr)
        if code == 0:
            break
        found[kind] += 1
    device.host.python()
    return {"operations": number, **{kind: found[kind] for kind in ("old", "new", "neither")}}


@contextmanager
def disk(folder: Path) -> Iterator[bool]:
    """A small file system, if one can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", action="store_true")
    options = parser.parse_args()
    if reason := remote_host.missing():
        sys.exit(reason)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as name,
        disk(Path(name) / "disk") as small,
        remote_host.running(Path(name) / "host") as host,
    ):
        device = Device(host, Path(name) / "disk" / "coralline", Path(name))
        assert device.deploy(1).wait() == 0
        kinds = ["client", "connection", "agent", *(["disk"] if small else [])]
        result: dict[str, Any] = {"seed": options.seed, **random_cuts(device, kinds, options.cuts, options.seed)}
        if options.operations:
            result["operations"] = operations(device)
        new = device.next()
        assert device.deploy(new).wait() == 0
        result["last_deployment_works"] = device.judge(new) == "new"
    result |= {"seconds": round(time.monotonic() - began), "cores": os.cpu_count(), "machine": platform.machine()}
    result["no_disk"] = None if small else "no file system could be mounted"
    RESULTS.write_text(json.dumps({"schema_version": 1, **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    lost = sum(each["neither"] for each in result["cuts"].values()) + result.get("operations", {}).get("neither", 0)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
