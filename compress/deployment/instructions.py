"""What is written beside the releases: how they are run, by hand and by systemd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.deployment.address import Address

INSTALL = (
    "python3 -m pip install numpy, and ai-edge-litert (Python 3.10 and newer, 64 bits)"
    " or tflite-runtime 'numpy<2' (others)"
)
_UNIT = """\
# Written by `python -m compress deploy`; nothing installs it by itself. To do so:
#   sudo cp {path}/coralline.service /etc/systemd/system/ && sudo systemctl enable --now coralline
# After a deployment or a rollback: sudo systemctl restart coralline
[Unit]
Description=Coralline: {title}
After=network.target

[Service]
ExecStart={python} {runner} serve {bundle}
WorkingDirectory={folder}
Restart=on-failure
RestartSec=2
NoNewPrivileges=true

[Install]
WantedBy=multi-user.target
"""
_README = """\
{title}, put here by `python -m compress deploy`.

Needs Python 3.7 or newer with numpy and a TFLite runtime; if they are missing:
  {install}

In this folder, on the board:
  python3 {current}/runner.pyz verify {current}/bundle.coralline
  python3 {current}/runner.pyz bench {current}/bundle.coralline --out results.json

Bring results.json back to where the bundle was made, and there:
  python -m compress results results.json --run runs/{title}
"""


def texts(state: Mapping[str, Any], address: Address, release: str, title: str) -> dict[str, str]:
    """The files to write, by name.

    Args:
        state: what the agent told of the folder and its Python.
        address: a device gets a unit for systemd; a folder here, which is to be carried to one, does not, and may
            be on a card whose file system knows no links.
        release: what shall run.
        title: the bundle's name.
    """
    title = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in title)[:80]
    current = "current" if address.host else f"releases/{release}"
    readme = {"README.txt": _README.format(title=title, install=INSTALL, current=current)}
    if address.host is None:
        return readme
    path = state["path"]
    unit = _UNIT.format(
        path=path,
        title=title,
        python=_quoted(state["program"]),
        runner=_quoted(f"{path}/current/runner.pyz"),
        bundle=_quoted(f"{path}/current/bundle.coralline"),
        folder=path.replace("%", "%%"),
    )
    return {**readme, "coralline.service": unit}


def _quoted(text: str) -> str:
    """A word of ExecStart=. Source: systemd.syntax(7), systemd.service(5)."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
