"""The constants of the Edge TPU: edgetpu.toml, which has their sources, is read here and nowhere else."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from compress.targets.base import TargetCompiler


@dataclass(frozen=True)
class MappedOperator:
    """An operator that the Edge TPU runs.

    Attributes:
        max_version: the newest version that compiler 16.0 maps.
        runtime: the oldest Edge TPU runtime that runs the operator.
        largest_mapped: values of the largest input or output that is known to be mapped; None if no file is known.
    """

    max_version: int
    runtime: int
    largest_mapped: int | None = None


@dataclass(frozen=True)
class OperatorLimits:
    """Limits of single operators, in positions, elements or inputs."""

    reduced_positions_mapped: int
    reduced_positions_refused: int
    resized_elements_mapped: Mapping[str, int]
    lstm_inputs_mapped: int
    softmax_elements: int
    transpose_elements: int


@dataclass(frozen=True)
class ParameterConstants:
    """Sizes of parameters in the compiled file; `softmax_bytes` is by the compiler's version."""

    joined_values_at_once: int
    joined_values_of_a_part: int
    softmax_bytes: Mapping[str, int]


@dataclass(frozen=True)
class MemoryConstants:
    """The on-chip memory, in bytes; `passes_that_compiled` is in memories of a tile."""

    memory_bytes: int
    cache_bytes: int
    cache_bytes_beside_streaming: int
    streamed_weights_per_output: int
    largest_cached_bytes: int
    plan_bytes: int
    narrow_bytes_per_tile: int
    passes_that_compiled: float


@dataclass(frozen=True)
class WeightPasses:
    """How many times streamed weights are sent if a tile's maps have at most `up_to_kib` KiB."""

    up_to_kib: int
    times: int


@dataclass(frozen=True)
class InstructionConstants:
    """Bytes of instructions: of a program, of each kind of layer, and by the number of ragged sides of a map."""

    base: int
    convolution: int
    dense: int
    depthwise: int
    other: int
    ragged_sides: tuple[int, int, int]


@dataclass(frozen=True)
class HostConstants:
    """The latency constants of a host; `cpu_factor` is None if the host has that of all hosts."""

    summary: str
    measurements: int
    basis: str
    fixed_ms: float
    transfer_ms_per_mb: float
    output_ms_per_mb: float
    compute_factor: float
    overlap: float
    spread: float
    cpu_ns_per_mac: float
    cpu_ns_per_element: float
    cpu_factor: float | None = None


@dataclass(frozen=True)
class LatencyConstants:
    """The latency constants at the maximum clock; `clocks` has the duration of a cycle relative to it."""

    conv_ns: float
    window_ns: float
    layer_us: float
    default_host: str
    clocks: Mapping[str, float]
    weight_passes: tuple[WeightPasses, ...]
    most_weight_passes: int
    cpu_factor: float
    largest_factor: float
    instructions: InstructionConstants
    hosts: Mapping[str, HostConstants]


@dataclass(frozen=True)
class EdgeTpuConstants:
    """The whole file.

    Attributes:
        tiles: tiles of a feature map along its height, and along its width.
        parser: operators by the newest version that the compiler's TFLite parser reads, and the known `customs`.
        advice: what to do about operators that the Edge TPU does not run.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    summary: str
    dtypes: tuple[str, ...]
    max_active_rank: int
    tiles: int
    compiler: TargetCompiler
    operators: Mapping[str, MappedOperator]
    parser: Mapping[str, tuple[str, ...]]
    advice: Mapping[str, str]
    limits: OperatorLimits
    parameters: ParameterConstants
    memory: MemoryConstants
    latency: LatencyConstants


_CONTENT = Path(__file__).with_name("edgetpu.toml").read_bytes()
DIGEST = hashlib.sha256(_CONTENT).hexdigest()
CONSTANTS = TypeAdapter(EdgeTpuConstants).validate_python(tomllib.loads(_CONTENT.decode()))
