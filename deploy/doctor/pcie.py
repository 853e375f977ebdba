"""The checks of `doctor` for Edge TPUs on PCIe: the kernel driver, its build by dkms, and the Raspberry Pi 5."""

from __future__ import annotations

import glob
import os
import re
from typing import Any, Dict, List

from deploy.doctor.command import Facts
from deploy.runner import host
from deploy.runner.host import text_of, version_numbers
from deploy.runner.problems import INSTALL_FEDORA, INSTALL_FEDORA_NEW, INSTALL_PACKAGE, NO_PACKAGE, PROBLEMS, Finding

MODULES = ("updates/dkms", "extra", "updates", "kernel/drivers/staging/gasket")
"""Folders of a kernel that its driver is in: dkms of Debian and Fedora, builds by hand, kernels 4.19 to 5.12."""
FIRST_KERNEL_WITHOUT_STOCK_DRIVER = (6, 4)
"""Google's gasket-dkms 1.0-18 calls class_create with two arguments; kernel 6.4 has one."""
FIRST_KERNEL_WITHOUT_PACKAGE = (6, 18)
"""No package for Debian is reported to build for this kernel: see the table in docs/hardware/pcie.md."""
_BREAKS = (
    ("class_create", "kernel 6.4 changed class_create"),
    ("eventfd_signal", "kernel 6.8 changed eventfd_signal"),
    ("no_llseek", "kernel 6.12 removed no_llseek"),
    ("MODULE_IMPORT_NS", "kernel 6.13 changed MODULE_IMPORT_NS"),
)
"""Names in the log of a failed build, and what they mean."""
SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
HEADERS = {
    "debian": "sudo apt-get install linux-headers-$(uname -r)",
    "proxmox": "apt-get install proxmox-default-headers",
    "fedora": "sudo dnf install kernel-devel-$(uname -r)",
}
"""How to install the headers of the running kernel, by the kind of system."""
_INSTALL_STOCK = "sudo apt-get install gasket-dkms && sudo modprobe apex"


def without_node(facts: Facts, tpu: Dict[str, Any]) -> Finding:
    """Return why an Edge TPU on PCIe has no device file."""
    kind = host.container(facts.root)
    if kind is not None:
        what = "%s is on PCIe, but /dev/apex_* is missing in this container (%s)" % (tpu["device"], kind)
        fix = "docker run --device /dev/apex_0 …"
        if kind == "lxc":
            fix = (
                "printf 'lxc.cgroup2.devices.allow: c 120:* rwm\\nlxc.mount.entry: /dev/apex_0 dev/apex_0 none "
                "bind,optional,create=file\\n' >> /etc/pve/lxc/ID.conf  # on the host; `ls -l /dev/apex_0` shows 120"
            )
        return PROBLEMS["not_passed"].finding("error", what, fix=fix)
    modules = text_of(facts.root, "proc/modules") or ""
    loaded = [name for name in ("gasket", "apex") if "\n%s " % name in "\n" + modules]
    what = "%s is on PCIe, but /dev/apex_* is missing; loaded of the modules gasket and apex: %s"
    what %= (tpu["device"], " and ".join(loaded) or "none")
    return _refused(facts, what) if len(loaded) == 2 else _not_loaded(facts, what)


def _refused(facts: Facts, what: str) -> Finding:
    if host.machine(facts.root) == "vmware":
        return PROBLEMS["vmware"].finding("error", what)
    # Either of two overlays of Raspberry Pi OS gives the card enough interrupts.
    has_interrupts = host.has_pi_setting(facts.root, "dtoverlay=pciex1-compat-pi5", "no-mip")
    has_interrupts = has_interrupts or host.has_pi_setting(facts.root, "dtoverlay=pineboards-hat-ai")
    if host.is_pi_5(facts.root) and not has_interrupts:
        path = host.pi_config(facts.root)
        return PROBLEMS["interrupts"].finding("error", what + "; %s has no overlay for it" % path, config=path)
    return PROBLEMS["driver_refuses"].finding("error", what)


def _not_loaded(facts: Facts, what: str) -> Finding:
    """Return why the driver is not loaded: not installed, not built for this kernel, refused, or only not loaded."""
    kernel = text_of(facts.root, "proc/sys/kernel/osrelease") or ""
    folder = os.path.join(facts.root, "lib/modules", kernel)
    if kernel and any(
        glob.glob(os.path.join(glob.escape(folder), module_folder, "apex.ko*")) for module_folder in MODULES
    ):
        if _secure_boot(facts.root):
            return PROBLEMS["secure_boot"].finding("error", what + "; Secure Boot is on")
        return PROBLEMS["not_loaded"].finding("error", what)
    system = _system(facts.root, kernel)
    if system == "truenas":
        return PROBLEMS["appliance"].finding("error", what)
    install = _install(system, kernel)
    sources = ("var/lib/dkms/gasket*", "usr/src/gasket*")  # the sources that dkms knows, and those of the package
    if not any(glob.glob(os.path.join(facts.root, pattern)) for pattern in sources):
        return PROBLEMS["no_driver"].finding("error", what, install=install)
    what += "; the driver is not built for the kernel %s" % (kernel or "that is running")
    if kernel and install != NO_PACKAGE and not os.path.exists(os.path.join(folder, "build")):
        row = PROBLEMS["headers"].finding("error", what + ", whose headers are missing", headers=HEADERS[system])
        return row._replace(hint=row.hint.replace("sudo ", "")) if system == "proxmox" else row
    logs = glob.glob(os.path.join(facts.root, "var/lib/dkms/gasket*/*/build/make.log"))
    log = "\n".join(text_of(path) or "" for path in sorted(logs))
    what += "".join("; " + meaning for name, meaning in _BREAKS if name in log)
    return PROBLEMS["not_built"].finding("error", what, install=install)


def _system(root: str, kernel: str) -> str:
    """Return the kind of system, by its kernel's name and os-release: truenas, proxmox, fedora or debian."""
    if "truenas" in kernel:
        return "truenas"
    if kernel.endswith("-pve"):
        return "proxmox"
    release = text_of(root, "etc/os-release") or ""
    names = re.findall(r"^ID(?:_LIKE)?=(.*)$", release, re.MULTILINE)
    return "fedora" if {"fedora", "rhel"} & set(re.findall(r"\w+", " ".join(names))) else "debian"


def _install(system: str, kernel: str) -> str:
    version = version_numbers(kernel)[:2]
    is_new = version >= FIRST_KERNEL_WITHOUT_PACKAGE
    if system == "fedora":
        return INSTALL_FEDORA_NEW if is_new else INSTALL_FEDORA
    if is_new:
        return NO_PACKAGE
    install = _INSTALL_STOCK if version < FIRST_KERNEL_WITHOUT_STOCK_DRIVER else INSTALL_PACKAGE
    if system == "proxmox":  # it has no sudo, and its kernel has its own headers
        return "%s && %s" % (HEADERS[system], install.replace("sudo ", ""))
    return install


def _secure_boot(root: str) -> bool:
    """Return whether Secure Boot is on: four bytes of attributes, and a byte that is 1."""
    try:
        with open(os.path.join(root, SECURE_BOOT), "rb") as stream:
            return stream.read(5)[4:] == b"\1"
    except OSError:
        return False


def turned_off(facts: Facts) -> List[Finding]:
    """Return a note if the PCIe connector of a Raspberry Pi 5 is off, and no Edge TPU was found."""
    on = ("dtparam=pciex1", "dtparam=nvme", "dtoverlay=pineboards-hat-ai")
    if not host.is_pi_5(facts.root) or any(host.has_pi_setting(facts.root, setting) for setting in on):
        return []
    path = host.pi_config(facts.root)
    what = "%s does not turn the PCIe connector on" % path
    return [PROBLEMS["pcie_off"].finding("note", what, config=path)]
