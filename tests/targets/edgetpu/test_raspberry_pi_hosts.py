"""The hosts pi4-usb3, pi5-usb3 and pi5-pcie: the source of their constants, and the width of their intervals."""

from __future__ import annotations

import math
from collections import Counter

import one_op
import published_latency
import pytest
import raspberry_pi_latency
import tiny
from one_op import Op, Tensor
from paths import EDGETPU

from compress.model.tflite import graph
from compress.targets import load
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.estimate import estimate

TARGET = load("edgetpu")
HOSTS = CONSTANTS.latency.hosts
PI_HOSTS = ("pi4-usb3", "pi5-usb3", "pi5-pcie")
shared = pytest.mark.skipif(not EDGETPU.exists(), reason=f"{EDGETPU} is not there; see CORALLINE_SHARED")


@shared
def test_the_constants_are_those_of_the_benchmark() -> None:
    """After a change, run `python benchmarks/latency.py --raspberry-pi --write`."""
    for host, constants in raspberry_pi_latency.constants().items():
        shipped = {name: getattr(HOSTS[host], name) for name in constants}
        assert shipped == pytest.approx(constants, rel=0.01)


@shared
def test_the_published_measurements_are_in_the_intervals() -> None:
    sources = {"pi4-usb3": "pi4-usb3", "cm4-pcie": "pi5-pcie"}
    rows = [(row, HOSTS[host]) for source, host in sources.items() for row in raspberry_pi_latency.measurements(source)]
    known = [(row, host) for row, host in rows if row["table"]]
    assert len(known) == 6
    for row, host in known:
        prediction = raspberry_pi_latency.predicted(row["table"], host, row["clock"])
        assert prediction.low <= float(row["ms"]) <= prediction.high, row


def test_thin_data_have_wide_intervals() -> None:
    fitted_well = [host.spread for host in HOSTS.values() if host.measurements >= 8]
    assert min(HOSTS[host].spread for host in PI_HOSTS) >= max(fitted_well)
    assert HOSTS["pi5-usb3"].spread > HOSTS["pi4-usb3"].spread


@shared
def test_the_counted_measurements_are_those_of_the_fits() -> None:
    measurements = published_latency.rows(EDGETPU / "latency.csv", EDGETPU / "layer_tables.json")
    counts = Counter(row.host for row in measurements if not row.is_stack)
    counts.update({"pi4-usb3": len([row for row in raspberry_pi_latency.measurements("pi4-usb3") if row["table"]])})
    assert {name: host.measurements for name, host in HOSTS.items()} == {
        **counts, "pi5-usb3": 0, "pi5-pcie": 0,
    }  # fmt: skip
    for host in HOSTS.values():
        if host.measurements:
            assert f"fitted to {host.measurements} published measurements" in host.basis
        else:
            assert "no measurement" in host.basis


def test_the_estimate_says_what_the_host_rests_on() -> None:
    for host in PI_HOSTS:
        prediction = estimate(graph.parse(tiny.classifier((16, 16, 3))), TARGET, host)
        assert f"this host: {HOSTS[host].basis}" in prediction.describe()
        assert prediction.to_json()["measurements"] == HOSTS[host].measurements
        assert prediction.to_json()["basis"] == HOSTS[host].basis


def test_an_operator_on_the_cpu_has_the_factor_of_its_host() -> None:
    tensors = {name: Tensor((1, 64, 64, 16)) for name in "abc"}
    model = one_op.read(tensors, [Op("RELU", ["a"], ["b"]), Op("NEG", ["b"], ["c"])], "a", "c")
    for host, factor in (("usb3", 2.0), ("pi4-usb3", 3.0)):
        prediction = estimate(model, TARGET, host).latency
        cpu_ms = prediction.parts["cpu_ms"]
        assert cpu_ms == pytest.approx(64 * 64 * 16 * HOSTS[host].cpu_ns_per_element / 1e6)
        spread = math.exp(HOSTS[host].spread)
        assert prediction.high == pytest.approx((prediction.total - cpu_ms) * spread + cpu_ms * factor)
        assert prediction.low == pytest.approx((prediction.total - cpu_ms) / spread + cpu_ms / factor)
