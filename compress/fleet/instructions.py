"""What is written beside the releases: how they are run, by hand and by systemd."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from compress.fleet.address import DeviceAddress

INSTALL = (
    "python3 -m pip install numpy, and ai-edge-litert (Python 3.10 and newer, 64 bits)"
    " or tflite-runtime 'numpy<2' (others)"
)
_README = """\
{title}, put here by `python -m compress deploy`.

Needs Python 3.7 or newer with numpy and a TFLite runtime; if they are missing:
  {install}

In this folder, on the board:
  {python} {current}/runner.pyz verify {current}/bundle.coralline
  {python} {current}/runner.pyz bench {current}/bundle.coralline --out results.json

Bring results.json back to where the bundle was made, and there:
  python -m compress results results.json --run runs/{title} --name NAME-OF-THE-BOARD
"""
_SERVICE = """
As a service; nothing installs or restarts it by itself. Once, and after each deployment or rollback:
  sudo cp coralline.service /etc/systemd/system/ && sudo systemctl daemon-reload
  sudo systemctl enable coralline && sudo systemctl restart coralline
"""


def readme(state: Mapping[str, Any], address: DeviceAddress, release: str, title: str) -> str:
    """README.txt.

    Args:
        state: what the agent told of the folder and its Python.
        address: a device has a unit for systemd; a folder here, which is to be carried to one, does not, and may
            be on a card whose file system knows no links.
        release: what shall run.
        title: the bundle's name.
    """
    title = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in title)[:80]
    if address.host is None:
        return _README.format(title=title, install=INSTALL, python="python3", current=f"releases/{release}")
    python = shlex.quote(state["program"])
    return _README.format(title=title, install=INSTALL, python=python, current="current") + _SERVICE
