"""A third target, in its own folder: it works everywhere without a line of code outside of that folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import tiny

from compress import targets
from compress.core.artifact import MODEL_COMPILED
from compress.core.errors import PipelineError, StageError
from compress.learning.pruning.allocation import importance_losses
from compress.learning.pruning.objective import Objective
from compress.learning.pruning.prunable import prepare
from compress.model.ir import keras_graph
from compress.model.tflite import graph
from compress.pipeline import runner
from compress.pipeline.schema import load
from compress.pipeline.stages.trial_conversion import TrialConverter
from compress.surface.cli.main import main
from deploy.contract import bundle

CODE = """
from dataclasses import asdict, dataclass

from compress.core.artifact import MODEL_COMPILED
from compress.core.errors import PipelineError
from compress.targets.base import ChannelBlocks, TargetCompiler, HardwareCostModel, NetworkCost, Target
from compress.model.tflite import macs
from compress.model.tflite.edit import Edit


@dataclass(frozen=True)
class Row:
    index: int
    op: str
    placement: str
    reason: str
    macs: int


@dataclass(frozen=True)
class NpuCheck:
    ops: tuple
    failure: object = None

    @property
    def complete(self):
        return all(row.placement == "npu" for row in self.ops)

    @property
    def summary(self):
        return f"{sum(row.placement == 'npu' for row in self.ops)} of {len(self.ops)} operators run on the NPU"

    def describe(self):
        return self.summary + "\\n"

    def to_json(self):
        return {"summary": self.summary, "ops": [asdict(row) for row in self.ops]}


@dataclass(frozen=True)
class NpuRewrite:
    graph: object
    after: object

    def describe(self):
        return "copied\\n"

    def to_json(self):
        return {"changes": [{"rewrite": "copied"}]}


@dataclass(frozen=True)
class NpuNetwork(NetworkCost):
    operators: tuple
    streamed_bytes = 0
    never_cached = {}

    def compute_ms(self, clock):
        return 0.0

    def latency_ms(self, host, clock):
        return sum(-(-each.output_shape[2] // 32) for each in self.operators) * {"lab": 1.0, "field": 2.0}[host]

    def cached_bytes(self, without=()):
        return 0


class NpuCost(HardwareCostModel):
    objectives = frozenset({"latency"})
    hosts = {"lab": "in the lab", "field": "in the field"}
    clocks = ("full",)
    blocks = ChannelBlocks(8, 32)

    def operator(self, shape):
        return shape

    def input_bytes(self, shape):
        return 0

    def output_bytes(self, shape):
        return 0

    def of_operators(self, operators, input_bytes, output_bytes):
        return NpuNetwork(tuple(operators))

    def of_file(self, graph):
        return NpuNetwork(())

    def cache_bytes(self):
        raise AssertionError

    def cache_limit_bytes(self, smallest):
        raise AssertionError

    def estimate(self, graph, host, clock, compiled=None):
        raise PipelineError("no latency of a file is predicted for the target npu")


class Npu(Target):
    cost = NpuCost()

    def check(self, graph, *, all_subgraphs=False):
        def row(op):
            mapped = op.name == "CONV_2D"
            reason = "" if mapped else "only convolutions"
            return Row(op.index, op.name, "npu" if mapped else "cpu", reason, macs.macs(graph, op))

        return NpuCheck(tuple(row(op) for op in graph.operators))

    def legalize(self, graph, inputs=(), *, io=None):
        copied = Edit(graph).graph()
        return NpuRewrite(copied, self.check(copied))

    def compile(self, model, settings, folder, note):
        from compress.model.tflite import graph

        (folder / MODEL_COMPILED).write_bytes(model)
        note(f"{self.compiler.name}: {settings.retries} retries")
        placement = self.check(graph.parse(model)).to_json()
        return {"placement": placement, "compiled": True, "reports": [{"version": "2.0"}]}

    def compiler_identity(self, settings):
        return {"compiler": "npuc 2.0"}

    def invalid_setting(self, settings):
        return "docker: npuc runs on this machine alone" if settings.docker else ""


TARGET = Npu("npu", "A processor for convolutions", "1", TargetCompiler("npuc", "2.0", {"2.0": 1, "1.0": 0}))
"""


@pytest.fixture
def npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[targets.Target]:
    folder = tmp_path / "third" / "npu"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(CODE)
    monkeypatch.setattr(targets, "__path__", [*targets.__path__, str(folder.parent)])
    yield targets.load("npu")
    sys.modules.pop("compress.targets.npu", None)
    if hasattr(targets, "npu"):
        del targets.npu


def test_targets_are_found_by_folder(npu: targets.Target, tmp_path: Path) -> None:
    """A folder that is not a package is not a target."""
    (tmp_path / "third" / "notes").mkdir()
    (tmp_path / "third" / "module.py").write_text("raise AssertionError")
    assert targets.names() == ["cpu", "edgetpu", "npu"]
    assert (npu.summary, npu.compiled_by("1.0").compiler.version) == (
        "A processor for convolutions",
        "1.0",
    )
    with pytest.raises(PipelineError, match="unknown target 'tpu'; allowed: cpu, edgetpu, npu"):
        targets.load("tpu")


def test_a_target_that_cannot_be_imported_leaves_no_half_of_it(npu: targets.Target) -> None:
    sys.modules.pop("compress.targets.npu")
    (folder,) = [Path(directory) / "npu" for directory in targets.__path__ if (Path(directory) / "npu").is_dir()]
    (folder / "__init__.py").write_text("raise RuntimeError('broken')\n" * 2)
    with pytest.raises(RuntimeError, match="broken"):
        targets.load("npu")
    assert "compress.targets.npu" not in sys.modules


def test_check_and_legalize_on_the_command_line(
    npu: targets.Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.tflite"
    model.write_bytes(tiny.classifier())
    assert main(["check", str(model), "--target", "npu"]) == 9
    assert capsys.readouterr().out == "1 of 2 operators run on the NPU\n"
    assert main(["legalize", str(model), str(tmp_path / "out.tflite"), "--target", "npu", "--json"]) == 9
    assert json.loads(capsys.readouterr().out) == {"changes": [{"rewrite": "copied"}]}
    assert [op.name for op in graph.read(tmp_path / "out.tflite").operators] == ["CONV_2D", "FULLY_CONNECTED"]


def test_a_pipeline_compiles_and_packs(npu: targets.Target, tmp_path: Path) -> None:
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
    npu: targets.Target, tmp_path: Path, stages: list[Any], message: str
) -> None:
    model = {"model": {"builder": "digits_cnn"}} if "prune" in stages[-1] else {}
    path = tiny.project(tmp_path / "project", stages, target="npu", **model)
    with pytest.raises(PipelineError) as refused:
        load(path)
    assert message in str(refused.value)


@pytest.mark.tensorflow
def test_pruning_by_the_target_s_cost(npu: targets.Target, keras: Any) -> None:
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
