"""Facts of the host: its Edge TPUs, processor, temperatures, memory and load, as the kernel tells them.

Everything is read below a root folder, so that another machine's /sys and /proc can be read too
(CORALLINE_ROOT; the tests use it). What is not there is None or empty, never a guess.
Runs on Python 3.7 with the standard library alone.
"""

from __future__ import annotations

import glob
import os
import platform
import sys
import time
from typing import Any, Dict, List, Optional

USB_IDS = (("1a6e", "089a"), ("18d1", "9302"))
"""Of the USB Accelerator: before its firmware is loaded, which happens at first use, and after."""
PCI_ID = ("0x1ac1", "0x089a")
USB3_MBPS = 5000
ARM_PARTS = {
    "0xd03": "A53",
    "0xd04": "A35",
    "0xd05": "A55",
    "0xd07": "A57",
    "0xd08": "A72",
    "0xd09": "A73",
    "0xd0b": "A76",
}
"""Cortex cores by the part number that /proc/cpuinfo tells. Source: Linux, arch/arm64/include/asm/cputype.h."""
Facts = Dict[str, Any]


def default_root() -> str:
    """The folder that /sys, /proc and /dev are in."""
    return os.environ.get("CORALLINE_ROOT", "/")


def _text(*parts: str) -> Optional[str]:
    try:
        with open(os.path.join(*parts), "rb") as stream:
            return stream.read(65536).decode("utf-8", "replace").strip("\0 \n")
    except OSError:
        return None


def _number(*parts: str) -> Optional[float]:
    text = _text(*parts)
    try:
        return None if text is None else float(text.split()[0])
    except (ValueError, IndexError):
        return None


def edge_tpus(root: Optional[str] = None) -> List[Facts]:
    """The Edge TPUs on USB and PCIe, in the order of the bus.

    Each has `device` (as libedgetpu takes it, `usb:0`), `id`, `node` (the file that libedgetpu opens, or None
    where the kernel made none), `accessible`, `speed_mbps` (USB), `link` (PCIe) and `temperature_c` (PCIe).
    """
    root = default_root() if root is None else root
    return _usb(root) + _pci(root)


def _usb(root: str) -> List[Facts]:
    found: List[Facts] = []
    for folder in sorted(glob.glob(os.path.join(root, "sys/bus/usb/devices/*"))):
        identity = (_text(folder, "idVendor"), _text(folder, "idProduct"))
        if identity not in USB_IDS:
            continue
        bus, number = _number(folder, "busnum"), _number(folder, "devnum")
        node = None
        if bus is not None and number is not None:
            node = os.path.join(root, "dev/bus/usb/%03d/%03d" % (bus, number))
        found.append(
            {
                "device": "usb:%d" % len(found),
                "id": "%s:%s" % identity,
                "node": node,
                "accessible": node is not None and os.access(node, os.R_OK | os.W_OK),
                "speed_mbps": _number(folder, "speed"),
                "link": None,
                "temperature_c": None,
            }
        )
    return found


def _pci(root: str) -> List[Facts]:
    found: List[Facts] = []
    links = sorted(glob.glob(os.path.join(root, "sys/class/apex/apex_*")))
    apexes = {os.path.basename(os.path.realpath(os.path.join(link, "device"))): link for link in links}
    for folder in sorted(glob.glob(os.path.join(root, "sys/bus/pci/devices/*"))):
        if (_text(folder, "vendor"), _text(folder, "device")) != PCI_ID:
            continue
        apex = apexes.get(os.path.basename(folder))
        node = os.path.join(root, "dev", os.path.basename(apex)) if apex else None
        celsius = _number(apex, "temp") if apex else None
        found.append(
            {
                "device": "pci:%d" % len(found),
                "id": "1ac1:089a",
                "node": node,
                "accessible": node is not None and os.access(node, os.R_OK | os.W_OK),
                "speed_mbps": None,
                "link": _text(folder, "current_link_speed"),
                "temperature_c": None if celsius is None else celsius / 1000,
            }
        )
    return found


def holders(node: str, root: Optional[str] = None) -> List[Facts]:
    """The other processes that have a device's file open, as far as this user may see: `pid` and `name`."""
    root = default_root() if root is None else root
    found = {}
    for link in glob.glob(os.path.join(root, "proc/[0-9]*/fd/*")):
        try:
            same = os.readlink(link) == node
        except OSError:  # it ended, or belongs to someone else
            continue
        pid = int(link.split(os.sep)[-3])
        if same and pid != os.getpid():
            found[pid] = {"pid": pid, "name": _text(root, "proc", str(pid), "comm") or "?"}
    return [found[pid] for pid in sorted(found)]


def temperatures(root: Optional[str] = None) -> Dict[str, float]:
    """Degrees Celsius by sensor: the kernel's thermal zones and the Edge TPUs on PCIe. Negative: the sensor is dead."""
    root = default_root() if root is None else root
    found: Dict[str, float] = {}
    for folder in sorted(glob.glob(os.path.join(root, "sys/class/thermal/thermal_zone*"))):
        value = _number(folder, "temp")
        if value is not None:
            found["%s (%s)" % (_text(folder, "type") or "zone", os.path.basename(folder))] = value / 1000
    for folder in sorted(glob.glob(os.path.join(root, "sys/class/apex/apex_*"))):
        value = _number(folder, "temp")
        if value is not None:
            found[os.path.basename(folder)] = value / 1000
    return found


def throttled(root: Optional[str] = None) -> Optional[int]:
    """The Raspberry Pi's throttling bits (`vcgencmd get_throttled`), where the kernel shows them.

    Bit 0: under-voltage now, 1: frequency capped now, 2: throttled now, 3: soft temperature limit now;
    the same from bit 16: since the start. Source: Raspberry Pi documentation, vcgencmd.
    """
    root = default_root() if root is None else root
    for path in glob.glob(os.path.join(root, "sys/devices/platform/soc*/soc*:firmware/get_throttled")):
        text = _text(path)
        try:
            return None if text is None else int(text, 16)
        except ValueError:
            return None
    return None


def clock_mhz(root: Optional[str] = None) -> Optional[float]:
    """The processor's frequency now: the mean of its cores."""
    root = default_root() if root is None else root
    paths = glob.glob(os.path.join(root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
    values = [value for value in (_number(path) for path in paths) if value is not None]
    return sum(values) / len(values) / 1000 if values else None


def load(root: Optional[str] = None) -> Optional[float]:
    """Processes that want to run, the mean of the last minute."""
    return _number(default_root() if root is None else root, "proc/loadavg")


def energy_counters(root: Optional[str] = None) -> Dict[str, Dict[str, float]]:
    """RAPL's readable counters of whole packages: `uj` now, and `range_uj`, where they begin anew."""
    root = default_root() if root is None else root
    found = {}
    for folder in sorted(glob.glob(os.path.join(root, "sys/class/powercap/intel-rapl:*"))):
        value, span = _number(folder, "energy_uj"), _number(folder, "max_energy_range_uj")
        if value is not None and span is not None and os.path.basename(folder).count(":") == 1:
            found[_text(folder, "name") or os.path.basename(folder)] = {"uj": value, "range_uj": span}
    return found


def _memory_bytes(root: str) -> Optional[int]:
    for line in (_text(root, "proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _cpu_name(root: str) -> Optional[str]:
    """By its name; on arm64, where the kernel tells numbers alone, by its kinds of cores."""
    parts = set()
    for line in (_text(root, "proc/cpuinfo") or "").splitlines():
        key, _, value = (each.strip() for each in line.partition(":"))
        if key.lower() in ("model name", "hardware"):
            return value
        if key == "CPU part" and value in ARM_PARTS:
            parts.add("Cortex-" + ARM_PARTS[value])
    return " and ".join(sorted(parts)) or None


def edge_tpu_clock(root: Optional[str] = None) -> Optional[str]:
    """`std` or `max`, by the Debian package that libedgetpu came with; None where it came in another way."""
    root = default_root() if root is None else root
    for name in ("max", "std"):
        if glob.glob(os.path.join(root, "var/lib/dpkg/info/libedgetpu1-%s*.list" % name)):
            return name
    return None


def facts(root: Optional[str] = None) -> Facts:
    """All of it, as a plain map."""
    root = default_root() if root is None else root
    cpus = os.path.join(root, "sys/devices/system/cpu")
    governors = {_text(path) for path in glob.glob(os.path.join(cpus, "cpu[0-9]*/cpufreq/scaling_governor"))}
    most = _number(cpus, "cpu0/cpufreq/cpuinfo_max_freq")
    return {
        "board": _text(root, "proc/device-tree/model"),
        "architecture": platform.machine(),
        "system": "%s %s" % (platform.system(), platform.release()),
        "python": platform.python_version(),
        "byteorder": sys.byteorder,
        "processor": _cpu_name(root),
        "cores": os.cpu_count(),
        "governor": "/".join(sorted(name for name in governors if name)) or None,
        "clock_mhz": clock_mhz(root),
        "clock_max_mhz": None if most is None else most / 1000,
        "clock_source": _text(root, "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "clock_resolution_ns": time.get_clock_info("perf_counter").resolution * 1e9,
        "memory_bytes": _memory_bytes(root),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "load": load(root),
        "temperatures_c": temperatures(root),
        "throttled": throttled(root),
        "edge_tpus": edge_tpus(root),
        "edge_tpu_clock": edge_tpu_clock(root),
    }
