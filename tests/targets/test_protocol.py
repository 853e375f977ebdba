"""A third target works everywhere without a line of code outside of `compress.targets`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import tiny

from compress import targets
from compress.core.artifact import MODEL_COMPILED, Facts
from compress.core.errors import PipelineError, StageError
from compress.learning.procedures.trial_conversion import TrialConverter
from compress.learning.pruning.allocation import importance_losses
from compress.learning.pruning.objective import Objective
from compress.learning.pruning.prunable import prepare
from compress.model.ir import keras_graph
from compress.model.tflite import graph, macs
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import Graph, Operator
from compress.pipeline import runner
from compress.pipeline.schema import load
from compress.surface.cli.main import main
from compress.targets.base import (
    ChannelBlocks,
    CompilerSettings,
    HardwareCostModel,
    NetworkCost,
    Target,
    TargetCompiler,
)
from deploy.contract import bundle


@dataclass(frozen=True)
class Row:
    index: int
    op: str
    placement: str
    reason: str
    macs: int


@dataclass(frozen=True)
class NpuCheck:
    ops: tuple[Row, ...]
    failure: None = None
    complete: bool = False

    @property
    def summary(self) -> str:
        return f"{sum(row.placement == 'npu' for row in self.ops)} of {len(self.ops)} operators run on the NPU"

    def describe(self) -> str:
        return self.summary + "\n"

    def to_json(self) -> dict[str, Any]:
        return {"summary": self.summary, "ops": [asdict(row) for row in self.ops]}


@dataclass(frozen=True)
class NpuRewrite:
    graph: Graph
    after: NpuCheck

    def describe(self) -> str:
        return "copied\n"

    def to_json(self) -> dict[str, Any]:
        return {"changes": [{"rewrite": "copied"}]}


@dataclass(frozen=True)
class NpuNetwork(NetworkCost):
    operators: tuple[Any, ...]
    streamed_bytes = 0
    never_cached = {}

    def compute_ms(self, clock: str) -> float:
        return 0.0

    def latency_ms(self, host: str, clock: str) -> float:
        return sum(-(-each.output_shape[2] // 32) for each in self.operators) * {"lab": 1.0, "field": 2.0}[host]

    def cached_bytes(self, without: Any = ()) -> int:
        return 0


class NpuCost(HardwareCostModel):
    objectives = frozenset({"latency"})
    hosts = {"lab": "in the lab", "field": "in the field"}
    clocks = ("full",)
    blocks = ChannelBlocks(8, 32)

    def of_operators(self, operators: Any, input_bytes: int, output_bytes: int) -> NpuNetwork:
        return NpuNetwork(tuple(operators))

    def of_file(self, graph: Graph) -> NpuNetwork:
        return NpuNetwork(())

    def cache_bytes(self) -> int:
        raise AssertionError

    def cache_limit_bytes(self, smallest: NetworkCost) -> int:
        raise AssertionError

    def estimate(self, *arguments: Any) -> Any:
        raise PipelineError("no latency of a file is predicted for the target npu")


class Npu(Target):
    cost = NpuCost()

    def check(self, graph: Graph, *, all_subgraphs: bool = False) -> NpuCheck:
        def row(op: Operator) -> Row:
            side, reason = ("npu", "") if op.name == "CONV_2D" else ("cpu", "only convolutions")
            return Row(op.index, op.name, side, reason, macs.macs(graph, op))

        return NpuCheck(tuple(map(row, graph.operators)))

    def legalize(self, graph: Graph, inputs: Any = (), *, io: str | None = None) -> NpuRewrite:
        copied = Edit(graph).graph()
        return NpuRewrite(copied, self.check(copied))

    def compile(self, model: bytes, settings: CompilerSettings, folder: Path, note: Any) -> Facts:
        (folder / MODEL_COMPILED).write_bytes(model)
        note(f"{self.compiler.name}: {settings.retries} retries")
        placement = self.check(graph.parse(model)).to_json()
        return {"placement": placement, "compiled": True, "reports": [{"version": "2.0"}]}

    def compiler_identity(self, settings: CompilerSettings) -> dict[str, str]:
        return {"compiler": "npuc 2.0"}

    def invalid_setting(self, settings: CompilerSettings) -> str:
        return "docker: npuc runs on this machine alone" if settings.docker else ""


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Target:
    compiler = TargetCompiler("npuc", "2.0", {"2.0": 1, "1.0": 0})
    monkeypatch.setitem(targets.TARGETS, "npu", Npu("npu", "A processor for convolutions", "1", compiler))
    return targets.load("npu")


def test_a_target_is_known_by_its_name(npu: Target) -> None:
    assert npu.compiled_by("1.0").compiler.version == "1.0"
    with pytest.raises(PipelineError, match="unknown target 'tpu'; allowed: cpu, edgetpu, npu"):
        targets.load("tpu")


def test_check_and_legalize_on_the_command_line(
    npu: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.tflite"
    model.write_bytes(tiny.classifier())
    assert main(["check", str(model), "--target", "npu"]) == 9
    assert capsys.readouterr().out == "1 of 2 operators run on the NPU\n"
    assert main(["legalize", str(model), str(tmp_path / "out.tflite"), "--target", "npu", "--json"]) == 9
    assert json.loads(capsys.readouterr().out) == {"changes": [{"rewrite": "copied"}]}
    assert [op.name for op in graph.read(tmp_path / "out.tflite").operators] == ["CONV_2D", "FULLY_CONNECTED"]


def test_a_pipeline_compiles_and_packs(npu: Target, tmp_path: Path) -> None:
    notes, path = tiny.Notes(), tiny.project(tmp_path / "project", target="npu")
    record = runner.run(load(path, tiny.STAGES), tmp_path / "runs", notes, frozenset()).to_json()
    assert tiny.statuses(record) == {"model": "done", "compile": "done", "package": "done"}
    assert record["target"] == {"name": "npu", "summary": "A processor for convolutions"}
    assert record["stages"][1]["facts"]["placement"]["summary"] == "1 of 2 operators run on the NPU"
    (packed,) = (tmp_path / "runs" / "tiny").glob("*.coralline")
    assert bundle.read(str(packed)).manifest["tools"]["npuc"] == "2.0"
    assert (tmp_path / "runs" / "tiny" / MODEL_COMPILED).read_bytes() == tiny.classifier()
    assert "only convolutions" in (tmp_path / "runs" / "tiny" / "report.html").read_text()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"compile": {"docker": "image"}}], "docker: npuc runs on this machine alone"),
        (
            ["train", {"prune": {"objective": "latency", "host": "usb3"}}],
            "unknown host 'usb3'; allowed: lab, field",
        ),
        (["train", {"prune": {"objective": "latency", "clock": "max"}}], "unknown clock 'max'; allowed: full"),
    ],
)
def test_settings_that_the_target_does_not_have_are_refused_before_any_work(
    npu: Target, tmp_path: Path, stages: list[Any], message: str
) -> None:
    model = {"model": {"builder": "digits_cnn"}} if "prune" in stages[-1] else {}
    path = tiny.project(tmp_path / "project", stages, target="npu", **model)
    with pytest.raises(PipelineError) as refused:
        load(path)
    assert message in str(refused.value)


@pytest.mark.tensorflow
def test_pruning_by_the_target_s_cost(npu: Target, keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(96, 3, activation="relu")(layers.Conv2D(80, 3, activation="relu")(image))
    model = networks.randomized(keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x))))
    prunable = prepare(keras_graph.read(model), npu, "batch_norm", None)
    costs, full = prunable.costs, prunable.full_widths
    goal = Objective("latency", 0.7)
    cost = goal.cost_of(costs, prunable.minimum_widths)
    assert cost(full) == 3 + 3 + 3 + 1  # blocks of 32: 80, 96, pooled 96, and 3 channels
    widths = goal.allocate(prunable, importance_losses(prunable, "balanced"), goal.limits(prunable))
    assert cost(widths) <= 7
    assert all(width % 32 == 0 for width in widths)  # between two multiples of 32, channels cost nothing
    assert costs.latency_ms(widths, "field") == 2 * costs.latency_ms(widths)
    figures = vars(costs.figures(widths)).items()
    assert {name for name, cost in figures if cost is not None} == {"macs", "parameters", "size_bytes", "latency_ms"}
    with pytest.raises(StageError, match=r"cache is not predicted for the target npu; allowed: .*size, latency"):
        Objective("cache").limits(prunable)
    files = TrialConverter(np.random.default_rng(0).random((4, 8, 8, 1), np.float32), npu)(prunable.network, model)
    assert files.graph is not None
    assert costs.calibrated(full, files).latency_ms(full) == 0  # the latency of the file
