"""Latency as a protocol: what is timed apart, under which conditions, and what makes a run not comparable.

1. Cold start, in a process of its own: Python and numpy, the runtime's import, libedgetpu and its delegate, the
   model, the first inference.
2. The first inference in this process: parameters are loaded.
3. Warm-up, not counted.
4. Steady state: N runs, or as many as fit into N seconds. Setting the input, the inference itself and reading
   the output are timed apart, with four readings of the clock for each run and nothing else between them.
   Temperatures and frequencies are read between chunks of runs, outside of what is timed.
5. Soak, if asked for: windows over a longer time, their medians beside the temperature.

Runs on Python 3.7 with numpy and a TFLite runtime.
"""

from __future__ import annotations

import array
import dataclasses
import resource
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from deploy import host as machine
from deploy import probe
from deploy.comparability import doubts
from deploy.contract.errors import ArgumentError
from deploy.contract.preprocessing import Array
from deploy.energy import Stretch
from deploy.measurement import Measured, measured, missing, told
from deploy.model import Model
from deploy.runtime import InferenceSession

MOST_RUNS = 1_000_000
CHUNK_S = 0.5
Progress = Callable[[str], None]
Seen = Dict[str, Any]
"""Temperatures, clock and throttling at one moment."""


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    """What is measured how often.

    Attributes:
        runs: timed inferences; not used where `seconds` is given.
        seconds: how long to measure; at most MOST_RUNS inferences.
        warmup: inferences before, not counted.
        soak_s: length of the soak; 0: none.
        meter: a meter's file (see `energy`).
        cold: whether to measure the cold start too.
    """

    runs: int = 200
    seconds: Optional[float] = None
    warmup: int = 20
    soak_s: float = 0.0
    meter: Optional[str] = None
    cold: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.runs <= MOST_RUNS or self.warmup < 0 or self.soak_s < 0:
            raise ArgumentError("there must be from 1 to %d runs, and no negative number" % MOST_RUNS, "use --runs 200")
        if self.seconds is not None and not 0 < self.seconds < 1e6:
            raise ArgumentError("%r seconds cannot be measured" % self.seconds, "use --seconds 10")


def timed(session: InferenceSession, tensor: Array, runs: int) -> Array:
    """Runs a model and times it: int64 [runs, 4], the clock before, and after input, inference and output, in ns."""
    place, result, clock = session.input_index, session.output_index, time.perf_counter_ns
    put, invoke, get = session.interpreter.set_tensor, session.interpreter.invoke, session.interpreter.get_tensor
    times = array.array("q", bytes(8 * 4 * runs))
    at = 0
    for _ in range(runs):
        before = clock()
        put(place, tensor)
        given = clock()
        invoke()
        done = clock()
        get(result)
        times[at + 3] = clock()
        times[at], times[at + 1], times[at + 2] = before, given, done
        at += 4
    return np.frombuffer(times, np.int64).reshape(runs, 4)


def bench(model: Model, settings: BenchmarkSettings, progress: Progress = lambda text: None) -> Dict[str, Any]:
    """Everything that the protocol measures, as a plain map.

    Raises:
        ArgumentError: the bundle has no golden input to run with, or the meter's file cannot be used.
    """
    names = model.bundle.manifest["golden"]["inputs"]
    if not names:
        raise ArgumentError("the bundle has no golden input to run with", "package it again")
    image = model.bundle.array(names[0])
    tensor, session = model.prepare(image), model.session
    before = machine.facts()
    progress("cold start")
    cold = _cold(model) if settings.cold else {"note": "not asked for"}
    progress("first inference and warm-up")
    first = timed(session, tensor, 1)
    warm = timed(session, tensor, max(settings.warmup, 1))
    progress("steady state")
    energy = Stretch(settings.meter)
    times, trace = _steady(session, tensor, settings, float(np.median(warm[:, 3] - warm[:, 0])) / 1e9)
    spent = energy.end(len(times))
    progress("preprocessing")
    result: Dict[str, Any] = {
        "model": model.describe(),
        "settings": dataclasses.asdict(settings),
        "host": before,
        "cold_start": cold,
        "first_inference": measured((first[0, 3] - first[0, 0]) / 1e6, "ms", "parameters loaded, in this process"),
        "preprocessing": _preprocessing(model, image),
        "steady": _steady_state(times),
        "trace": trace,
        "memory": _memory(),
        "energy_per_inference": spent,
    }
    if settings.soak_s:
        progress("soak, %.0f s" % settings.soak_s)
        result["soak"] = soak(session, tensor, settings.soak_s)
    result["doubts"] = doubts(result, machine.facts(), times)
    result["comparable"] = not result["doubts"]
    return result


def _cold(model: Model) -> Dict[str, Any]:
    """The steps of the cold start, in ms, and their sum."""
    outcome = model.trial  # with an Edge TPU, from before this process took it: it can have one only
    if outcome is None:
        outcome = probe.run(model.content, model.session.options)
    if not outcome.sound:
        return {"total": missing("ms", str(probe.failure(outcome, model.session.options)))}
    at = {"python": 0.0}
    at.update(outcome.seconds)
    steps = list(at)
    note = "in a process of its own, files in the page cache"
    found = {step: measured((at[later] - at[step]) * 1000, "ms", note) for step, later in zip(steps, steps[1:])}
    found["total"] = measured(at["end"] * 1000, "ms", note)
    return dict(found, libedgetpu=outcome.libedgetpu)


def _steady(
    session: InferenceSession, tensor: Array, settings: BenchmarkSettings, estimate_s: float
) -> Tuple[Array, List[Dict[str, Any]]]:
    """The times of all runs, and what was seen between the chunks."""
    size = int(min(max(CHUNK_S / max(estimate_s, 1e-7), 1), 20_000))
    chunks: List[Array] = []
    began, done = time.monotonic(), 0
    trace = [_seen(0.0)]
    while True:
        if settings.seconds is None:
            size = min(size, settings.runs - done)
        chunks.append(timed(session, tensor, size))
        done += size
        elapsed = time.monotonic() - began
        trace.append(_seen(elapsed))
        over = done >= settings.runs if settings.seconds is None else elapsed >= settings.seconds
        if over or done + size > MOST_RUNS:
            return np.concatenate(chunks), trace


def _seen(at_s: float) -> Seen:
    return {
        "at_s": round(at_s, 3),
        "temperatures_c": machine.temperatures(),
        "clock_mhz": machine.clock_mhz(),
        "throttled": machine.throttled(),
    }


def _steady_state(times: Array) -> Dict[str, Measured]:
    """Percentiles of whole runs, their parts, and throughput."""
    steps = np.diff(times, axis=1) / 1e6
    whole = (times[:, 3] - times[:, 0]) / 1e6
    note = "%d runs, input set, inference, output read" % len(times)
    found = {name: measured(np.percentile(whole, share), "ms", note) for name, share in _SHARES.items()}
    found["mean"], found["slowest"] = measured(whole.mean(), "ms", note), measured(whole.max(), "ms", note)
    for place, name in enumerate(("input", "inference", "output")):
        found[name] = measured(np.median(steps[:, place]), "ms", "median of %d runs" % len(times))
    found["throughput"] = measured(1000 / whole.mean(), "1/s", "one after the other, %d runs" % len(times))
    return found


_SHARES = {"median": 50, "p90": 90, "p99": 99}


def _preprocessing(model: Model, image: Array, runs: int = 20) -> Measured:
    model.prepare(image)
    times = []
    for _ in range(runs):
        before = time.perf_counter()
        model.prepare(image)
        times.append(time.perf_counter() - before)
    return measured(
        float(np.median(times)) * 1000, "ms", "one decoded sample %r, median of %d" % (list(image.shape), runs)
    )


def _memory() -> Measured:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return measured(peak, "bytes", "largest resident set of this process, Python and numpy included")


def soak(session: InferenceSession, tensor: Array, seconds: float) -> Dict[str, Any]:
    """A long run in at most some 600 windows: how the median moves beside the temperature."""
    window_s = max(1.0, seconds / 600)
    estimate = timed(session, tensor, 3)
    size = int(min(max(0.1 / max(float(np.median(estimate[:, 3] - estimate[:, 0])) / 1e9, 1e-7), 1), 20_000))
    windows: List[Dict[str, Any]] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        until, whole = time.monotonic() + window_s, []
        while time.monotonic() < until:
            times = timed(session, tensor, size)
            whole.append(times[:, 3] - times[:, 0])
        values = np.concatenate(whole) / 1e6
        seen = _seen(time.monotonic() - began)
        windows.append(dict(seen, runs=len(values), median_ms=float(np.median(values)), slowest_ms=float(values.max())))
    medians = np.array([window["median_ms"] for window in windows])
    edge = max(len(medians) // 10, 1)
    drift = float(np.median(medians[-edge:]) / np.median(medians[:edge]))
    note = "median of the last tenth of %d windows over that of the first" % len(windows)
    return {"drift": measured(drift, "ratio", note), "windows": windows, "runs": sum(each["runs"] for each in windows)}


def text(result: Dict[str, Any]) -> str:
    """For people."""
    model, host, steady = result["model"], result["host"], result["steady"]
    lines = [
        "%s on %s, %s %s, %d thread%s, %s kernels"
        % (
            model["role"],
            model["device"],
            model["runtime"]["name"],
            model["runtime"]["version"],
            model["threads"],
            "s" * (model["threads"] != 1),
            model["kernels"],
        ),
        "%s, %s, governor %s, Python %s, numpy %s"
        % (
            host["board"] or host["processor"] or host["architecture"],
            host["system"],
            host["governor"] or "unknown",
            host["python"],
            model["runtime"]["numpy"],
        ),
    ]
    lines += ["  %-22s %s" % (name.replace("_", " "), told(value)) for name, value in steady.items()]
    for name in ("first_inference", "preprocessing", "memory", "energy_per_inference"):
        lines.append("  %-22s %s" % (name.replace("_", " "), told(result[name])))
    steps = ["%s %s" % (name, told(each, 3)) for name, each in result["cold_start"].items() if isinstance(each, dict)]
    lines.append("  %-22s %s" % ("cold start", ", ".join(steps) or "not measured: not asked for"))
    if "soak" in result:
        lines.append("  %-22s drift %s" % ("soak", told(result["soak"]["drift"])))
    lines += ["not comparable: %(what)s; %(why)s; to do: %(todo)s" % each for each in result["doubts"]]
    return "\n".join(lines)
