"""Failures of a stand-in for libedgetpu that crashes, hangs and refuses: each has a name and a command that helps."""

from __future__ import annotations

import ctypes.util
import json
import os
from pathlib import Path
from typing import Any

import devices
import pytest

from deploy.contract.errors import EdgeTpuError
from deploy.runner import probe
from deploy.runner.runtime import RuntimeOptions

LATER = "is too new for Google's libedgetpu 16.0; to do: "
FAILURES = [
    ("busy", "busy", "the Edge TPU is in use: Device or resource busy; to do: sudo fuser"),
    ("null", "refused", "is connected and free, but libedgetpu cannot open it (it gives no reason); to do: unplug"),
    ("text", "refused", "cannot open it (this is what it says)"),
    ("crash-version", "crash", "ended by SIGSEGV after the TFLite runtime was imported"),
    ("crash", "crash", "ended by SIGSEGV after libedgetpu was loaded"),
    ("crash-run", "crash", "ended by SIGSEGV after the model was loaded"),
    ("old", "old_library", "needs Edge TPU runtime 14, and the installed libedgetpu has runtime 13; to do: sudo"),
]


def asked(path: Path, root: Path, *arguments: object, library: Path | None = None, **more: object) -> Any:
    """Run a compiled model on a host; return the exit code, the JSON output and stderr."""
    folder = devices.stand_in() if library is None else library
    done = devices.runner(
        "run", path, "--role", "compiled", "--json", *arguments,
        LD_LIBRARY_PATH=folder, CORALLINE_ROOT=root, **more,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("python", devices.pythons())
def test_a_compiled_model_answers_with_the_stand_in(path: Path, tmp_path: Path, python: str) -> None:
    root = devices.host(tmp_path)
    code, report, noise = asked(path, root, "--device", "usb:0", python=python)
    assert code == 0, noise
    done = devices.runner("run", path, "--role", "int8", "--json", python=python)
    assert report["answers"] == json.loads(done.stdout)["answers"]
    assert (report["model"]["role"], report["model"]["device"]) == ("compiled", "edge tpu usb:0")


@pytest.mark.parametrize("python", devices.pythons())
@pytest.mark.parametrize(("how", "kind", "says"), FAILURES, ids=[row[0] for row in FAILURES])
def test_failures_have_names(path: Path, tmp_path: Path, python: str, how: str, kind: str, says: str) -> None:
    code, report, noise = asked(path, devices.host(tmp_path), python=python, EDGETPU_STAND_IN=how)
    assert (code, report["error"]["kind"], report["error"]["exit_code"]) == (12, kind, 12), noise
    assert says in noise
    assert report["error"]["hint"]
    assert "Traceback" not in noise


def test_a_crash_with_a_runtime_that_is_too_new_says_so(path: Path, tmp_path: Path) -> None:
    _, report, noise = asked(path, devices.host(tmp_path), EDGETPU_STAND_IN="crash-run")
    assert LATER in noise
    assert "libedgetpu" in report["error"]["hint"]


@pytest.mark.parametrize(("how", "before"), [("hang", "libedgetpu was loaded"), ("hang-run", "the model was loaded")])
def test_a_hang_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, before: str) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(devices.stand_in()))
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path))
    monkeypatch.setenv("EDGETPU_STAND_IN", how)
    with pytest.raises(EdgeTpuError, match=f"did not end in time; the last success: {before}; to do: unplug") as caught:
        probe.check(devices.models()["compiled"], RuntimeOptions(""), timeout_s=8)
    assert caught.value.kind == "hang"


@pytest.mark.parametrize(
    ("folder", "kind", "says"),
    [
        ("missing", "library_missing", "libedgetpu.so.1 is not installed; to do: sudo apt-get install libedgetpu1-std"),
        ("without-libusb", "libusb_missing", "but libusb is not: libusb-1.0.so.0: cannot open"),
        ("text", "library_broken", "libedgetpu.so.1 does not load"),
    ],
)
def test_libraries_that_do_not_load(path: Path, tmp_path: Path, folder: str, kind: str, says: str) -> None:
    if kind == "libusb_missing" and ctypes.util.find_library("usb-1.0"):
        pytest.skip("libusb is installed here, so it cannot be missing")
    library = devices.stand_in() / folder
    if folder == "text":
        library = tmp_path / "text"
        library.mkdir()
        (library / "libedgetpu.so.1").write_text("not a library")
    code, report, noise = asked(path, devices.host(tmp_path / "root"), library=library)
    assert (code, report["error"]["kind"]) == (12, kind), noise
    assert says in noise


@pytest.mark.parametrize(
    ("devices_of_host", "device", "kind", "says"),
    [
        (None, "", "no_device", "libedgetpu.so.1 is installed, but no Edge TPU is on USB or PCIe; to do: plug it in"),
        ({}, "pci:0", "no_device", "no Edge TPU pci:0 is connected; connected: usb:0; to do: use --device usb:0"),
        (
            {"usb": False, "node": False},
            "",
            "no_driver",
            "pci:0 is on the bus, but has no device file; to do: sudo apt-get install gasket",
        ),
    ],
)
def test_no_device(
    path: Path, tmp_path: Path, devices_of_host: dict[str, bool] | None, device: str, kind: str, says: str
) -> None:
    root = tmp_path if devices_of_host is None else devices.host(tmp_path, **devices_of_host)
    _, report, noise = asked(path, root, *(["--device", device] if device else []), EDGETPU_STAND_IN="null")
    assert report["error"]["kind"] == kind
    assert says in noise


def test_in_use(path: Path, tmp_path: Path) -> None:
    root = devices.host(tmp_path, usb=False)
    (root / "proc/4711/fd").mkdir(parents=True)
    (root / "proc/4711/comm").write_text("frigate\n")
    (root / "proc/4711/fd/3").symlink_to(root / "dev/apex_0")
    for how in ("null", "busy"):
        _, report, noise = asked(path, root, EDGETPU_STAND_IN=how)
        assert report["error"]["kind"] == "busy"
        assert "the Edge TPU is in use by frigate (process 4711); to do: kill 4711" in noise


@pytest.mark.parametrize(("usb", "group"), [(True, "plugdev"), (False, "apex")])
def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usb: bool, group: str) -> None:
    monkeypatch.setenv("CORALLINE_ROOT", str(devices.host(tmp_path, usb=usb)))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may open everything
    outcome = probe.ProbeResult({}, "delegate", {"type": "ValueError", "text": ""}, 0, None, "")
    error = probe.failure(outcome, RuntimeOptions(""))
    assert (error.kind, f"sudo usermod -aG {group} $USER" in str(error)) == ("permission", True)


def test_an_edge_tpu_that_is_there_is_no_silent_detour(path: Path, tmp_path: Path) -> None:
    more = {"LD_LIBRARY_PATH": devices.stand_in(), "CORALLINE_ROOT": devices.host(tmp_path)}
    done = devices.runner("run", path, "--json", **more)
    assert json.loads(done.stdout)["model"]["role"] == "compiled"
    done = devices.runner("run", path, **more, EDGETPU_STAND_IN="null")
    assert (done.returncode, done.stdout) == (12, "")


def test_what_went_well_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(devices.stand_in()))
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path))
    content = devices.models(filters=3)["compiled"]
    first = probe.check(content, RuntimeOptions(""))
    assert (first.sound, first.libedgetpu) == (True, "BuildLabel(stand-in), RuntimeVersion(14)")
    assert list(first.seconds) == ["runtime", "library", "delegate", "interpreter", "inference", "end"]
    assert list(first.seconds.values()) == sorted(first.seconds.values())
    monkeypatch.setenv("EDGETPU_STAND_IN", "crash")
    assert probe.check(content, RuntimeOptions("")) is first


def test_the_child_comes_out_of_runner_pyz_too(path: Path, tmp_path: Path) -> None:
    pyz = devices.pyz(tmp_path / "runner.pyz")
    more = {"LD_LIBRARY_PATH": devices.stand_in(), "CORALLINE_ROOT": devices.host(tmp_path / "root")}
    done = devices.runner("run", path, "--role", "compiled", "--json", pyz=pyz, **more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["role"] == "compiled"
