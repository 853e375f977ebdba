"""The roles of the channels of a detector's last convolutions: boxes, scores, objectness, keypoints.

They follow from what the outputs do with the channels. A score is a sigmoid of one channel, or part of a softmax; a box
that the model decodes is something else; values that come out unchanged are boxes that the model does not decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.detectors.families import Preset
from compress.model.detectors.probing import Floats, MapProbe, Tail

EXACT = 1e-4
"""Largest difference between a value and a function of its channels, relative to 1 + the value."""
UNCHANGED = (1.0, 0.0)
"""Slope and start of a line that changes nothing."""
MODERATE = 0.01
"""Probabilities from here to 1 minus this tell the argument of a sigmoid precisely."""
FEWEST_BINS, MOST_BINS = 5, 64
"""Bins of a distribution over distances."""


class ValueKind(Enum):
    """The function of its channels that an output value is."""

    SAME = "same"
    SIGMOID = "sigmoid"
    PRODUCT = "product"
    ROOT = "root"
    SOFTMAX = "softmax"
    WEIGHTED_SOFTMAX = "softmax times sigmoid"
    OTHER = "other"


SCORES = frozenset(ValueKind) - {ValueKind.SAME, ValueKind.OTHER}
"""The kinds that only scores have, and the visibility of keypoints."""
_Function = tuple[ValueKind, tuple[int, ...], tuple[float, float]]
"""The kind, the channels and the line of a `Value`."""


@dataclass(frozen=True)
class Value:
    """One output value of a location.

    Attributes:
        anchor: the number of the anchor, if the layout of the output says it, else 0.
        channels: the channels that it depends on; for a score, the one of its class first.
        line: of a sigmoid, slope and start of the line that is applied to its channel before.
    """

    index: int
    output: int
    anchor: int
    column: int
    kind: ValueKind
    channels: tuple[int, ...]
    line: tuple[float, float] = UNCHANGED


@dataclass(frozen=True)
class AnchorRoles:
    """The channels of one anchor.

    Attributes:
        boxes: the channels of the box, in their order in the model.
        box_values: the four output values of the decoded box; empty if the model does not decode.
        objectness: its channel; None without.
        keypoints: the channels of keypoints and their visibility.
        keypoint_values: the output values of the decoded keypoints, without visibility.
    """

    boxes: tuple[int, ...]
    box_values: tuple[int, ...]
    scores: tuple[int, ...]
    objectness: int | None = None
    keypoints: tuple[int, ...] = ()
    keypoint_values: tuple[int, ...] = ()

    @property
    def in_pairs(self) -> bool:
        """Whether the position and the size of boxes are not next to each other, as in CenterNet."""
        return len(self.boxes) == 4 and self.boxes != tuple(range(self.boxes[0], self.boxes[0] + 4))


@dataclass(frozen=True)
class MapRoles:
    """The roles on one map.

    Attributes:
        softmax: whether the scores are a softmax over the channels, instead of sigmoids.
        background: the position of the background among the channels of scores: "first", "last" or None.
        root: whether the score is the root of the product of class and objectness.
        unused: output values without a role, such as the coefficients of masks.
        lines: by channel, the slope and start of the line that the model applies to it before the code of boxes, or
            before the sigmoid; none for unchanged channels. The cut convolutions take it over.
        assumed_sigmoid: whether the scores come out as raw values, which are assumed to be for sigmoids.
        assumed_background: whether the position of the background is assumed, because all scores come out.
    """

    probe: MapProbe
    anchors: tuple[AnchorRoles, ...]
    softmax: bool
    background: str | None
    root: bool
    unused: int
    lines: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    assumed_sigmoid: bool = False
    assumed_background: bool = False


def values_of(tail: Tail, probe: MapProbe) -> list[Value]:
    """Return the output values of a map's locations, in the order of the outputs."""
    sizes = np.cumsum([0] + [int(np.prod(shape)) for shape in tail.shapes])
    shapes = _in_rows(tail.shapes)
    outputs = np.searchsorted(sizes, probe.elements[0], side="right") - 1
    anchors, columns = np.zeros_like(outputs), np.zeros_like(outputs)
    for output in np.unique(outputs):
        rows = np.flatnonzero(outputs == output)
        flat = probe.elements[:, rows] - sizes[output]
        anchors[rows], columns[rows] = _layout(flat, shapes[output])
    kinds = _kinds(probe)
    return [
        Value(index, int(outputs[index]), int(anchors[index]), int(columns[index]), *kinds[index])
        for index in range(len(outputs))
        if probe.depends[index].any()
    ]


def _in_rows(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shapes of outputs; a flat output gets as many rows as the output of boxes."""
    rows = [shape[0] for shape in shapes if len(shape) == 2 and shape[1] == 4]
    if len(rows) != 1:
        return list(shapes)
    return [
        (rows[0], shape[0] // rows[0]) if len(shape) == 1 and shape[0] % rows[0] == 0 else shape for shape in shapes
    ]


def _layout(flat: NDArray[np.int64], shape: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return anchor and column of the values of a location in one output, from flat indices [positions, values]."""
    here = np.stack(np.unravel_index(flat[0], shape))
    there = np.stack(np.unravel_index(flat[-1], shape))
    varying = [axis for axis in range(len(shape)) if len(set(here[axis])) > 1]
    by_position = [axis for axis in varying if set(here[axis]) != set(there[axis])]
    if len(varying) == 2 and not by_position:
        by_position = [min(varying, key=lambda axis: len(set(here[axis])))]
    zeros = np.zeros(flat.shape[1], np.int64)
    anchors = np.unique(here[by_position[0]], return_inverse=True)[1] if by_position else zeros
    rest = [axis for axis in varying if axis not in by_position]
    return anchors, here[rest[0]] if rest else zeros


def _kinds(probe: MapProbe) -> list[_Function]:
    """Return the function that each value of a location is."""
    likely = 1 / (1 + np.exp(-probe.raw))
    kinds: list[_Function] = []
    for index in range(probe.elements.shape[1]):
        channels = np.flatnonzero(probe.depends[index])
        answers = probe.answers[..., index]
        kind, line = ValueKind.OTHER, UNCHANGED
        if len(channels) == 1:
            kind, line = _of_one(probe.raw[..., channels[0]], answers)
        elif len(channels) == 2 and _equal(answers, likely[..., channels].prod(axis=-1)):
            kind = ValueKind.PRODUCT
        elif len(channels) == 2 and _equal(answers, np.sqrt(likely[..., channels].prod(axis=-1))):
            kind = ValueKind.ROOT
        if kind is ValueKind.OTHER and len(channels) > 1:
            class_index = _softmax_index(probe.raw[..., channels], answers)
            if class_index is not None:
                kind = ValueKind.SOFTMAX
                channels = np.concatenate([channels[[class_index]], np.delete(channels, class_index)])
        kinds.append((kind, tuple(int(channel) for channel in channels), line))
    return _with_class_first(_weighted_softmaxes(probe, kinds))


def _of_one(raw: Floats, answers: Floats) -> tuple[ValueKind, tuple[float, float]]:
    """Return the kind of a value that depends on one channel, and the line in front of a sigmoid."""
    if _equal(answers, raw):
        return ValueKind.SAME, UNCHANGED
    if not ((answers >= 0) & (answers <= 1)).all():
        return ValueKind.OTHER, UNCHANGED
    precise = (answers > MODERATE) & (answers < 1 - MODERATE)
    if precise.sum() < 2:
        return ValueKind.OTHER, UNCHANGED
    likely = answers[precise].astype(np.float64)
    slope, start = np.polyfit(raw[precise].astype(np.float64), np.log(likely / (1 - likely)), 1)
    if not _equal(answers, 1 / (1 + np.exp(-(slope * raw + start)))):
        return ValueKind.OTHER, UNCHANGED
    if abs(slope - 1) < EXACT and abs(start) < EXACT:
        return ValueKind.SIGMOID, UNCHANGED
    return ValueKind.SIGMOID, (float(slope), float(start))


def _weighted_softmaxes(probe: MapProbe, kinds: list[_Function]) -> list[_Function]:
    """Return the functions with products of a softmax and a sigmoid marked: the sum of the products is this sigmoid."""
    likely = 1 / (1 + np.exp(-probe.raw))
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (kind, channels, _) in enumerate(kinds):
        if kind is ValueKind.OTHER and len(channels) > 2:
            groups.setdefault(channels, []).append(index)
    marked = list(kinds)
    for channels, members in groups.items():
        if len(members) != len(channels) - 1:
            continue
        total = probe.answers[..., members].sum(axis=-1)
        objectness = next((channel for channel in channels if _equal(total, likely[..., channel])), None)
        if objectness is None:
            continue
        classes = np.array([channel for channel in channels if channel != objectness])
        for index in members:
            shares = (probe.answers[..., index] / likely[..., objectness]).astype(np.float32)
            class_index = _softmax_index(probe.raw[..., classes], shares)
            if class_index is not None:
                marked[index] = (ValueKind.WEIGHTED_SOFTMAX, (int(classes[class_index]), objectness), UNCHANGED)
    return marked


def _softmax_index(raw: Floats, answers: Floats) -> int | None:
    """Return the index of the channel whose share in a softmax the answers are, or None."""
    powers = np.exp(raw - raw.max(axis=-1, keepdims=True))
    shares = powers / powers.sum(axis=-1, keepdims=True)
    differences = np.abs(shares - answers[..., np.newaxis]).max(axis=(0, 1))
    index = int(differences.argmin())
    return index if differences[index] < EXACT else None


def _with_class_first(kinds: list[_Function]) -> list[_Function]:
    """Return products with the channel of the class first: fewer values depend on it than on the other channel."""
    products = [channels for kind, channels, _ in kinds if kind in (ValueKind.PRODUCT, ValueKind.ROOT)]
    uses = {channel: sum(channel in factors for factors in products) for product in products for channel in product}
    return [
        (kind, tuple(sorted(channels, key=lambda channel: (uses[channel], channel))), line)
        if kind in (ValueKind.PRODUCT, ValueKind.ROOT)
        else (kind, channels, line)
        for kind, channels, line in kinds
    ]


def _equal(answers: Floats, expected: NDArray[np.floating[Any]]) -> bool:
    return bool((np.abs(answers - expected) <= EXACT * (1 + np.abs(expected))).all())


def roles_of(tail: Tail, probe: MapProbe, preset: Preset) -> MapRoles | None:
    """Return the roles on a map; None for a map without boxes and scores."""
    values = values_of(tail, probe)
    anchors = max(value.anchor for value in values) + 1
    if anchors == 1 and preset.anchors_per_cell > 1:
        values = _split_by_anchor(values, preset.anchors_per_cell)
        anchors = preset.anchors_per_cell
    if all(value.kind is ValueKind.SAME for value in values):
        values = _raw_scores(probe, values, preset)
    groups = [[value for value in values if value.anchor == anchor] for anchor in range(anchors)]
    all_roles = [_of_anchor(probe, group, preset) for group in groups]
    known = [roles for roles in all_roles if roles is not None]
    if len(known) != anchors:
        return None
    kinds = {value.kind for value in values}
    softmax = bool(kinds & {ValueKind.SOFTMAX, ValueKind.WEIGHTED_SOFTMAX})
    used = sum(
        (len(roles.box_values) or len(roles.boxes))
        + len(roles.scores)
        + (roles.objectness is not None)
        + len(roles.keypoints)
        for roles in known
    )
    all_scores = [_softmax_channels(group) for group in groups]
    missing = ValueKind.SOFTMAX in kinds and len(known[0].scores) < len(all_scores[0])
    if missing:
        known = [replace(roles, scores=channels) for roles, channels in zip(known, all_scores, strict=True)]
    background = preset.background
    measured = not softmax or background is not None or known[0].objectness is not None
    if not measured:
        # The background is the end of the softmax that the outputs leave out.
        kept = {value.channels[0] for value in groups[0] if value.kind is ValueKind.SOFTMAX}
        background = "last" if missing and all_scores[0][0] in kept else "first"
    return MapRoles(
        probe,
        tuple(known),
        softmax,
        background,
        ValueKind.ROOT in kinds,
        len(values) - used,
        {value.channels[0]: value.line for value in values if value.line != UNCHANGED},
        not kinds & SCORES,
        not measured and not missing,
    )


def _softmax_channels(values: Sequence[Value]) -> tuple[int, ...]:
    return tuple(sorted({channel for value in values if value.kind is ValueKind.SOFTMAX for channel in value.channels}))


def _split_by_anchor(values: list[Value], anchors: int) -> list[Value]:
    """Return values whose output has the anchors one after the other in one axis."""
    widths = {
        output: sum(value.output == output for value in values) // anchors for output in {v.output for v in values}
    }
    ranks: dict[int, int] = {}
    split = []
    for value in sorted(values, key=lambda output_value: (output_value.output, output_value.column)):
        rank = ranks.get(value.output, 0)
        ranks[value.output] = rank + 1
        anchor, column = divmod(rank, widths[value.output])
        split.append(replace(value, anchor=anchor, column=column))
    return split


def _raw_scores(probe: MapProbe, values: list[Value], preset: Preset) -> list[Value]:
    """Return values with the scores marked as sigmoids, for a file that ends at its convolutions."""
    ordered = sorted(values, key=lambda value: (value.anchor, value.output, value.column))
    if preset.size_first:
        boxes = {value.index for value in ordered if value.output != ordered[0].output}
    elif preset.box_columns is not None:
        boxes = set()
        for anchor in {value.anchor for value in values}:
            columns = [value.index for value in ordered if value.anchor == anchor]
            start = preset.box_columns[0] % len(columns)
            boxes.update(columns[start : start + preset.box_columns[1]])
    else:
        tensors = _box_tensors(probe.head.widths)
        if tensors is None:
            return values
        boxes = {value.index for value in ordered if _tensor_of(probe, value) in tensors}
    return [value if value.index in boxes else replace(value, kind=ValueKind.SIGMOID) for value in ordered]


def _box_tensors(widths: Sequence[int]) -> list[int] | None:
    """Return the tensors of a map that hold boxes, and keypoints: of width 4, or else of several bins for each side."""
    if len(widths) < 2:
        return None
    plain = [index for index, width in enumerate(widths) if width == 4]
    binned = [index for index, width in enumerate(widths) if width % 4 == 0 and FEWEST_BINS <= width // 4 <= MOST_BINS]
    boxes = plain[:1] or [index for index in binned if widths[index] == 64][:1] or binned[:1]
    if not boxes:
        return None
    rest = [index for index in range(len(widths)) if index not in boxes]
    singles = [index for index in rest if widths[index] == 1]
    keypoints = [index for index in rest if len(singles) == 2 and widths[index] % 2 == 0]
    return boxes + keypoints


def _tensor_of(probe: MapProbe, value: Value) -> int:
    """Return the number of the tensor that the first channel of a value belongs to."""
    return int(np.searchsorted(np.cumsum(probe.head.widths), value.channels[0], side="right"))


def _of_anchor(probe: MapProbe, values: Sequence[Value], preset: Preset) -> AnchorRoles | None:
    ordered = sorted(values, key=lambda value: (value.output, value.column))
    others = [value for value in ordered if value.kind is ValueKind.OTHER]
    scores = [value for value in ordered if value.kind in SCORES]
    same = [value for value in ordered if value.kind is ValueKind.SAME]
    if others and not scores:
        scores = same
    if not scores:
        return None
    if others:
        wide = [value for value in others if len(value.channels) > 1]
        boxes = (wide or others)[:4]
        keypoints = [value for value in others if value not in boxes]
        channels = {channel for value in boxes for channel in value.channels}
        roles = AnchorRoles(tuple(sorted(channels)), tuple(value.index for value in boxes), ())
    elif preset.size_first:
        boxes, keypoints = same[:4], same[4:]
        roles = AnchorRoles(tuple(value.channels[0] for value in (*boxes[2:], *boxes[:2])), (), ())
    else:
        boxes, keypoints = _raw_boxes(same)
        roles = AnchorRoles(tuple(value.channels[0] for value in boxes), (), ())
    if len(boxes) < 4 or len(roles.boxes) % 4:
        return None
    if keypoints:
        seen = [value for value in scores if value.output == keypoints[0].output and value.column > keypoints[0].column]
        scores = [value for value in scores if value not in seen]
        points = sorted([*keypoints, *seen], key=lambda value: (value.output, value.column))
        decoded = tuple(value.index for value in keypoints) if others else ()
        roles = replace(roles, keypoints=tuple(value.channels[0] for value in points), keypoint_values=decoded)
    return _with_scores(probe, roles, scores, preset)


def _raw_boxes(same: list[Value]) -> tuple[list[Value], list[Value]]:
    """Return the box and the keypoints among values that come out unchanged."""
    by_output = [[value for value in same if value.output == output] for output in sorted({v.output for v in same})]
    fours = [group for group in by_output if len(group) == 4]
    if len(by_output) > 1 and fours:
        return fours[0], [value for group in by_output if group is not fours[0] for value in group]
    twos = [group for group in by_output if len(group) == 2]
    if not fours and len(twos) == 2:  # CenterNet has the size before the position
        return twos[1] + twos[0], [value for group in by_output if group not in twos for value in group]
    if len(same) > 4 and len(same) % 4 and len(same) % 2 == 0:
        return same[:4], same[4:]
    return same, []


def _with_scores(probe: MapProbe, roles: AnchorRoles, scores: list[Value], preset: Preset) -> AnchorRoles | None:
    if not scores:
        return None
    if scores[0].kind in (ValueKind.PRODUCT, ValueKind.ROOT, ValueKind.WEIGHTED_SOFTMAX):
        classes = tuple(value.channels[0] for value in scores)
        shared = {channel for value in scores for channel in value.channels[1:]}
        return replace(roles, scores=classes, objectness=shared.pop()) if len(shared) == 1 else None
    shares = [value for value in scores if value.kind is ValueKind.SOFTMAX]
    if shares:
        single = [value.channels[0] for value in scores if value.kind is ValueKind.SIGMOID]
        objectness = single[0] if len(single) == 1 else None
        return replace(roles, scores=tuple(value.channels[0] for value in shares), objectness=objectness)
    tensors = [_tensor_of(probe, value) for value in scores]
    counts = {tensor: tensors.count(tensor) for tensor in dict.fromkeys(tensors)}
    alone = [tensor for tensor, count in counts.items() if count == 1]
    box_tensor = int(np.searchsorted(np.cumsum(probe.head.widths), roles.boxes[0], side="right"))
    # One convolution for all parts, with one box each: the first score of YOLOv3 to v7 is the objectness.
    joint = len(counts) == 1 and tensors[0] == box_tensor and len(roles.boxes) == 4 and len(scores) > 1
    if len(counts) == 2 and alone:
        objectness_index = tensors.index(alone[-1])
    elif joint and preset.objectness is not False:
        objectness_index = 0
    else:
        return replace(roles, scores=tuple(value.channels[0] for value in scores))
    classes = tuple(value.channels[0] for at, value in enumerate(scores) if at != objectness_index)
    return replace(roles, scores=classes, objectness=scores[objectness_index].channels[0])
