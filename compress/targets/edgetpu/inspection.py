"""`inspect`: a compiled .tflite file, opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.errors import ModelError
from compress.targets.base import Target
from compress.targets.edgetpu import darwinn_package
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.constants import MEMORY
from compress.targets.edgetpu.darwinn_package import DarwinnPackage, Executable
from compress.tflite import graph
from compress.tflite.graph import Graph, Tensor

SCHEMA_VERSION = 1
LEAST_SHARE, MOST_TIMES, OWN_BYTES = 0.8, 8, 1 << 16
"""Real bytes of parameters by what is predicted for the same model. Of 29 models 28 are within 2%; of an LSTM the
compiler makes 5 times as many, with matrices of its own."""
MADE_OF_IT = "give the file that edgetpu_compiler made of this model"


@dataclass(frozen=True)
class Inspection:
    """The content of a compiled model.

    Attributes:
        packages: what each of its custom operators holds, in their order.
        cpu_ops: the operators that stay on the CPU.
        inputs: the model's inputs.
        outputs: the model's outputs.
    """

    packages: tuple[DarwinnPackage, ...]
    cpu_ops: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def executables(self) -> tuple[Executable, ...]:
        """The programs of all packages."""
        return tuple(executable for each in self.packages for executable in each.executables)

    @property
    def min_runtime(self) -> int:
        """The oldest runtime that can run all of it."""
        return max(each.min_runtime for each in self.packages)

    @property
    def cached_bytes(self) -> int:
        """Parameters that are loaded once and stay on the chip."""
        return sum(each.cached_bytes for each in self.packages)

    @property
    def streamed_bytes(self) -> int:
        """Parameters that are sent at every inference."""
        return sum(each.streamed_bytes for each in self.packages)

    def to_json(self) -> dict[str, Any]:
        """As a plain map, schema 1."""
        return {
            "schema_version": SCHEMA_VERSION,
            "min_runtime": self.min_runtime,
            "compiler_versions": sorted({each.compiler_version for each in self.packages}),
            "cached_bytes": self.cached_bytes,
            "streamed_bytes": self.streamed_bytes,
            "custom_ops": len(self.packages),
            "cpu_ops": list(self.cpu_ops),
            "inputs": [_tensor(tensor) for tensor in self.inputs],
            "outputs": [_tensor(tensor) for tensor in self.outputs],
            "executables": [asdict(executable) for executable in self.executables],
        }


def inspect(path: Path) -> Inspection:
    """Open a compiled model.

    Raises:
        ModelError: not a .tflite file, not compiled, or not by the vendor's compiler.
    """
    return inspect_graph(graph.read(path), str(path))


def inspect_graph(parsed: Graph, where: str = "") -> Inspection:
    """Open a file that is parsed already; `where` names it in messages.

    Raises:
        ModelError: not compiled, or not by the vendor's compiler.
    """
    compiled = [
        operator for operator in parsed.operators if operator.custom and operator.name == darwinn_package.OPERATOR
    ]
    if not compiled:
        raise ModelError(
            f"has no {darwinn_package.OPERATOR}: it is not compiled for the Edge TPU",
            where=where,
            todo="give the file that edgetpu_compiler wrote (…_edgetpu.tflite)",
        )
    try:
        packages = tuple(darwinn_package.read(_options(parsed, operator.index)) for operator in compiled)
    except ModelError as error:
        error.where = where
        raise
    on_tpu = {operator.index for operator in compiled}
    return Inspection(
        packages,
        tuple(operator.name for operator in parsed.operators if operator.index not in on_tpu),
        tuple(parsed.tensors[index] for index in parsed.inputs),
        tuple(parsed.tensors[index] for index in parsed.outputs),
    )


def compare_with_prediction(found: Inspection, original: Path, target: Target) -> list[dict[str, Any]]:
    """Compare what `check` predicts for the original with the content of the compiled model.

    Args:
        found: the compiled model.
        original: the .tflite file it was compiled from.
        target: the target, with the compiler's version.

    Raises:
        ModelError: the original cannot be read.
    """
    return [
        {"name": name, "predicted": one, "real": other}
        for name, (one, other) in _predicted_and_real(found, graph.read(original), target).items()
    ]


def _predicted_and_real(found: Inspection, original: Graph, target: Target) -> dict[str, tuple[int | None, int]]:
    predicted = check(original, target)
    sizes = predicted.parameters
    on_cpu = [op.op for op in predicted.placement.ops if op.placement == "cpu"]
    tile = max(executable.narrow_bytes_per_tile for executable in found.executables)
    return {
        "cached_bytes": (sizes.cached_bytes if sizes else None, found.cached_bytes),
        "streamed_bytes": (sizes.streamed_bytes if sizes else None, found.streamed_bytes),
        "narrow_bytes_per_tile": (predicted.activation_bytes, tile),
        "partitions": (predicted.subgraphs, len(found.packages)),
        "cpu_ops": (len(on_cpu), len(found.cpu_ops)),
    }


def verify_same_model(found: Inspection, original: Graph, target: Target, where: str) -> None:
    """Nothing, if a compiled model can have been made of an original; nor if the compiler would refuse that.

    Args:
        found: the compiled model.
        original: what it is said to be compiled from.
        target: the target, with the compiler's version.
        where: the compiled file, for messages.

    Raises:
        ModelError: inputs, outputs, what stays on the CPU, or the bytes of parameters are another model's.
    """
    given = [original.tensors[index] for index in (*original.inputs, *original.outputs)]
    ends, own = (
        [f"{each.dtype} {list(each.shape)}" for each in some] for some in ((*found.inputs, *found.outputs), given)
    )
    pairs = _predicted_and_real(found, original, target)
    predicted, real = (sum(size or 0 for size in sizes) for sizes in zip(*list(pairs.values())[:2], strict=True))
    alike = pairs["cpu_ops"][0] == pairs["cpu_ops"][1]  # otherwise less may be mapped than is predicted
    if pairs["cached_bytes"][0] is None:
        return
    if ends != own:
        what = f"takes and gives {', '.join(ends)}; the model {', '.join(own)}"
    elif strange := Counter(found.cpu_ops) - Counter(operator.name for operator in original.operators):
        what = f"leaves {', '.join(strange)} on the CPU, of which the model has fewer"
    elif real > MOST_TIMES * predicted + OWN_BYTES or (alike and real < LEAST_SHARE * predicted):
        what = f"holds {real:,} bytes of parameters; of the model {predicted:,} are expected"
    else:
        return
    raise ModelError(f"{what}: it was compiled from another model", where=where, todo=MADE_OF_IT)


def _options(parsed: Graph, index: int) -> bytes:
    """The custom options of an operator, as stored."""
    stored = parsed.source.subgraphs[0].operators[index].customOptions
    return b"" if stored is None else bytes(stored)


def _tensor(tensor: Tensor) -> dict[str, Any]:
    quantization = tensor.quantization
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "scale": quantization.scale[0] if quantization else None,
        "zero_point": quantization.zero_point[0] if quantization and quantization.zero_point else None,
    }


def describe(found: Inspection) -> str:
    """Return the content as text for a person."""
    lines = [
        f"minimum runtime    {found.min_runtime}",
        f"cached on chip     {found.cached_bytes:,} bytes of parameters, loaded once",
        f"streamed           {found.streamed_bytes:,} bytes of parameters at every inference",
        f"custom operators   {len(found.packages)}",
        f"left on the CPU    {', '.join(found.cpu_ops) or 'none'}",
    ]
    for name, tensors in (("input", found.inputs), ("output", found.outputs)):
        for tensor in tensors:
            shown = _tensor(tensor)
            scaled = "" if shown["scale"] is None else f"  scale {shown['scale']:g}, zero point {shown['zero_point']}"
            lines.append(f"{name:<18} {shown['dtype']} {shown['shape']} {shown['name']}{scaled}")
    tile_bytes = MEMORY["narrow_bytes_per_tile"]
    lines += [
        f"{executable.type:<18} {executable.parameter_bytes:,} bytes of parameters, "
        f"{executable.instruction_bytes:,} of instructions, {executable.scratch_bytes:,} of scratch, "
        f"{executable.narrow_bytes_per_tile:,} of {tile_bytes:,} in each tile, token {executable.token:016x}"
        for executable in found.executables
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class InspectionResult:
    """A compiled model, and what was predicted for its original.

    Attributes:
        inspection: the compiled model.
        rows: predicted and real figures, as `compare_with_prediction` returns them; None without an original.
    """

    inspection: Inspection
    rows: Sequence[Mapping[str, Any]] | None

    def describe(self) -> str:
        """Return both as text for a person."""
        rows = (
            f"{row['name']:<24} predicted {row['predicted']!s:>12}  real {row['real']!s:>12}\n"
            for row in self.rows or ()
        )
        return describe(self.inspection) + "".join(rows)

    def to_json(self) -> dict[str, Any]:
        """Return both as a plain map."""
        compare_with_prediction = {} if self.rows is None else {"against": list(self.rows)}
        return {**self.inspection.to_json(), **compare_with_prediction}
