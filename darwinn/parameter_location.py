"""The search for the parameters of each operator in a compiled file, until every byte is accounted for.

Most regions are predicted completely, and found as one string of bytes. An operator whose values differ from the
file's has a region too: bytes in a gap, if most of its weights are equal there, or if the size fits exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.graph import Graph, Operator
from darwinn.blocks import INPUT_BLOCK, round_up
from darwinn.compiled_file import CompiledFile
from darwinn.package import Executable
from darwinn.parameter_layout import ALIGNMENT, NumberKind, ParameterLayout, Values
from darwinn.stored_parameters import Choice, Single, StoredParameters, stored_parameters

# Chosen limits of searches: a damaged file could otherwise take long.
MAX_MATCHES = 4096
"""The most positions where the beginning of a region is looked at."""
MIN_EQUAL_WEIGHTS = 0.5
"""The share of equal weights from which different bytes count as the region of an operator.

By chance, one of 256 weights is equal."""
_MAX_OFFSETS = 8
"""The most positions in a gap where different bytes are compared completely."""
_SAMPLE = 256
"""The bytes of a region's beginning that are compared at every position of a large gap."""


class LeftoverKind(StrEnum):
    """Bytes that no operator's values account for."""

    ALIGNMENT = "alignment"
    FILL = "zeros and one other value"
    UNKNOWN = "not accounted for"


@dataclass(frozen=True, eq=False)
class ParameterRegion:
    """The location of an operator's parameters.

    Attributes:
        layout: the order of the values in the region.
        executable: the index of the executable in the file.
        offset: the first byte in the executable's parameters, a multiple of ALIGNMENT.
        is_equal: whether the region is exactly as predicted.
        is_interchangeable: whether another operator has an equal region, so that the two could be the other way round.
    """

    parameters: StoredParameters
    values: Values
    layout: ParameterLayout
    executable: int
    offset: int
    is_equal: bool
    is_interchangeable: bool = False

    @property
    def operator(self) -> Operator:
        """The operator."""
        return self.parameters.operator

    @property
    def size_bytes(self) -> int:
        """The size without the zeros up to the next region."""
        return self.layout.size_bytes

    @property
    def extent(self) -> range:
        """The bytes in the executable's parameters, with the zeros up to the next region."""
        return range(self.offset, self.offset + round_up(self.size_bytes, ALIGNMENT))


@dataclass(frozen=True)
class Leftover:
    """Bytes outside of all regions.

    Attributes:
        executable: the index of the executable in the file.
        extent: the positions in the executable's parameters.
    """

    executable: int
    extent: range
    kind: LeftoverKind


@dataclass(frozen=True)
class ParameterLocation:
    """The locations of all parameters of a model in a compiled file.

    Attributes:
        regions: the regions in the order of the operators; parameters that are stored several times have several.
        missing: the parameters that were not found; tables that the compiler does not always make are not among them.
        leftovers: all other bytes.
    """

    regions: tuple[ParameterRegion, ...]
    missing: tuple[StoredParameters, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all parameters were found exactly as predicted, and every byte is accounted for."""
        unknown = any(leftover.kind is LeftoverKind.UNKNOWN for leftover in self.leftovers)
        return not unknown and not self.missing and all(region.is_equal for region in self.regions)


def parameter_bytes(file: CompiledFile, executable: Executable) -> NDArray[np.uint8]:
    """Return the parameters of an executable."""
    return np.frombuffer(file.bytes_at(executable.parameters), np.uint8)


def region_bytes(file: CompiledFile, region: ParameterRegion) -> NDArray[np.uint8]:
    """Return the bytes of a region, without the zeros up to the next one."""
    content = parameter_bytes(file, file.executables[region.executable])
    return content[region.offset : region.offset + region.size_bytes]


def locate(file: CompiledFile, graph: Graph, operators: Iterable[Operator]) -> ParameterLocation:
    """Find the parameters of operators in a compiled file."""
    blobs = [_Blob(index, parameter_bytes(file, executable)) for index, executable in enumerate(file.executables)]
    search = _Search([blob for blob in blobs if len(blob.content)])
    parts = [part for operator in operators for part in stored_parameters(operator, graph)]
    required_parts = [part for part in parts if not part.is_table]
    search.find_equal(required_parts)
    search.find_equal([part for part in parts if part.is_table])
    search.find_different(required_parts)
    search.find_equal(search.missing(required_parts), zeros=True)
    order = {part: position for position, part in enumerate(parts)}
    regions = sorted(search.regions, key=lambda region: (order[region.parameters], region.executable, region.offset))
    located = {region.parameters for region in regions}
    missing = tuple(part for part in parts if part not in located and not part.is_table)
    return ParameterLocation(tuple(regions), missing, tuple(search.leftovers()))


@dataclass
class _Blob:
    """The parameters of one executable, and which of its lines of ALIGNMENT bytes belong to a region."""

    executable: int
    content: NDArray[np.uint8]
    text: bytes = field(init=False)
    claimed: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.content.tobytes()
        self.claimed = np.zeros(-(-len(self.content) // ALIGNMENT), bool)

    def gaps(self) -> list[range]:
        """Return the bytes between regions."""
        edges = np.flatnonzero(np.diff(np.concatenate([[True], self.claimed, [True]])))
        starts, stops = edges[::2].tolist(), edges[1::2].tolist()
        size = len(self.content)
        return [range(a * ALIGNMENT, min(b * ALIGNMENT, size)) for a, b in zip(starts, stops, strict=True)]

    def find(self, beginning: bytes) -> Iterator[int]:
        """Yield the aligned positions of a string."""
        position = self.text.find(beginning)
        for _ in range(MAX_MATCHES):
            if position < 0:
                return
            if position % ALIGNMENT == 0:
                yield position
            position = self.text.find(beginning, position + 1)


class _Search:
    def __init__(self, blobs: Sequence[_Blob]) -> None:
        self.blobs = blobs
        self.regions: list[ParameterRegion] = []

    def find_equal(self, parts: Sequence[StoredParameters], *, zeros: bool = False) -> None:
        """Claim the regions that are exactly as predicted.

        Operators with one candidate are claimed first, because a claimed region is no longer a candidate for others.
        Regions of zeros look like the padding of other regions, and are claimed only if `zeros` is set.
        """
        candidates = {
            part: [
                match
                for blob in self.blobs
                for match in _equal(part, blob)
                if zeros or blob.content[match.offset : match.offset + match.size_bytes].any()
            ]
            for part in parts
        }
        remaining = list(parts)
        while remaining:
            for part in remaining:
                candidates[part] = [region for region in candidates[part] if not self._lines(region).any()]
            remaining = [part for part in remaining if candidates[part]]
            certain = next((part for part in remaining if len(candidates[part]) == 1), None)
            if certain is not None:
                self._claim(candidates[certain])
                remaining.remove(certain)
            elif remaining:
                remaining = self._claim_alike(remaining[0], remaining, candidates)

    def _claim_alike(
        self,
        part: StoredParameters,
        remaining: list[StoredParameters],
        candidates: dict[StoredParameters, list[ParameterRegion]],
    ) -> list[StoredParameters]:
        """Claim the positions of operators with equal regions, in the order of the operators."""
        positions = [(region.executable, region.offset) for region in candidates[part]]
        alike = [
            other
            for other in remaining
            if [(region.executable, region.offset) for region in candidates[other]] == positions
        ]
        shared = len(alike) > 1 and not part.is_table
        for number, other in enumerate(alike):
            # The last one gets all further copies: a constant is stored once for each pass.
            stop = number + 1 if number + 1 < len(alike) else None
            self._claim([replace(region, is_interchangeable=shared) for region in candidates[other][number:stop]])
        return [other for other in remaining if other not in alike]

    def _claim(self, regions: Iterable[ParameterRegion]) -> None:
        for region in regions:
            lines = self._lines(region)
            if not lines.any():
                lines[:] = True
                self.regions.append(region)

    def _lines(self, region: ParameterRegion) -> NDArray[np.bool_]:
        return self._blob(region).claimed[region.offset // ALIGNMENT : region.extent.stop // ALIGNMENT]

    def _blob(self, region: ParameterRegion) -> _Blob:
        return next(blob for blob in self.blobs if blob.executable == region.executable)

    def find_different(self, parts: Sequence[StoredParameters]) -> None:
        """Claim regions whose values differ from the predicted ones, in the gaps."""
        missing = self.missing(parts)
        for part in missing:
            matches = [match for blob in self.blobs for gap in blob.gaps() for match in _similar(part, blob, gap)]
            share, best = max(matches, key=lambda match: match[0], default=(0.0, None))
            if best is not None and share >= MIN_EQUAL_WEIGHTS:
                self._claim([best])
        self._fill_gaps(parts)

    def missing(self, parts: Sequence[StoredParameters]) -> list[StoredParameters]:
        """Return the parameters without a region."""
        located = {region.parameters for region in self.regions}
        return [part for part in parts if part not in located]

    def _fill_gaps(self, parts: Sequence[StoredParameters]) -> None:
        """Claim gaps whose size is exactly that of the operators between two neighbours."""
        order = {part: index for index, part in enumerate(parts)}
        for blob in self.blobs:
            for gap in blob.gaps():
                before = [order.get(r.parameters, -1) for r in self._in(blob) if r.extent.stop <= gap.start]
                after = [order.get(r.parameters, len(parts)) for r in self._in(blob) if r.offset >= gap.stop]
                between = parts[max(before[-1:], default=-1) + 1 : min(after[:1], default=len(parts))]
                self._fill_gap(blob, gap, self.missing(between))

    def _in(self, blob: _Blob) -> list[ParameterRegion]:
        regions = [region for region in self.regions if region.executable == blob.executable]
        return sorted(regions, key=lambda region: region.offset)

    def _fill_gap(self, blob: _Blob, gap: range, parts: Sequence[StoredParameters]) -> None:
        sizes = [round_up(part.choices[0].size_bytes, ALIGNMENT) if part.choices else 0 for part in parts]
        if not parts or sum(sizes) != len(gap):
            return
        offset = gap.start
        for part, size in zip(parts, sizes, strict=True):
            matches = list(_compared(part, part.choices[0], blob, [offset]))
            _, best = max(matches, key=lambda match: match[0])
            content = blob.content[offset : offset + best.size_bytes]
            if not best.layout.padding_differs(content, best.values):
                self._claim([best])
            offset += size

    def leftovers(self) -> Iterator[Leftover]:
        """Yield the bytes outside of all regions, by what they are."""
        for region in self.regions:
            if len(region.extent) > region.size_bytes:
                extent = range(region.offset + region.size_bytes, region.extent.stop)
                content = self._blob(region).content[extent.start : extent.stop]
                kind = LeftoverKind.UNKNOWN if content.any() else LeftoverKind.ALIGNMENT
                yield Leftover(region.executable, extent, kind)
        for blob in self.blobs:
            for gap in blob.gaps():
                yield from _classified(blob, gap)


def _classified(blob: _Blob, gap: range) -> Iterator[Leftover]:
    """Yield parts of a gap: runs of lines that have at most one value other than 0, and others."""
    start, last = gap.start, None
    for line in range(gap.start, gap.stop, ALIGNMENT):
        content = blob.content[line : line + ALIGNMENT]
        others = np.unique(content[content > 0])
        kind = LeftoverKind.FILL if len(others) <= 1 else LeftoverKind.UNKNOWN
        if last is not None and kind is not last:
            yield Leftover(blob.executable, range(start, line), last)
            start = line
        last = kind
    if last is not None:
        yield Leftover(blob.executable, range(start, gap.stop), last)


def _equal(part: StoredParameters, blob: _Blob) -> Iterator[ParameterRegion]:
    """Yield the regions in a blob that are exactly as predicted; of overlapping ones, the largest."""
    taken: list[range] = []
    for choice in sorted(part.choices, key=lambda candidate: -candidate.size_bytes):
        if choice.size_bytes > len(blob.content) or not choice.size_bytes:
            continue
        for region in _equal_to(part, choice, blob):
            if all(region.offset >= other.stop or region.extent.stop <= other.start for other in taken):
                taken.append(region.extent)
                yield region


def _equal_to(part: StoredParameters, choice: Choice, blob: _Blob) -> Iterator[ParameterRegion]:
    usual = choice.usual_layout
    beginning = usual.encode(choice.values)[: _beginning(choice)].tobytes()
    for offset in blob.find(beginning):
        if offset + choice.size_bytes > len(blob.content):
            continue
        content = blob.content[offset : offset + choice.size_bytes]
        for layout in _layouts(choice, usual, content, all_blocks=False):
            if np.array_equal(layout.encode(choice.values), content):
                yield ParameterRegion(part, choice.values, layout, blob.executable, offset, is_equal=True)
                break


def _beginning(choice: Choice) -> int:
    """Return the number of bytes at the beginning that are the same in all layouts: the header and the first block."""
    if isinstance(choice, Single):
        return choice.size_bytes
    return choice.first_rows * (4 * len(choice.header) + INPUT_BLOCK)


def _layouts(
    choice: Choice, usual: ParameterLayout, content: NDArray[np.uint8], *, all_blocks: bool
) -> Iterator[ParameterLayout]:
    """Yield the layouts of a region.

    `usual` is `choice.usual_layout`, which is built once for several regions. With `all_blocks`, the first block of the
    second tap, whose position gives the number of inner channel blocks, may differ; then the four best are taken.
    """
    if isinstance(choice, Single):
        yield usual
        return
    block = choice.first_rows * INPUT_BLOCK
    header = choice.first_rows * 4 * len(choice.header)
    counts = choice.inner_blocks
    if len(counts) > 1:
        second_tap = header + counts[0] * block
        expected = usual.encode(choice.values)[second_tap : second_tap + block]
        equal = {
            count: int((content[header + count * block :][:block] == expected).sum())
            for count in counts
            if header + (count + 1) * block <= len(content)
        }
        best = sorted(equal, key=lambda count: -equal[count])
        counts = best[:4] if all_blocks else [count for count in best if equal[count] == block]
    for count in counts:
        for ones in (
            (False, True) if choice.is_padded_to_a_group and NumberKind.MULTIPLIER in choice.header else (False,)
        ):
            yield usual if count == choice.inner_blocks[0] and not ones else choice.layout_of(count, ones=ones)


def _similar(part: StoredParameters, blob: _Blob, gap: range) -> Iterator[tuple[float, ParameterRegion]]:
    """Yield the share of equal weights, and the region, for the best positions in a gap."""
    for choice in part.choices:
        last = gap.stop - choice.size_bytes
        if last < gap.start or not choice.size_bytes:
            continue
        offsets = np.arange(gap.start, last + 1, ALIGNMENT)
        if len(offsets) > _MAX_OFFSETS:
            beginning = choice.usual_layout.encode(choice.values)[: min(_beginning(choice), _SAMPLE)]
            equal = np.zeros(len(offsets), np.int64)
            for position, value in enumerate(beginning.tolist()):
                equal += blob.content[offsets + position] == value
            offsets = offsets[np.argsort(-equal, kind="stable")[:2]]
        yield from _compared(part, choice, blob, offsets.tolist())


def _compared(
    part: StoredParameters, choice: Choice, blob: _Blob, offsets: Sequence[int]
) -> Iterator[tuple[float, ParameterRegion]]:
    """Yield the share of equal weights, and the region, for each position and layout."""
    usual = choice.usual_layout
    main = NumberKind.WEIGHT if NumberKind.WEIGHT in choice.values.arrays else NumberKind.CONSTANT
    start = choice.values.starts[main]
    stop = start + choice.values.arrays[main].nbytes
    for offset in offsets:
        content = blob.content[offset : offset + choice.size_bytes]
        for layout in _layouts(choice, usual, content, all_blocks=True):
            equal = layout.encode(choice.values) == content
            weights = (layout.sources >= start) & (layout.sources < stop) & ~layout.padding
            share = float(equal[weights].mean()) if weights.any() else 0.0
            # Of equal shares, the layout with more equal padding is right.
            region = ParameterRegion(part, choice.values, layout, blob.executable, offset, bool(equal.all()))
            yield share + 1e-6 * float(equal.mean()), region


def possible_layouts(region: ParameterRegion, file: CompiledFile) -> list[tuple[int, ParameterLayout]]:
    """Return all layouts in which an operator's values have the bytes of its region, each with its choice's index.

    Several are possible if many values are equal. Other values would then have different bytes in each.
    """
    content = region_bytes(file, region)
    return [
        (index, layout)
        for index, choice in enumerate(region.parameters.choices)
        if choice.size_bytes == region.size_bytes
        for layout in _layouts(choice, choice.usual_layout, content, all_blocks=False)
        if np.array_equal(layout.encode(choice.values), content)
    ]
