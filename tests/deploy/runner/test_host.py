"""Facts of a host, read from a fake root folder."""

from __future__ import annotations

import json
from pathlib import Path

import devices
import pytest

from deploy.runner import host


def write(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


def test_a_usb_accelerator(tmp_path: Path) -> None:
    root = str(devices.host(tmp_path, speed="480"))
    (edge_tpu,) = host.edge_tpus(root)
    assert edge_tpu == {
        "device": "usb:0",
        "id": "18d1:9302",
        "node": f"{root}/dev/bus/usb/002/007",
        "accessible": True,
        "speed_mbps": 480.0,
        "link": None,
        "temperature_c": None,
    }


def test_a_pcie_module(tmp_path: Path) -> None:
    root = str(devices.host(tmp_path, usb=False))
    (edge_tpu,) = host.edge_tpus(root)
    assert (edge_tpu["device"], edge_tpu["node"], edge_tpu["accessible"]) == ("pci:0", f"{root}/dev/apex_0", True)
    assert (edge_tpu["link"], edge_tpu["temperature_c"]) == ("5.0 GT/s PCIe", 45.5)
    assert host.temperatures(root) == {"apex_0": 45.5}


def test_a_dead_sensor_and_other_devices(tmp_path: Path) -> None:
    root = devices.host(tmp_path, usb=False)
    (root / "sys/class/apex/apex_0/temp").write_text("-89700\n")
    write(root, sys__bus__usb__devices__usb1__idVendor="1d6b", sys__bus__usb__devices__usb1__idProduct="0002")
    (edge_tpu,) = host.edge_tpus(str(root))
    assert edge_tpu["temperature_c"] == -89.7


def test_a_board(tmp_path: Path) -> None:
    cpu = "sys__devices__system__cpu__cpu"
    files = {f"{cpu}{core}__cpufreq__scaling_governor": "ondemand" for core in range(2)}
    files.update({f"{cpu}{core}__cpufreq__scaling_cur_freq": str(600000 + core * 900000) for core in range(2)})
    files["proc__device-tree__model"] = "Raspberry Pi 5 Model B Rev 1.0\0"
    files["sys__devices__platform__soc__soc:firmware__get_throttled"] = "50005"
    files["sys__class__thermal__thermal_zone0__temp"] = "61200"
    files["sys__class__thermal__thermal_zone0__type"] = "cpu-thermal"
    files["var__lib__dpkg__info__libedgetpu1-max:arm64.list"] = ""
    files["proc__meminfo"] = "MemTotal:        4096 kB\nMemFree: 1 kB"
    files[f"{cpu}0__cpufreq__cpuinfo_max_freq"] = "2400000"
    write(tmp_path, **files)
    facts = host.facts(str(tmp_path))
    assert facts["board"] == "Raspberry Pi 5 Model B Rev 1.0"
    assert (facts["governor"], facts["clock_mhz"], facts["clock_max_mhz"]) == ("ondemand", 1050.0, 2400.0)
    assert (facts["memory_bytes"], facts["throttled"], facts["edge_tpu_clock"]) == (4096 * 1024, 0x50005, "max")
    assert facts["temperatures_c"] == {"cpu-thermal (thermal_zone0)": 61.2}


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd08\n\nCPU part\t: 0xd08", "Cortex-A72"),
        ("CPU part\t: 0xd09\n\nCPU part\t: 0xd03", "Cortex-A53 and Cortex-A73"),
        ("CPU part\t: 0xfff", None),
        ("model name\t: Some CPU @ 2 GHz\nmodel\t: 7", "Some CPU @ 2 GHz"),
    ],
)
def test_the_name_of_the_processor(cpuinfo: str, name: str | None, tmp_path: Path) -> None:
    write(tmp_path, proc__cpuinfo=cpuinfo)
    assert host.facts(str(tmp_path))["processor"] == name


def test_nothing_is_guessed(tmp_path: Path) -> None:
    facts = host.facts(str(tmp_path))
    for key in ("board", "governor", "clock_mhz", "memory_bytes", "load", "throttled", "edge_tpu_clock", "processor"):
        assert facts[key] is None, key
    assert (facts["edge_tpus"], facts["temperatures_c"]) == ([], {})


def test_nonsense_in_the_files(tmp_path: Path) -> None:
    write(tmp_path, proc__loadavg="", sys__class__thermal__thermal_zone0__temp="hot", proc__meminfo="MemFree: 1 kB")
    write(tmp_path, **{"sys__devices__platform__soc__soc:firmware__get_throttled": "zzz"})
    facts = host.facts(str(tmp_path))
    assert (facts["load"], facts["temperatures_c"], facts["memory_bytes"], facts["throttled"]) == (None, {}, None, None)


def test_this_host() -> None:
    facts = host.facts("/")
    assert facts["memory_bytes"] > 1 << 20
    assert json.loads(json.dumps(facts)) == facts


def test_who_has_a_file_open(tmp_path: Path) -> None:
    for pid, target in (("12", "dev/x"), ("7", "dev/x"), ("8", "dev/y")):
        (tmp_path / "proc" / pid / "fd").mkdir(parents=True)
        (tmp_path / "proc" / pid / "fd" / "0").symlink_to(tmp_path / target)
    write(tmp_path, proc__7__comm="python3")
    processes = host.holders(str(tmp_path / "dev/x"), str(tmp_path))
    assert processes == [{"pid": 7, "name": "python3"}, {"pid": 12, "name": "?"}]


def test_energy_counters_are_of_whole_packages(tmp_path: Path) -> None:
    folder = "sys__class__powercap__intel-rapl:"
    for name in ("0", "0:0"):
        write(tmp_path, **{f"{folder}{name}__energy_uj": "123", f"{folder}{name}__max_energy_range_uj": "1000"})
        write(tmp_path, **{f"{folder}{name}__name": f"package-{name}"})
    assert host.energy_counters(str(tmp_path)) == {"package-0": {"uj": 123.0, "range_uj": 1000.0}}
