"""The checks of `doctor` for the Edge TPU, its connection, and the state of the host."""

from __future__ import annotations

import glob
import os
import time
from typing import Any, Callable, Dict, List, Tuple

from deploy import host
from deploy.doctor import Facts, Finding

RULES = "/etc/udev/rules.d/99-coral.rules"
USB_RULE = 'SUBSYSTEM=="usb", ATTRS{idVendor}=="1a6e|18d1", MODE="0660", GROUP="plugdev"'
PCI_RULE = 'SUBSYSTEM=="apex", MODE="0660", GROUP="apex"'
HOT_C, DEAD_C = 85.0, 0.0
"""The apex driver throttles the Edge TPU from 85 degrees on. Source: coral.ai, M.2 datasheet."""
HOT_CPU_C = 80.0
LOW_MEMORY, LOW_DISK = 96 << 20, 128 << 20
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
    result = [] if tpus else [_absent(facts)]
    for tpu in tpus:
        result += _usb(facts, tpu) if tpu["device"].startswith("usb") else _pci(facts, tpu)
        result += _busy(facts, tpu)
    checks: Tuple[Callable[[Facts], List[Finding]], ...] = (_heat, _power, _pages, _free_space, _clock, _governor)
    for check in checks:
        result += check(facts)
    return result


def _absent(facts: Facts) -> Finding:
    nodes = glob.glob(os.path.join(facts.root, "dev/apex_*"))
    if nodes:
        what = "%s exists, but no Edge TPU is on PCIe" % ", ".join(sorted(nodes))
        return Finding("error", "no_device", what, "heat or low power made the device disappear", "sudo reboot")
    what = "no Edge TPU is on USB (1a6e:089a, 18d1:9302) or PCIe (1ac1:089a)"
    return Finding("warning", "no_device", what, "the int8 model runs on the CPU instead", "lsusb; lspci -n")


# --- USB and PCIe ---------------------------------------------------------------------


def _usb(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    result = [Finding("note", "device", "%s: %s" % (tpu["device"], tpu["id"]), "an Edge TPU on USB")]
    if tpu["node"] is None or not os.path.exists(tpu["node"]):
        what = "%s is on the bus, but its device file %s is missing" % (tpu["device"], tpu["node"])
        hint = "docker run --device /dev/bus/usb …  # in a container; otherwise: sudo udevadm trigger"
        result.append(Finding("error", "no_node", what, "libedgetpu opens that file", hint))
    elif not tpu["accessible"]:
        result.append(_forbidden(facts, tpu, "plugdev", USB_RULE))
    vendors = [vendor for vendor in ("1a6e", "18d1") if not _has_rule(facts.root, vendor)]
    if vendors and facts.user != "root" and tpu["accessible"]:
        what = "no udev rule allows the USB vendor %s" % " and ".join(vendors)
        why = "the id changes from 1a6e:089a to 18d1:9302 at first use, and both must be allowed"
        result.append(Finding("warning", "udev", what, why, _rule(USB_RULE)))
    speed = tpu["speed_mbps"]
    if speed is not None and speed < host.USB3_MBPS:
        what = "%s is connected with %g Mbit/s, not with USB 3" % (tpu["device"], speed)
        why = "transfers take 3 to 10 times as long"
        result.append(Finding("warning", "usb_2", what, why, "lsusb -t  # then use a blue port and a USB 3 cable"))
    return result + _hub(facts, tpu)


def _hub(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    """Return a finding for an Edge TPU behind a hub: it needs up to 900 mA, more than many hubs supply."""
    for folder in sorted(glob.glob(os.path.join(facts.root, "sys/bus/usb/devices/*"))):
        ids = (_read(folder, "idVendor"), _read(folder, "idProduct"))
        if ids in host.USB_IDS and "." in os.path.basename(folder):
            what = "%s is behind a hub (%s)" % (tpu["device"], os.path.basename(folder))
            why = "it needs up to 900 mA; with less it disconnects during an inference"
            hint = "lsusb -t  # then use a port of the board, or a powered hub"
            return [Finding("note", "hub", what, why, hint)]
    return []


def _pci(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    if tpu["node"] is None or not os.path.exists(tpu["node"]):
        modules = _read(facts.root, "proc/modules")
        loaded = [name for name in ("gasket", "apex") if "\n%s " % name in "\n" + modules]
        what = "%s is on PCIe, but /dev/apex_* is missing; loaded of the modules gasket and apex: %s"
        what %= (tpu["device"], " and ".join(loaded) or "none")
        hint = "sudo apt-get install gasket-dkms && sudo modprobe apex"
        if len(loaded) == 2:
            hint = "sudo dmesg | grep -i apex  # the driver is loaded and refuses the device"
        return [Finding("error", "no_driver", what, "libedgetpu needs the kernel driver to reach it", hint)]
    result = [Finding("note", "device", "%s: %s" % (tpu["device"], tpu["node"]), "an Edge TPU on PCIe")]
    if not tpu["accessible"]:
        result.append(_forbidden(facts, tpu, "apex", PCI_RULE))
    return result


def _forbidden(facts: Facts, tpu: Dict[str, Any], group: str, rule: str) -> Finding:
    """Return the missing step: the udev rule, the group, or applying the rule."""
    what = "%s may not open %s" % (facts.user, tpu["node"])
    why = "libedgetpu then finds no device, and gives no reason"
    patterns = ("apex",) if group == "apex" else ("18d1", "1a6e")
    if not all(_has_rule(facts.root, pattern) for pattern in patterns):
        return Finding("error", "udev", what + ": no udev rule allows it", why, _rule(rule))
    if group not in facts.groups:
        hint = "sudo usermod -aG %s %s  # and log in again" % (group, facts.user)
        return Finding("error", "permission", "%s: not in the group %s" % (what, group), why, hint)
    hint = "sudo udevadm control --reload-rules && sudo udevadm trigger"
    return Finding("error", "permission", what + ", although the udev rule and the group are correct", why, hint)


def _rule(rule: str) -> str:
    return "echo '%s' | sudo tee -a %s && sudo udevadm control --reload-rules && sudo udevadm trigger" % (rule, RULES)


def _has_rule(root: str, pattern: str) -> bool:
    """Return whether a udev rule contains a text."""
    for folder in ("etc/udev/rules.d", "lib/udev/rules.d", "usr/lib/udev/rules.d"):
        for path in glob.glob(os.path.join(root, folder, "*.rules")):
            lines = _read(path).splitlines()
            if any(pattern in line and not line.lstrip().startswith("#") for line in lines):
                return True
    return False


def _busy(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    holders = host.holders(tpu["node"], facts.root) if tpu["node"] else []
    if not holders:
        return []
    what = "%s is in use by %s" % (
        tpu["device"],
        ", ".join("%(name)s (process %(pid)d)" % holder for holder in holders),
    )
    why = "only one process at a time can use an Edge TPU"
    return [Finding("warning", "busy", what, why, "kill %d" % holders[0]["pid"])]


# --- the host -------------------------------------------------------------------------


def _heat(facts: Facts) -> List[Finding]:
    result = []
    for name, celsius in host.temperatures(facts.root).items():
        apex = name.startswith("apex")
        if apex and celsius < DEAD_C:
            what = "%s reports %g degrees" % (name, celsius)
            why = "a negative temperature means that the Edge TPU no longer responds"
            result.append(Finding("error", "dead", what, why, "sudo reboot"))
        elif celsius >= (HOT_C if apex else HOT_CPU_C):
            what = "%s has %.0f degrees" % (name, celsius)
            why = "it is throttled, so benchmarks are not comparable"
            hint = "watch cat /sys/class/thermal/thermal_zone*/temp  # cool it"
            result.append(Finding("warning", "hot", what, why, hint))
    return result


def _power(facts: Facts) -> List[Finding]:
    bits = host.throttled(facts.root) or 0
    result: Dict[str, Finding] = {}
    for bit, kind, what in _THROTTLED:
        if bits >> bit & 1 and kind not in result:
            why = "an Edge TPU on USB needs up to 900 mA and disconnects if the voltage drops; benchmarks vary"
            severity = "error" if kind == "under_voltage" and bit < 16 else "warning"
            hint = "vcgencmd get_throttled  # must print 0x0: use a stronger supply, and cool the board"
            result[kind] = Finding(severity, kind, what, why, hint)
    return list(result.values())


def _pages(facts: Facts) -> List[Finding]:
    """Return a finding for large memory pages. A Raspberry Pi 5 boots a kernel with pages of 16 KiB by default."""
    if facts.page_bytes <= 4096:
        return []
    board = _read(facts.root, "proc/device-tree/model").strip("\0\n ") or "this host"
    what = "%s has memory pages of %d KiB" % (board, facts.page_bytes // 1024)
    why = "the driver gasket, and libraries built for pages of 4 KiB, fail or do not load"
    hint = "getconf PAGESIZE  # boot a kernel with pages of 4 KiB"
    if "Raspberry Pi" in board:
        config = "/boot/firmware/config.txt"
        if not os.path.exists(os.path.join(facts.root, config[1:])):
            config = "/boot/config.txt"
        hint = "echo kernel=kernel8.img | sudo tee -a %s && sudo reboot" % config
    pci = any(tpu["device"].startswith("pci") for tpu in host.edge_tpus(facts.root))
    return [Finding("error" if pci else "warning", "pages", what, why, hint)]


def _free_space(facts: Facts) -> List[Finding]:
    result = []
    for line in _read(facts.root, "proc/meminfo").splitlines():
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
    why = "certificates are not valid yet, so downloads fail; logs have wrong times"
    return [Finding("warning", "clock", what, why, "sudo timedatectl set-ntp true")]


def _governor(facts: Facts) -> List[Finding]:
    paths = glob.glob(os.path.join(facts.root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"))
    if not any(_read(path).strip() == "powersave" for path in paths):
        return []
    why = "the processor's part of an inference takes longer, and benchmarks vary with the load"
    hint = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    return [Finding("note", "governor", "the CPU governor is powersave", why, hint)]


def _read(*parts: str) -> str:
    """Return the text of a file; an empty string if it cannot be read."""
    try:
        with open(os.path.join(*parts), "rb") as stream:
            return stream.read(1 << 20).decode("utf-8", "replace").strip("\n")
    except OSError:
        return ""
