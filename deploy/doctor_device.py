"""What `doctor` finds about the Edge TPU itself, how it is connected, and the state of the host.

Runs on Python 3.7 with the standard library alone.
"""

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
"""The apex driver slows the Edge TPU down from 85 degrees on. Source: coral.ai, M.2 datasheet."""
HOT_CPU_C = 80.0
LOW_MEMORY, LOW_DISK = 96 << 20, 128 << 20
BUILT = 1735689600.0
"""2025-01-01: no host that runs this code can be earlier."""
_THROTTLED = (
    (0, "under_voltage", "the supply voltage is too low now"),
    (2, "throttled", "the processor is throttled now"),
    (16, "under_voltage", "the supply voltage was too low since the start"),
    (18, "throttled", "the processor was throttled since the start"),
)


def findings(facts: Facts) -> List[Finding]:
    """All of them."""
    tpus = host.edge_tpus(facts.root)
    result = [] if tpus else [_absent(facts)]
    for tpu in tpus:
        result += _usb(facts, tpu) if tpu["device"].startswith("usb") else _pci(facts, tpu)
        result += _busy(facts, tpu)
    checks: Tuple[Callable[[Facts], List[Finding]], ...] = (_heat, _power, _pages, _room, _clock, _governor)
    return result + [each for check in checks for each in check(facts)]


def _absent(facts: Facts) -> Finding:
    nodes = glob.glob(os.path.join(facts.root, "dev/apex_*"))
    if nodes:
        what = "%s is there, but no Edge TPU is on PCIe" % ", ".join(sorted(nodes))
        return Finding("error", "no_device", what, "the device was lost: heat or power", "sudo reboot")
    what = "no Edge TPU is on USB (1a6e:089a, 18d1:9302) or PCIe (1ac1:089a)"
    return Finding("warning", "no_device", what, "the int8 model runs on the CPU instead", "lsusb; lspci -n")


# --- USB and PCIe ---------------------------------------------------------------------


def _usb(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    result = [Finding("note", "device", "%s: %s" % (tpu["device"], tpu["id"]), "an Edge TPU on USB")]
    if tpu["node"] is None or not os.path.exists(tpu["node"]):
        what = "%s is on the bus, but its file %s is not there" % (tpu["device"], tpu["node"])
        todo = "docker run --device /dev/bus/usb …  # in a container; otherwise: sudo udevadm trigger"
        result.append(Finding("error", "no_node", what, "libedgetpu opens that file", todo))
    elif not tpu["accessible"]:
        result.append(_forbidden(facts, tpu, "plugdev", USB_RULE))
    ids = [number for number in ("1a6e", "18d1") if not _ruled(facts.root, number)]
    if ids and facts.user != "root" and tpu["accessible"]:
        what = "no udev rule is for the USB vendor %s" % " and ".join(ids)
        why = "the id changes from 1a6e:089a to 18d1:9302 at first use, and both must be allowed"
        result.append(Finding("warning", "udev", what, why, _rule(USB_RULE)))
    speed = tpu["speed_mbps"]
    if speed is not None and speed < host.USB3_MBPS:
        what = "%s is connected with %g Mbit/s, not with USB 3" % (tpu["device"], speed)
        why = "everything takes 3 to 10 times as long"
        result.append(Finding("warning", "usb_2", what, why, "lsusb -t  # then use a blue port and a USB 3 cable"))
    return result + _hub(facts, tpu)


def _hub(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    """The Edge TPU takes up to 900 mA, more than many a hub gives."""
    result = []
    for folder in sorted(glob.glob(os.path.join(facts.root, "sys/bus/usb/devices/*"))):
        number = (_read(folder, "idVendor"), _read(folder, "idProduct"))
        if number in host.USB_IDS and "." in os.path.basename(folder):
            what = "%s is behind a hub (%s)" % (tpu["device"], os.path.basename(folder))
            why = "it takes up to 900 mA; with less it vanishes in the middle of an inference"
            result.append(
                Finding("note", "hub", what, why, "lsusb -t  # then use a port of the board, or a powered hub")
            )
    return result[:1]


def _pci(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    if tpu["node"] is None or not os.path.exists(tpu["node"]):
        modules = _read(facts.root, "proc/modules")
        loaded = [name for name in ("gasket", "apex") if "\n%s " % name in "\n" + modules]
        what = "%s is on PCIe, but there is no /dev/apex_*; of gasket and apex is loaded: %s"
        what %= (tpu["device"], " and ".join(loaded) or "nothing")
        todo = "sudo apt-get install gasket-dkms && sudo modprobe apex"
        if len(loaded) == 2:
            todo = "sudo dmesg | grep -i apex  # the driver is there and refuses the device"
        return [Finding("error", "no_driver", what, "libedgetpu reaches it through the kernel's driver alone", todo)]
    result = [Finding("note", "device", "%s: %s" % (tpu["device"], tpu["node"]), "an Edge TPU on PCIe")]
    if not tpu["accessible"]:
        result.append(_forbidden(facts, tpu, "apex", PCI_RULE))
    return result


def _forbidden(facts: Facts, tpu: Dict[str, Any], group: str, rule: str) -> Finding:
    """The one step that is missing: the rule, the group, or that the rule is applied."""
    what = "%s may not open %s" % (facts.user, tpu["node"])
    why = "libedgetpu then finds no device, and gives no reason"
    marks = ("apex",) if group == "apex" else ("18d1", "1a6e")
    if not all(_ruled(facts.root, mark) for mark in marks):
        return Finding("error", "udev", what + ": there is no udev rule for it", why, _rule(rule))
    if group not in facts.groups:
        todo = "sudo usermod -aG %s %s  # and log in again" % (group, facts.user)
        return Finding("error", "permission", "%s: not in the group %s" % (what, group), why, todo)
    todo = "sudo udevadm control --reload-rules && sudo udevadm trigger"
    return Finding("error", "permission", what + ", though rule and group are there", why, todo)


def _rule(rule: str) -> str:
    return "echo '%s' | sudo tee -a %s && sudo udevadm control --reload-rules && sudo udevadm trigger" % (rule, RULES)


def _ruled(root: str, mark: str) -> bool:
    """Whether a udev rule names something."""
    for folder in ("etc/udev/rules.d", "lib/udev/rules.d", "usr/lib/udev/rules.d"):
        for path in glob.glob(os.path.join(root, folder, "*.rules")):
            lines = _read(path).splitlines()
            if any(mark in line and not line.lstrip().startswith("#") for line in lines):
                return True
    return False


def _busy(facts: Facts, tpu: Dict[str, Any]) -> List[Finding]:
    held = host.holders(tpu["node"], facts.root) if tpu["node"] else []
    if not held:
        return []
    names = ", ".join("%s (process %d)" % (each["name"], each["pid"]) for each in held)
    why = "an Edge TPU serves one process at a time"
    return [Finding("warning", "busy", "%s is in use by %s" % (tpu["device"], names), why, "kill %d" % held[0]["pid"])]


# --- the host -------------------------------------------------------------------------


def _heat(facts: Facts) -> List[Finding]:
    result = []
    for name, celsius in host.temperatures(facts.root).items():
        apex = name.startswith("apex")
        if apex and celsius < DEAD_C:
            what = "%s tells %g degrees" % (name, celsius)
            why = "a negative temperature means that the Edge TPU does not answer any more"
            result.append(Finding("error", "dead", what, why, "sudo reboot"))
        elif celsius >= (HOT_C if apex else HOT_CPU_C):
            what = "%s has %.0f degrees" % (name, celsius)
            why = "it is slowed down, and benchmarks say little"
            result.append(
                Finding("warning", "hot", what, why, "watch cat /sys/class/thermal/thermal_zone*/temp  # cool it")
            )
    return result


def _power(facts: Facts) -> List[Finding]:
    bits = host.throttled(facts.root) or 0
    found = {}
    for bit, kind, what in _THROTTLED:
        if bits >> bit & 1 and kind not in found:
            why = (
                "an Edge TPU on USB takes up to 900 mA and vanishes when the voltage falls; figures are not comparable"
            )
            severity = "error" if kind == "under_voltage" and bit < 16 else "warning"
            todo = "vcgencmd get_throttled  # 0x0 with a supply that is strong enough, and cooled"
            found[kind] = Finding(severity, kind, what, why, todo)
    return list(found.values())


def _pages(facts: Facts) -> List[Finding]:
    """The Raspberry Pi 5 starts a kernel with pages of 16 KiB where there is one."""
    if facts.page_bytes <= 4096:
        return []
    board = _read(facts.root, "proc/device-tree/model").strip("\0\n ") or "this host"
    what = "%s has memory pages of %d KiB" % (board, facts.page_bytes // 1024)
    why = "the driver gasket and libraries that were built for pages of 4 KiB fail or do not load"
    todo = "getconf PAGESIZE  # the kernel must be one of 4 KiB"
    if "Raspberry Pi" in board:
        config = "/boot/firmware/config.txt"
        if not os.path.exists(os.path.join(facts.root, config[1:])):
            config = "/boot/config.txt"
        todo = "echo kernel=kernel8.img | sudo tee -a %s && sudo reboot" % config
    pci = any(tpu["device"].startswith("pci") for tpu in host.edge_tpus(facts.root))
    return [Finding("error" if pci else "warning", "pages", what, why, todo)]


def _room(facts: Facts) -> List[Finding]:
    result = []
    for line in _read(facts.root, "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:") and int(line.split()[1]) * 1024 < LOW_MEMORY:
            what = "%d MiB of memory are free" % (int(line.split()[1]) // 1024)
            why = "runtime and model need about 100; the kernel ends processes when there is none left"
            result.append(Finding("warning", "memory", what, why, "ps aux --sort=-rss | head"))
    if facts.free_bytes < LOW_DISK:
        what = "%d MiB of disk are free in %s" % (facts.free_bytes >> 20, facts.folder)
        why = "a deployment needs room for the new version beside the old one"
        result.append(Finding("warning", "disk", what, why, "du -xh %s | sort -h | tail" % facts.folder))
    return result


def _clock(facts: Facts) -> List[Finding]:
    if facts.now >= BUILT:
        return []
    what = "the clock says %s" % time.strftime("%Y-%m-%d", time.gmtime(facts.now))
    why = "certificates seem not to be valid yet, so downloads fail; logs cannot be put in order"
    return [Finding("warning", "clock", what, why, "sudo timedatectl set-ntp true")]


def _governor(facts: Facts) -> List[Finding]:
    paths = glob.glob(os.path.join(facts.root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"))
    if not any(_read(path).strip() == "powersave" for path in paths):
        return []
    why = "the processor's part of an inference takes longer, and figures change with the load"
    todo = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    return [Finding("note", "governor", "the processor saves power", why, todo)]


def _read(*parts: str) -> str:
    """A file's text; empty where there is none."""
    try:
        with open(os.path.join(*parts), "rb") as stream:
            return stream.read(1 << 20).decode("utf-8", "replace").strip("\n")
    except OSError:
        return ""
