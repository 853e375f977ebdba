"""Published latencies, the constants fitted to them, and the error of each prediction."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from compress.targets.edgetpu import latency
from compress.targets.edgetpu.constants import CONSTANTS, LatencyConstants
from compress.targets.edgetpu.latency import ArrayLayer, BusTraffic

HOSTS = ("pcie", "usb3", "devboard", "usb2")
JUDGED = ("pcie", "usb3", "devboard")
KNOWN = {
    "conv_ns": 2.05,
    "window_ns": 2.05,
    "layer_us": 2.0,
    "fixed_ms": {"pcie": 0.07, "usb3": 0.65, "devboard": 0.65, "usb2": 0.4},
    "transfer_ms_per_mb": {"pcie": 2.65, "usb3": 2.74, "devboard": 2.65, "usb2": 27.5},
    "output_ms_per_mb": {"pcie": 7.1, "usb3": 18.6, "devboard": 44.9, "usb2": 60.0},
    "compute_factor": dict.fromkeys(HOSTS, 1.0),
}
"""Values known without these rows.

They come from the clock, from an earlier fit of the starts and outputs of other hosts, and from stacks of layers.
"""
STACK = re.compile(r"conv(\d+)x(\d+)x(\d+)layers_(\d+)x(\d+)_F(\d+)")
"""A published stack of convolutions: kernel, layers, map, and filters of each layer. The image has 3 channels."""
STACKS_COUNT_AS = 4
"""The weight of all stacks together, as a number of networks: they are one architecture."""
FAMILIES = ("mobilenet", "inception", "resnet", "vgg", "squeezenet", "efficientnet", "unet", "stack")
PRIOR_WEIGHT = 0.1
"""The weight with which a constant is held near its known value."""
LOSS_SCALE = 0.08
"""The error, as a logarithm, above which a row counts less."""
COVERED = 0.95
"""The share of errors that an interval must cover."""


@dataclass(frozen=True)
class Row:
    """One published measurement, and the inputs of its prediction."""

    model: str
    host: str
    clock: str
    measured_ms: float
    layers: tuple[ArrayLayer, ...]
    sent: BusTraffic

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of equal layers, not a network for practical use."""
        return self.model.startswith("stack")

    @property
    def family(self) -> str:
        """The architecture of the network; PoseNet counts as MobileNet."""
        return "mobilenet" if self.model.startswith("posenet") else next(filter(self.model.startswith, FAMILIES))


def network(table: Mapping[str, Any]) -> tuple[tuple[ArrayLayer, ...], BusTraffic]:
    """Return layers and bus traffic of a table: rows of t, h, w, k, kw, ci, co, ih, iw; inb and outb in bytes."""
    layers = tuple(_layer(row) for row in table["ops"])
    layers = tuple(replace(layer, parameters=latency.layer_parameters(layer)) for layer in layers)
    return layers, _traffic(layers, table["inb"], _outputs(layers, table["outb"]))


def _traffic(layers: Sequence[ArrayLayer], input_bytes: int, output_bytes: int) -> BusTraffic:
    streamed = latency.streamed_bytes(layers)
    return BusTraffic(input_bytes, output_bytes, latency.instruction_bytes(layers), streamed)


def stack(kernel: int, count: int, side: int, filters: int) -> tuple[tuple[ArrayLayer, ...], BusTraffic]:
    """Return the layers and the bus traffic of a stack of convolutions on square maps."""
    channels = [3, *[filters] * count]
    shapes = [
        ArrayLayer("conv", (side, side, filters), (side, side, input_channels), (kernel, kernel))
        for input_channels in channels[:-1]
    ]
    layers = tuple(replace(layer, parameters=latency.layer_parameters(layer)) for layer in shapes)
    return layers, _traffic(layers, side * side * 3, latency.padded_map_bytes((side, side, filters)))


def _layer(row: Mapping[str, Any]) -> ArrayLayer:
    kind = row["t"] if row["t"] in latency.KINDS else "elt"
    input_shape = (row["ih"], row["iw"], row["ci"])
    if kind == "tconv" and input_shape[:2] == (row["h"], row["w"]):  # here the tables give the output size twice
        input_shape = (row["h"] // 2, row["w"] // 2, row["ci"])
    return ArrayLayer(kind, (row["h"], row["w"], row["co"]), input_shape, (row["k"], row["kw"]), name=row["t"])


def _outputs(layers: Sequence[ArrayLayer], stated: int) -> int:
    """Return the bytes that the Edge TPU sends to the host.

    If the model's outputs are smaller than the output of its last convolution, a CPU operator computes them (poses from
    four maps). Then the maps are sent: the outputs of all last convolutions that read the same map.
    """
    last = layers[-1]
    if stated == math.prod(last.output_shape):
        return latency.padded_map_bytes(last.output_shape)
    if stated > math.prod(last.output_shape) or last.kind != "conv":
        return stated
    total = 0
    for layer in reversed(layers):
        if layer.input_shape != last.input_shape or layer.output_shape[2] == last.input_shape[2]:
            break
        total += latency.padded_map_bytes(layer.output_shape)
    return total


def rows(table: Path, tables: Path) -> list[Row]:
    """Return the rows that can be predicted: fully mapped on a known host with a table; and stacks of convolutions."""
    networks = {name: network(network_table) for name, network_table in json.loads(tables.read_text()).items()}
    predictable_rows = []
    for row in csv.DictReader(table.read_text().splitlines()):
        match = STACK.match(row["model"])
        if match:
            kernel, _, count, side, _, filters = map(int, match.groups())
            measured_ms = float(row["latency_ms"])
            predictable_rows.append(
                Row(f"stack of {filters}", "pcie", "max", measured_ms, *stack(kernel, count, side, filters))
            )
        if row["table"] not in networks or row["fully_mapped"] != "yes" or row["host_kind"] not in HOSTS:
            continue
        if "unstated" in row["host"] and row["host_kind"] == "usb2":  # some of them are faster than USB 2 can be
            continue
        clock = "std" if "std" in row["runtime"] else "max"
        predictable_rows.append(
            Row(row["table"], row["host_kind"], clock, float(row["latency_ms"]), *networks[row["table"]])
        )
    return predictable_rows


def flat(constants: Mapping[str, Any]) -> dict[str, float]:
    """Return the constants as a flat map, with names such as `fixed_ms usb3` for the constants of a host."""
    flat_constants = {}
    for name, value in constants.items():
        for host, number in (value if isinstance(value, dict) else {"": value}).items():
            flat_constants[f"{name} {host}".strip()] = float(number)
    return flat_constants


def nested(constants: Mapping[str, float]) -> LatencyConstants:
    """Return the shipped constants with others from a flat map."""
    of_hosts: dict[str, dict[str, float]] = {host: {"spread": 0.0} for host in HOSTS}
    of_array = {}
    for name, value in constants.items():
        word, _, host = name.partition(" ")
        (of_hosts[host] if host else of_array)[word] = value
    shipped = CONSTANTS.latency
    return replace(
        shipped, **of_array, hosts={host: replace(shipped.hosts[host], **values) for host, values in of_hosts.items()}
    )


def predicted(row: Row, constants: LatencyConstants) -> float:
    return latency.predict(row.layers, row.sent, constants, row.host, row.clock).total


def _weights(rows: Sequence[Row]) -> Any:
    """Return the weight of each row: a model on a host counts 1, and all stacks together count STACKS_COUNT_AS."""
    often = Counter((row.model, row.host) for row in rows)
    stacks = sum(row.is_stack for row in rows)
    return np.array([STACKS_COUNT_AS / stacks if row.is_stack else 1 / often[row.model, row.host] for row in rows])


def fitted(rows: Sequence[Row]) -> dict[str, float]:
    start = flat(KNOWN)
    names, zero = list(start), np.log(list(start.values()))
    importance = np.sqrt(_weights(rows))

    def misses(point: Any) -> Any:
        constants = nested(dict(zip(names, np.exp(point), strict=True)))
        predictions = [math.log(predicted(row, constants) / row.measured_ms) for row in rows]
        return np.concatenate([np.multiply(predictions, importance), PRIOR_WEIGHT * (point - zero)])

    solution = least_squares(misses, zero, loss="soft_l1", f_scale=LOSS_SCALE)
    return {name: float(value) for name, value in zip(names, np.exp(solution.x), strict=True)}


def spread(misses: Sequence[float]) -> float:
    """Return the half width of an interval that covers the share COVERED of the errors, all as logarithms."""
    return float(np.quantile(np.abs(misses), COVERED, method="higher")) if len(misses) else math.inf


def judged(rows: Sequence[Row], predictions: Sequence[float], group: Callable[[Row], str]) -> dict[str, Any]:
    """Return the error figures of the networks on the judged hosts, pooled and for each host, and of the stacks."""
    misses = np.log(np.array(predictions) / [row.measured_ms for row in rows])
    chosen = [index for index, row in enumerate(rows) if row.host in JUDGED and not row.is_stack]
    holds, widths = [], []
    for index in chosen:
        others = [i for i in chosen if group(rows[i]) != group(rows[index])]
        widths.append(spread(misses[others]))
        holds.append(abs(misses[index]) <= widths[-1])
    errors = {index: abs(predictions[index] / rows[index].measured_ms - 1) for index in range(len(rows))}
    measured = [rows[index].measured_ms for index in chosen]

    def figures(indices: Sequence[int]) -> dict[str, float]:
        values = [errors[index] for index in indices]
        return {
            "rows": len(indices),
            "median": float(np.median(values)),
            "90th percentile": float(np.percentile(values, 90)),
            "worst": max(values),
        }

    stacks = [index for index, row in enumerate(rows) if row.is_stack]
    return {
        "pooled": figures(chosen)
        | {
            "rank correlation": float(spearmanr([predictions[index] for index in chosen], measured).statistic),
            "intervals hold": float(np.mean(holds)),
            "mean half width of the intervals, as a logarithm": float(np.mean(widths)),
        },
        **{host: figures([index for index in chosen if rows[index].host == host]) for host in JUDGED},
        "stacks of convolutions": figures(stacks),
    }
