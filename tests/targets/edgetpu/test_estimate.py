"""Expected latency: the formula on networks that can be counted by hand, published measurements, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import one_op
import packages
import published_latency
import pytest
import tiny
from one_op import Op, Tensor
from paths import EDGETPU

from compress.core.errors import ModelError, PipelineError
from compress.model.tflite import graph
from compress.surface.cli.main import main
from compress.targets import load
from compress.targets.edgetpu import inspection, latency
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.estimate import estimate
from compress.targets.edgetpu.latency import ArrayLayer, BusTraffic

TARGET = load("edgetpu")
LATENCY = CONSTANTS.latency
shared = pytest.mark.skipif(not EDGETPU.exists(), reason=f"{EDGETPU} is not there; see CORALLINE_SHARED")
NOTHING = BusTraffic(0, 0, 0, ())


def conv(outputs: int, inputs: int = 64, side: int = 16, kernel: int = 3) -> ArrayLayer:
    return ArrayLayer("conv", (side, side, outputs), (side, side, inputs), (kernel, kernel))


@pytest.mark.parametrize(
    ("layer", "cycles"),
    [
        (conv(64), 16 * 9 * 16),
        (conv(1), 16 * 9 * 16),  # one output costs as much as 64
        (conv(65), 2 * 16 * 9 * 16),
        (conv(64, inputs=61), 16 * 9 * 16),  # 61 inputs cost as much as 64
        (conv(64, side=13), 16 * 9 * 16),
        (ArrayLayer("dw", (16, 16, 64), (16, 16, 64), (3, 3)), 16 * 9 * 16),
        (ArrayLayer("tconv", (32, 32, 64), (16, 16, 64), (2, 2)), 16 * 4 * 16),  # counted by its input positions
        (ArrayLayer("fc", (1, 1, 10), (1, 1, 1024)), 256),
        (ArrayLayer("elt", (16, 16, 6), (16, 16, 6)), 16 * 2),
    ],
)
def test_cycles_come_in_whole_steps(layer: ArrayLayer, cycles: int) -> None:
    assert layer.megacycles * 1e6 == pytest.approx(cycles)


def test_large_maps_take_their_weights_more_than_once() -> None:
    assert [conv(400, inputs=400, side=side).passes for side in (32, 64, 84, 128)] == [1, 4, 6, 9]


@pytest.mark.parametrize("host", sorted(LATENCY.hosts))
def test_parts_are_the_whole_and_more_never_takes_less(host: str) -> None:
    layers = (conv(256, inputs=256), conv(512, inputs=256))
    sent = BusTraffic(50_000, 10_000, 30_000, (0, 1_000_000))
    prediction = latency.predict(layers, sent, LATENCY, host)
    assert prediction.total == pytest.approx(sum(prediction.parts.values()))
    assert prediction.low < prediction.total < prediction.high
    assert sum(prediction.layers) == pytest.approx(prediction.parts["compute_ms"] + prediction.parts["stream_ms"])
    more = {"input_bytes": 90_000, "output_bytes": 20_000, "instruction_bytes": 60_000, "streamed_bytes": (10**6,) * 2}
    for name, value in more.items():
        assert latency.predict(layers, replace(sent, **{name: value}), LATENCY, host).total > prediction.total
    slow = latency.predict(layers, sent, LATENCY, host, "std")
    assert slow.total > prediction.total


def test_streaming_overlaps_with_its_own_layer() -> None:
    """On hosts that wait, a layer takes the longer time of computing and streaming."""
    layer, bus = conv(64), replace(LATENCY.hosts["usb3"], fixed_ms=0.0)
    constants = replace(LATENCY, layer_us=0.0, hosts={"usb3": bus})
    computed = latency.predict((layer,), replace(NOTHING, streamed_bytes=(0,)), constants, "usb3").total
    hidden = int(computed / bus.transfer_ms_per_mb * 1e6)
    assert latency.predict((layer,), replace(NOTHING, streamed_bytes=(hidden,)), constants, "usb3").total == computed
    twice = latency.predict((layer,), replace(NOTHING, streamed_bytes=(hidden * 2,)), constants, "usb3").total
    assert twice == pytest.approx(computed * 2, rel=1e-3)


def test_a_small_model_is_told_that_the_cpu_is_faster() -> None:
    prediction = estimate(graph.parse(tiny.classifier((16, 16, 3), filters=72)), TARGET, "usb3")
    assert prediction.cpu_alone_ms < prediction.latency.total
    assert prediction.advice[0].what.startswith("too small for the Edge TPU: on the CPU alone")
    assert [layer.index for layer in prediction.layers] == [0, 1]
    report = prediction.to_json()
    assert set(report["parts"]) == {f"{part}_ms" for part in ("fixed", "input", "compute", "stream", "output", "cpu")}
    assert sum(report["parts"].values()) == pytest.approx(report["latency_ms"])
    assert "predicted, not measured" in prediction.describe()


def test_streaming_is_told() -> None:
    prediction = estimate(graph.parse(tiny.classifier((96, 96, 16), classes=20)), TARGET, "usb3")
    assert prediction.streamed_bytes > 1_000_000
    (saves,) = (each.saves_ms for each in prediction.advice if "MB less, and no parameters are sent" in each.what)
    assert saves == pytest.approx(prediction.latency.parts["stream_ms"])


def test_free_channels_are_told() -> None:
    wide, middle, narrow = (
        estimate(graph.parse(tiny.classifier((32, 32, 256), filters=count)), TARGET, "usb3") for count in (128, 72, 64)
    )
    gains = {change.what: change.saves_ms for change in middle.advice}
    saves = gains["CONV_2D 0: 56 more output channels are free, or 8 fewer save time"]
    assert wide.latency.layers[0] == pytest.approx(middle.latency.layers[0])
    assert middle.latency.layers[0] - narrow.latency.layers[0] == pytest.approx(saves, rel=0.01)


def test_what_is_refused() -> None:
    tensor = Tensor((1, 4, 4, 8))
    refused = {
        r"will reject this model.*; quantize it first: `quantize`": graph.parse(tiny.classifier(int8=False)),
        "already compiled; give the full-integer model that": graph.parse(packages.compiled(tiny.classifier())),
        "FlexErf; replace the layers that became FlexErf": one_op.one("FlexErf", [tensor], tensor, custom=True),
        r"newer than its TFLite parser.*; see `python -m compress check`": one_op.one("RELU", [tensor], tensor, 9),
    }
    for message, model in refused.items():
        with pytest.raises(ModelError, match=message):
            estimate(model, TARGET, "usb3")
    for host, clock in (("usb9", "max"), ("usb3", "fast")):
        with pytest.raises(PipelineError, match=r"unknown (host 'usb9'|clock 'fast')"):
            TARGET.cost.estimate(graph.parse(tiny.classifier()), host, clock)


@shared
@pytest.mark.parametrize("name", ["movenet_single_pose_lightning_ptq", "color_blue_128x128", "dense_1024"])
def test_the_bytes_of_a_compiled_model_are_used(name: str) -> None:
    folder = EDGETPU / "pairs" / name
    compiled = inspection.inspect(folder / "compiled.tflite")
    prediction = estimate(graph.read(folder / "model.tflite"), TARGET, "usb3", compiled=compiled)
    assert (prediction.streamed_bytes, prediction.compiled) == (compiled.streamed_bytes, True)


@shared
def test_another_model_s_bytes_are_not_taken_for_this_one_s() -> None:
    original = graph.read(EDGETPU / "pairs" / "dense_1024" / "model.tflite")
    for other in ("bright_16x16", "keras_lstm_mnist_ptq", "color_red_64x64"):
        compiled = EDGETPU / "pairs" / other / "compiled.tflite"
        with pytest.raises(ModelError, match="from another model; give the file that edgetpu_compiler") as caught:
            TARGET.cost.estimate(original, "usb3", None, compiled)
        assert caught.value.where == str(compiled)


def test_how_another_model_is_known(tmp_path: Path) -> None:
    def refused(*arguments: Any) -> str:
        try:
            inspection.verify_same_model(*arguments, TARGET, "m.tflite")
        except ModelError as error:
            return error.what
        return ""

    model, other = (graph.parse(tiny.classifier((8, 8, 3), filters=count)) for count in (4, 400))
    compiled = inspection.inspect_graph(graph.parse(packages.compiled(tiny.classifier((8, 8, 3)))))
    assert refused(compiled, model) == ""
    assert refused(compiled, other).startswith("has 4,160 bytes of parameters; 431,168 are expected")
    assert "INT8 [1, 8, 8, 3]" in refused(compiled, graph.parse(tiny.classifier((16, 16, 3))))
    assert "leaves NEG on the CPU" in refused(replace(compiled, cpu_ops=("NEG",)), model)
    assert refused(compiled, graph.parse(tiny.classifier((8, 8, 3), int8=False))) == ""  # it is rejected anyway


@pytest.mark.parametrize(("width", "doubted", "streams"), [(1000, 0, 0), (2304, 1, 0), (2560, 0, 1)])
def test_estimate_and_check_stream_the_same(width: int, doubted: bool, streams: bool) -> None:
    """Two dense layers: 2304 units need more memory than is certain; with 2560, the smaller layer is streamed."""
    tensors = {"a": Tensor((1, 1024)), "b": Tensor((1, width)), "c": Tensor((1, width))}
    tensors |= {"v": Tensor((width, 1024), data=1), "w": Tensor((width, width), data=1)}
    dense = [Op("FULLY_CONNECTED", ["a", "v", ""], ["b"], 4), Op("FULLY_CONNECTED", ["b", "w", ""], ["c"], 4)]
    parsed = one_op.read(tensors, dense, "a", "c")
    check_result, prediction = check(parsed, TARGET), estimate(parsed, TARGET, "usb3")
    assert check_result.parameters is not None
    assert prediction.streamed_bytes == check_result.parameters.streamed_bytes
    assert (prediction.streamed_bytes > 0) == streams
    assert ("the compiler cached no more" in prediction.describe()) == doubted
    assert ("the compiler cached no more" in check_result.describe()) == doubted


@shared
def test_published_measurements_are_met_without_their_models() -> None:
    """The test uses the shipped constants; benchmarks/latency.py also leaves out each model in turn."""
    measurements = published_latency.rows(EDGETPU / "latency.csv", EDGETPU / "layer_tables.json")
    shipped = [published_latency.predicted(row, LATENCY) for row in measurements]
    figures = published_latency.judged(measurements, shipped, lambda row: row.model)
    assert (figures["pooled"]["rows"], figures["stacks of convolutions"]["rows"]) == (43, 36)
    assert figures["pooled"]["median"] <= 0.05
    assert figures["pooled"]["90th percentile"] <= 0.12
    assert figures["stacks of convolutions"]["90th percentile"] <= 0.15
    fresh = published_latency.nested(published_latency.fitted(measurements))
    assert shipped == pytest.approx([published_latency.predicted(row, fresh) for row in measurements], rel=0.01)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(tiny.classifier((16, 16, 3)))
    command = ["estimate", str(path), "--host"]
    assert main([*command, "devboard", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["low_ms"] < report["latency_ms"] < report["high_ms"]
    assert report["host"] == "devboard"
    assert main([*command, "usb3", "--clock", "std"]) == 0
    assert "ms on usb3 (USB Accelerator on USB 3, x86 host)" in capsys.readouterr().out
    assert main([*command, "moon"]) == 2
    assert "allowed: pcie, usb3, usb2, devboard" in capsys.readouterr().err
    path.write_bytes(b"no model")
    assert main([*command, "usb3"]) == ModelError.exit_code
