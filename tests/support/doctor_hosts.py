"""Fake hosts that `doctor` examines, and its findings there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import devices

from deploy.doctor import command as doctor
from deploy.doctor.command import Facts
from deploy.runner import problems
from deploy.runner.problems import Finding

RULES = 'SUBSYSTEM=="usb", ATTRS{idVendor}=="1a6e"\nSUBSYSTEM=="usb", ATTRS{idVendor}=="18d1"\nSUBSYSTEM=="apex"\n'
RULES_FILE = "etc/udev/rules.d/99-coral.rules"
LITERT = {"name": "ai_edge_litert", "version": "2.3.0", "numpy": "2.4.6", "too_new": True}
TFLITE = {"name": "tflite_runtime", "version": "2.5.0", "numpy": "1.16.6", "too_new": False}
GOOD = {"step": "end", "numpy": "1.16.6", "runtime": TFLITE, "pycoral": "missing", "libedgetpu": "RuntimeVersion(14)"}


def write(root: Path, content: Mapping[str, str | bytes]) -> None:
    """Write files by their paths below a folder."""
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def sound(root: Path, **settings: Any) -> Path:
    """Write a host of `devices.host` with the udev rules; return its root folder."""
    write(devices.host(root, **settings), {RULES_FILE: RULES})
    return root


def facts(root: Path, report: Mapping[str, Any] = GOOD, **more: Any) -> Facts:
    ours = {"user": "me", "groups": ("plugdev", "apex"), "folder": str(root), "package": "/somewhere"}
    return Facts(str(root), reported=dict(report), **{**ours, **more})


def findings(host_facts: Facts) -> dict[str, Finding]:
    """Return the findings by kind, without those that a healthy host has, too."""
    rows = doctor.findings(host_facts)
    assert all(row.severity in problems.SEVERITIES and row.what and row.why for row in rows)
    assert all(row.hint for row in rows if row.severity != "note")
    assert "\n" not in "".join(row.hint for row in rows)
    return {row.kind: row for row in rows if row.kind not in ("runtime", "device")}
