"""Models that share Edge TPUs: the queue and a simulation, the search and every assignment, the command."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import queue_simulation
import tiny

from compress.cli.main import main
from compress.errors import ModelError, PipelineError
from compress.targets import load
from compress.targets.edgetpu.several import sharing
from compress.targets.edgetpu.several.queueing import Queue
from compress.targets.edgetpu.several.sharing import Load, Predictions, Service
from compress.tflite import graph
from compress.tflite.graph import Graph

TARGET = load("edgetpu")


def large(side: int = 1500, seed: int = 0) -> Graph:
    """A dense layer of `side` by `side`: 2.25 MB of parameters at 1500."""
    random = np.random.default_rng(seed)
    model = tiny.TfliteBuilder(int8=True)
    input_tensor = model.activation("input", [1, side], (0.0, 1.0))
    output_tensor = model.activation("output", [1, side], (-20.0, 20.0))
    model.dense(input_tensor, random.uniform(-1, 1, (side, side)), np.ones(side), output_tensor)
    return graph.parse(model.finish([input_tensor], [output_tensor]))


@pytest.mark.parametrize("load_factor", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("reload_ms", [0.0, 4.0])
def test_the_queue_is_that_of_a_simulation(load_factor: float, reload_ms: float) -> None:
    services = [Service(2.0, 0.0, 0, 0, 0), Service(9.0, 0.0, 0, 0, 0)]
    loads = [Load("a", None, 3.0), Load("b", None, 1.0)]  # type: ignore[arg-type]
    reloads = [reload_ms, reload_ms / 2]
    busy = sharing.shared((0, 1), loads, services, reloads).queue.utilization
    rates = [load_factor / busy * model_load.rate_per_s for model_load in loads]
    loads = [Load(model_load.name, model_load.graph, rate) for model_load, rate in zip(loads, rates, strict=True)]
    queue = sharing.shared((0, 1), loads, services, reloads).queue
    assert queue.utilization == pytest.approx(load_factor)
    waits = queue_simulation.waits_ms(rates, [2.0, 9.0], reloads)
    assert queue.mean_wait_ms == pytest.approx(waits.mean(), rel=0.1)
    assert queue.wait_ms() == pytest.approx(np.quantile(waits, 0.95), rel=0.1, abs=0.2)


def test_exponential_service_has_the_known_distribution() -> None:
    shares = np.diff(1 - np.exp(-np.linspace(0, 12, 400) / 1.0))
    times = (np.linspace(0, 12, 400)[:-1] + np.linspace(0, 12, 400)[1:]) / 2
    queue = Queue(500, list(times), list(shares / shares.sum()))  # M/M/1, utilization one half, mean 1 ms
    assert queue.mean_wait_ms == pytest.approx(1.0, rel=0.01)
    assert queue.wait_ms() == pytest.approx(2 * np.log(0.5 / 0.05), rel=0.02)


def test_too_many_requests_never_end() -> None:
    queue = Queue(1000, [2.0], [1.0])
    assert queue.mean_wait_ms == queue.wait_ms() == float("inf")
    assert Queue(10, [1.0], [1.0]).wait_ms() == 0.0  # 99% of the requests find the Edge TPU idle


def test_what_is_compiled_later_gets_what_is_left() -> None:
    predictions = Predictions([Load("a", large(), 1.0)], TARGET, "usb3", "max")
    first = predictions.service(0, 0)
    later = predictions.service(0, 7_000_000)
    assert (first.streamed_bytes, later.cached_bytes) == (0, 0)
    assert later.streamed_bytes == first.cached_bytes
    assert later.array_ms > first.array_ms


def test_a_rare_model_is_compiled_last() -> None:
    loads = [Load(f"{index}", large(seed=index), rate) for index, rate in enumerate((1, 60, 60, 60))]
    (group,) = sharing.assign(loads, TARGET, 1, "usb3", "max").groups
    assert group.together
    assert group.models[-1] == 0


def test_local_search_is_as_good_as_every_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [large(seed=index) for index in range(2)]
    loads = [Load(str(index), graphs[index % 2], 10.0 + 7 * index) for index in range(6)]
    best = sharing.assign(loads, TARGET, 2, "usb3", "max")
    monkeypatch.setattr(sharing, "MOST_TRIED", 0)
    local_optimum = sharing.assign(loads, TARGET, 2, "usb3", "max")
    assert best.method != local_optimum.method
    values = [sum(group.value[1] for group in assignment.groups) for assignment in (best, local_optimum)]
    assert values[1] <= values[0] * 1.02
    assert sorted(index for group in local_optimum.groups for index in group.models) == list(range(6))


def test_refusals() -> None:
    model = graph.parse(tiny.classifier())
    with pytest.raises(PipelineError, match="0 models"):
        sharing.assign([], TARGET, 1, "usb3", "max")
    with pytest.raises(PipelineError, match="requests per second"):
        sharing.assign([Load("a", model, -1.0)], TARGET, 1, "usb3", "max")
    with pytest.raises(ModelError, match="float"):
        sharing.assign([Load("float", graph.parse(tiny.classifier(int8=False)), 1.0)], TARGET, 1, "usb3", "max")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(tiny.classifier())
    assert main(["assign", f"{path}=50", f"{path}=20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stable"]
    assert report["groups"][0]["compiled_together"]
    assert main(["assign", f"{path}=5000"]) == 7
    assert "too many requests" in capsys.readouterr().out
    assert main(["assign", f"{path}=5000", "--json"]) == 7
    assert json.loads(capsys.readouterr().out)["groups"][0]["mean_wait_ms"] is None
    assert main(["assign", str(path)]) == 2
    assert "requests per second" in capsys.readouterr().err


def test_more_tpus_are_never_worse(tmp_path: Path) -> None:
    loads = [Load(str(index), large(), 30.0) for index in range(4)]
    values = [
        sum(group.value[1] for group in sharing.assign(loads, TARGET, count, "usb3", "max").groups)
        for count in (1, 2, 4)
    ]
    assert all(more <= fewer for fewer, more in pairwise(values))
