"""The measurement protocol: what is timed, what is reported, and what makes a run not comparable."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest

from deploy import Model
from deploy.contract import bundle
from deploy.contract.errors import ArgumentError
from deploy.runner import benchmark
from deploy.runner import host as machine
from deploy.runner.benchmark import MEANING, BenchmarkSettings, doubts


@pytest.fixture(scope="module")
def model() -> Any:
    return Model(bundle.Bundle(devices.packed(samples=0)), "int8")


def test_times_are_in_order_and_cover_the_run(model: Model) -> None:
    tensor = model.prepare(devices.images(1)[0])
    before = time.perf_counter_ns()
    times = benchmark.timed(model.session, tensor, 50)
    after = time.perf_counter_ns()
    flat = [before, *times.ravel().tolist(), after]
    assert times.shape == (50, 4)
    assert flat == sorted(flat)


def test_the_protocol(model: Model) -> None:
    said: list[str] = []
    report = benchmark.bench(model, BenchmarkSettings(runs=25, warmup=3), said.append)
    assert said == ["cold start", "first inference and warm-up", "steady state", "preprocessing"]
    assert json.loads(json.dumps(report)) == report
    steady = {name: metric["value"] for name, metric in report["steady"].items()}
    assert 0 < steady["median"] <= steady["p90"] <= steady["p99"] <= steady["slowest"]
    assert steady["input"] + steady["inference"] + steady["output"] <= steady["slowest"]
    assert steady["throughput"] == pytest.approx(1000 / steady["mean"])
    assert report["steady"]["median"]["note"].startswith("25 runs")
    cold = {name: metric["value"] for name, metric in report["cold_start"].items() if name != "libedgetpu"}
    assert sum(duration for name, duration in cold.items() if name != "total") == pytest.approx(cold["total"])
    assert set(cold) == {"python", "runtime", "interpreter", "inference", "total"}
    assert report["memory"]["value"] > 1 << 20
    assert (report["model"]["role"], report["host"]["python"]) == ("int8", platform.python_version())
    assert report["trace"][-1]["at_s"] >= report["trace"][0]["at_s"]
    text = benchmark.text(report)
    assert "int8 on cpu" in text
    assert "p99" in text


def test_seconds_instead_of_runs(model: Model) -> None:
    report = benchmark.bench(model, BenchmarkSettings(seconds=0.3, cold=False))
    assert report["trace"][-1]["at_s"] >= 0.3
    assert report["steady"]["mean"]["note"]
    assert report["cold_start"] == {"note": "disabled by --no-cold"}


def test_soak(model: Model) -> None:
    tensor = model.prepare(devices.images(1)[0])
    report = benchmark.soak(model.session, tensor, 2.0)
    assert [window["at_s"] for window in report["windows"]] == sorted(window["at_s"] for window in report["windows"])
    assert report["runs"] == sum(window["runs"] for window in report["windows"])
    assert report["drift"]["value"] > 0


@pytest.mark.parametrize("settings", [{"runs": 0}, {"warmup": -1}, {"seconds": 0.0}, {"runs": 10**9}, {"soak_s": -1.0}])
def test_settings_that_do_not_make_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        BenchmarkSettings(**settings)


def steady(runs: int = 60, slower: float = 1.0) -> Any:
    """Return the times of runs of one millisecond, with the second half slower by a factor."""
    durations = np.full(runs, 1e6) * np.where(np.arange(runs) < runs / 2, 1, slower)
    ends = np.cumsum(durations)
    return np.stack([ends - durations, ends - durations, ends, ends], axis=1).astype(np.int64)


def kinds(host: dict[str, Any], times: Any, device: str = "edge tpu usb", trace: Any = ()) -> list[str]:
    result = {"host": host, "model": {"device": device}, "trace": list(trace)}
    findings = doubts(result, {**host, **machine_seen()}, times)
    assert all(finding["what"] and finding["why"] and finding["hint"] for finding in findings)
    return [finding["kind"] for finding in findings]


def machine_seen(**changes: Any) -> dict[str, Any]:
    return {"temperatures_c": {"cpu": 50.0}, "clock_mhz": 1500.0, "throttled": 0, **changes}


def calm(**changes: Any) -> dict[str, Any]:
    usb = {"device": "usb:0", "speed_mbps": 5000.0}
    return {"edge_tpus": [usb], "governor": "performance", "load": 0.1, "cores": 4, **machine_seen(), **changes}


@pytest.mark.parametrize(
    ("host", "times", "trace", "kind"),
    [
        (calm(edge_tpus=[{"device": "usb:0", "speed_mbps": 480.0}]), steady(), [], "usb_2"),
        (calm(governor="powersave"), steady(), [], "powersave"),
        (calm(load=3.0), steady(), [], "busy_host"),
        (calm(), steady(), [machine_seen(throttled=0x50004)], "throttled"),
        (calm(), steady(), [machine_seen(temperatures_c={"cpu": 84.0})], "hot"),
        (calm(), steady(), [machine_seen(clock_mhz=600.0)], "clock_moved"),
        (calm(), steady(slower=1.3), [], "not_steady"),
    ],
)
def test_doubts_have_names(host: dict[str, Any], times: Any, trace: Any, kind: str) -> None:
    assert kinds(host, times, trace=trace) == [kind]


def test_every_doubt_has_a_test() -> None:
    (mark,) = [mark for mark in test_doubts_have_names.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert {row[-1] for row in mark.args[1]} == set(MEANING)


def test_a_calm_host_usb_2_on_the_cpu_and_throttling_of_the_past_give_no_doubts() -> None:
    assert kinds(calm(), steady()) == []
    assert kinds(calm(edge_tpus=[{"device": "usb:0", "speed_mbps": 480.0}]), steady(), "cpu") == []
    assert kinds(calm(), steady(), trace=[machine_seen(throttled=0x50000)]) == []


def test_energy_from_a_meter(tmp_path: Path) -> None:
    path = tmp_path / "meter.csv"
    now = time.time()
    rows = [f"{now + step / 10:.3f},{3.0 if step < 0 else 4.0}" for step in range(-20, 40)]
    path.write_text("\n".join(["time,watts", *rows, "17322"]) + "\n")
    meter = benchmark.EnergyMeter(str(path))
    meter._start = now - 0.5
    time.sleep(0.5)
    consumption = meter.end(100)
    seconds = time.time() - now
    joules = 3.0 * 0.45 + 4.0 * seconds + 0.05 * 3.5 - 4.0 * 0.05 + 4.0 * 0.05  # the step from 3 to 4 W takes 0.1 s
    assert (consumption["how"], consumption["unit"]) == ("measured", "mJ")
    assert consumption["value"] == pytest.approx(joules * 1000 / 100, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no readings of these"),
        ([(-100.0, 3.0), (-90.0, 3.0)], "no readings of these"),
        ([(-1.0, 3.0), (4.0, 3.0)], "a gap of 5.0 s"),
    ],
)
def test_a_meter_that_was_not_there(rows: list[tuple[float, float]], says: str) -> None:
    consumption = benchmark._from_meter([(1000.0 + at, watts) for at, watts in rows], 1000.0, 1003.0, 1)
    assert (consumption["how"], says in consumption["note"]) == ("missing", True), consumption


def test_a_meter_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "meter.csv"
    for line in ("3,nan", "and then"):
        path.write_text(f"time,watts\n1,2\n{line}\n4,5\n")
        with pytest.raises(ArgumentError, match=f"meter.csv:3: '{line}' is not in the form time,watts"):
            benchmark.EnergyMeter(str(path)).end(1)


def test_energy_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = iter([{"package-0": {"uj": energy_uj, "range_uj": 1000.0}} for energy_uj in (900.0, 400.0)])
    monkeypatch.setattr(machine, "energy_counters", lambda: next(counters))
    consumption = benchmark.EnergyMeter(None).end(10)
    assert consumption["value"] == pytest.approx(0.05)  # 500 uJ, with a wrap-around of the counter
    assert "without the Edge TPU" in consumption["note"]


def test_energy_without_a_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path))
    consumption = benchmark.EnergyMeter(None).end(10)
    assert (consumption["how"], consumption["note"], consumption["value"]) == ("missing", "no meter", None)
