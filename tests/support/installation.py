"""The wheel of this project, installed without extras into an environment with nothing but its requirements."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from paths import ROOT

sys.path.insert(0, str(ROOT / "packaging"))
import bill_of_materials as bills


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
    for name in bills.dependencies("coralline", ()).keys() - {"coralline"}:
        for file in metadata.files(name) or ():
            if ".." not in file.parts:
                link = site / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.locate())
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", "--no-index", str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return programs
