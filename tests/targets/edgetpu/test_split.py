"""Segments for several Edge TPUs: their cuts compared with an exhaustive search, their outputs, and the command."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import several
import tiny
from paths import EDGETPU
from tiny import TfliteBuilder

from compress.core.errors import ModelError, PipelineError
from compress.model.tflite import graph
from compress.surface.cli.main import main
from compress.targets import load
from compress.targets.edgetpu.several import cuts as search
from compress.targets.edgetpu.several import segments
from compress.targets.edgetpu.several import split as splitting
from compress.targets.edgetpu.several.cuts import FITS, STREAMS, OperatorSequence
from compress.targets.edgetpu.several.segments import SplitGraph

TARGET = load("edgetpu")
shared = pytest.mark.skipif(not EDGETPU.exists(), reason=f"{EDGETPU} is not there; see CORALLINE_SHARED")


def residual(channels: int = 8, layers: int = 6) -> bytes:
    """Convolutions whose first output is added to the last one: it crosses every cut between them."""
    random = np.random.default_rng(1)
    model = TfliteBuilder(int8=True)
    image = model.activation("image", [1, 16, 16, channels], (0.0, 1.0))
    current = image
    outputs = []
    for index in range(layers):
        following = model.activation(f"layer {index}", [1, 16, 16, channels], (0.0, 4.0))
        model.convolution(current, random.uniform(-1, 1, (channels, 3, 3, channels)), np.zeros(channels), following)
        outputs.append(following)
        current = following
    total = model.activation("total", [1, 16, 16, channels], (0.0, 8.0))
    model.operator("ADD", [outputs[0], current], total, model.schema.AddOptionsT())
    return model.finish([image], [total])


class Cost:
    def __init__(self, latency_ms: float, risk: int) -> None:
        self.latency_ms = latency_ms
        self.risk = risk


def random_network(seed: int) -> OperatorSequence:
    """Operators with random times, bytes and parameters; a segment has a fixed time, and streams above a limit."""
    random = np.random.default_rng(seed)
    count = int(random.integers(4, 14))
    times = random.uniform(0.1, 2, count)
    sizes = random.uniform(0, 3, count)
    crossing = random.integers(0, 5, count + 1)

    def predict(start: int, stop: int) -> Cost | None:
        if sizes[start:stop].sum() == 0:
            return None
        risk = STREAMS if sizes[start:stop].sum() > 6 else FITS
        return Cost(0.3 + times[start:stop].sum() + 0.1 * (crossing[start] + crossing[stop]), risk)

    return OperatorSequence(range(count + 1), list(times), [int(byte_count) for byte_count in crossing], predict)


def exhaustive(network: OperatorSequence, count: int) -> tuple[int, float] | None:
    """Return the least risk of all cuts, and the shortest latency of the slowest segment with this risk."""
    candidates = []
    for inner in combinations(network.positions[1:-1], count - 1):
        costs = [network.predict(start, stop) for start, stop in pairwise((0, *inner, network.operators))]
        if None not in costs:
            known = [cost for cost in costs if cost is not None]
            candidates.append((max(cost.risk for cost in known), max(cost.latency_ms for cost in known)))
    return min(candidates, default=None)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_cuts_of_random_networks_are_those_of_exhaustive_search(count: int) -> None:
    for network in map(random_network, range(25)):
        positions = search.best(network, count)
        expected = exhaustive(network, count)
        assert positions is not None
        assert expected is not None
        costs = search.costs_of(network, positions)
        assert len(costs) == count
        assert max(cost.risk for cost in costs) == expected[0]
        assert max(cost.latency_ms for cost in costs) <= expected[1] * search.TOLERANCE


def test_of_equally_fast_cuts_the_least_crosses() -> None:
    network = OperatorSequence(
        range(5), [1.0] * 4, [0, 9, 5, 1, 0], lambda start, stop: Cost(max(3.0, stop - start), FITS)
    )
    assert search.best(network, 2) == (0, 3, 4)
    short = OperatorSequence(range(3), [1.0] * 2, [0] * 3, lambda start, stop: Cost(1.0, FITS))
    assert search.best(short, 3) is None  # it has not enough positions


def prepared(content: bytes) -> SplitGraph:
    return segments.prepare(graph.parse(content), TARGET, "usb3", "max")


@pytest.mark.parametrize("tpus", [2, 3, 4])
def test_a_tensor_skips_segments(tpus: int) -> None:
    result = splitting.split(graph.parse(residual()), TARGET, tpus, "usb3", "max", compare=True)
    parts = [graph.parse(content) for content in result.files.values()]
    assert len(parts) == tpus
    names = [{part.tensors[index].name for index in part.inputs} for part in parts]
    assert "layer 0" in names[-1]
    assert sum("layer 0" in inputs for inputs in names) <= 2  # it passes through no segment that does not use it
    assert [parts[-1].tensors[index].name for index in parts[-1].outputs] == ["total"]
    assert result.equal_bytes is not None
    assert sum(len(part.operators) for part in parts) == 7
    written = json.loads(result.all_files()["split.json"])
    assert written["segments"][0]["operators"][0] == 0
    assert not written["split"]
    assert written["recommended"] == f"{tpus} copies of the whole model"


def test_several_inputs_and_outputs_and_a_cpu_operator() -> None:
    result = splitting.split(graph.parse(several.two_inputs()), TARGET, 2, "usb3", "max")
    assert any(segment.on_cpu for segment in result.segments)
    assert "on the CPU" in result.describe()


def test_a_changed_segment_is_found() -> None:
    model = prepared(residual())
    first, second = (model.segment(0, 3), model.segment(3, 7))
    assert first is not None
    assert second is not None
    other = prepared(residual(layers=6))
    parts = [model.file(first), other.file(second)]
    splitting.verify(model.graph, parts)
    weights = parts[1].source.buffers
    changed = max(weights, key=lambda buffer: 0 if buffer.data is None else len(buffer.data))
    changed.data = 255 - np.asarray(changed.data, np.uint8)
    with pytest.raises(ModelError, match="another output"):
        splitting.verify(model.graph, parts)


def test_equal_names_become_different() -> None:
    source = graph.parse(residual())
    for index in source.producer:
        source.source.subgraphs[0].tensors[index].name = b"same"
    result = splitting.split(graph.from_source(source.source), TARGET, 2, "usb3", "max")
    assert len(result.files) == 2


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = graph.parse(residual())
    with pytest.raises(PipelineError, match="2 to 16"):
        splitting.split(source, TARGET, 1, "usb3", "max")
    with pytest.raises(ModelError, match="cannot be cut into 8 segments"):
        splitting.split(source, TARGET, 8, "usb3", "max")
    source.source.subgraphs[0].operators[0].intermediates = [999]
    with pytest.raises(ModelError, match="damaged"):
        splitting.split(source, TARGET, 2, "usb3", "max")
    path = tmp_path / "float.tflite"
    path.write_bytes(tiny.classifier(int8=False))
    assert main(["split", str(path), "--tpus", "2", "-o", str(tmp_path / "out")]) == 4
    assert not (tmp_path / "out").exists()
    assert "quantize it first" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.tflite").write_bytes(residual())
    assert main(["split", "net.tflite", "--tpus", "2", "--json", "--compare"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["folder"] == "net_2_segments"
    assert sorted(path.name for path in Path("net_2_segments").iterdir()) == [
        "model_segment_0_of_2.tflite",
        "model_segment_1_of_2.tflite",
        "split.json",
    ]
    assert main(["split", "net.tflite", "--tpus", "2"]) == 2
    assert "exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@shared
def test_a_real_model_with_state_is_cut_around_it() -> None:
    source = graph.read(EDGETPU / "pairs" / "keras_lstm_mnist_ptq" / "model.tflite")
    assert splitting.split(source, TARGET, 3, "usb3", "max").segments
