"""README.txt in the folder of the releases: how to run a release by hand and with systemd."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from compress.surface.fleet.address import DeviceAddress
from deploy.contract.errors import INSTALL

_README = """\
{title}, deployed by `python -m compress deploy`.

It needs Python 3.7 or newer with numpy and a TFLite runtime. To install them:
  {install}

In this folder, on the board:
  {python} {current}/runner.pyz verify {current}/bundle.coralline
  {python} {current}/runner.pyz bench {current}/bundle.coralline --out results.json

Copy results.json to the computer that packed the bundle, and run there:
  python -m compress results results.json --run runs/{title} --name NAME-OF-THE-BOARD
"""
_SERVICE = """
To run it as a service, run this once, and again after each deployment or rollback:
  sudo cp coralline.service /etc/systemd/system/ && sudo systemctl daemon-reload
  sudo systemctl enable coralline && sudo systemctl restart coralline
"""


def readme(state: Mapping[str, Any], address: DeviceAddress, release: str, title: str) -> str:
    """Return the text of README.txt.

    Args:
        state: the agent's description of the folder and its Python.
        address: a device, which has a systemd unit; or a local folder, such as a card without symbolic links.
        release: the current release.
        title: the bundle's name.
    """
    title = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in title)[:80]
    if address.host is None:
        return _README.format(title=title, install=INSTALL, python="python3", current=f"releases/{release}")
    python = shlex.quote(state["program"])
    return _README.format(title=title, install=INSTALL, python=python, current="current") + _SERVICE
