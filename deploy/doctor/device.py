"""The checks of `doctor` for the Edge TPU, its connection, and the state of the host."""

from __future__ import annotations

import glob
import os
import time
from typing import Any, Dict, List

from deploy.doctor import pcie as doctor_pcie
from deploy.doctor.command import Facts
from deploy.runner import host
from deploy.runner.problems import PROBLEMS, SET_PERFORMANCE, Finding

HOT_C, DEAD_C = 85.0, -80.0
"""The apex driver throttles the Edge TPU from 85 degrees on (source: coral.ai, M.2 datasheet). A card that no longer
responds reports -88 to -90 degrees (source: google-coral/edgetpu 843); a card in frost reports its temperature."""
LOW_MEMORY, LOW_DISK = 96 << 20, 128 << 20
"""Runtime and model need about 100 MiB of memory; a deployment needs disk space for the new version too."""
EARLIEST = 1735689600.0
"""2025-01-01, before this code was written: an earlier clock is wrong."""
_THROTTLED = (
    (0, "under_voltage", "the supply voltage is too low now"),
    (2, "throttled", "the processor is throttled now"),
    (16, "under_voltage", "the supply voltage was too low since the start"),
    (18, "throttled", "the processor was throttled since the start"),
)


def findings(facts: Facts) -> List[Finding]:
    """Return all findings on the Edge TPU and the host."""
    tpus = host.edge_tpus(facts.root)
    result = [] if tpus else _absent(facts)
    for tpu in tpus:
        result += _usb(facts, tpu) if tpu["device"].startswith("usb") else _pci(facts, tpu)
        result += _busy(facts, tpu)
    for check in (_heat, _power, _pages, _free_space, _clock, _governor):
        result += check(facts)
    return result


def _absent(facts: Facts) -> List[Finding]:
    nodes = glob.glob(os.path.join(facts.root, "dev/apex_*"))
    if nodes:
        what = "%s exists, but no Edge TPU is on PCIe" % ", ".join(sorted(nodes))
        return [PROBLEMS["lost"].finding("error", what)]
    what = "no Edge TPU is on USB (1a6e:089a, 18d1:9302) or PCIe (1ac1:089a)"
    machine, kind = host.machine(facts.root), host.container(facts.root)
    if machine == "wsl":
        return [PROBLEMS["no_device_wsl"].finding("warning", what + " of this WSL")]
    if kind is not None:
        return [PROBLEMS["no_device_container"].finding("warning", what + " of this container (%s)" % kind)]
    if machine is not None:
        return [PROBLEMS["no_device_machine"].finding("warning", what + " of this virtual machine (%s)" % machine)]
    return [PROBLEMS["no_device"].finding("warning", what), *doctor_pcie.turned_off(facts)]


# --- USB and PCIe ---------------------------------------------------------------------


def _usb(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    result = [Finding("note", "device", "%s: %s" % (tpu["device"], tpu["id"]), "an Edge TPU on USB")]
    if tpu["node"] is None or not os.path.exists(tpu["node"]):
        what = "%s is on the bus, but its device file %s is missing" % (tpu["device"], tpu["node"])
        fix = "docker run --device /dev/bus/usb …  # in a container; otherwise: sudo udevadm trigger"
        result.append(PROBLEMS["no_node"].finding("error", what, fix=_passing(facts) or fix))
    elif not tpu["accessible"]:
        result.append(_forbidden(facts, tpu))
    result += _half_a_rule(facts, tpu) + _firmware(facts, tpu) + _usb_speed(facts, tpu)
    if host.is_pi_5(facts.root) and host.pi_usb_limited(facts.root):
        what = "%s: the USB ports are limited to 600 mA in total" % host.pi_model(facts.root)
        result.append(PROBLEMS["usb_current"].finding("warning", what, config=host.pi_config(facts.root)))
    return result + _hub(facts, tpu)


def _half_a_rule(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    vendors = [vendor for vendor in ("1a6e", "18d1") if not _has_rule(facts.root, vendor)]
    if not vendors or facts.user == "root" or not tpu["accessible"] or host.container(facts.root) is not None:
        return []
    what = "no udev rule allows the USB vendor %s" % " and ".join(vendors)
    return [PROBLEMS["udev_usb_half"].finding("warning", what)]


def _passing(facts: Facts) -> str:
    """Return how a USB device is passed to this container or virtual machine; empty on real hardware."""
    kind = host.container(facts.root)
    if kind == "lxc":
        return (
            "printf 'lxc.cgroup2.devices.allow: c 189:* rwm\\nlxc.mount.entry: /dev/bus/usb dev/bus/usb none "
            "bind,optional,create=dir\\n' >> /etc/pve/lxc/ID.conf  # on the host"
        )
    if kind is not None:
        return "docker run --device-cgroup-rule 'c 189:* rmw' -v /dev/bus/usb:/dev/bus/usb …"
    machine = host.machine(facts.root)
    if machine == "wsl":
        return "usbipd attach --wsl --busid BUSID --auto-attach  # on Windows"
    if machine is not None:
        return "qm set ID -usb0 host=BUS-PORT,usb3=1  # on the host (Proxmox): pass the port, not one id"
    return ""


def _firmware(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    """Return a finding for a stick without firmware in a container or virtual machine: it will disconnect once."""
    fix = _passing(facts)
    if not fix or not tpu["id"].startswith("1a6e"):
        return []
    environment = host.container(facts.root) or host.machine(facts.root)
    what = "%s has not loaded its firmware yet, and this is a container or virtual machine (%s)"
    return [PROBLEMS["firmware"].finding("warning", what % (tpu["device"], environment), fix=fix)]


def _usb_speed(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    speed = tpu["speed_mbps"]
    if speed is None or speed >= host.USB3_MBPS:
        return []
    what = "%s is connected with %g Mbit/s, not with USB 3" % (tpu["device"], speed)
    board = host.text_of(facts.root, "proc/device-tree/model") or ""
    if "Coral" in board and "Mini" in board:
        return [PROBLEMS["mini"].finding("note", what)]
    return [PROBLEMS["usb_2"].finding("warning", what)]


def _hub(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    """Return a finding for an Edge TPU behind a hub: it needs up to 900 mA, more than many hubs supply."""
    for folder in sorted(glob.glob(os.path.join(facts.root, "sys/bus/usb/devices/*"))):
        ids = (host.text_of(folder, "idVendor"), host.text_of(folder, "idProduct"))
        if ids in host.USB_IDS and "." in os.path.basename(folder):
            what = "%s is behind a hub (%s)" % (tpu["device"], os.path.basename(folder))
            return [PROBLEMS["hub"].finding("note", what)]
    return []


def _pci(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    if tpu["node"] is None or not os.path.exists(tpu["node"]):
        return [doctor_pcie.without_node(facts, tpu)]
    result = [Finding("note", "device", "%s: %s" % (tpu["device"], tpu["node"]), "an Edge TPU on PCIe")]
    if not tpu["accessible"]:
        result.append(_forbidden(facts, tpu))
    return result


def _forbidden(facts: Facts, tpu: Dict[str, Any]) -> Finding:
    """Return the finding of the missing step: the udev rule, the group, or applying the rule."""
    pci = tpu["device"].startswith("pci")
    group, ending, patterns = ("apex", "_pci", ("apex",)) if pci else ("plugdev", "_usb", ("18d1", "1a6e"))
    what = "%s may not open %s" % (facts.user, tpu["node"])
    if not all(_has_rule(facts.root, pattern) for pattern in patterns):
        return PROBLEMS["udev" + ending].finding("error", what + ": no udev rule allows it")
    problem = PROBLEMS["permission" + ending]
    if group not in facts.groups:
        return problem.finding("error", "%s: not in the group %s" % (what, group), user=facts.user)
    row = problem.finding("error", what + ", although the udev rule and the group are correct")
    return row._replace(hint="sudo udevadm control --reload-rules && sudo udevadm trigger")


def _has_rule(root: str, pattern: str) -> bool:
    """Return whether a udev rule contains a text."""
    for folder in ("etc/udev/rules.d", "lib/udev/rules.d", "usr/lib/udev/rules.d"):
        for path in glob.glob(os.path.join(root, folder, "*.rules")):
            lines = (host.text_of(path) or "").splitlines()
            if any(pattern in line and not line.lstrip().startswith("#") for line in lines):
                return True
    return False


def _busy(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    holders = host.holders(tpu["node"], facts.root) if tpu["node"] else []
    if not holders:
        return []
    names = ", ".join("%(name)s (process %(pid)d)" % holder for holder in holders)
    what = "%s is in use by %s" % (tpu["device"], names)
    return [PROBLEMS["busy"].finding("warning", what, pid=holders[0]["pid"])]


# --- the host -------------------------------------------------------------------------


def _heat(facts: Facts) -> List[Finding]:
    result = []
    for name, celsius in host.temperatures(facts.root).items():
        apex = name.startswith("apex")
        if apex and celsius < DEAD_C:
            result.append(PROBLEMS["dead"].finding("error", "%s reports %g degrees" % (name, celsius)))
        elif celsius >= (HOT_C if apex else host.HOT_CPU_C):
            row = PROBLEMS["hot"].finding("warning", "%s has %.0f degrees" % (name, celsius))
            result.append(row if apex else row._replace(page=""))
    return result


def _power(facts: Facts) -> List[Finding]:
    bits = host.throttled(facts.root) or 0
    result: Dict[str, Finding] = {}
    for bit, kind, what in _THROTTLED:
        if bits >> bit & 1 and kind not in result:
            severity = "error" if kind == "under_voltage" and bit < 16 else "warning"
            result[kind] = PROBLEMS["under_voltage"].finding(severity, what)._replace(kind=kind)
    return list(result.values())


def _pages(facts: Facts) -> List[Finding]:
    """Return a finding for large memory pages. A Raspberry Pi 5 boots a kernel with pages of 16 KiB by default."""
    if facts.page_bytes <= 4096:
        return []
    board = host.text_of(facts.root, "proc/device-tree/model") or "this host"
    what = "%s has memory pages of %d KiB" % (board, facts.page_bytes // 1024)
    fix = "getconf PAGESIZE  # boot a kernel with pages of 4 KiB"
    if host.pi_model(facts.root):
        fix = "echo kernel=kernel8.img | sudo tee -a %s && sudo reboot" % host.pi_config(facts.root)
    pci = any(tpu["device"].startswith("pci") for tpu in host.edge_tpus(facts.root))
    return [PROBLEMS["pages"].finding("error" if pci else "warning", what, fix=fix)]


def _free_space(facts: Facts) -> List[Finding]:
    result = []
    for line in (host.text_of(facts.root, "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:") and int(line.split()[1]) * 1024 < LOW_MEMORY:
            what = "%d MiB of memory are free" % (int(line.split()[1]) // 1024)
            why = "runtime and model need about 100 MiB; without free memory the kernel kills processes"
            result.append(Finding("warning", "memory", what, why, "ps aux --sort=-rss | head"))
    if facts.free_bytes < LOW_DISK:
        what = "%d MiB of disk are free in %s" % (facts.free_bytes >> 20, facts.folder)
        why = "a deployment needs space for the new version in addition to the old one"
        result.append(Finding("warning", "disk", what, why, "du -xh %s | sort -h | tail" % facts.folder))
    return result


def _clock(facts: Facts) -> List[Finding]:
    if facts.now >= EARLIEST:
        return []
    what = "the clock is set to %s" % time.strftime("%Y-%m-%d", time.gmtime(facts.now))
    return [PROBLEMS["clock"].finding("warning", what)]


def _governor(facts: Facts) -> List[Finding]:
    paths = glob.glob(os.path.join(facts.root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"))
    if not any((host.text_of(path) or "").strip() == "powersave" for path in paths):
        return []
    why = "the processor's part of an inference takes longer, and benchmarks vary with the load"
    return [Finding("note", "governor", "the CPU governor is powersave", why, SET_PERFORMANCE)]
