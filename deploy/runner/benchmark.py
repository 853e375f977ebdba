"""The protocol of a latency measurement.

1. Cold start, in a child process: Python and numpy, the import of the runtime, libedgetpu and its delegate, the
   model, the first inference.
2. The first inference in this process, which loads the parameters.
3. Warm-up, not counted.
4. Steady state: N runs, or as many as fit into N seconds. Setting the inputs, the inference and reading the outputs are
   timed separately: the clock is read four times in each run. Temperatures and frequencies are read between chunks of
   runs, so that this is not timed.
   The inputs are those of the first golden sample; zeros without one.
5. Soak, optional: the medians of windows over a longer time, with the temperatures.

The result says why it is not comparable with others, if it is not: the condition, its effect, and what to do.
"""

from __future__ import annotations

import array
import dataclasses
import os
import resource
import time
from math import isfinite
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.errors import ArgumentError
from deploy.contract.preprocessing import Array
from deploy.runner import host as machine
from deploy.runner import probe
from deploy.runner.measurement import Measured, describe, measured, missing
from deploy.runner.model import Model
from deploy.runner.problems import SET_PERFORMANCE
from deploy.runner.runtime import InferenceSession

MAX_RUNS = 1_000_000
"""The largest number of timed inferences; chosen: their times take 32 MB."""
CHUNK_S = 0.5
"""How long runs follow each other before temperatures and clocks are read; chosen."""
_PEAK = "peak resident memory of this process, including Python and numpy"
Progress = Callable[[str], None]
Reading = Dict[str, Any]
"""Temperatures, clock and throttling at one moment."""
BUSY = 0.5
"""The load average per core above which a host is busy."""
DRIFT = 1.10
"""The largest ratio between the medians of the last and the first third of a steady run."""
CLOCK_MOVED = 0.8
"""The smallest ratio between the lowest and the highest clock of a comparable run."""
THROTTLING = {1: "under-voltage", 2: "frequency capped", 4: "throttled", 8: "soft temperature limit"}
"""The Raspberry Pi's bits for its present state: see `host.throttled`."""
MEANING = {
    "usb_2": ("inputs and parameters take 3 to 10 times longer", "use a USB 3 port and its own cable"),
    "powersave": ("the processor runs below its frequency", SET_PERFORMANCE),
    "busy_host": ("other processes took part of the time", "stop other processes; list them with: top"),
    "throttled": ("the processor ran below its normal speed", "use a 5 V supply of 3 A or more, and cool the board"),
    "hot": ("hot processors are throttled", "cool the board, and measure again"),
    "clock_moved": ("the runs were measured at different clocks", SET_PERFORMANCE),
    "not_steady": ("the host was not in a steady state", "measure again, with --seconds 30"),
}
"""Effect and remedy of each kind."""
Facts = Dict[str, Any]
ENERGY_UNIT = "mJ"
MAX_GAP_S = 2.0
"""The longest time between two readings, and between the measurement and a reading before or after it."""


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    """The settings of a measurement.

    Attributes:
        runs: the number of timed inferences; ignored if `seconds` is set.
        seconds: the duration of the steady state, limited to MAX_RUNS inferences.
        warmup: the number of inferences before the timed ones.
        soak_s: the duration of the soak; 0: no soak.
        meter: the file of a power meter (see `EnergyMeter`).
    """

    runs: int = 200
    seconds: Optional[float] = None
    warmup: int = 20
    soak_s: float = 0.0
    meter: Optional[str] = None
    cold: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.runs <= MAX_RUNS:
            raise ArgumentError("--runs is %d, and must be from 1 to %d" % (self.runs, MAX_RUNS), "use --runs 200")
        if self.warmup < 0 or self.soak_s < 0:
            raise ArgumentError("--warmup and --soak must not be negative", "use --warmup 20")
        if self.seconds is not None and not 0 < self.seconds < 1e6:
            raise ArgumentError("--seconds is %g, and must be between 0 and 1e6" % self.seconds, "use --seconds 10")


def timed(session: InferenceSession, tensors: Sequence[Array], runs: int) -> Array:
    """Run a model; return the clock in ns at the start and after input, inference and output: int64 [runs, 4]."""
    inputs = list(zip(session.input_indices, tensors))
    outputs = session.output_indices
    clock = time.perf_counter_ns
    set_tensor = session.interpreter.set_tensor
    invoke = session.interpreter.invoke
    get_tensor = session.interpreter.get_tensor
    times = array.array("q", bytes(8 * 4 * runs))
    position = 0
    for _ in range(runs):
        start = clock()
        for index, tensor in inputs:
            set_tensor(index, tensor)
        input_set = clock()
        invoke()
        invoked = clock()
        for index in outputs:
            get_tensor(index)
        times[position + 3] = clock()  # before the other times are stored: storing them takes time
        times[position] = start
        times[position + 1] = input_set
        times[position + 2] = invoked
        position += 4
    return np.frombuffer(times, np.int64).reshape(runs, 4)


def bench(model: Model, settings: BenchmarkSettings, progress: Progress = lambda text: None) -> Dict[str, Any]:
    """Run the whole protocol; return the measurements as a plain map.

    Raises:
        ArgumentError: the file of the meter is invalid.
    """
    session = model.session
    names = model.bundle.manifest["golden"]["inputs"]
    sample = model.bundle.array(names[0]) if names else None
    tensors = session.zeros() if sample is None else model.prepare(sample)
    before = machine.facts()
    progress("cold start")
    cold = _cold_start(model) if settings.cold else {"note": "disabled by --no-cold"}
    progress("first inference and warm-up")
    first = timed(session, tensors, 1)
    warm = timed(session, tensors, max(settings.warmup, 1))
    progress("steady state")
    energy = EnergyMeter(settings.meter)
    times, trace = _measure(session, tensors, settings, float(np.median(warm[:, 3] - warm[:, 0])) / 1e9)
    energy_per_inference = energy.end(len(times))
    progress("preprocessing")
    result: Dict[str, Any] = {
        "model": model.describe(),
        "settings": dataclasses.asdict(settings),
        "host": before,
        "cold_start": cold,
        "first_inference": measured((first[0, 3] - first[0, 0]) / 1e6, "ms", "parameters loaded, in this process"),
        "preprocessing": _preprocessing(model, sample) if names else missing("ms", "the bundle has no golden inputs"),
        "steady": _statistics(times),
        "trace": trace,
        # Linux counts ru_maxrss in KiB.
        "memory": measured(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "bytes", _PEAK),
        "energy_per_inference": energy_per_inference,
    }
    if settings.soak_s:
        progress("soak, %.0f s" % settings.soak_s)
        result["soak"] = soak(session, tensors, settings.soak_s)
    result["doubts"] = doubts(result, machine.facts(), times)
    result["comparable"] = not result["doubts"]
    return result


def _cold_start(model: Model) -> Dict[str, Any]:
    """Return the duration of each step of the cold start, and their sum."""
    outcome = model.trial  # of an Edge TPU: this process holds it now, so no other one can open it
    if outcome is None:
        outcome = probe.run(model.content, model.session.options)
    if not outcome.sound:
        return {"total": missing("ms", str(probe.failure(outcome, model.session.options)))}
    begins = {"python": 0.0}
    begins.update(outcome.seconds)
    steps = list(begins)
    note = "in a child process, files in the page cache"
    result = {}
    for step, following in zip(steps, steps[1:]):
        result[step] = measured((begins[following] - begins[step]) * 1000, "ms", note)
    result["total"] = measured(begins["end"] * 1000, "ms", note)
    return dict(result, libedgetpu=outcome.libedgetpu)


def _chunk_runs(duration_s: float, inference_s: float) -> int:
    """Return how many inferences fit into a duration: from 1 to 20,000."""
    return int(min(max(duration_s / max(inference_s, 1e-7), 1), 20_000))


def _measure(
    session: InferenceSession, tensors: Sequence[Array], settings: BenchmarkSettings, inference_s: float
) -> Tuple[Array, List[Reading]]:
    size = _chunk_runs(CHUNK_S, inference_s)
    chunks: List[Array] = []
    start = time.monotonic()
    done = 0
    trace = [_reading(0.0)]
    while True:
        if settings.seconds is None:
            size = min(size, settings.runs - done)
        chunks.append(timed(session, tensors, size))
        done += size
        elapsed = time.monotonic() - start
        trace.append(_reading(elapsed))
        complete = done >= settings.runs if settings.seconds is None else elapsed >= settings.seconds
        if complete or done + size > MAX_RUNS:
            return np.concatenate(chunks), trace


def _reading(at_s: float) -> Reading:
    return {
        "at_s": round(at_s, 3),
        "temperatures_c": machine.temperatures(),
        "clock_mhz": machine.clock_mhz(),
        "throttled": machine.throttled(),
    }


def _statistics(times: Array) -> Dict[str, Measured]:
    parts = np.diff(times, axis=1) / 1e6
    runs = (times[:, 3] - times[:, 0]) / 1e6
    note = "%d runs: set the input, run, read the output" % len(times)
    result = {}
    for name, percent in (("median", 50), ("p90", 90), ("p99", 99)):
        result[name] = measured(np.percentile(runs, percent), "ms", note)
    result["mean"] = measured(runs.mean(), "ms", note)
    result["slowest"] = measured(runs.max(), "ms", note)
    for index, name in enumerate(("input", "inference", "output")):
        result[name] = measured(np.median(parts[:, index]), "ms", "median of %d runs" % len(times))
    result["throughput"] = measured(1000 / runs.mean(), "1/s", "one run after another, %d runs" % len(times))
    return result


def _preprocessing(model: Model, sample: Array, runs: int = 20) -> Measured:
    model.prepare(sample)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        model.prepare(sample)
        times.append(time.perf_counter() - start)
    note = "one decoded sample %r, median of %d" % (list(sample.shape), runs)
    return measured(float(np.median(times)) * 1000, "ms", note)


def soak(session: InferenceSession, tensors: Sequence[Array], seconds: float) -> Dict[str, Any]:
    """Run for a long time; return the median latency and the temperatures of up to 600 windows."""
    window_s = max(1.0, seconds / 600)
    first = timed(session, tensors, 3)
    size = _chunk_runs(0.1, float(np.median(first[:, 3] - first[:, 0])) / 1e9)
    windows: List[Dict[str, Any]] = []
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        window_end = time.monotonic() + window_s
        chunks = []
        while time.monotonic() < window_end:
            times = timed(session, tensors, size)
            chunks.append(times[:, 3] - times[:, 0])
        values = np.concatenate(chunks) / 1e6
        window = _reading(time.monotonic() - start)
        window.update(runs=len(values), median_ms=float(np.median(values)), slowest_ms=float(values.max()))
        windows.append(window)
    medians = np.array([window["median_ms"] for window in windows])
    edge = max(len(medians) // 10, 1)
    drift = float(np.median(medians[-edge:]) / np.median(medians[:edge]))
    note = "median of the last tenth of %d windows, divided by that of the first tenth" % len(windows)
    runs = sum(window["runs"] for window in windows)
    return {"drift": measured(drift, "ratio", note), "windows": windows, "runs": runs}


def text(result: Dict[str, Any]) -> str:
    """Return the result of `bench` as text."""
    model = result["model"]
    host = result["host"]
    library = model["runtime"]
    lines = [
        "%s on %s, %s %s, CPU threads: %d, %s kernels"
        % (model["role"], model["device"], library["name"], library["version"], model["threads"], model["kernels"]),
        "%s, %s, governor %s, Python %s, numpy %s"
        % (
            host["board"] or host["processor"] or host["architecture"],
            host["system"],
            host["governor"] or "unknown",
            host["python"],
            library["numpy"],
        ),
    ]
    rows = dict(result["steady"])
    for name in ("first_inference", "preprocessing", "memory", "energy_per_inference"):
        rows[name] = result[name]
    lines += ["  %-22s %s" % (name.replace("_", " "), describe(value)) for name, value in rows.items()]
    steps = [(name, value) for name, value in result["cold_start"].items() if isinstance(value, dict)]
    cold = ", ".join("%s %s" % (name, describe(value, 3)) for name, value in steps)
    lines.append("  %-22s %s" % ("cold start", cold or "not measured: disabled by --no-cold"))
    if "soak" in result:
        lines.append("  %-22s drift %s" % ("soak", describe(result["soak"]["drift"])))
    lines += ["not comparable: %(what)s; %(why)s; to do: %(hint)s" % doubt for doubt in result["doubts"]]
    return "\n".join(lines)


# --- comparability --------------------------------------------------------------------


def doubts(result: Facts, after: Facts, times: Array) -> List[Dict[str, str]]:
    """Return all reasons against comparing the result of `bench` so far, with its times, with other measurements."""
    reasons = _host_doubts(result["host"], result["model"]["device"] != "cpu")
    readings = [*result["trace"], after]
    throttling = _throttling(readings)
    if throttling:
        reasons["throttled"] = "the board reports: %s" % ", ".join(throttling)
    sensors = [sensor for row in readings for sensor in row["temperatures_c"].items()]
    name, celsius = max(sensors, key=lambda sensor: sensor[1], default=("", 0.0))
    if celsius >= machine.HOT_CPU_C:
        reasons["hot"] = "%s reached %.0f degrees" % (name, celsius)
    clocks = [row["clock_mhz"] for row in readings if row["clock_mhz"]]
    if clocks and min(clocks) < CLOCK_MOVED * max(clocks):
        reasons["clock_moved"] = "the processor's clock changed between %.0f and %.0f MHz" % (min(clocks), max(clocks))
    third = max(len(times) // 3, 1)
    runs = times[:, 3] - times[:, 0]
    drift = float(np.median(runs[-third:]) / np.median(runs[:third]))
    if len(times) >= 30 and not 1 / DRIFT <= drift <= DRIFT:
        reasons["not_steady"] = "the last third of the runs took %.2f times as long as the first" % drift
    rows = []
    for kind, what in reasons.items():
        why, hint = MEANING[kind]
        rows.append({"kind": kind, "what": what, "why": why, "hint": hint})
    return rows


def _host_doubts(host: Facts, on_tpu: bool) -> Dict[str, str]:
    """Return the doubts about the state of the host before the measurement: kind and message."""
    reasons = {}
    speeds = [tpu["speed_mbps"] for tpu in host["edge_tpus"] if tpu["speed_mbps"]]
    if on_tpu and speeds and min(speeds) < machine.USB3_MBPS:
        reasons["usb_2"] = "the Edge TPU is on USB 2 (%d Mbit/s)" % min(speeds)
    if "powersave" in (host["governor"] or ""):
        reasons["powersave"] = "the CPU governor is powersave"
    cores = host["cores"] or os.cpu_count() or 1
    if host["load"] is not None and host["load"] > BUSY * cores:
        reasons["busy_host"] = "the load average before the measurement was %.1f on %d cores" % (host["load"], cores)
    return reasons


def _throttling(readings: List[Facts]) -> List[str]:
    bits = 0
    for row in readings:
        bits |= row["throttled"] or 0
    return [name for bit, name in THROTTLING.items() if bits & bit]


# --- energy ---------------------------------------------------------------------------


class EnergyMeter:
    """The energy from the creation of this object to `end`, from the file of a power meter or from RAPL.

    The counters of the processor (RAPL) are used without a file. The file has one line for each reading: time in
    seconds since 1970, a comma, watts. A header line is skipped. The program of the meter may write the file while the
    measurement runs::

        time,watts
        1732222000.10,3.41
        1732222000.20,3.44
    """

    def __init__(self, meter: Optional[str]) -> None:
        self._meter = meter
        self._counters = machine.energy_counters()
        self._start = time.time()

    def end(self, inferences: int) -> Measured:
        """Return the energy per inference, including everything else that the meter or the counters measure.

        Raises:
            ArgumentError: the meter's file has a line without two numbers.
        """
        end = time.time()
        if self._meter is not None:
            return _from_meter(_readings(self._meter), self._start, end, inferences)
        return _from_counters(self._counters, machine.energy_counters(), inferences)


def _from_counters(before: Dict[str, Any], after: Dict[str, Any], inferences: int) -> Measured:
    names = sorted(set(before) & set(after))
    if not names:
        return missing(ENERGY_UNIT, "no meter")
    used = sum((after[name]["uj"] - before[name]["uj"]) % max(before[name]["range_uj"], 1) for name in names)
    note = "RAPL counters of %s: all work of the processor, without the Edge TPU" % ", ".join(names)
    return measured(used / 1000 / inferences, ENERGY_UNIT, note)


def _readings(path: str) -> List[Tuple[float, float]]:
    rows: List[Tuple[float, float]] = []
    with open(path, encoding="utf-8", errors="replace") as stream:
        lines = stream.read().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            at, watts = (float(part) for part in line.split(",")[:2])
            if not (isfinite(at) and isfinite(watts)):
                raise ValueError
        except ValueError:
            if number == 1 or number == len(lines):  # the header; the line that the meter is writing
                continue
            what = "%s:%d: %r is not in the form time,watts" % (path, number, line[:80])
            raise ArgumentError(what, "write one reading per line")
        rows.append((at, watts))
    return sorted(rows)


def _from_meter(rows: List[Tuple[float, float]], start: float, end: float, inferences: int) -> Measured:
    near = [row for row in rows if start - MAX_GAP_S <= row[0] <= end + MAX_GAP_S]
    duration = end - start
    if len(near) < 2 or near[0][0] > start + MAX_GAP_S or near[-1][0] < end - MAX_GAP_S:
        return missing(ENERGY_UNIT, "the meter's file has no readings of these %.1f s" % duration)
    times, watts = np.array(near).T
    longest_gap = np.diff(times).max()
    if longest_gap > MAX_GAP_S:
        return missing(ENERGY_UNIT, "the meter's file has a gap of %.1f s" % longest_gap)
    at = np.concatenate([[start], times[(times > start) & (times < end)], [end]])
    power = np.interp(at, times, watts)
    joules = float((np.diff(at) * (power[1:] + power[:-1]) / 2).sum())
    note = "meter, %d readings over %.1f s, mean %.2f W, idle power included" % (len(near), duration, joules / duration)
    return measured(joules * 1000 / inferences, ENERGY_UNIT, note)
