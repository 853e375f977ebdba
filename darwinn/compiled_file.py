"""A compiled .tflite file with the positions of everything that a model's values determine.

A file in which only such bytes are replaced keeps its structure: no offset in it changes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from compress.core.errors import ModelError
from compress.model.tflite import graph
from compress.model.tflite.graph import Graph, Operator
from compress.model.tflite.verifier import Allowance
from darwinn import package
from darwinn.package import DarwinnPackage, DmaHints, Executable, PackageTable

MAX_INSTRUCTION_BYTES = 1 << 23
"""The compiler writes less than a tenth of it; every bit is looked at, which takes 32 times the memory."""
# Field numbers. Source: tensorflow/lite/schema/schema.fbs.
MODEL_SUBGRAPHS = 2  # Model.subgraphs
_SUBGRAPH_OPERATORS = 3  # SubGraph.operators
_OPERATOR_CUSTOM_OPTIONS = 5  # Operator.custom_options


@dataclass(frozen=True)
class CompiledOperator:
    """A custom operator for the Edge TPU.

    Attributes:
        operator: the operator in the compiled file's graph.
        package: the operator's package; its positions are positions in the file.
    """

    operator: Operator
    package: DarwinnPackage


@dataclass(frozen=True)
class CompiledFile:
    """A compiled .tflite file.

    Attributes:
        graph: the file's graph, of custom operators and operators on the CPU.
        operators: the custom operators for the Edge TPU, in the order of execution.
    """

    content: bytes
    graph: Graph
    operators: tuple[CompiledOperator, ...]

    @property
    def executables(self) -> tuple[Executable, ...]:
        """The executables of all custom operators."""
        return tuple(executable for operator in self.operators for executable in operator.package.executables)

    @property
    def custom_operators(self) -> set[int]:
        """The indices of the custom operators in the file's graph."""
        return {compiled.operator.index for compiled in self.operators}

    def bytes_at(self, positions: range) -> bytes:
        """Return a part of the file, such as the parameters of an executable."""
        return self.content[positions.start : positions.stop]


def read(path: Path) -> CompiledFile:
    """Read a compiled file.

    Raises:
        ModelError: the file is not a .tflite file, or the vendor's compiler did not compile it.
    """
    try:
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from error


def parse(content: bytes, where: str = "") -> CompiledFile:
    """Return the compiled file with these bytes; `where` is its name in messages.

    Raises:
        ModelError: the file is not a .tflite file, or the vendor's compiler did not compile it.
    """
    parsed = graph.parse(content, where)
    try:
        operators = []
        for operator in custom_operators(parsed, where):
            positions = _custom_options(content, operator.index)
            options = package.read(content[positions.start : positions.stop], positions.start)
            operators.append(CompiledOperator(operator, options))
    except ModelError as error:
        error.where = where
        raise
    file = CompiledFile(content, parsed, tuple(operators))
    size = sum(executable.instruction_bytes for executable in file.executables)
    if size > MAX_INSTRUCTION_BYTES:
        allowed = f"{MAX_INSTRUCTION_BYTES:,} bytes"
        raise ModelError(f"has {size:,} bytes of instructions", where=where, allowed=allowed)
    return file


def dma_hints(file: CompiledFile, compiled: CompiledOperator) -> tuple[DmaHints, ...]:
    """Return the DMA hints of each executable of a custom operator.

    Raises:
        ModelError: the DMA hints are damaged.
    """
    positions = _custom_options(file.content, compiled.operator.index)
    return package.read_dma_hints(file.bytes_at(positions))


def custom_operators(parsed: Graph, where: str) -> tuple[Operator, ...]:
    """Return the custom operators for the Edge TPU.

    Raises:
        ModelError: the file is not compiled for the Edge TPU.
    """
    operators = tuple(parsed.custom_operators(package.OPERATOR))
    if not operators:
        raise ModelError(
            f"has no {package.OPERATOR}: it is not compiled for the Edge TPU",
            where=where,
            hint="give the file that edgetpu_compiler wrote (…_edgetpu.tflite)",
        )
    return operators


def _custom_options(content: bytes, index: int) -> range:
    """Return the positions of the custom options of an operator of the main subgraph."""
    try:
        model = PackageTable.root(memoryview(content), Allowance(len(content)), 0)
        return model.item(MODEL_SUBGRAPHS, 0).item(_SUBGRAPH_OPERATORS, index).extent(_OPERATOR_CUSTOM_OPTIONS)
    except (struct.error, ValueError) as error:
        raise ModelError(f"is a damaged .tflite file: {error}") from error
