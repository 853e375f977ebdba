"""The first screen of the report: what the target does with the result, and the most important values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compress.core.measurement import COSTS, Metric
from compress.report.blocks import joined
from compress.report.record import DeviceRecord, HostLatencyRecord, ModelsRecord, PlacementRecord, RunRecord
from compress.report.wording import MAX_PROSE, interval, number, sentence, shorten, show

MAX_DEVICES = 3
SHOWN = tuple(metric for metric in COSTS if metric.name in ("size_bytes", "macs"))
"""The costs among the most important values."""


@dataclass(frozen=True)
class KeyFigure:
    """One of the most important values: "0.989 → 0.987", and its change with the interval."""

    label: str
    value: str
    more: str = ""


def headline(record: RunRecord) -> str:
    """Return sentences about the result on its target: operators, latency, memory for parameters, devices."""
    return " ".join(_sentences(record))


def _sentences(record: RunRecord) -> Iterator[str]:
    if record.placement is not None:
        yield from _placement(record.placement)
    rejected = record.placement is not None and bool(record.placement.failure)
    if record.latency is not None and not (rejected and record.latency.provenance == "predicted"):
        yield _latency(record.latency, record)
    if record.placement is not None:
        yield from _parameters(record.placement)
    for device in record.devices[:MAX_DEVICES]:
        yield from _device(device)


def _placement(placement: PlacementRecord) -> Iterator[str]:
    total = len(placement.ops)
    if placement.failure:
        yield sentence(f"The compiler rejects the model: {shorten(placement.failure, MAX_PROSE)}")
    elif total:
        on_tpu = sum(operator.on_tpu for operator in placement.ops)
        origin = "read from the compiled file" if placement.origin == "measured" else "predicted"
        if on_tpu == total:
            yield f"All {total:,} operators run on the Edge TPU ({origin})."
            return
        macs = sum(placement.macs.values())
        share = f" with {number(placement.macs.get('tpu', 0) / macs, 'fraction')} of the MACs" if macs else ""
        yield f"{on_tpu:,} of {total:,} operators run on the Edge TPU{share}, {total - on_tpu:,} on the CPU ({origin})."


def _latency(latency: HostLatencyRecord, record: RunRecord) -> str:
    """Return the latency on the host; for a target without hosts, on this machine."""
    host = shorten(latency.host)
    if latency.value is None:
        return sentence(f"The latency on {host} is unknown: {shorten(latency.note, MAX_PROSE)}")
    text = f"{number(latency.value, 'ms')} for each inference, {latency.provenance} on {host}"
    if latency.low is not None and latency.high is not None:
        text += f" ({number(latency.low, 'ms')} to {number(latency.high, 'ms')})"
    change = show(record.changes.get("latency_ratio"), "latency_ratio")
    if latency.provenance == "measured" and change.style != "missing":
        text += f", {change.text} the latency of the original"
    return f"{text}."


def _parameters(placement: PlacementRecord) -> Iterator[str]:
    cached, streamed = placement.cached_bytes, placement.streamed_bytes
    if cached is None or streamed is None or placement.failure:
        return
    if streamed:
        yield (
            f"{number(cached, 'bytes')} of parameters stay in the memory of the chip, and {number(streamed, 'bytes')} "
            "are sent at every inference (predicted)."
        )
    else:
        yield f"{number(cached, 'bytes')} of parameters fit into the memory of the chip (predicted)."


def _device(device: DeviceRecord) -> Iterator[str]:
    median = device.measurements.get("latency_ms")
    if median is not None and median.value is not None:
        yield f"{number(median.value, 'ms')} measured on the device {shorten(device.device)}."


def key_figures(record: RunRecord) -> tuple[KeyFigure, ...]:
    """Return the quality, the size and the MACs of both models; empty if they were not compared."""
    if record.models is None:
        return ()
    return tuple(_key_figure(record, record.models, metric) for metric in (record.quality, *SHOWN))


def _key_figure(record: RunRecord, models: ModelsRecord, metric: Metric) -> KeyFigure:
    before, after = (show(model.measurements.get(metric.name)) for model in (models.original, models.result))
    change = record.changes.get(metric.change)
    shown = show(change, metric.change)
    more = ""
    if change is not None and shown.style != "missing":
        word = metric.change.rpartition("_")[2]
        name = "" if word == "ratio" else word
        more = joined(" ", name, shown.text, interval(change, metric.change), "of the original" * (word == "ratio"))
    origins = {cell.style for cell in (before, after)} - {"measured"}
    if origins:
        more = joined("; ", more, ", ".join(sorted(origins)))
    return KeyFigure(metric.label, f"{before.text} → {after.text}", more)
