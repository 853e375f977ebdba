"""The content of a compiled model: the DarwiNN package in its `edgetpu-custom-op`.

A compiled .tflite file has one custom operator for each partition on the Edge TPU. The operator's options are a
flexbuffer map. Its entry "4" is a flatbuffer, the package, which contains a flatbuffer of executables. Each executable
is a flatbuffer too.

Source of field numbers and meanings: executable/executable.fbs and tflite/custom_op_data.cc in google-coral/libedgetpu.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

from compress.core.errors import ModelError
from compress.model.tflite.verifier import Allowance

OPERATOR = "edgetpu-custom-op"
IDENTIFIER = b"DWN1"
TYPES = {0: "STAND_ALONE", 1: "PARAMETER_CACHING", 2: "EXECUTION_ONLY"}
DATA_TYPES = {
    0: "FIXED_POINT8",
    1: "FIXED_POINT16",
    2: "SIGNED_FIXED_POINT32",
    3: "BFLOAT",
    4: "HALF",
    5: "SINGLE",
    8: "SIGNED_FIXED_POINT8",
    9: "SIGNED_FIXED_POINT16",
}
DMA_KINDS = {0: "output", 1: "input", 2: "parameters", 3: "scratch"}
_TRANSFER_HINT, _INSTRUCTION_HINT = 1, 2
_OTHER_HINTS = {3: "interrupt", 4: "fence"}
_HINT_EXPANSION = 32
"""As _MAX_EXPANSION, for DMA hints: three tables for each."""
_MAX_EXPANSION, _EXTRA_BYTES = 4, 4096
"""The memory limit for reading a package: a multiple of its size, plus a constant."""
_TABLE = 512
"""The approximate memory for one table with its Python objects."""


@dataclass(frozen=True)
class LayerInfo:
    """An input or output of an executable.

    Attributes:
        shape: (y, x, z).
        size_bytes: the bytes that are transferred, padding included.
        data_type: the name of the data type in the schema.
        zero_point: the zero point of the quantization, as unsigned (an int8 zero point plus 128).
        zero_point_position: position of the zero point (int32) in the file; None: the file omits it, because it is 0.
        scale_position: position of the scale (float32) in the file; None: the file omits it.
    """

    name: str
    shape: tuple[int, int, int]
    size_bytes: int
    data_type: str
    zero_point: int
    scale: float
    zero_point_position: int | None = None
    scale_position: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the description as a plain map, without positions."""
        names = ("name", "shape", "size_bytes", "data_type", "zero_point", "scale")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Executable:
    """One program for the Edge TPU.

    Attributes:
        type: STAND_ALONE (parameters streamed at every inference), PARAMETER_CACHING (loads parameters once) or
            EXECUTION_ONLY (uses cached parameters).
        parameters: the positions of the parameters in the file.
        instructions: the positions of each stream of instructions in the file; streams are sent at every inference.
        scratch_bytes: host memory for activations that do not fit on the chip.
        narrow_bytes_per_tile: on-chip activation memory, of 196,608 in each tile.
        token: equal in executables that may keep their parameters on the chip together.
        token_position: position of the token (uint64) in the file; None: the file omits it, because it is 0.
    """

    type: str
    parameters: range
    instructions: tuple[range, ...]
    scratch_bytes: int
    narrow_bytes_per_tile: int
    token: int
    inputs: tuple[LayerInfo, ...]
    outputs: tuple[LayerInfo, ...]
    token_position: int | None = None

    @property
    def parameter_bytes(self) -> int:
        """The number of bytes of its parameters."""
        return len(self.parameters)

    @property
    def instruction_bytes(self) -> int:
        """The number of bytes of its instructions."""
        return sum(len(stream) for stream in self.instructions)

    def to_json(self) -> dict[str, Any]:
        """Return the description as a plain map, without positions."""
        names = ("type", "parameter_bytes", "instruction_bytes", "scratch_bytes", "narrow_bytes_per_tile", "token")
        return {
            **{name: getattr(self, name) for name in names},
            "inputs": tuple(layer.to_json() for layer in self.inputs),
            "outputs": tuple(layer.to_json() for layer in self.outputs),
        }


@dataclass(frozen=True)
class DarwinnPackage:
    """The content of one custom operator.

    Attributes:
        min_runtime: the oldest runtime that can load it.
        compiler_version: the compiler's version, if the package has it.
    """

    min_runtime: int
    compiler_version: str
    executables: tuple[Executable, ...]

    def parameter_bytes(self, *types: str) -> int:
        """Return the bytes of parameters in executables of these types."""
        return sum(executable.parameter_bytes for executable in self.executables if executable.type in types)

    @property
    def cached_bytes(self) -> int:
        """Parameters that are loaded once and stay on the chip."""
        return self.parameter_bytes("PARAMETER_CACHING")

    @property
    def streamed_bytes(self) -> int:
        """Parameters that are sent at every inference."""
        return self.parameter_bytes("STAND_ALONE", "EXECUTION_ONLY")


@dataclass(frozen=True)
class DmaHint:
    """A transfer that an executable announces to the runtime, or another event in their order.

    Attributes:
        kind: one of DMA_KINDS, or "instructions", "interrupt" or "fence".
        name: the name of the input or output.
        offset: the first byte in the input, output, parameters or scratch memory.
        size_bytes: the number of bytes; for instructions, the bytes of the whole stream.
    """

    kind: str
    name: str = ""
    offset: int = 0
    size_bytes: int = 0
    to_host: bool = False


@dataclass(frozen=True)
class DmaHints:
    """The DMA hints of an executable.

    Attributes:
        is_complete: whether the hints are all transfers of the executable.
    """

    hints: tuple[DmaHint, ...]
    is_complete: bool


def read_dma_hints(options: bytes) -> tuple[DmaHints, ...]:
    """Return the DMA hints of each executable in the options of a custom operator.

    They are read apart from the rest of the package, because only their explanation needs them.

    Raises:
        ModelError: the options contain no package, or damaged hints.
    """
    try:
        payload, _ = _payload(options)
        allowance = Allowance(_HINT_EXPANSION * len(payload) + _EXTRA_BYTES)
        package = PackageTable.root(memoryview(payload), allowance, 0)
        multi = package.nested(package.extent(1))
        return tuple(_dma_hints(multi.nested(extent)) for extent in multi.extents(0))
    except (struct.error, IndexError, ValueError, KeyError, RecursionError, OverflowError) as error:
        raise ModelError(f"its {OPERATOR} has damaged DMA hints ({error})") from error


def _dma_hints(executable: PackageTable) -> DmaHints:
    table = executable.table(7)
    if table is None:
        return DmaHints((), is_complete=False)
    streams = [len(stream.extent(0)) for stream in executable.tables(5)]
    hints = tuple(_dma_hint(hint, streams) for hint in table.tables(0))
    return DmaHints(hints, bool(table.number(1, "<B")))


def _dma_hint(table: PackageTable, streams: list[int]) -> DmaHint:
    kind, content = table.number(0, "<B"), table.table(1)
    if content is None:
        raise ValueError("a DMA hint without content")
    to_host = bool(table.number(2, "<h"))
    if kind == _TRANSFER_HINT:
        meta = content.table(0)
        described = meta.number(0, "<h") if meta else None
        if meta is None or described not in DMA_KINDS:
            raise ValueError(f"a DMA hint for {described}")
        offset, size = content.number(1, "<i"), content.number(2, "<i")
        if offset < 0 or size < 0:
            raise ValueError("a DMA hint of a negative size")
        return DmaHint(DMA_KINDS[described], meta.text(2), offset, size, to_host)
    if kind == _INSTRUCTION_HINT:
        index = content.number(0, "<i")
        if not 0 <= index < len(streams):
            raise ValueError(f"a DMA hint for instructions {index} of {len(streams)}")
        return DmaHint("instructions", size_bytes=streams[index])
    if kind not in _OTHER_HINTS:
        raise ValueError(f"a DMA hint of type {kind}")
    return DmaHint(_OTHER_HINTS[kind], to_host=to_host)


def read(options: bytes, position: int = 0) -> DarwinnPackage:
    """Return the package in the options of a custom operator.

    `position` is the position of the options in the file, which is added to every position in the result.

    Raises:
        ModelError: the options contain no package: the vendor's compiler did not write the file.
    """
    try:
        payload, start = _payload(options)
        return _package(payload, position + start)
    except (struct.error, IndexError, ValueError, KeyError, RecursionError, OverflowError) as error:
        raise ModelError(
            f"its {OPERATOR} holds no Edge TPU package ({error}): the vendor's compiler did not make this file",
            hint="compile the original model with edgetpu_compiler",
        ) from error


def _payload(options: bytes) -> tuple[bytes, int]:
    """Return entry "4" of the flexbuffer map, and its position in the options."""
    from flatbuffers import flexbuffers

    if len(options) < 16:
        raise ValueError(f"{len(options)} bytes of options")
    root = flexbuffers.GetRoot(options)
    if not root.IsMap:
        raise ValueError("its options are not a map")
    value = root.AsMap["4"]
    if value.IsNull or not value.IsString:
        raise ValueError("its options have no executable")
    payload = bytes(value.AsStringBytes)
    if len(payload) < 16 or payload[4:8] != IDENTIFIER:
        raise ValueError("its payload is not of the type DWN1")
    start = options.find(payload)
    if options.find(payload, start + 1) >= 0:
        raise ValueError("its options hold the payload twice")
    return payload, start


def _package(content: bytes, position: int) -> DarwinnPackage:
    allowance = Allowance(_MAX_EXPANSION * len(content) + _EXTRA_BYTES)
    package = PackageTable.root(memoryview(content), allowance, position)
    multi = package.nested(package.extent(1))
    executables = tuple(_executable(multi.nested(extent)) for extent in multi.extents(0))
    if not executables:
        raise ValueError("it has no executables")
    return DarwinnPackage(package.number(0, "<i"), package.text(4), executables)


def _executable(table: PackageTable) -> Executable:
    kind = table.number(13, "<h")
    if kind not in TYPES:
        raise ValueError(f"an executable of type {kind}")
    return Executable(
        TYPES[kind],
        table.extent(6),
        tuple(stream.extent(0) for stream in table.tables(5)),
        table.number(4, "<i"),
        table.number(12, "<i"),
        table.number(14, "<Q"),
        tuple(_layer(layer) for layer in table.tables(8)),
        tuple(_layer(layer) for layer in table.tables(9)),
        table.position_of(14),
    )


def _layer(table: PackageTable) -> LayerInfo:
    numerics = table.table(5)
    scale = float(numerics.number(1, "<f")) if numerics else 0.0
    if not isfinite(scale):
        raise ValueError("a scale is not a finite number")
    return LayerInfo(
        table.text(0),
        (table.number(2, "<i"), table.number(3, "<i"), table.number(4, "<i")),
        table.number(1, "<i"),
        DATA_TYPES.get(table.number(6, "<h"), "unknown"),
        numerics.number(0, "<i") if numerics else 0,
        scale,
        numerics.position_of(0) if numerics else None,
        numerics.position_of(1) if numerics else None,
    )


class PackageTable:
    """A flatbuffer table, read field by field; every offset is checked against the buffer.

    A small file could refer to one table many times and take much memory. Therefore each table is charged to an
    allowance, and bytes are not copied.

    Source: FlatBuffers internals, "Tables": a table starts with the signed distance back to
    its vtable, whose entries are field offsets in 16 bits; 0 is a field left out.
    """

    def __init__(self, content: memoryview, position: int, allowance: Allowance, base: int) -> None:
        """Refer to the table at a position of a flatbuffer; `base` is the flatbuffer's position in the file."""
        allowance.spend(_TABLE)
        self.content, self.position, self.allowance, self.base = content, position, allowance, base
        self.vtable = position - self._at(position, "<i")
        self.size = self._at(self.vtable, "<H")

    @classmethod
    def root(cls, content: memoryview, allowance: Allowance, base: int) -> PackageTable:
        """Return the root table of a flatbuffer."""
        (position,) = struct.unpack_from("<I", content, 0)
        return cls(content, position, allowance, base)

    def nested(self, extent: range) -> PackageTable:
        """Return the root of a flatbuffer inside this one."""
        content = self.content[extent.start - self.base : extent.stop - self.base]
        return PackageTable.root(content, self.allowance, extent.start)

    def _at(self, position: int, code: str) -> Any:
        if position < 0:
            raise ValueError("an offset before the beginning")
        return struct.unpack_from(code, self.content, position)[0]

    def _field_position(self, field: int) -> int | None:
        entry = 4 + 2 * field
        offset = self._at(self.vtable + entry, "<H") if entry < self.size else 0
        return self.position + offset if offset else None

    def number(self, field: int, code: str) -> Any:
        """Return a scalar; 0 if it is missing."""
        position = self._field_position(field)
        return 0 if position is None else self._at(position, code)

    def position_of(self, field: int) -> int | None:
        """Return the position of a scalar in the file; None if it is missing."""
        position = self._field_position(field)
        return None if position is None else self.base + position

    def _vector(self, field: int) -> tuple[int, int]:
        """Return start and length of a vector; (0, 0) if it is missing."""
        position = self._field_position(field)
        if position is None:
            return 0, 0
        start = position + self._at(position, "<I")
        return start + 4, self._at(start, "<I")

    def extent(self, field: int) -> range:
        """Return the positions of a vector of bytes in the file; empty if it is missing."""
        return self._extent(*self._vector(field))

    def _extent(self, start: int, length: int) -> range:
        if start + length > len(self.content):
            raise ValueError("a vector beyond the end")
        return range(self.base + start, self.base + start + length)

    def text(self, field: int) -> str:
        """Return a string; empty if it is missing."""
        start, length = self._vector(field)
        self.allowance.spend(4 * length)
        return bytes(self.content[start : start + length]).decode("utf-8", "replace")

    def _items(self, field: int) -> Iterator[int]:
        start, length = self._vector(field)
        for position in range(start, start + 4 * length, 4):
            yield position + self._at(position, "<I")

    def tables(self, field: int) -> list[PackageTable]:
        """Return a vector of tables."""
        return [self._table(position) for position in self._items(field)]

    def item(self, field: int, index: int) -> PackageTable:
        """Return one table of a vector of tables."""
        start, length = self._vector(field)
        if not 0 <= index < length:
            raise ValueError(f"item {index} of {length}")
        position = start + 4 * index
        return self._table(position + self._at(position, "<I"))

    def extents(self, field: int) -> Iterator[range]:
        """Yield the positions of each string of a vector in the file."""
        for position in self._items(field):
            yield self._extent(position + 4, self._at(position, "<I"))

    def table(self, field: int) -> PackageTable | None:
        """Return a table; None if it is missing."""
        position = self._field_position(field)
        return None if position is None else self._table(position + self._at(position, "<I"))

    def _table(self, position: int) -> PackageTable:
        return PackageTable(self.content, position, self.allowance, self.base)
