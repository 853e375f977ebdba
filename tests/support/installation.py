"""The wheel of this project, installed without extras into an environment with nothing but its requirements."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT


def required(name: str, extras: tuple[str, ...]) -> set[str]:
    """Return the normalized names of a package and of all packages that it needs in this environment."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((needed.name, tuple(needed.extras)))
    return {canonicalize_name(name) for name, _ in seen}


def built(root: Path, to: Path) -> Path:
    """Build the wheel of a source tree in a new folder `to`, and return its path."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(to), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=to.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = to.glob("*.whl")
    return wheel


def installed(folder: Path) -> Path:
    """Install the wheel of the repository into a new environment, and return the folder of its programs.

    The environment has links to the files of the packages that Coralline requires without extras, and no other package,
    so nothing is downloaded. pip refuses to install the wheel if a requirement is missing.
    """
    wheel = built(ROOT, folder / "dist")
    programs = folder / "environment" / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(programs.parent)], check=True)
    (site,) = programs.parent.glob("lib/python*/site-packages")
    for name in required("coralline", ()) - {"coralline"}:
        for file in metadata.files(name) or ():
            if ".." not in file.parts:
                link = site / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.locate())
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", "--no-index", str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return programs
