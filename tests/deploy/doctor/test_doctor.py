"""Findings of `doctor`, each on a host that has the problem and on one that does not."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import devices
import pytest
from doctor_hosts import GOOD, LITERT, RULES, RULES_FILE, facts, findings, sound, write

from deploy.doctor import command as doctor
from deploy.runner import host, problems

STOCK = "Package: libedgetpu1-std\nStatus: install ok installed\nVersion: 16.0\n\nPackage: other\nVersion: 1\n"


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    return sound(tmp_path / "root", usb=False)


@pytest.mark.parametrize("usb", [True, False])
def test_a_sound_host_has_nothing(usb: bool, tmp_path: Path) -> None:
    assert findings(facts(sound(tmp_path, usb=usb))) == {}


def without(*keys: str, **more: Any) -> dict[str, Any]:
    return {**{key: value for key, value in GOOD.items() if key not in keys}, **more}


BROKEN = {"kind": "no_runtime", "what": "there is no TFLite runtime", "hint": "", "exit_code": 11}
NO_LIBRARY = "libedgetpu.so.1: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("report", "kind", "severity", "hint"),
    [
        (without("runtime", broken=BROKEN), "no_runtime", "error", "pip install ai-edge-litert"),
        (without("runtime", no_numpy="No module named 'numpy'"), "no_numpy", "error", "pip install numpy"),
        (without(numpy="2.0.2"), "numpy_2", "error", "pip install 'numpy<2'"),
        (without("libedgetpu", unloadable=NO_LIBRARY), "library_missing", "error", "apt-get install libedgetpu1-std"),
        (without("libedgetpu", unloadable="libusb-1.0.so.0: cannot open"), "libusb_missing", "error", "libusb-1.0-0"),
        (without("libedgetpu", unloadable="undefined symbol: x"), "library_broken", "error", "--reinstall"),
        (without("libedgetpu", step="library", ended="it ended with code -11"), "crash", "error", "libedgetpu1-std"),
        (without("runtime", step="runtime", ended="it ended with code -11"), "crash", "error", "ai-edge-litert"),
        (without("libedgetpu", step="pycoral", ended="it did not come back"), "crash", "error", "uninstall -y pycoral"),
        (without(pycoral="other"), "pycoral", "warning", "uninstall -y pycoral"),
        (without(runtime=LITERT), "too_new", "warning", "libedgetpu"),
    ],
)
def test_of_libraries(report: dict[str, Any], kind: str, severity: str, hint: str, usb: Path) -> None:
    rows = findings(facts(usb, report))
    assert list(rows) == [kind]
    assert rows[kind].severity == severity
    assert hint in rows[kind].hint


@pytest.mark.parametrize(
    ("python", "bits", "hint"),
    [
        ((3, 7, 3), 64, "tflite-runtime==2.11.0"),
        ((3, 9, 1), 64, "tflite-runtime 'numpy<2'"),
        ((3, 13, 0), 64, "ai-edge-litert"),
        ((3, 11, 2), 32, "tflite-runtime 'numpy<2'"),
        ((3, 13, 5), 32, "getconf LONG_BIT"),
    ],
)
def test_the_runtime_to_install_is_one_for_this_python(
    python: tuple[int, ...], bits: int, hint: str, usb: Path
) -> None:
    host_facts = facts(usb, without("runtime", broken=BROKEN), python=python, bits=bits)
    assert hint in findings(host_facts)["no_runtime"].hint


def test_a_python_of_the_system_is_left_alone(usb: Path) -> None:
    """On Debian 12 and later, and on systems derived from it, pip refuses to install for the system's Python."""
    row = findings(facts(usb, without("runtime", broken=BROKEN), managed=True))["no_runtime"]
    assert "python3 -m venv" in row.hint
    assert "~/coralline/bin/python -m pip install ai-edge-litert" in row.hint
    row = findings(facts(usb, without(pycoral="other"), managed=True))["pycoral"]
    assert row.hint == "python3 -m pip uninstall -y pycoral --break-system-packages"


@pytest.mark.parametrize(("prefix", "marked", "managed"), [("a", True, True), ("a", False, False), ("b", True, False)])
def test_which_python_is_the_systems(
    prefix: str, marked: bool, managed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if marked:
        (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor.sys, "base_prefix", "a")
    monkeypatch.setattr(doctor.sys, "prefix", prefix)
    assert doctor.look("nowhere.so").managed is managed


def test_a_stock_libedgetpu_beside_a_new_runtime(usb: Path) -> None:
    report = without(runtime=LITERT)
    write(usb, {"var/lib/dpkg/status": STOCK})
    row = findings(facts(usb, report))["too_new"]
    assert row.severity == "error"
    assert "libedgetpu 16.0" in row.what
    assert "tflite-runtime<2.12" in findings(facts(usb, report, python=(3, 9)))["too_new"].hint
    write(usb, {"var/lib/dpkg/status": STOCK.replace("16.0", "16.0tf2.17.1-1.bookworm")})
    assert findings(facts(usb, report)) == {}
    write(usb, {"var/lib/dpkg/status": STOCK})
    assert findings(facts(usb)) == {}


def test_the_runtime_that_is_used_is_told(usb: Path) -> None:
    rows = doctor.findings(facts(usb, installed={"ai-edge-litert": "2.3.0", "tflite-runtime": "2.5.0"}))
    finding = next(row for row in rows if row.kind == "runtime")
    assert "tflite_runtime 2.5.0 with numpy 1.16.6 is used; also installed: ai-edge-litert" in finding.what


def test_packages_that_are_traps(usb: Path, tmp_path: Path) -> None:
    (tmp_path / "site" / "edgecompiler-0.1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "Some_Thing-2.0-py3.7.egg-info").mkdir()
    names = doctor.installed([str(tmp_path / "site"), "/nonexistent"])
    assert names == {"edgecompiler": "0.1.0", "some-thing": "2.0"}
    assert findings(facts(usb, installed=names))["edgecompiler"].severity == "warning"


def test_folders_that_shadow_ours(usb: Path, tmp_path: Path) -> None:
    app, other = tmp_path / "app", tmp_path / "other"
    for folder in (app / "deploy", app / "models", other / "compress", other / "deploy"):
        folder.mkdir(parents=True)
    host_facts = facts(usb, folder=str(app), path=("", str(other)))
    assert findings(host_facts) == {}  # not packages: Python searches further
    (app / "deploy" / "__init__.py").write_text("")
    (other / "compress.py").write_text("")
    rows = [row for row in doctor.findings(host_facts) if row.kind == "shadow"]
    assert [row.what.split()[0] for row in rows] == [str(app / "deploy"), str(other / "compress.py")]
    assert rows[0].hint == f"mv {app}/deploy {app}/deploy_own"
    (app / "models" / "__init__.py").write_text("")
    assert findings(host_facts)["shadow_models"].severity == "note"
    (app / "deploy" / "contract").mkdir()
    for name in ("bundle.py", "preprocessing.py"):
        (app / "deploy" / "contract" / name).write_text("")
    assert len([row for row in doctor.findings(host_facts) if row.kind == "shadow"]) == 1  # a copy of our package


def test_no_device(tmp_path: Path) -> None:
    assert findings(facts(tmp_path))["no_device"].severity == "warning"
    write(tmp_path, {"dev/apex_0": ""})
    assert "reboot" in findings(facts(tmp_path))["no_device"].hint


def test_permission_by_the_step_that_is_missing(usb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "access", lambda *_: False)
    assert "udevadm trigger" in findings(facts(usb))["permission"].hint
    assert "usermod -aG plugdev me" in findings(facts(usb, groups=()))["permission"].hint
    write(usb, {RULES_FILE: RULES.replace("18d1", "beef")})
    row = findings(facts(usb))["udev"]
    assert row.severity == "error"
    assert problems.USB_RULE in row.hint


def test_permission_on_pcie(pci: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "access", lambda *_: False)
    assert "usermod -aG apex me" in findings(facts(pci, groups=("plugdev",)))["permission"].hint
    write(pci, {RULES_FILE: f"# {RULES}".replace("\n", "\n# ")})
    assert problems.PCI_RULE in findings(facts(pci))["udev"].hint


def test_a_rule_for_one_of_both_ids(usb: Path) -> None:
    write(usb, {RULES_FILE: RULES.replace("1a6e", "beef")})
    row = findings(facts(usb))["udev"]
    assert row.severity == "warning"
    assert "1a6e" in row.what


def test_no_file_in_a_container(usb: Path) -> None:
    (usb / "dev/bus/usb/002/007").unlink()
    assert "docker run --device" in findings(facts(usb))["no_node"].hint


def test_usb_2_and_a_hub(tmp_path: Path) -> None:
    root = devices.host(tmp_path, speed="480")
    write(root, {"etc/udev/rules.d/1.rules": RULES})
    assert "480 Mbit/s" in findings(facts(root))["usb_2"].what
    os.rename(root / "sys/bus/usb/devices/1-2", root / "sys/bus/usb/devices/1-2.3")
    assert findings(facts(root))["hub"].severity == "note"


@pytest.mark.parametrize(
    ("celsius", "kinds"),
    [
        ("90000", {"hot": "warning"}),
        ("-89700", {"dead": "error"}),
        ("-87900", {"dead": "error"}),
        ("60000", {}),
        ("-10000", {}),
    ],
)
def test_temperature_of_the_edge_tpu(celsius: str, kinds: dict[str, str], pci: Path) -> None:
    write(pci, {"sys/class/apex/apex_0/temp": celsius})
    assert {kind: row.severity for kind, row in findings(facts(pci)).items()} == kinds


@pytest.mark.parametrize(
    ("bits", "kinds"),
    [
        ("0x0", {}),
        ("0x1", {"under_voltage": "error"}),
        ("0x50000", {"under_voltage": "warning", "throttled": "warning"}),
        ("0x50005", {"under_voltage": "error", "throttled": "warning"}),
    ],
)
def test_power(bits: str, kinds: dict[str, str], usb: Path) -> None:
    write(usb, {"sys/devices/platform/soc/soc:firmware/get_throttled": bits})
    assert {kind: row.severity for kind, row in findings(facts(usb)).items()} == kinds


def test_pages_of_16_kib(usb: Path) -> None:
    write(usb, {"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0", "boot/firmware/config.txt": ""})
    row = findings(facts(usb, page_bytes=16384))["pages"]
    assert row.severity == "warning"
    assert row.hint == "echo kernel=kernel8.img | sudo tee -a /boot/firmware/config.txt && sudo reboot"


def test_pages_of_16_kib_with_pcie(pci: Path) -> None:
    assert findings(facts(pci, page_bytes=16384))["pages"].severity == "error"


def test_who_holds_the_device(usb: Path) -> None:
    (usb / "proc/4321/fd").mkdir(parents=True)
    (usb / "proc/4321/fd/7").symlink_to(usb / "dev/bus/usb/002/007")
    write(usb, {"proc/4321/comm": "frigate"})
    row = findings(facts(usb))["busy"]
    assert "frigate (process 4321)" in row.what
    assert row.hint == "kill 4321"


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"free_bytes": 1 << 20}, "disk"), ({"now": 1e9}, "clock"), ({"page_bytes": 65536}, "pages")],
)
def test_of_the_host(change: dict[str, Any], kind: str, usb: Path) -> None:
    assert list(findings(dataclasses.replace(facts(usb), **change))) == [kind]


def test_memory_and_governor(usb: Path) -> None:
    write(usb, {"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 20000 kB\n"})
    write(usb, {"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n"})
    assert list(findings(facts(usb))) == ["memory", "governor"]


def test_the_verb(usb: Path) -> None:
    done = devices.runner("doctor", "--json", "--library", "nowhere.so", CORALLINE_ROOT=usb)
    report = json.loads(done.stdout)
    kinds = {row["kind"]: row for row in report["findings"]}
    assert kinds["library_missing"]["severity"] == "error"
    assert kinds["runtime"]["what"].startswith("ai_edge_litert")
    assert (done.returncode, report["sound"], done.stderr) == (14, False, "")
    text = devices.runner("doctor", "--library", "nowhere.so", CORALLINE_ROOT=usb).stdout
    assert "do:  sudo apt-get install ./libedgetpu1-std_16.0tf*.deb" in text  # Google's does not fit ai_edge_litert
    assert "see: docs/hardware/index.md" in text
    assert kinds["library_missing"]["page"] == "docs/hardware/index.md"


def test_a_library_that_crashes(usb: Path) -> None:
    more = {"CORALLINE_ROOT": usb, "EDGETPU_STAND_IN": "crash-version"}
    done = devices.runner("doctor", "--json", "--library", devices.stand_in() / "libedgetpu.so.1", **more)
    rows = {row["kind"]: row for row in json.loads(done.stdout)["findings"]}
    assert "the step `library`: it ended with code -11" in rows["crash"]["what"]
    assert done.returncode == 14


def test_this_very_host_is_examined_on_every_interpreter() -> None:
    for python in devices.pythons():
        done = devices.runner("doctor", "--json", python=python)
        assert done.returncode in (0, 14), done.stderr
        assert "crash" not in {row["kind"] for row in json.loads(done.stdout)["findings"]}
