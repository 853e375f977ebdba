"""Findings of `doctor` on a Raspberry Pi, about the driver on PCIe, in containers and in virtual machines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import devices
import doctor_hosts
import pytest
from doctor_hosts import GOOD, LITERT, RULES, RULES_FILE, TFLITE, write
from paths import ROOT

from deploy.doctor import pcie as doctor_pcie
from deploy.runner import host, problems
from deploy.runner.problems import PROBLEMS, Finding

TFLITE_2_14 = {**TFLITE, "version": "2.14.0"}
PI_5 = "Raspberry Pi 5 Model B Rev 1.0\0"
KERNEL = "6.12.47+rpt-rpi-v8"
INSTALLED = "Package: libedgetpu1-std\nStatus: install ok installed\nVersion: %s\n"


def findings(root: Path, report: Mapping[str, Any] = GOOD, **more: Any) -> dict[str, Finding]:
    return doctor_hosts.findings(doctor_hosts.facts(root, report, **more))


def only(root: Path, **more: Any) -> Finding:
    (row,) = findings(root, **more).values()
    return row


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """A PCIe card whose driver does not run."""
    root = devices.host(tmp_path / "root", usb=False, node=False)
    write(root, {RULES_FILE: RULES, "proc/sys/kernel/osrelease": KERNEL + "\n"})
    return root


# --- the driver on PCIe ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "hint"),
    [
        ("5.15.0-67-generic", "apt-get install gasket-dkms && sudo modprobe apex"),
        ("6.3.0", "apt-get install gasket-dkms &&"),
        ("6.4.0", "./gasket-dkms_1.0-18.4_all.deb"),
        (KERNEL, "./gasket-dkms_1.0-18.4_all.deb"),
        ("6.17.2-2-pve", "apt-get install proxmox-default-headers && apt-get install dkms"),
        ("6.18.0", "start a kernel up to 6.17"),
        ("7.0.2-2-pve", "start a kernel up to 6.17"),
        ("6.12.15-production+truenas", "pass this card to a virtual machine"),
    ],
)
def test_the_driver_to_install_is_one_for_this_kernel(kernel: str, hint: str, pci: Path) -> None:
    write(pci, {"proc/sys/kernel/osrelease": kernel})
    row = only(pci)
    assert (row.kind, row.severity, row.page) == ("no_driver", "error", "docs/hardware/pcie.md")
    assert hint in row.hint


@pytest.mark.parametrize("kernel", ["6.18.1", "7.0.2-2-pve"])
def test_no_driver_is_named_that_does_not_build(kernel: str, pci: Path) -> None:
    """Neither before nor after a failed build; the manual says the same."""
    write(pci, {"proc/sys/kernel/osrelease": kernel, f"lib/modules/{kernel}/build/Makefile": ""})
    before = only(pci)
    write(pci, {"var/lib/dkms/gasket/1.0/build/make.log": "MODULE_IMPORT_NS(DMA_BUF);"})
    for row in (before, only(pci)):
        assert "gasket-dkms" not in row.hint
        assert "USB Accelerator" in row.hint
    assert "| 6.18 and newer | no package for Debian" in (ROOT / "docs/hardware/pcie.md").read_text()
    assert doctor_pcie.FIRST_KERNEL_WITHOUT_PACKAGE == (6, 18)


@pytest.mark.parametrize(
    ("kernel", "release", "headers"),
    [
        ("6.14.8-2-pve", "ID=debian", "apt-get install proxmox-default-headers && "),
        ("6.17.8-200.fc42.x86_64", "ID=fedora", "sudo dnf install kernel-devel-$(uname -r) && "),
        ("5.14.0-503.el9", 'ID="rocky"\nID_LIKE="rhel centos fedora"', "sudo dnf install kernel-devel-$(uname -r) && "),
    ],
)
def test_the_headers_of_other_systems(kernel: str, release: str, headers: str, pci: Path) -> None:
    write(pci, {"proc/sys/kernel/osrelease": kernel, "etc/os-release": release})
    install = only(pci).hint
    assert ("sudo" in install) is ("dnf" in install)
    assert ("kernel-devel" if "dnf" in headers else "proxmox-default-headers") in install
    write(pci, {"usr/src/gasket-1.0/dkms.conf": ""})
    assert only(pci).hint.startswith(headers)


def test_a_new_fedora(pci: Path) -> None:
    write(pci, {"proc/sys/kernel/osrelease": "6.19.7-300.fc44.x86_64", "etc/os-release": "NAME=x\nID=fedora\n"})
    assert "akmod-gasket" in only(pci).hint


@pytest.mark.parametrize(
    ("log", "meaning"),
    [
        ("error: too many arguments to function 'class_create'", "kernel 6.4 changed class_create"),
        ("error: too many arguments to function 'eventfd_signal'", "kernel 6.8 changed eventfd_signal"),
        ("error: 'no_llseek' undeclared here", "kernel 6.12 removed no_llseek"),
        ("MODULE_IMPORT_NS(DMA_BUF);", "kernel 6.13 changed MODULE_IMPORT_NS"),
        ("cc: killed", "not built for the kernel 6.12.47+rpt-rpi-v8"),
    ],
)
def test_a_driver_that_did_not_build(log: str, meaning: str, pci: Path) -> None:
    write(pci, {"var/lib/dkms/gasket/1.0/build/make.log": log, f"lib/modules/{KERNEL}/build/Makefile": ""})
    row = only(pci)
    assert row.kind == "not_built"
    assert row.what.endswith(meaning)
    assert problems.DRIVER_RELEASE in row.hint


def test_a_driver_without_the_headers_of_the_kernel(pci: Path) -> None:
    write(pci, {"usr/src/gasket-1.0/dkms.conf": ""})
    row = only(pci)
    assert row.kind == "headers"
    assert "linux-headers-$(uname -r)" in row.hint


@pytest.mark.parametrize("name", ["updates/dkms/apex.ko.xz", "extra/apex.ko", "kernel/drivers/staging/gasket/apex.ko"])
@pytest.mark.parametrize(
    ("secure_boot", "kind"), [(None, "not_loaded"), (b"\6\0\0\0\0", "not_loaded"), (b"\6\0\0\0\1", "secure_boot")]
)
def test_a_built_driver_that_is_not_loaded(name: str, secure_boot: bytes | None, kind: str, pci: Path) -> None:
    write(pci, {f"lib/modules/{KERNEL}/{name}": "", "usr/src/gasket-1.0/dkms.conf": ""})
    if secure_boot is not None:
        write(pci, {"sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c": secure_boot})
    row = only(pci)
    assert row.kind == kind
    assert ("mokutil --import" if kind == "secure_boot" else "sudo modprobe apex") in row.hint


def test_a_module_of_another_kernel_does_not_count(pci: Path) -> None:
    write(pci, {"lib/modules/6.6.31+rpt-rpi-v8/updates/dkms/apex.ko.xz": "", "usr/src/gasket-1.0/dkms.conf": ""})
    assert only(pci).kind == "headers"


LOADED = "apex 20480 0 - Live\ngasket 114688 1 apex, Live\n"


def test_interrupts_of_a_raspberry_pi_5(pci: Path) -> None:
    write(pci, {"proc/modules": LOADED, "proc/device-tree/model": PI_5, "boot/firmware/config.txt": "[all]\n"})
    row = only(pci)
    assert row.kind == "interrupts"
    assert "dtoverlay=pciex1-compat-pi5,no-mip\\ndtoverlay=pcie-32bit-dma-pi5" in row.hint
    assert row.hint.count("/boot/firmware/config.txt") == 1


@pytest.mark.parametrize(
    "line", ["dtoverlay=pciex1-compat-pi5,no-mip", "dtoverlay = pciex1-compat-pi5, l1ss, no-mip  # Coral",
             "dtoverlay=pineboards-hat-ai"],
)  # fmt: skip
def test_a_driver_that_refuses_the_device_although_the_overlay_is_there(line: str, pci: Path) -> None:
    write(pci, {"proc/modules": LOADED, "proc/device-tree/model": PI_5, "boot/firmware/config.txt": line})
    row = only(pci)
    assert row.kind == "no_driver"
    assert "dmesg" in row.hint


def test_an_overlay_in_a_comment_does_not_count(pci: Path) -> None:
    content = "#dtoverlay=pciex1-compat-pi5,no-mip\ndtoverlay=pciex1-compat-pi5\n"
    write(pci, {"proc/modules": LOADED, "proc/device-tree/model": PI_5, "boot/firmware/config.txt": content})
    assert only(pci).kind == "interrupts"


def test_a_card_in_a_virtual_machine_of_esxi(pci: Path) -> None:
    write(pci, {"proc/modules": LOADED, "sys/class/dmi/id/sys_vendor": "VMware, Inc.\n"})
    row = only(pci)
    assert (row.kind, row.page) == ("vmware", "docs/hardware/virtual.md")


@pytest.mark.parametrize(
    ("sign", "hint"),
    [
        ({".dockerenv": ""}, "docker run --device /dev/apex_0"),
        ({"run/.containerenv": ""}, "docker run --device /dev/apex_0"),
        ({"proc/1/environ": "PATH=/bin\0container=lxc\0TERM=x\0"}, "lxc.mount.entry: /dev/apex_0"),
    ],
)
def test_a_card_that_was_not_passed_to_the_container(sign: dict[str, str | bytes], hint: str, pci: Path) -> None:
    write(pci, {**sign, "proc/modules": LOADED})
    row = only(pci)
    assert row.kind == "not_passed"
    assert hint in row.hint


# --- USB ------------------------------------------------------------------------------


def test_a_container_without_the_file_of_the_stick(usb: Path) -> None:
    (usb / "dev/bus/usb/002/007").unlink()
    write(usb, {"run/systemd/container": "lxc\n"})
    assert "lxc.cgroup2.devices.allow: c 189:* rwm" in findings(usb)["no_node"].hint
    write(usb, {"run/systemd/container": "docker"})
    assert "--device-cgroup-rule 'c 189:* rmw' -v /dev/bus/usb:/dev/bus/usb" in findings(usb)["no_node"].hint


@pytest.mark.parametrize(
    ("sign", "hint"),
    [
        ({".dockerenv": ""}, "docker run --device-cgroup-rule"),
        ({"proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2"}, "usbipd attach --wsl"),
        ({"sys/class/dmi/id/sys_vendor": "QEMU"}, "qm set ID -usb0 host=BUS-PORT"),
    ],
)
def test_a_stick_without_firmware_where_it_gets_lost(sign: dict[str, str | bytes], hint: str, usb: Path) -> None:
    write(usb, sign)
    assert findings(usb) == {}
    write(usb, {"sys/bus/usb/devices/1-2/idVendor": "1a6e", "sys/bus/usb/devices/1-2/idProduct": "089a"})
    row = only(usb)
    assert (row.kind, row.severity) == ("firmware", "warning")
    assert hint in row.hint


def test_a_stick_without_firmware_is_normal_on_real_hardware(usb: Path) -> None:
    write(usb, {"sys/bus/usb/devices/1-2/idVendor": "1a6e", "sys/bus/usb/devices/1-2/idProduct": "089a"})
    assert findings(usb) == {}


def test_udev_rules_are_the_hosts_in_a_container(usb: Path) -> None:
    (usb / RULES_FILE).unlink()
    assert list(findings(usb)) == ["udev"]
    write(usb, {".dockerenv": ""})
    assert findings(usb) == {}


@pytest.mark.parametrize(
    ("board", "limit", "kinds"),
    [
        (PI_5, b"\0\0\0\0", ["usb_current"]),
        (PI_5, b"\0\0\0\1", []),
        (PI_5, b"\0", []),
        (PI_5, None, []),
        ("Raspberry Pi 4 Model B Rev 1.4\0", b"\0\0\0\0", []),
    ],
)
def test_the_current_of_the_usb_ports(board: str, limit: bytes | None, kinds: list[str], usb: Path) -> None:
    write(usb, {"proc/device-tree/model": board, "boot/firmware/config.txt": ""})
    if limit is not None:
        write(usb, {"proc/device-tree/chosen/power/usb_max_current_enable": limit})
    rows = findings(usb)
    assert list(rows) == kinds
    if kinds:
        assert "usb_max_current_enable=1 | sudo tee -a /boot/firmware/config.txt" in rows["usb_current"].hint


def test_a_dev_board_mini_has_usb_2(tmp_path: Path) -> None:
    root = devices.host(tmp_path, speed="480")
    write(root, {"etc/udev/rules.d/1.rules": RULES, "proc/device-tree/model": "MediaTek Coral Dev Board Mini\0"})
    row = only(root)
    assert (row.kind, row.severity, row.page) == ("usb_2", "note", "docs/hardware/dev_board.md")


# --- no Edge TPU at all ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("sign", "hint", "page"),
    [
        ({}, "lsusb; lspci -n", "usb"),
        ({".dockerenv": ""}, "pass /dev/bus/usb or /dev/apex_0 to the container", "virtual"),
        ({"sys/class/dmi/id/product_name": "VirtualBox"}, "pass the USB port", "virtual"),
        ({"proc/sys/kernel/osrelease": "5.15-microsoft-standard"}, "usbipd attach --wsl", "virtual"),
    ],
)
def test_no_device(sign: dict[str, str | bytes], hint: str, page: str, tmp_path: Path) -> None:
    write(tmp_path, sign)
    row = only(tmp_path)
    assert (row.kind, row.page) == ("no_device", f"docs/hardware/{page}.md")
    assert hint in row.hint


@pytest.mark.parametrize(
    ("board", "config", "noted"),
    [
        (PI_5, "arm_64bit=1\n", True),
        ("Raspberry Pi Compute Module 5 Rev 1.0\0", "#dtparam=pciex1\n", True),
        (PI_5, "dtparam=pciex1\n", False),
        (PI_5, "dtparam=pciex1_gen=2\n", False),
        ("Raspberry Pi 4 Model B\0", "", False),
    ],
)
def test_the_pcie_connector_of_a_raspberry_pi_5(board: str, config: str, noted: bool, tmp_path: Path) -> None:
    write(tmp_path, {"proc/device-tree/model": board, "boot/firmware/config.txt": config})
    assert ("pcie_off" in findings(tmp_path)) == noted


# --- software -------------------------------------------------------------------------


def test_alpine(usb: Path) -> None:
    write(usb, {"lib/ld-musl-aarch64.so.1": ""})
    assert only(usb).kind == "musl"
    write(usb, {"lib/ld-linux-aarch64.so.1": ""})  # Debian with the package musl
    assert findings(usb) == {}


@pytest.mark.parametrize(
    ("packaged", "runtime", "noted"),
    [
        ("16.0tf2.17.1-1.bookworm", TFLITE_2_14, True),
        ("16.0tf2.14.1-1", TFLITE_2_14, False),
        ("16.0", TFLITE_2_14, False),
        ("16.0tf2.17.1-1", LITERT, False),
    ],
)
def test_a_rebuilt_libedgetpu_of_another_version(
    packaged: str, runtime: dict[str, Any], noted: bool, usb: Path
) -> None:
    write(usb, {"var/lib/dpkg/status": INSTALLED % packaged})
    rows = findings(usb, {**GOOD, "runtime": runtime})
    assert ("library_version" in rows) == noted
    if noted:
        assert "was built with TFLite 2.17.1; tflite_runtime 2.14.0 is used" in rows["library_version"].what


def test_the_libedgetpu_to_install(usb: Path) -> None:
    missing = {key: value for key, value in GOOD.items() if key != "libedgetpu"}
    missing["unloadable"] = "libedgetpu.so.1: cannot open shared object file"
    hint = findings(usb, missing)["library_missing"].hint
    assert hint == "sudo apt-get install libedgetpu1-std  # after adding Google's archive to apt"
    source = "deb [signed-by=x] https://packages.cloud.google.com/apt coral-edgetpu-stable main"
    write(usb, {"etc/apt/sources.list.d/coral-edgetpu.list": source})
    assert findings(usb, missing)["library_missing"].hint == "sudo apt-get install libedgetpu1-std"
    hint = findings(usb, {**missing, "runtime": LITERT})["library_missing"].hint
    assert problems.LIBRARY_RELEASES in hint


# --- the facts and the catalogue ------------------------------------------------------


def test_container_and_machine_are_facts_of_a_benchmark(tmp_path: Path) -> None:
    assert (host.facts(str(tmp_path))["container"], host.facts(str(tmp_path))["machine"]) == (None, None)
    write(tmp_path, {"sys/class/dmi/id/sys_vendor": "Microsoft Corporation\n", ".dockerenv": ""})
    assert host.machine(str(tmp_path)) is None  # a laptop
    write(tmp_path, {"sys/class/dmi/id/product_name": "Virtual Machine\n"})
    facts = host.facts(str(tmp_path))
    assert (facts["container"], facts["machine"]) == ("docker", "hyperv")


def test_config_txt_of_older_systems(tmp_path: Path) -> None:
    assert host.pi_config(str(tmp_path)) == "/boot/config.txt"
    write(tmp_path, {"boot/config.txt": "a=1", "boot/firmware/config.txt": "[pi5]\n b = 2 # c\n"})
    assert host.pi_config(str(tmp_path)) == "/boot/firmware/config.txt"
    assert host.pi_settings(str(tmp_path)) == ["b=2"]


def test_every_problem_can_be_said() -> None:
    values = dict.fromkeys(("user", "config", "fix", "install", "headers", "pid"), "VALUE")
    for name, problem in PROBLEMS.items():
        row = problem.finding("error", "what", **values)
        assert not re.search(r"\{(?!idVendor)\w+\}", row.why + row.hint), name
        assert "\n" not in row.hint
        assert row.page.startswith("docs/hardware/")
        assert all(source.startswith("https://") for source in problem.sources), name
