"""Facts of the host from the kernel's files: its Edge TPUs, processor, temperatures, memory and load, and the settings
of a Raspberry Pi (config.txt).

All files are read below a root folder (the environment variable CORALLINE_ROOT), so that the /sys and /proc of another
machine can be examined. A fact that is not available is None or empty. It imports only the standard library.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

USB_IDS = (("1a6e", "089a"), ("18d1", "9302"))
"""Vendor and product of the USB Accelerator, before and after its first use, which loads its firmware."""
PCI_ID = ("0x1ac1", "0x089a")
USB3_MBPS = 5000
"""The speed of USB 3.0 as the kernel reports it; USB 2 has 480."""
HOT_CPU_C = 80.0
"""The temperature at which boards with a Raspberry Pi or an i.MX 8M begin to throttle."""
ARM_PARTS = {
    "0xd03": "A53",
    "0xd04": "A35",
    "0xd05": "A55",
    "0xd07": "A57",
    "0xd08": "A72",
    "0xd09": "A73",
    "0xd0b": "A76",
}
"""Cortex cores by the part number in /proc/cpuinfo. Source: Linux, arch/arm64/include/asm/cputype.h."""
_HYPERVISORS = (
    ("vmware", "VMware"),
    ("virtualbox", "VirtualBox"),
    ("hyperv", "Microsoft Corporation Virtual Machine"),
    ("kvm", "QEMU"),
    ("kvm", "KVM"),
)
"""The names that hypervisors write into /sys/class/dmi/id (sys_vendor and product_name)."""
PI_CONFIGS = ("/boot/firmware/config.txt", "/boot/config.txt")
"""Where config.txt is: since Raspberry Pi OS of Debian 12, and before."""
_PI_5 = re.compile(r"Raspberry Pi (5|500|Compute Module 5)\b")
HostFacts = Dict[str, Any]


def version_numbers(text: str) -> Tuple[int, ...]:
    """Return the numbers at the start of a version: `2.5.0.post1` gives (2, 5, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def needs_numpy_1(runtime: str, version: str) -> bool:
    """Return whether a runtime was built for numpy 1: tflite-runtime up to 2.14, the last one on the package index."""
    return runtime == "tflite_runtime" and version_numbers(version)[:2] <= (2, 14)


def default_root() -> str:
    """Return the folder that /sys, /proc and /dev are in."""
    return os.environ.get("CORALLINE_ROOT", "/")


def text_of(*parts: str) -> Optional[str]:
    """Return the first MiB of a file without NUL bytes and spaces at its ends; None if it cannot be read."""
    try:
        with open(os.path.join(*parts), "rb") as stream:
            return stream.read(1 << 20).decode("utf-8", "replace").strip("\0 \n")
    except OSError:
        return None


def _number(*parts: str) -> Optional[float]:
    text = text_of(*parts)
    try:
        return None if text is None else float(text.split()[0])
    except (ValueError, IndexError):
        return None


def edge_tpus(root: Optional[str] = None) -> List[HostFacts]:
    """Return the Edge TPUs on USB and PCIe, in the order of the bus.

    Each has `device` (libedgetpu's name, `usb:0`), `id`, `node` (the device file, or None if it is missing),
    `accessible`, `speed_mbps` (USB), `link` (PCIe) and `temperature_c` (PCIe).
    """
    root = default_root() if root is None else root
    return _usb(root) + _pci(root)


def _usb(root: str) -> List[HostFacts]:
    tpus: List[HostFacts] = []
    for folder in sorted(glob.glob(os.path.join(root, "sys/bus/usb/devices/*"))):
        identity = (text_of(folder, "idVendor"), text_of(folder, "idProduct"))
        if identity not in USB_IDS:
            continue
        bus = _number(folder, "busnum")
        number = _number(folder, "devnum")
        node = None
        if bus is not None and number is not None:
            node = os.path.join(root, "dev/bus/usb/%03d/%03d" % (bus, number))
        tpu = _edge_tpu("usb:%d" % len(tpus), "%s:%s" % identity, node)
        tpus.append(dict(tpu, speed_mbps=_number(folder, "speed")))
    return tpus


def _edge_tpu(device: str, identity: str, node: Optional[str]) -> HostFacts:
    return {
        "device": device,
        "id": identity,
        "node": node,
        "accessible": node is not None and os.access(node, os.R_OK | os.W_OK),
        "speed_mbps": None,
        "link": None,
        "temperature_c": None,
    }


def _pci(root: str) -> List[HostFacts]:
    tpus: List[HostFacts] = []
    links = sorted(glob.glob(os.path.join(root, "sys/class/apex/apex_*")))
    apexes = {os.path.basename(os.path.realpath(os.path.join(link, "device"))): link for link in links}
    for folder in sorted(glob.glob(os.path.join(root, "sys/bus/pci/devices/*"))):
        if (text_of(folder, "vendor"), text_of(folder, "device")) != PCI_ID:
            continue
        apex = apexes.get(os.path.basename(folder))
        node = os.path.join(root, "dev", os.path.basename(apex)) if apex else None
        tpu = _edge_tpu("pci:%d" % len(tpus), "1ac1:089a", node)
        tpu["link"] = text_of(folder, "current_link_speed")
        celsius = _number(apex, "temp") if apex else None
        if celsius is not None:
            tpu["temperature_c"] = celsius / 1000
        tpus.append(tpu)
    return tpus


def container(root: Optional[str] = None) -> Optional[str]:
    """Return the kind of container that this is, such as docker, podman or lxc; None outside of containers.

    Source: systemd, "The Container Interface"; .dockerenv and .containerenv are files of Docker and Podman.
    """
    root = default_root() if root is None else root
    named = text_of(root, "run/systemd/container")
    for variable in (text_of(root, "proc/1/environ") or "").split("\0"):
        if variable.startswith("container="):
            named = variable[len("container=") :] or "other"
    if named:
        return named
    if os.path.exists(os.path.join(root, ".dockerenv")):
        return "docker"
    return "podman" if os.path.exists(os.path.join(root, "run/.containerenv")) else None


def machine(root: Optional[str] = None) -> Optional[str]:
    """Return the hypervisor of this virtual machine: wsl, vmware, virtualbox, hyperv or kvm; None on real hardware."""
    root = default_root() if root is None else root
    if "microsoft" in (text_of(root, "proc/sys/kernel/osrelease") or "").lower():
        return "wsl"
    folder = os.path.join(root, "sys/class/dmi/id")
    product = " ".join(text_of(folder, name) or "" for name in ("sys_vendor", "product_name"))
    for name, sign in _HYPERVISORS:
        if sign in product:
            return name
    return None


def holders(node: str, root: Optional[str] = None) -> List[HostFacts]:
    """Return `pid` and `name` of the other processes that have a device file open, if this user may see them."""
    root = default_root() if root is None else root
    processes = {}
    for link in glob.glob(os.path.join(root, "proc/[0-9]*/fd/*")):
        try:
            same = os.readlink(link) == node
        except OSError:  # the process ended, or belongs to another user
            continue
        pid = int(link.split(os.sep)[-3])
        if same and pid != os.getpid():
            processes[pid] = {"pid": pid, "name": text_of(root, "proc", str(pid), "comm") or "?"}
    return [processes[pid] for pid in sorted(processes)]


def temperatures(root: Optional[str] = None) -> Dict[str, float]:
    """Return degrees Celsius of the thermal zones and of Edge TPUs on PCIe. Negative: the sensor does not respond."""
    root = default_root() if root is None else root
    celsius: Dict[str, float] = {}
    for folder in sorted(glob.glob(os.path.join(root, "sys/class/thermal/thermal_zone*"))):
        value = _number(folder, "temp")
        if value is not None:
            celsius["%s (%s)" % (text_of(folder, "type") or "zone", os.path.basename(folder))] = value / 1000
    for folder in sorted(glob.glob(os.path.join(root, "sys/class/apex/apex_*"))):
        value = _number(folder, "temp")
        if value is not None:
            celsius[os.path.basename(folder)] = value / 1000
    return celsius


def throttled(root: Optional[str] = None) -> Optional[int]:
    """Return the Raspberry Pi's throttling bits (`vcgencmd get_throttled`), or None.

    Bit 0: under-voltage now, 1: frequency capped now, 2: throttled now, 3: soft temperature limit now.
    Bits 16 to 19: the same, since the start. Source: Raspberry Pi documentation, vcgencmd.
    """
    root = default_root() if root is None else root
    for path in glob.glob(os.path.join(root, "sys/devices/platform/soc*/soc*:firmware/get_throttled")):
        text = text_of(path)
        try:
            return None if text is None else int(text, 16)
        except ValueError:
            return None
    return None


def clock_mhz(root: Optional[str] = None) -> Optional[float]:
    """Return the current frequency of the processor: the mean of its cores."""
    root = default_root() if root is None else root
    paths = glob.glob(os.path.join(root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
    values = [value for value in map(_number, paths) if value is not None]
    return sum(values) / len(values) / 1000 if values else None


def load(root: Optional[str] = None) -> Optional[float]:
    """Return the load average of the last minute."""
    return _number(default_root() if root is None else root, "proc/loadavg")


def energy_counters(root: Optional[str] = None) -> Dict[str, Dict[str, float]]:
    """Return the readable RAPL counters of processor packages: `uj`, and `range_uj`, at which they wrap around."""
    root = default_root() if root is None else root
    counters = {}
    for folder in sorted(glob.glob(os.path.join(root, "sys/class/powercap/intel-rapl:*"))):
        value = _number(folder, "energy_uj")
        span = _number(folder, "max_energy_range_uj")
        if value is not None and span is not None and os.path.basename(folder).count(":") == 1:
            counters[text_of(folder, "name") or os.path.basename(folder)] = {"uj": value, "range_uj": span}
    return counters


def _memory_bytes(root: str) -> Optional[int]:
    for line in (text_of(root, "proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _cpu_name(root: str) -> Optional[str]:
    """Return the name of the processor; on arm64, where the kernel only has part numbers, the types of its cores."""
    parts = set()
    for line in (text_of(root, "proc/cpuinfo") or "").splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key.lower() in ("model name", "hardware"):
            return value
        if key == "CPU part" and value in ARM_PARTS:
            parts.add("Cortex-" + ARM_PARTS[value])
    return " and ".join(sorted(parts)) or None


def edge_tpu_clock(root: Optional[str] = None) -> Optional[str]:
    """Return the clock of the Debian package of libedgetpu, `std` or `max`; None without such a package."""
    root = default_root() if root is None else root
    for name in ("max", "std"):
        if glob.glob(os.path.join(root, "var/lib/dpkg/info/libedgetpu1-%s*.list" % name)):
            return name
    return None


def facts(root: Optional[str] = None) -> HostFacts:
    """Return all facts as a plain map."""
    root = default_root() if root is None else root
    cpus = os.path.join(root, "sys/devices/system/cpu")
    governors = {text_of(path) for path in glob.glob(os.path.join(cpus, "cpu[0-9]*/cpufreq/scaling_governor"))}
    max_khz = _number(cpus, "cpu0/cpufreq/cpuinfo_max_freq")
    return {
        "board": text_of(root, "proc/device-tree/model"),
        "container": container(root),
        "machine": machine(root),
        "architecture": platform.machine(),
        "system": "%s %s" % (platform.system(), platform.release()),
        "python": platform.python_version(),
        "byteorder": sys.byteorder,
        "processor": _cpu_name(root),
        "cores": os.cpu_count(),
        "governor": "/".join(sorted(name for name in governors if name)) or None,
        "clock_mhz": clock_mhz(root),
        "clock_max_mhz": None if max_khz is None else max_khz / 1000,
        "clock_source": text_of(root, "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "clock_resolution_ns": time.get_clock_info("perf_counter").resolution * 1e9,
        "memory_bytes": _memory_bytes(root),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "load": load(root),
        "temperatures_c": temperatures(root),
        "throttled": throttled(root),
        "edge_tpus": edge_tpus(root),
        "edge_tpu_clock": edge_tpu_clock(root),
    }


def pi_model(root: str) -> str:
    """Return the name of the board; empty if it is not a Raspberry Pi."""
    name = text_of(root, "proc/device-tree/model") or ""
    return name if "Raspberry Pi" in name else ""


def is_pi_5(root: str) -> bool:
    """Return whether this is a Raspberry Pi 5, 500 or Compute Module 5."""
    return _PI_5.search(pi_model(root)) is not None


def pi_config(root: str) -> str:
    """Return the path of config.txt, without the root folder."""
    paths = [path for path in PI_CONFIGS if os.path.exists(os.path.join(root, path[1:]))]
    return (paths or ["/boot/config.txt"])[0]


def pi_settings(root: str) -> List[str]:
    """Return the lines of config.txt without comments, spaces and sections. Files that it includes are not read."""
    text = text_of(root, pi_config(root)[1:]) or ""
    lines = ("".join(line.partition("#")[0].split()) for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("[")]


def has_pi_setting(root: str, start: str, *words: str) -> bool:
    """Return whether a line of config.txt begins with `start` and contains all words."""
    return any(line.startswith(start) and all(word in line for word in words) for line in pi_settings(root))


def pi_usb_limited(root: str) -> Optional[bool]:
    """Return whether the firmware limits the USB ports to 600 mA in total; None if it does not say.

    The firmware of a Raspberry Pi 5 writes big-endian numbers of 32 bits into the device tree.
    """
    path = os.path.join(root, "proc/device-tree/chosen/power/usb_max_current_enable")
    try:
        with open(path, "rb") as stream:
            content = stream.read(4)
    except OSError:
        return None
    return int.from_bytes(content, "big") == 0 if len(content) == 4 else None
