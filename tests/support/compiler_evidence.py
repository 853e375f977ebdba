"""Predictions for the Edge TPU, and the reports of the vendor's compiler for the same models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import operator_tables
from paths import EDGETPU

from compress.model.tflite import graph
from compress.targets import load
from compress.targets.edgetpu import operator_parameters, parameter_memory
from compress.targets.edgetpu.check import activation_bytes_per_tile
from compress.targets.edgetpu.inspection import inspect
from compress.targets.edgetpu.placement import place

TARGET = load("edgetpu")
MIB = 1 << 20
VERSIONS = {"16.0": "16.0", "15.0": "15.0", "15.0 or 2.x": "2.1", "1.0": "1.0"}


@dataclass(frozen=True)
class CompiledModel:
    """A model, and the results of the real compiler for it.

    Attributes:
        name: its name.
        parsed: the model before it was compiled.
        version: the compiler version whose rules the compiled file follows.
        runtime: the oldest runtime that the compiled model runs on.
        placement: "tpu" or "cpu" for each operator.
        parameter_bytes: bytes of all parameters in the compiled file, cached and streamed.
        narrow_bytes_per_tile: activation memory per tile that the compiled file requests, in bytes.
    """

    name: str
    parsed: graph.Graph
    version: str
    runtime: int
    placement: tuple[str, ...]
    parameter_bytes: int
    narrow_bytes_per_tile: int

    @property
    def mapped(self) -> list[graph.Operator]:
        """The operators that the compiler mapped to the Edge TPU."""
        return [op for op, side in zip(self.parsed.operators, self.placement, strict=True) if side == "tpu"]

    def misplaced(self) -> int:
        """Return the number of operators whose predicted placement differs from that of the compiler."""
        predicted = [op.placement for op in place(self.parsed, TARGET).ops]
        return sum(ours != real for ours, real in zip(predicted, self.placement, strict=True))

    def predicted_parameter_bytes(self) -> int:
        target = TARGET.compiled_by(self.version, self.runtime)
        return sum(operator_parameters.count(op, self.parsed, target).size_bytes for op in self.mapped)

    def predicted_narrow_bytes(self) -> int:
        """Return the predicted activation memory per tile, in bytes."""
        return activation_bytes_per_tile(self.parsed, {op.index for op in self.mapped})


def real_models() -> list[CompiledModel]:
    """Return the models of the shared folder. Each compiled file is inspected."""
    models = []
    for row in json.loads((EDGETPU / "pairs" / "index.json").read_text()):
        folder = EDGETPU / "pairs" / row["name"]
        real = inspect(folder / "compiled.tflite")
        models.append(
            CompiledModel(
                name=row["name"],
                parsed=graph.read(folder / "model.tflite"),
                version=VERSIONS[row["behaves_like"]],
                runtime=real.min_runtime,
                placement=tuple(row["placement"]),
                parameter_bytes=real.cached_bytes + real.streamed_bytes,
                narrow_bytes_per_tile=max(executable.narrow_bytes_per_tile for executable in real.executables),
            )
        )
    return models


def recorded_models() -> list[CompiledModel]:
    """Return the same models, rebuilt from the operator tables in the repository."""
    return [
        CompiledModel(
            name=row["name"],
            parsed=operator_tables.graph_of(row["table"]),
            version=row["version"],
            runtime=row["runtime"],
            placement=tuple(row["placement"]),
            parameter_bytes=row["parameter_bytes"],
            narrow_bytes_per_tile=row["narrow_bytes_per_tile"],
        )
        for row in operator_tables.load()["models"]
    ]


def stack(row: dict[str, Any]) -> list[parameter_memory.Parameters]:
    """Return the layers of one row of the compiler's memory sweep."""
    channels, layers, conv = row["input"][-1], [], row["network"] == "conv"
    for outputs in [row["width"]] * row["layers"] + ([] if conv else [row["classes"]]):
        per_output = parameter_memory.round_up(channels, 4) * (row["kernel"] ** 2 if conv else 1)
        places = row["input"][0] * row["input"][1] if conv else 1
        parameters = parameter_memory.convolution(
            outputs, per_output, 8 if conv else 0, places, one_position_in=not conv
        )
        layers.append(parameter_memory.mark_uncacheable(parameters, per_output))
        channels = outputs
    return layers


def reported(row: dict[str, Any]) -> bool:
    """Return whether both predicted sizes equal those in the compiler's report, to the digits that it prints."""
    allocation = parameter_memory.allocate_cache(stack(row))
    numbers = (
        (allocation.report_on_chip_bytes, "report_on_chip_MiB"),
        (allocation.report_off_chip_bytes, "report_off_chip_MiB"),
    )
    return all(abs(size / MIB - row[name]) <= (0.00501 if row[name] >= 1 else 0.00001) for size, name in numbers)
