"""The protocol of a target: check, legalize, cost and compile.

A target is a folder next to this file with a TOML file of its constants, each with its source, and a class that
implements `Target`. The package's attribute `TARGET` is that class. The rest of the program knows targets by this
protocol only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from compress.artifact import Facts
from compress.errors import PipelineError
from compress.targets.compiler_settings import CompilerSettings
from compress.tflite.comparison import Feed
from compress.tflite.graph import Graph


class TargetResult(Protocol):
    """A result that can be shown to a person, and to a program."""

    def describe(self) -> str:
        """Return the result as text for a person."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as a plain map."""


class PlacementSummary(Protocol):
    """The share of a model that runs where the target runs models best."""

    @property
    def failure(self) -> str | None:
        """Why the target's compiler refuses the whole model, or None."""

    @property
    def summary(self) -> str:
        """One line about where the model runs."""

    @property
    def complete(self) -> bool:
        """Whether every operator runs where the target runs models best."""


class CheckResult(PlacementSummary, TargetResult, Protocol):
    """The expected placement and memory of a model; `summary` and `ops` are always in its map."""


class LegalizeResult(TargetResult, Protocol):
    """A rewritten model, and what was rewritten; `changes` is always in its map."""

    @property
    def graph(self) -> Graph:
        """The rewritten model; the same object if there was nothing to rewrite."""

    @property
    def after(self) -> PlacementSummary:
        """The placement of the rewritten model."""


@dataclass(frozen=True)
class ChannelBlocks:
    """Block sizes of a target along the channels: fewer channels save time only in whole blocks.

    Attributes:
        inputs: input channels that are computed at once; the pruner keeps multiples of it.
        outputs: output channels that are computed at once.
    """

    inputs: int
    outputs: int


@dataclass(frozen=True)
class OperatorShape:
    """One operator of a network that is not a file yet, as far as its cost depends on it.

    Attributes:
        kind: "conv", "tconv" (transposed), "fc" (dense), "dw" (depthwise), "pool", or "elt" (element by element).
        output_shape: height, width and channels of its output.
        input_shape: height, width and channels of its input.
        kernel: height and width of its window; 1x1 for an operator without one.
        index: its position in the model.
        name: a word for the reader.
        constant: whether it has a constant for each output channel, such as the slopes of a PReLU.
    """

    kind: str
    output_shape: tuple[int, int, int]
    input_shape: tuple[int, int, int]
    kernel: tuple[int, int] = (1, 1)
    index: int = 0
    name: str = ""
    constant: bool = False


class NetworkCost(ABC):
    """Time and memory of one network on a target."""

    @abstractmethod
    def compute_ms(self, clock: str) -> float:
        """Return the time of the arithmetic alone."""

    @abstractmethod
    def latency_ms(self, host: str, clock: str) -> float:
        """Return the predicted latency of one inference on a host."""

    @property
    @abstractmethod
    def streamed_bytes(self) -> int:
        """Parameters that are sent to the target at every inference."""

    @property
    @abstractmethod
    def never_cached(self) -> Mapping[int, int]:
        """By operator index, the bytes of parameters that are streamed however empty the target's memory is."""

    @abstractmethod
    def cached_bytes(self, without: Collection[int] = ()) -> int:
        """Return the target's memory that all parameters would take together, except those of some operators."""


class CostModel(ABC):
    """Costs that a target predicts. Multiply-accumulates and file sizes are the same on all targets, and not here."""

    @property
    @abstractmethod
    def objectives(self) -> frozenset[str]:
        """The objectives that the pruner can minimize on this target: some of "compute", "latency" and "cache"."""

    @property
    @abstractmethod
    def hosts(self) -> Mapping[str, str]:
        """A line about each host that latency is predicted on, by name."""

    @property
    @abstractmethod
    def clocks(self) -> Sequence[str]:
        """Names of the clock rates; the default is the first."""

    @property
    @abstractmethod
    def blocks(self) -> ChannelBlocks:
        """Block sizes along which fewer channels save time."""

    @property
    def default_host(self) -> str:
        """The host that latency is predicted on where none is named; "" without hosts."""
        return next(iter(self.hosts), "")

    def host(self, name: str | None) -> str:
        """Return a host's name; None stands for the default host.

        Raises:
            PipelineError: the target has no such host.
        """
        return self.default_host if name is None else _known("host", name, [*self.hosts])

    def clock(self, name: str | None) -> str:
        """Return a clock's name; None stands for the first clock.

        Raises:
            PipelineError: the target has no such clock.
        """
        first = self.clocks[0] if self.clocks else ""
        return first if name is None else _known("clock", name, self.clocks)

    @abstractmethod
    def operator(self, shape: OperatorShape) -> OperatorShape:
        """Return an operator with what this target needs to know of it. The result can be used in many networks."""

    def activation_operators(self, function: str) -> int:
        """Return the number of operators that an activation becomes, in addition to the operator before it.

        Args:
            function: Keras' name of the activation, such as "silu".
        """
        return 0 if function in ("linear", "relu", "relu6") else 1

    @abstractmethod
    def input_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of an input tensor on the way to the target."""

    @abstractmethod
    def output_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of an output tensor on the way from the target."""

    @abstractmethod
    def of_operators(self, operators: Sequence[Any], input_bytes: int, output_bytes: int) -> NetworkCost:
        """Return the cost of a network of operators that `operator` returned."""

    @abstractmethod
    def of_file(self, graph: Graph) -> NetworkCost:
        """Return the cost of a .tflite file.

        Raises:
            ModelError: the target's compiler would refuse it.
        """

    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the target's memory for parameters that every network can count on."""

    @abstractmethod
    def cache_limit_bytes(self, smallest: NetworkCost) -> int:
        """Return the memory that all parameters must fit into for none to be streamed.

        Args:
            smallest: the cost of the network with as few channels as possible.
        """


def _known(what: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise PipelineError(f"there is no {what} {name!r}", allowed=", ".join(known) or f"no {what} at all")
    return name


@dataclass(frozen=True)
class Target(ABC):
    """A target and its constants.

    Attributes:
        name: the word for it in pipeline.yaml.
        digest: SHA-256 of the TOML file, part of the key of every stage that depends on the target.
        tables: the TOML file's content.
    """

    name: str
    digest: str
    tables: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """One line about the target."""
        return str(self.tables["summary"])

    @property
    def has_compiler(self) -> bool:
        """Whether a model must be compiled for this target."""
        return "compiler" in self.tables

    @property
    def compiler_name(self) -> str:
        """The name of the target's compiler, "" if there is none."""
        return str(self.tables["compiler"]["name"]) if self.has_compiler else ""

    def compiled_by(self, version: str) -> Target:
        """Return the same target with another version of its compiler.

        Raises:
            PipelineError: the target does not know that version.
        """
        known = self.tables["compiler"]["runtimes"] if self.has_compiler else {}
        if version not in known:
            raise PipelineError(f"there is no compiler {version!r}", allowed=", ".join(known) or "no compiler at all")
        compiler = {**self.tables["compiler"], "version": version}
        return replace(self, tables={**self.tables, "compiler": compiler})

    @abstractmethod
    def check(self, graph: Graph, *, all_subgraphs: bool = False) -> CheckResult:
        """Predict where each operator of a model runs, and why.

        Args:
            graph: the model.
            all_subgraphs: whether the compiler is asked for several partitions.

        Raises:
            ModelError: the model is damaged.
        """

    @abstractmethod
    def legalize(self, graph: Graph, inputs: Sequence[Feed] = (), *, io: str | None = None) -> LegalizeResult:
        """Rewrite a model into operators that run on the target.

        Args:
            graph: the model, quantized to full integer except at its ends.
            inputs: real inputs that rewrites are verified on.
            io: "INT8" or "UINT8", the type of inputs and outputs; None for the type inside.

        Raises:
            ModelError: the model cannot be run as it is.
        """

    @property
    @abstractmethod
    def cost(self) -> CostModel:
        """The costs that the target predicts."""

    @abstractmethod
    def compile(self, model: bytes, settings: CompilerSettings, folder: Path, note: Callable[[str], None]) -> Facts:
        """Compile a model, and leave the result in a folder.

        Args:
            model: the .tflite file.
            settings: the compile stage's settings.
            folder: where compiled files go.
            note: a function that shows a message at once.

        Returns:
            Facts for the report: `placement`, `compiled` (a boolean), and what else the target knows.

        Raises:
            ModelError: the model cannot be read.
            StageError: the compiler failed.
        """

    def compiler_identity(self, settings: CompilerSettings) -> dict[str, str]:
        """Return what changes when another compiler may make another result."""
        del settings
        return {}

    def invalid_setting(self, settings: CompilerSettings) -> str:
        """Return why a setting does not fit this target's compiler, or ""."""
        del settings
        return ""

    def estimate(self, graph: Graph, host: str | None, clock: str | None, compiled: Path | None = None) -> TargetResult:
        """Predict the latency of a model on a host.

        Args:
            graph: the model, not compiled.
            host: one of `cost.hosts`; None: the default host.
            clock: one of `cost.clocks`; None: the first.
            compiled: what the target's compiler made of the model, where it is known.

        Raises:
            PipelineError: this target predicts no latency, or has no such host or clock.
            ModelError: the compiler would refuse the model, or `compiled` is another model.
        """
        del graph, host, clock, compiled
        raise PipelineError(f"no latency is predicted for the target {self.name}")

    def inspect(self, compiled: Path, original: Path | None = None) -> TargetResult:
        """Open a compiled model.

        Args:
            compiled: the file that the target's compiler wrote.
            original: the .tflite file that it was compiled from, to compare predictions with.

        Raises:
            PipelineError: this target has no compiler.
            ModelError: the file is not a compiled model.
        """
        del compiled, original
        raise PipelineError(f"the target {self.name} has no compiled models")

    def operators_page(self) -> str:
        """Return the page of the manual on what runs on this target.

        Raises:
            PipelineError: there is no such page.
        """
        raise PipelineError(f"there is no page on the operators of the target {self.name}")

    def newer_than_boards(self, graph: Graph) -> list[str] | None:
        """Return the operators, with versions, that runtimes on old boards do not open; None if that is not known."""
        del graph
        return None
