"""The protocol of a target: check, legalize, cost and compile.

A target is a package next to this file with an instance of `Target`, and `compress.targets.TARGETS` lists it. The rest
of the program uses targets through this protocol only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

from pydantic import Field, model_validator

from compress.core.artifact import Facts
from compress.core.errors import PipelineError
from compress.core.settings import Settings
from compress.model.tflite.comparison import Feed
from compress.model.tflite.graph import Graph
from compress.results.placement import OperatorPlacement


class TargetResult(Protocol):
    """A result that can be shown to a person, and to a program."""

    def describe(self) -> str:
        """Return the result as text for a person."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as a plain map."""


class PlacementSummary(Protocol):
    """The placement of a model's operators."""

    @property
    def failure(self) -> str | None:
        """The reason why the target's compiler will reject the whole model, or None."""

    @property
    def summary(self) -> str:
        """One line about where the model runs."""

    @property
    def complete(self) -> bool:
        """Whether every operator runs on the accelerator; always true for a target without one."""


class CheckResult(PlacementSummary, TargetResult, Protocol):
    """The predicted placement and memory of a model; its map always has `summary` and `ops`."""

    @property
    def ops(self) -> Sequence[OperatorPlacement]:
        """Every operator, in execution order."""


class EstimateResult(TargetResult, Protocol):
    """The predicted latency of a model on a host."""

    @property
    def latency_ms(self) -> float:
        """The predicted latency."""

    @property
    def low_ms(self) -> float:
        """The lower end of the interval in which measurements are expected."""

    @property
    def high_ms(self) -> float:
        """The upper end of the interval."""


class LegalizeResult(TargetResult, Protocol):
    """A rewritten model and its changes; its map always has `changes`."""

    @property
    def graph(self) -> Graph:
        """The rewritten model; the same object if nothing was rewritten."""

    @property
    def after(self) -> PlacementSummary:
        """The placement of the rewritten model."""


@dataclass(frozen=True)
class TargetCompiler:
    """A vendor's compiler.

    Attributes:
        version: the version whose results are predicted.
        runtimes: for each version, the newest runtime of the device that the compiler writes for.
    """

    name: str
    version: str
    runtimes: Mapping[str, int]


NO_COMPILER = TargetCompiler("", "", {})
"""The compiler of a target that runs .tflite files as they are."""


@dataclass(frozen=True)
class ChannelBlocks:
    """Numbers of channels that a target computes at once: fewer channels save time only in whole blocks.

    Attributes:
        inputs: block size of input channels; the pruner keeps multiples of it.
        outputs: block size of output channels.
    """

    inputs: int
    outputs: int


@dataclass(frozen=True)
class OperatorShape:
    """One operator of a network, with the properties that its cost depends on.

    Attributes:
        kind: "conv", "tconv" (transposed convolution), "fc" (dense), "dw" (depthwise), "pool" or "elt" (element-wise).
        output_shape: height, width and channels of the output.
        input_shape: height, width and channels of the input.
        kernel: height and width of the window; 1x1 for an operator without a window.
        name: the operator's name in messages.
        constant: whether the operator has one constant for each output channel, such as the slopes of a PReLU.
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
        """Return the time of the computation without transfers."""

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
        """By operator index, the bytes of parameters that are streamed even if the target's memory is empty."""

    @abstractmethod
    def cached_bytes(self, without: Collection[int] = ()) -> int:
        """Return the target's memory for all parameters, except those of the operators `without`."""


class CostModel:
    """The costs of a network on a target. This class predicts neither time nor memory; MACs need no target.

    Attributes:
        blocks: the numbers of channels that are computed at once.
        objectives: the objectives that the pruner can minimize on this target, from "compute", "latency" and "cache".
        hosts: one line about each host for which latency is predicted, by name.
        clocks: the names of the clocks; the first one is the default.
    """

    blocks: ChannelBlocks
    objectives: frozenset[str] = frozenset()
    hosts: Mapping[str, str] = {}
    clocks: Sequence[str] = ()

    @property
    def default_host(self) -> str:
        """The host for latency predictions if none is given; "" without hosts."""
        return next(iter(self.hosts), "")

    def host(self, name: str | None) -> str:
        """Return a host's name; None means the default host.

        Raises:
            PipelineError: the target has no such host.
        """
        return self.default_host if name is None else _require("host", name, [*self.hosts])

    def clock(self, name: str | None) -> str:
        """Return a clock's name; None means the first clock.

        Raises:
            PipelineError: the target has no such clock.
        """
        if name is not None:
            return _require("clock", name, self.clocks)
        return self.clocks[0] if self.clocks else ""

    def operator(self, shape: OperatorShape) -> OperatorShape:
        """Return an operator with the properties that this target needs. The result can be used in many networks."""
        return shape

    def activation_operators(self, function: str) -> int:
        """Return the number of operators for an activation (a Keras name, "silu"), in addition to the one before it."""
        return 0 if function in ("linear", "relu", "relu6") else 1

    def input_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of an input tensor that are sent to the target; 0 for a target without a bus."""
        del shape
        return 0

    def output_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of an output tensor that are sent from the target; 0 for a target without a bus."""
        del shape
        return 0


class HardwareCostModel(CostModel, ABC):
    """A cost model that predicts time and memory."""

    @abstractmethod
    def of_operators(self, operators: Sequence[Any], input_bytes: int, output_bytes: int) -> NetworkCost:
        """Return the cost of a network; `operator` returned its operators."""

    @abstractmethod
    def of_file(self, graph: Graph) -> NetworkCost:
        """Return the cost of a .tflite file.

        Raises:
            ModelError: the target's compiler will reject the file.
        """

    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the target's memory for parameters that is available to every network."""

    @abstractmethod
    def cache_limit_bytes(self, smallest: NetworkCost) -> int:
        """Return the memory that all parameters must fit into, so that none is streamed.

        `smallest` is the cost of the network with as few channels as possible.
        """

    @abstractmethod
    def estimate(
        self, graph: Graph, host: str | None, clock: str | None, compiled: Path | None = None
    ) -> EstimateResult:
        """Predict the latency of a model on a host.

        Args:
            graph: the model, not compiled.
            host: one of `hosts`; None for the default host.
            clock: one of `clocks`; None for the first.
            compiled: the compiled model, if there is one.

        Raises:
            PipelineError: the target has no such host or clock.
            ModelError: the compiler will reject the model, or `compiled` is another model.
        """


def _require(kind: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise PipelineError(f"unknown {kind} {name!r}", allowed=", ".join(known) or f"no {kind}")
    return name


@dataclass(frozen=True)
class Target(ABC):
    """A target and its constants.

    Attributes:
        name: the target's name in pipeline.yaml.
        digest: SHA-256 of the constants, part of the cache key of every stage that depends on the target.
        compiler: the vendor's compiler; NO_COMPILER if models need none.
    """

    name: str
    summary: str
    digest: str
    compiler: TargetCompiler = NO_COMPILER

    def compiled_by(self, version: str, runtime: int | None = None) -> Target:
        """Return the same target with another version of its compiler.

        `runtime` is the oldest runtime that the compiled model must run on; the version's own if it is None or newer.

        Raises:
            PipelineError: the compiler has no such version.
        """
        runtimes = dict(self.compiler.runtimes)
        _require("compiler", version, [*runtimes])
        if runtime is not None:
            runtimes[version] = min(runtime, runtimes[version])
        return replace(self, compiler=replace(self.compiler, version=version, runtimes=runtimes))

    @abstractmethod
    def check(self, graph: Graph, *, all_subgraphs: bool = False) -> CheckResult:
        """Predict where each operator of a model runs, with the reason.

        With `all_subgraphs`, the compiler makes several partitions.

        Raises:
            ModelError: the model is damaged.
        """

    @abstractmethod
    def legalize(self, graph: Graph, inputs: Sequence[Feed] = (), *, io: str | None = None) -> LegalizeResult:
        """Rewrite a model into operators that run on the target.

        Args:
            graph: the model, quantized to full integer; its inputs and outputs may be float.
            inputs: real inputs for the verification of rewrites.
            io: "INT8" or "UINT8", the type of inputs and outputs; None for the internal type.

        Raises:
            ModelError: the TFLite runtime cannot run the model.
        """

    @property
    @abstractmethod
    def cost(self) -> CostModel:
        """The costs that the target predicts."""

    @abstractmethod
    def compile(self, model: bytes, settings: CompilerSettings, folder: Path, note: Callable[[str], None]) -> Facts:
        """Compile a model, and write the result into a folder.

        `folder` gets the compiled files, and `note` shows a message at once.

        Returns:
            Facts for the report: `placement`, `compiled` (a boolean), and others that depend on the target.

        Raises:
            ModelError: the model cannot be read.
            StageError: the compiler failed.
        """

    def compiler_identity(self, settings: CompilerSettings) -> dict[str, str]:
        """Return values that differ between compilers whose results may differ."""
        del settings
        return {}

    def invalid_setting(self, settings: CompilerSettings) -> str:
        """Return an error message if a setting is invalid for this target's compiler, otherwise ""."""
        del settings
        return ""

    def newer_than_boards(self, graph: Graph) -> list[str] | None:
        """Return the operators, with versions, that runtimes on old boards cannot load; None if that is unknown."""
        del graph
        return None


def hardware_costs(target: Target) -> HardwareCostModel:
    """Return the cost model of a target that predicts time and memory.

    Raises:
        PipelineError: the target predicts neither.
    """
    if not isinstance(target.cost, HardwareCostModel):
        raise PipelineError(f"no latency is predicted for the target {target.name}")
    return target.cost


IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}$"
"""A Docker image: name, tag or digest, never an option."""
SSH_HOST = r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9][A-Za-z0-9._:-]{0,252}$"
"""A host name or a name in ~/.ssh/config, with or without a user; never an option."""


class CompilerSettings(Settings):
    """The location of the vendor's compiler, and its options."""

    compiler: str | None = None
    """Path of edgetpu_compiler on this machine; by default the one on PATH, if there is one."""
    docker: Annotated[str, Field(pattern=IMAGE)] | None = None
    """A Docker image with edgetpu_compiler on its PATH. The container has no network."""
    ssh: Annotated[str, Field(pattern=SSH_HOST)] | None = None
    """Another host with edgetpu_compiler on its PATH: user@host, or a name in ~/.ssh/config."""
    compiler_version: Annotated[str, Field(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}(\.[0-9]{1,12})?$")] | None = None
    """The version that the compiler must have, such as 16.0; by default any version, and 16.0 for results from the
    cache."""
    cache: str | None = None
    """A folder for compiled results, which several users may share. A result in it is used without the compiler."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Time limit of one attempt in seconds, with the transfer to and from the host."""
    child_timeout_s: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """The compiler's own time limit for each attempt to partition the model, in seconds (-t; 16.0 only; 180 by
    default)."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Number of times that a failure which may be random is retried."""
    all_subgraphs: bool = False
    """Also compile operators after one that runs on the CPU, as further subgraphs (-a)."""
    min_runtime_version: Annotated[int, Field(ge=1)] | None = None
    """The oldest Edge TPU runtime on which the result must run, 10 to 14 (-m); by default the compiler decides."""
    num_segments: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of segments for a pipeline of several Edge TPUs (-n). `package` needs a model in one segment."""
    intermediate_tensors: tuple[Annotated[str, Field(pattern=r"^[^,\-][^,]*$")], ...] = ()
    """Names of the tensors at which the Edge TPU's part ends (-i)."""
    search_delegate: bool = False
    """Move operators at the end to the CPU until the rest compiles (-d; 16.0 only)."""

    @model_validator(mode="after")
    def _one_host(self) -> Self:
        if sum(host is not None for host in (self.compiler, self.docker, self.ssh)) > 1:
            raise ValueError("only one of the keys 'compiler', 'docker' and 'ssh' can be given")
        return self
