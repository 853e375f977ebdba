"""Outputs of one bundle on x86-64 and on an emulated aarch64: `python benchmarks/aarch64.py BUNDLE FOLDER`.

Needs Debian with qemu-user-static. Debian's Python for arm64, numpy and the TFLite runtime (`--runtime`, by default
ai-edge-litert, from the package index) are installed into FOLDER; the rest of the machine is not changed. For each
model and kind of kernels the benchmark prints how many evaluation samples have outputs different from those on this
machine, and the size of the differences. It writes no results file. Times under emulation are not meaningful.

To run the runner itself under emulation, the kernel must know the emulator (binfmt_misc), because the runner starts
processes of the same Python: `FOLDER/python3 runner.pyz verify BUNDLE`. The emulated processor is a Cortex-A72: with
the default processor of qemu 7.2, XNNPACK's int8 outputs are wrong; with qemu 10 they are right.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import repository  # noqa: F401 - the search path

import numpy as np
from paths import ROOT

PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
CPUINFO = "processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
CPUINFO += "CPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n"
"""The content of /proc/cpuinfo: the runtime reads the processor type there, and crashes on that of an x86-64."""
ANSWERS = """
import sys
import numpy as np
from deploy.runner import runtime
from deploy.contract import bundle
from deploy.runner.model import Model

opened, found = bundle.read(sys.argv[1]), {}
samples, _ = opened.evaluation()
for role in ("original", "int8"):
    for kernels in runtime.find().kernels():
        model = Model(opened, role, kernels=kernels)
        found[role + " " + kernels] = np.concatenate([model.session.run(model.prepare(s)) for s in samples])
np.savez(sys.argv[2], **found)
"""


def root(folder: Path) -> None:
    """Unpack Debian's Python for arm64 and its dependencies into a folder, without an installation."""
    state, options = folder / "apt", ["-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"]
    for place in ("lists/partial", "archives/partial"):
        (state / place).mkdir(parents=True)
    places = {"State": state, "State::status": "/dev/null", "Cache": state, "Cache::archives": state / "archives"}
    options += [word for name, place in places.items() for word in ("-o", f"Dir::{name}={place}")]
    subprocess.run(["apt-get", "-qq", *options, "update"], check=True)
    install = ["install", "--download-only", "--no-install-recommends", "-y", *PACKAGES]
    subprocess.run(["apt-get", "-qq", *options, *install], check=True)
    for package in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, folder / "root"], check=True)
    (folder / "root" / "proc").mkdir()
    (folder / "root" / "proc" / "cpuinfo").write_text(CPUINFO)
    if not (folder / "root" / "lib").exists():
        (folder / "root" / "lib").symlink_to("usr/lib")


def interpreter(folder: Path, packages: list[str]) -> Path:
    """Install packages for the emulated Python, and return a script that runs it."""
    python = (folder / "root/usr/bin/python3").resolve()
    site, version = folder / "site", python.name.removeprefix("python")
    platforms = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (17, 27, 28, 34)]
    wheels = ["--only-binary=:all:", *platforms, "--platform=manylinux2014_aarch64", f"--python-version={version}"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", site, *wheels, *packages], check=True)
    script = folder / "python3"
    emulator = f"QEMU_CPU=cortex-a72 QEMU_LD_PREFIX={folder}/root PYTHONPATH=$PYTHONPATH:{site}"
    script.write_text(f'#!/bin/sh\nexport {emulator}\nexec qemu-aarch64-static {python} "$@"\n')
    script.chmod(0o755)
    return script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path, help="does not exist yet, or is one of before")
    parser.add_argument("--runtime", nargs="+", default=["ai-edge-litert", "numpy"], help="for tflite-runtime: numpy<2")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if not (folder / "python3").exists():
        root(folder)
        interpreter(folder, options.runtime)
    for python, name in ((sys.executable, "here"), (folder / "python3", "there")):
        command = [python, "-c", ANSWERS, options.bundle, folder / f"{name}.npz"]
        subprocess.run(command, check=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})
    here, there = np.load(folder / "here.npz"), np.load(folder / "there.npz")
    for key in here.files:
        difference = np.abs(here[key].astype(np.float64) - there[key]).reshape(len(here[key]), -1)
        differ = (difference > 0).any(axis=1).sum()
        print(f"{key}: {differ} of {len(difference)} samples differ, by up to {difference.max():.2g}")


if __name__ == "__main__":
    main()
