"""The roles of the channels of a detector's last convolutions: boxes, scores, objectness, keypoints.

They follow from what the outputs do with the channels. A score is a sigmoid of one channel, or part of a softmax; a box
that the model decodes is something else; numbers that come out unchanged are boxes that the model does not decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.detectors.families import Preset
from compress.detectors.probing import Floats, MapProbe, Tail

EXACT = 1e-4
"""Largest difference between a value and a function of its channels, relative to 1 + the value."""
FEWEST_BINS, MOST_BINS = 5, 64
"""Bins of a distribution over distances."""


class ValueKind(Enum):
    """The function of its channels that an output value is."""

    SAME = "same"
    SIGMOID = "sigmoid"
    PRODUCT = "product"
    ROOT = "root"
    SOFTMAX = "softmax"
    OTHER = "other"


@dataclass(frozen=True)
class Value:
    """One output value of a location.

    Attributes:
        index: its number among the values of a location.
        output: the number of the output tensor.
        anchor: the number of the anchor, if the layout of the output says it, else 0.
        column: the position in the output.
        kind: the function.
        channels: the channels that it depends on; for a score, the one of its class first.
    """

    index: int
    output: int
    anchor: int
    column: int
    kind: ValueKind
    channels: tuple[int, ...]


@dataclass(frozen=True)
class AnchorRoles:
    """The channels of one anchor.

    Attributes:
        boxes: the channels of the box, in their order in the model.
        box_values: the four output values of the decoded box; empty if the model does not decode.
        scores: the channel of each class.
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


@dataclass(frozen=True)
class MapRoles:
    """The roles on one map.

    Attributes:
        probe: the map.
        anchors: the roles for each anchor.
        softmax: whether the scores are a softmax over the channels, instead of sigmoids.
        background: the position of the background among the channels of scores: "first", "last" or None.
        root: whether the score is the root of the product of class and objectness.
        unused: output values without a role, such as the coefficients of masks.
    """

    probe: MapProbe
    anchors: tuple[AnchorRoles, ...]
    softmax: bool
    background: str | None
    root: bool
    unused: int


def values_of(tail: Tail, probe: MapProbe) -> list[Value]:
    """Return the output values of a map's locations, in the order of the outputs."""
    sizes = np.cumsum([0] + [int(np.prod(shape)) for shape in tail.shapes])
    outputs = np.searchsorted(sizes, probe.elements[0], side="right") - 1
    anchors, columns = np.zeros_like(outputs), np.zeros_like(outputs)
    for output in np.unique(outputs):
        rows = np.flatnonzero(outputs == output)
        flat = probe.elements[:, rows] - sizes[output]
        anchors[rows], columns[rows] = _layout(flat, tail.shapes[output])
    kinds = _kinds(probe)
    return [
        Value(index, int(outputs[index]), int(anchors[index]), int(columns[index]), *kinds[index])
        for index in range(len(outputs))
    ]


def _layout(flat: NDArray[np.int64], shape: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the anchor and the column of the values of a location in one output.

    Args:
        flat: [positions, values], flat indices.
        shape: the shape of the output.
    """
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


def _kinds(probe: MapProbe) -> list[tuple[ValueKind, tuple[int, ...]]]:
    likely = 1 / (1 + np.exp(-probe.raw))
    found: list[tuple[ValueKind, tuple[int, ...]]] = []
    for index in range(probe.elements.shape[1]):
        channels = np.flatnonzero(probe.depends[index])
        answers = probe.answers[..., index]
        kind = ValueKind.OTHER
        if len(channels) == 1:
            if _equal(answers, probe.raw[..., channels[0]]):
                kind = ValueKind.SAME
            elif _equal(answers, likely[..., channels[0]]):
                kind = ValueKind.SIGMOID
        elif len(channels) == 2 and _equal(answers, likely[..., channels].prod(axis=-1)):
            kind = ValueKind.PRODUCT
        elif len(channels) == 2 and _equal(answers, np.sqrt(likely[..., channels].prod(axis=-1))):
            kind = ValueKind.ROOT
        if kind is ValueKind.OTHER and len(channels) > 1:
            place = _softmax_place(probe.raw[..., channels], answers)
            if place is not None:
                kind = ValueKind.SOFTMAX
                channels = np.concatenate([channels[[place]], np.delete(channels, place)])
        found.append((kind, tuple(int(channel) for channel in channels)))
    return _with_class_first(found)


def _softmax_place(raw: Floats, answers: Floats) -> int | None:
    """Return the channel whose share in a softmax the answers are, or None."""
    powers = np.exp(raw - raw.max(axis=-1, keepdims=True))
    shares = powers / powers.sum(axis=-1, keepdims=True)
    differences = np.abs(shares - answers[..., np.newaxis]).max(axis=(0, 1))
    place = int(differences.argmin())
    return place if differences[place] < EXACT else None


def _with_class_first(found: list[tuple[ValueKind, tuple[int, ...]]]) -> list[tuple[ValueKind, tuple[int, ...]]]:
    """Return products with the channel of the class first: the one that fewer values depend on."""
    products = [channels for kind, channels in found if kind in (ValueKind.PRODUCT, ValueKind.ROOT)]
    uses = {channel: sum(channel in each for each in products) for each in products for channel in each}
    return [
        (kind, tuple(sorted(channels, key=lambda channel: (uses[channel], channel))))
        if kind in (ValueKind.PRODUCT, ValueKind.ROOT)
        else (kind, channels)
        for kind, channels in found
    ]


def _equal(answers: Floats, expected: NDArray[np.floating[Any]]) -> bool:
    return bool((np.abs(answers - expected) <= EXACT * (1 + np.abs(expected))).all())


def roles_of(tail: Tail, probe: MapProbe, preset: Preset) -> MapRoles | None:
    """Return the roles on a map; None if it has no boxes and scores.

    Args:
        tail: the tail.
        probe: the map.
        preset: what is known of the detector.
    """
    values = values_of(tail, probe)
    anchors = max(value.anchor for value in values) + 1
    if anchors == 1 and preset.anchors_per_cell > 1:
        values = _split_by_anchor(values, preset.anchors_per_cell)
        anchors = preset.anchors_per_cell
    if all(value.kind is ValueKind.SAME for value in values):
        values = _raw_scores(probe, values, preset)
    groups = [[value for value in values if value.anchor == anchor] for anchor in range(anchors)]
    found = [_of_anchor(probe, group, preset) for group in groups]
    known = [roles for roles in found if roles is not None]
    if len(known) != anchors:
        return None
    kinds = {value.kind for value in values}
    softmax = ValueKind.SOFTMAX in kinds
    used = sum(_used(roles) for roles in known)
    all_scores = [_softmax_channels(group) for group in groups]
    missing = softmax and len(known[0].scores) < len(all_scores[0])
    if missing:
        known = [replace(roles, scores=channels) for roles, channels in zip(known, all_scores, strict=True)]
    background = preset.background
    if softmax and background is None:
        background = "first" if not missing else _removed_column(groups[0])
    return MapRoles(probe, tuple(known), softmax, background, ValueKind.ROOT in kinds, len(values) - used)


def _softmax_channels(values: Sequence[Value]) -> tuple[int, ...]:
    return tuple(sorted({channel for value in values if value.kind is ValueKind.SOFTMAX for channel in value.channels}))


def _removed_column(values: Sequence[Value]) -> str:
    """Return the end of the softmax that the outputs leave out: the background."""
    channels = _softmax_channels(values)
    kept = {value.channels[0] for value in values if value.kind is ValueKind.SOFTMAX}
    return "first" if channels[0] not in kept else "last"


def _used(roles: AnchorRoles) -> int:
    boxes = len(roles.box_values) or len(roles.boxes)
    return boxes + len(roles.scores) + (roles.objectness is not None) + len(roles.keypoints)


def _split_by_anchor(values: list[Value], anchors: int) -> list[Value]:
    """Return values whose output has the anchors one after the other in one axis."""
    widths = {
        output: sum(value.output == output for value in values) // anchors for output in {v.output for v in values}
    }
    ranks: dict[int, int] = {}
    split = []
    for value in sorted(values, key=lambda each: (each.output, each.column)):
        rank = ranks.get(value.output, 0)
        ranks[value.output] = rank + 1
        anchor, column = divmod(rank, widths[value.output])
        split.append(replace(value, anchor=anchor, column=column))
    return split


def _raw_scores(probe: MapProbe, values: list[Value], preset: Preset) -> list[Value]:
    """Return values with those marked as sigmoids that must be scores, in a file that ends at its convolutions."""
    ordered = sorted(values, key=lambda value: (value.anchor, value.output, value.column))
    if preset.size_first:
        heatmap = ordered[0].output
        return [replace(value, kind=ValueKind.SIGMOID) if value.output == heatmap else value for value in ordered]
    if preset.box_columns is not None:
        marked = []
        for anchor in {value.anchor for value in values}:
            columns = [value for value in ordered if value.anchor == anchor]
            start = preset.box_columns[0] % len(columns)
            boxes = range(start, start + preset.box_columns[1])
            marked += [
                value if at in boxes else replace(value, kind=ValueKind.SIGMOID) for at, value in enumerate(columns)
            ]
        return marked
    box_tensor = _box_tensor(probe.head.widths)
    if box_tensor is None:
        return values
    return [
        value if _tensor_of(probe, value) in box_tensor else replace(value, kind=ValueKind.SIGMOID) for value in ordered
    ]


def _box_tensor(widths: Sequence[int]) -> list[int] | None:
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
    scores = [value for value in ordered if value.kind not in (ValueKind.OTHER, ValueKind.SAME)]
    same = [value for value in ordered if value.kind is ValueKind.SAME]
    if not scores:
        return None
    if others:
        wide = [value for value in others if len(value.channels) > 1]
        boxes = (wide or others)[:4]
        keypoints = [value for value in others if value not in boxes]
        found = AnchorRoles(_channels(boxes), tuple(value.index for value in boxes), ())
    elif preset.size_first:
        boxes, keypoints = same[:4], same[4:]
        found = AnchorRoles(tuple(value.channels[0] for value in (*boxes[2:], *boxes[:2])), (), ())
    else:
        boxes, keypoints = _raw_boxes(same)
        found = AnchorRoles(_channels(boxes), (), ())
    if len(boxes) < 4 or len(found.boxes) % 4:
        return None
    if keypoints:
        seen = [value for value in scores if value.output == keypoints[0].output and value.column > keypoints[0].column]
        scores = [value for value in scores if value not in seen]
        points = sorted([*keypoints, *seen], key=lambda value: (value.output, value.column))
        decoded = tuple(value.index for value in keypoints) if others else ()
        found = replace(found, keypoints=tuple(value.channels[0] for value in points), keypoint_values=decoded)
    return _with_scores(probe, found, scores, preset)


def _channels(values: Sequence[Value]) -> tuple[int, ...]:
    return tuple(sorted({channel for value in values for channel in value.channels}))


def _raw_boxes(same: list[Value]) -> tuple[list[Value], list[Value]]:
    """Return the box and the keypoints among numbers that come out unchanged."""
    by_output = [[value for value in same if value.output == output] for output in sorted({v.output for v in same})]
    fours = [group for group in by_output if len(group) == 4]
    if len(by_output) > 1 and fours:
        return fours[0], [value for group in by_output if group is not fours[0] for value in group]
    if len(same) > 4 and len(same) % 4 and len(same) % 2 == 0:
        return same[:4], same[4:]
    return same, []


def _with_scores(probe: MapProbe, roles: AnchorRoles, scores: list[Value], preset: Preset) -> AnchorRoles | None:
    """Return the roles with scores and objectness."""
    if not scores:
        return None
    if scores[0].kind in (ValueKind.PRODUCT, ValueKind.ROOT):
        classes = tuple(value.channels[0] for value in scores)
        shared = {channel for value in scores for channel in value.channels[1:]}
        return replace(roles, scores=classes, objectness=shared.pop()) if len(shared) == 1 else None
    if scores[0].kind is ValueKind.SOFTMAX:
        return replace(roles, scores=tuple(value.channels[0] for value in scores))
    tensors = [_tensor_of(probe, value) for value in scores]
    counts = {tensor: tensors.count(tensor) for tensor in dict.fromkeys(tensors)}
    single = [tensor for tensor, count in counts.items() if count == 1]
    box_tensor = int(np.searchsorted(np.cumsum(probe.head.widths), roles.boxes[0], side="right"))
    # One convolution for all parts, with one box each: the first score of YOLOv3 to v7 is the objectness.
    joint = len(counts) == 1 and tensors[0] == box_tensor and len(roles.boxes) == 4 and len(scores) > 1
    if len(counts) == 2 and single:
        objectness = tensors.index(single[-1])
    elif joint and preset.objectness is not False:
        objectness = 0
    else:
        return replace(roles, scores=tuple(value.channels[0] for value in scores))
    classes = tuple(value.channels[0] for at, value in enumerate(scores) if at != objectness)
    return replace(roles, scores=classes, objectness=scores[objectness].channels[0])
