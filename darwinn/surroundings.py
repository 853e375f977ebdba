"""The .tflite file around the programs of a compiled model: its values for another model.

A compiled file has the operators that stay on the CPU, with their constants; the tensors between them and the programs,
with names, scales and zero points; and inside each package the same for inputs and outputs. All of them are replaced in
place: no offset in the file changes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from zipfile import BadZipFile, ZipFile

import numpy as np

from compress.model.tflite.graph import Graph, Tensor, text_of
from compress.model.tflite.verifier import Allowance
from darwinn.compiled_file import MODEL_SUBGRAPHS, CompiledFile
from darwinn.operator_constants import unsigned_zero_point
from darwinn.package import LayerInfo, PackageTable

# Field numbers. Source: tensorflow/lite/schema/schema.fbs.
_MODEL_BUFFERS = 4  # Model.buffers
_SUBGRAPH_TENSORS = 0  # SubGraph.tensors
_TENSOR_QUANTIZATION = 4  # Tensor.quantization
_QUANTIZATION_SCALE, _QUANTIZATION_ZERO_POINT = 2, 3  # QuantizationParameters.scale and .zero_point
_BUFFER_DATA = 0  # Buffer.data
_ALLOWANCE = 1 << 24
"""The memory limit for reading tensors of a file that was parsed before, in addition to its size."""
_SHORTEST_NAME = 8
"""The bytes of a shorter name could be in a file by chance."""


class Replacement:
    """New bytes for some positions of a file. Positions that two values share must get equal bytes.

    Attributes:
        content: the file with all replacements so far.
        problems: the positions that two values share, and that would need different bytes.
    """

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self.problems: list[str] = []
        self._written = np.zeros(len(content), bool)

    def write(self, position: int, data: bytes, what: str) -> None:
        """Replace the bytes at a position; `what` is for messages."""
        stop = position + len(data)
        again = self._written[position:stop]
        if stop > len(self.content) or (
            again.any()
            and (np.frombuffer(data, np.uint8) != np.frombuffer(self.content[position:stop], np.uint8))[again].any()
        ):
            self.problems.append(f"{what}: the compiled file shares its bytes with another value")
            return
        self.content[position:stop] = data
        again[:] = True


@dataclass(frozen=True)
class TensorPair:
    """A tensor of a compiled file, in the model that the file holds and in the one that it shall hold."""

    stored: Tensor
    old: Tensor
    new: Tensor


def replace_numbers(replacement: Replacement, file: CompiledFile, pairs: Sequence[TensorPair]) -> list[str]:
    """Replace the scales, zero points and constants around the programs, and return what cannot be replaced."""
    problems = []
    model = PackageTable.root(memoryview(file.content), Allowance(len(file.content) + _ALLOWANCE), 0)
    subgraph = model.item(MODEL_SUBGRAPHS, 0)
    for pair in pairs:
        table = subgraph.item(_SUBGRAPH_TENSORS, pair.stored.index)
        problems += _replace_quantization(replacement, table, pair.old, pair.new)
        problems += _replace_data(replacement, file, model, pair)
    by_name = {pair.stored.name: pair for pair in pairs}
    for executable in file.executables:
        for layer in (*executable.inputs, *executable.outputs):
            layer_pair = by_name.get(layer.name)
            # Others are states inside the program.
            if layer_pair is not None and not layer_pair.old.is_variable:
                problems += _replace_layer(replacement, layer, layer_pair.old, layer_pair.new)
    return problems


def _replace_quantization(replacement: Replacement, table: PackageTable, before: Tensor, after: Tensor) -> list[str]:
    if before.quantization is None or after.quantization is None:
        return [] if before.quantization is after.quantization else [f"only one model quantizes tensor {before.name!r}"]
    stored = table.table(_TENSOR_QUANTIZATION)
    assert stored is not None
    scales, zero_points = stored.extent(_QUANTIZATION_SCALE), stored.extent(_QUANTIZATION_ZERO_POINT)
    new_zero_points = after.quantization.zero_point
    if len(scales) != len(after.quantization.scale) or len(zero_points) != len(new_zero_points):
        return [
            f"the compiled file has {len(zero_points)} zero points for tensor {before.name!r}, "
            f"the new model {len(new_zero_points)}"
        ]
    what = f"the quantization of tensor {before.name!r}"
    replacement.write(scales.start, np.array(after.quantization.scale, "<f4").tobytes(), what)
    replacement.write(zero_points.start, np.array(new_zero_points, "<i8").tobytes(), what)
    return []


def _replace_data(replacement: Replacement, file: CompiledFile, model: PackageTable, pair: TensorPair) -> list[str]:
    before, after = pair.stored, pair.new
    if before.data is None or after.data is None:
        return []
    number = file.graph.source.subgraphs[0].tensors[before.index].buffer
    extent = model.item(_MODEL_BUFFERS, number).extent(_BUFFER_DATA)
    if len(extent) != len(after.data):
        return [
            f"constant {before.name!r} has {len(extent)} bytes in the compiled file, {len(after.data)} in the new model"
        ]
    replacement.write(extent.start, after.data.tobytes(), f"constant {before.name!r}")
    return []


def _replace_layer(replacement: Replacement, layer: LayerInfo, before: Tensor, after: Tensor) -> list[str]:
    """Replace scale and zero point in the description of an executable's input or output."""
    if before.quantization is None or after.quantization is None:
        return []
    scale, zero_point = np.float32(after.quantization.scale[0]), unsigned_zero_point(after)
    problems = []
    if bool(zero_point) != bool(layer.zero_point) or (zero_point and layer.zero_point_position is None):
        problems.append(
            f"the zero point of {layer.name!r} (as uint8) is 0 in one of the models only, and the file then omits it"
        )
    elif layer.zero_point_position is not None:
        replacement.write(layer.zero_point_position, struct.pack("<i", zero_point), f"layer {layer.name!r}")
    if layer.scale_position is None:
        problems.append(f"layer {layer.name!r} of the program has no scale")
    else:
        replacement.write(layer.scale_position, struct.pack("<f", scale), f"layer {layer.name!r}")
    return problems


def replace_names(replacement: Replacement, file: CompiledFile, pairs: Sequence[TensorPair]) -> list[str]:
    """Replace the names of tensors, and return those whose new name does not fit into the place of the old one."""
    problems = []
    for pair in pairs:
        old_name, new_name = pair.stored.name, pair.new.name
        if old_name == new_name:
            continue
        old_text, new_text = old_name.encode(), new_name.encode()
        positions = _strings(file, old_text) if len(old_text) >= _SHORTEST_NAME else []
        if _padded(len(old_text)) != _padded(len(new_text)) or not positions:
            problems.append(
                f"the name {old_name!r} of a tensor has no room for {new_name!r}: give the new model the old names, "
                "or keep the old ones with --keep-names"
            )
            continue
        for position in positions:
            text = struct.pack("<I", len(new_text)) + new_text.ljust(_padded(len(new_text)), b"\0")
            replacement.write(position, text, f"the name {old_name!r}")
    return problems


def _padded(length: int) -> int:
    """Return the bytes of a string in a flatbuffer: with a zero at its end, in whole words."""
    return (length + 4) // 4 * 4


def _strings(file: CompiledFile, text: bytes) -> list[int]:
    """Return the positions of a flatbuffer string, outside of parameters and instructions."""
    stored = struct.pack("<I", len(text)) + text.ljust(_padded(len(text)), b"\0")
    positions = []
    position = file.content.find(stored)
    while position >= 0:
        if not any(
            position in extent
            for executable in file.executables
            for extent in (executable.parameters, *executable.instructions)
        ):
            positions.append(position)
        position = file.content.find(stored, position + 1)
    return positions


def replace_metadata(
    replacement: Replacement, file: CompiledFile, old: Graph, new: Graph, contents: tuple[bytes, bytes]
) -> list[str]:
    """Replace what a compiled file says about the old model, such as labels, and return what cannot be replaced.

    `contents` has the bytes of both models, for files that are attached at their ends.
    """
    model = PackageTable.root(memoryview(file.content), Allowance(len(file.content) + _ALLOWANCE), 0)
    before, after = _metadata(old), _metadata(new)
    problems = []
    for entry in file.graph.source.metadata or []:
        name = text_of(entry.name)
        if before.get(name) == after.get(name):
            continue
        extent = model.item(_MODEL_BUFFERS, entry.buffer).extent(_BUFFER_DATA)
        stored, updated = file.bytes_at(extent), after.get(name)
        if stored == before.get(name) and updated is not None and len(updated) == len(stored):
            replacement.write(extent.start, updated, f"the metadata {name!r}")
        else:
            problems.append(f"the metadata {name!r}, which the compiled file contains, differ between the models")
    attached = _attached(file.content)
    if attached and (_attached(contents[0]) != attached or _attached(contents[1]) != attached):
        problems.append("the files attached to the compiled file, such as labels, are not those of both models")
    return problems


def _metadata(graph: Graph) -> dict[str, bytes]:
    entries = {}
    for entry in graph.source.metadata or []:
        data = graph.source.buffers[entry.buffer].data
        entries[text_of(entry.name)] = b"" if data is None else np.asarray(data, np.uint8).tobytes()
    return entries


def _attached(content: bytes) -> dict[str, int]:
    """Return the files attached to a model as a zip archive at its end, with their checksums."""
    try:
        with ZipFile(BytesIO(content)) as archive:
            return {entry.filename: entry.CRC for entry in archive.infolist()}
    except (BadZipFile, ValueError, NotImplementedError, EOFError, struct.error):
        return {}


def replace_tokens(replacement: Replacement, file: CompiledFile, tokens: Mapping[int, int]) -> list[str]:
    """Replace the caching tokens, and return the reasons why that is not safe.

    `tokens` has the new token for each old one.
    """
    problems = []
    positions_by_token: dict[int, set[int]] = {}
    for executable in file.executables:
        if executable.token_position is not None:
            positions_by_token.setdefault(executable.token, set()).add(executable.token_position)
    for token, positions in positions_by_token.items():
        if file.content.count(struct.pack("<Q", token)) != len(positions):
            problems.append(
                f"the caching token {token:016x} is at more positions in the file than the programs that have it"
            )
        for position in positions:
            replacement.write(position, struct.pack("<Q", tokens[token]), "a caching token")
    problems += [
        f"an executable ({executable.type}) has no caching token that could be replaced"
        for executable in file.executables
        if executable.token_position is None and executable.type != "STAND_ALONE"
    ]
    return problems
