"""`inspect`: the contents of a compiled .tflite file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.core.errors import ModelError
from compress.model.tflite import graph
from compress.model.tflite.graph import Graph, Tensor
from compress.targets.base import Target
from compress.targets.edgetpu.check import TILE_BYTES, check
from darwinn import compiled_file, package
from darwinn.package import DarwinnPackage, Executable

SCHEMA_VERSION = 1
MIN_PARAMETER_SHARE = 0.8
"""The least parameter bytes of a compiled file, relative to the prediction for the same model.

For 28 of 29 compiled models the prediction is within 2%."""
MAX_PARAMETER_FACTOR = 8
"""The most parameter bytes, relative to the prediction: for an LSTM, to which the compiler adds matrices, it is 5."""
EXTRA_PARAMETER_BYTES = 1 << 16
"""Further bytes that are allowed; chosen, because a small model has hardly any predicted bytes to compare with."""


@dataclass(frozen=True)
class Inspection:
    """The contents of a compiled model.

    Attributes:
        packages: the contents of the custom operators, in the order of execution.
        cpu_ops: the names of the operators that stay on the CPU.
    """

    packages: tuple[DarwinnPackage, ...]
    cpu_ops: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def executables(self) -> tuple[Executable, ...]:
        """The executables of all packages."""
        return tuple(executable for package in self.packages for executable in package.executables)

    @property
    def min_runtime(self) -> int:
        """The oldest runtime that can run the whole model."""
        return max(package.min_runtime for package in self.packages)

    @property
    def cached_bytes(self) -> int:
        """Parameters that are loaded once and stay on the chip."""
        return sum(package.cached_bytes for package in self.packages)

    @property
    def streamed_bytes(self) -> int:
        """Parameters that are sent at every inference."""
        return sum(package.streamed_bytes for package in self.packages)

    def to_json(self) -> dict[str, Any]:
        """Return the contents as a plain map, schema 1."""
        return {
            "schema_version": SCHEMA_VERSION,
            "min_runtime": self.min_runtime,
            "compiler_versions": sorted({package.compiler_version for package in self.packages}),
            "cached_bytes": self.cached_bytes,
            "streamed_bytes": self.streamed_bytes,
            "custom_ops": len(self.packages),
            "cpu_ops": list(self.cpu_ops),
            "inputs": [_tensor(tensor) for tensor in self.inputs],
            "outputs": [_tensor(tensor) for tensor in self.outputs],
            "executables": [executable.to_json() for executable in self.executables],
        }

    def describe(self) -> str:
        """Return the contents as text for a person."""
        lines = [
            f"minimum runtime    {self.min_runtime}",
            f"cached on chip     {self.cached_bytes:,} bytes of parameters, loaded once",
            f"streamed           {self.streamed_bytes:,} bytes of parameters at every inference",
            f"custom operators   {len(self.packages)}",
            f"left on the CPU    {', '.join(self.cpu_ops) or 'none'}",
            *(_describe_tensor("input", tensor) for tensor in self.inputs),
            *(_describe_tensor("output", tensor) for tensor in self.outputs),
        ]
        lines += [
            f"{executable.type:<18} {executable.parameter_bytes:,} bytes of parameters, "
            f"{executable.instruction_bytes:,} of instructions, {executable.scratch_bytes:,} of scratch, "
            f"{executable.narrow_bytes_per_tile:,} of {TILE_BYTES:,} in each tile, token {executable.token:016x}"
            for executable in self.executables
        ]
        return "\n".join(lines) + "\n"


def _tensor(tensor: Tensor) -> dict[str, Any]:
    quantization = tensor.quantization
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "scale": quantization.scale[0] if quantization else None,
        "zero_point": quantization.zero_point[0] if quantization and quantization.zero_point else None,
    }


def _describe_tensor(kind: str, tensor: Tensor) -> str:
    row = _tensor(tensor)
    line = f"{kind:<18} {row['dtype']} {row['shape']} {row['name']}"
    return line if row["scale"] is None else f"{line}  scale {row['scale']:g}, zero point {row['zero_point']}"


@dataclass(frozen=True)
class FigureComparison:
    """A predicted figure of a model, and the real one in the compiled file."""

    name: str
    predicted: int | None
    real: int


@dataclass(frozen=True)
class InspectionResult:
    """The contents of a compiled model, and a comparison with the prediction for its original.

    Attributes:
        rows: the comparison; None without an original.
    """

    inspection: Inspection
    rows: Sequence[FigureComparison] | None

    def describe(self) -> str:
        """Return both as text for a person."""
        rows = (f"{row.name:<24} predicted {row.predicted!s:>12}  real {row.real!s:>12}\n" for row in self.rows or ())
        return self.inspection.describe() + "".join(rows)

    def to_json(self) -> dict[str, Any]:
        """Return both as a plain map."""
        result = self.inspection.to_json()
        if self.rows is not None:
            result["against"] = [asdict(row) for row in self.rows]
        return result


def inspect(path: Path) -> Inspection:
    """Read a compiled model.

    Raises:
        ModelError: the file is not a .tflite file, or the vendor's compiler did not compile it.
    """
    return inspect_graph(graph.read(path), str(path))


def inspect_graph(parsed: Graph, where: str = "") -> Inspection:
    """Return the contents of a compiled model that is already parsed; `where` is its name in messages.

    Raises:
        ModelError: the vendor's compiler did not compile the model.
    """
    custom_operators = compiled_file.custom_operators(parsed, where)
    compiled = {operator.index for operator in custom_operators}
    cpu_ops = [operator.name for operator in parsed.operators if operator.index not in compiled]
    try:
        packages = []
        for operator in custom_operators:
            options = parsed.source.subgraphs[0].operators[operator.index].customOptions
            packages.append(package.read(b"" if options is None else bytes(options)))
    except ModelError as error:
        error.where = where
        raise
    inputs = tuple(parsed.tensors[index] for index in parsed.inputs)
    outputs = tuple(parsed.tensors[index] for index in parsed.outputs)
    return Inspection(tuple(packages), tuple(cpu_ops), inputs, outputs)


def compare_with_prediction(inspection: Inspection, original: Graph, target: Target) -> list[FigureComparison]:
    """Compare the contents of a compiled model with the predictions of `check` for the original.

    Raises:
        ModelError: the original is damaged.
    """
    predicted = check(original, target)
    sizes = predicted.parameters
    cpu_ops = sum(op.placement == "cpu" for op in predicted.ops)
    tile_bytes = max(executable.narrow_bytes_per_tile for executable in inspection.executables)
    return [
        FigureComparison("cached_bytes", sizes.cached_bytes if sizes else None, inspection.cached_bytes),
        FigureComparison("streamed_bytes", sizes.streamed_bytes if sizes else None, inspection.streamed_bytes),
        FigureComparison("narrow_bytes_per_tile", predicted.activation_bytes, tile_bytes),
        FigureComparison("partitions", predicted.subgraphs, len(inspection.packages)),
        FigureComparison("cpu_ops", cpu_ops, len(inspection.cpu_ops)),
    ]


def verify_same_model(inspection: Inspection, original: Graph, target: Target, where: str) -> None:
    """Verify that a compiled model can come from an original. Accept every original that the compiler would reject.

    `where` is the compiled file's name in messages.

    Raises:
        ModelError: inputs, outputs, CPU operators or parameter bytes differ from those of the original.
    """
    figures = {row.name: row for row in compare_with_prediction(inspection, original, target)}
    if figures["cached_bytes"].predicted is None:
        return
    difference = (
        _interface_difference(inspection, original)
        or _cpu_difference(inspection, original)
        or _parameter_difference(figures)
    )
    if difference:
        raise ModelError(
            f"{difference}: it was compiled from another model",
            where=where,
            hint="give the file that edgetpu_compiler wrote for this model",
        )


def _interface_difference(inspection: Inspection, original: Graph) -> str:
    compiled = [_type_and_shape(tensor) for tensor in (*inspection.inputs, *inspection.outputs)]
    expected = [_type_and_shape(original.tensors[index]) for index in (*original.inputs, *original.outputs)]
    if compiled == expected:
        return ""
    return f"has the inputs and outputs {', '.join(compiled)}; the model has {', '.join(expected)}"


def _type_and_shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _cpu_difference(inspection: Inspection, original: Graph) -> str:
    unexpected = Counter(inspection.cpu_ops) - Counter(operator.name for operator in original.operators)
    return f"leaves {', '.join(unexpected)} on the CPU, and the model has fewer of them" if unexpected else ""


def _parameter_difference(figures: Mapping[str, FigureComparison]) -> str:
    rows = (figures["cached_bytes"], figures["streamed_bytes"])
    real = sum(row.real for row in rows)
    predicted = sum(row.predicted or 0 for row in rows)
    # If more operators stay on the CPU than predicted, the compiled file may have fewer parameters.
    same_placement = figures["cpu_ops"].predicted == figures["cpu_ops"].real
    too_many = real > MAX_PARAMETER_FACTOR * predicted + EXTRA_PARAMETER_BYTES
    too_few = same_placement and real < MIN_PARAMETER_SHARE * predicted
    if not too_many and not too_few:
        return ""
    return f"has {real:,} bytes of parameters; {predicted:,} are expected for the model"
