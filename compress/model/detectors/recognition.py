"""Recognize a detector by the structure of its head, and describe how its boxes and scores are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.model.detectors import box_fit
from compress.model.detectors.families import AUTO, BY_ANCHORS, PRESETS, USUAL_BINS, Preset, Sizes
from compress.model.detectors.probing import probes, tail_of
from compress.model.detectors.roles import MapRoles, roles_of
from compress.model.ir.keras_graph import Network, tensors_in
from deploy.contract.box_codes import WITH_ANCHORS
from deploy.contract.detection import Detector

SEED = 0
"""Random inputs are the same in every run, so that the same file is always recognized as the same family."""
MOST_CELLS = 1 << 16
"""Cells of all maps. A detector with a stride of 4 has as many at 1024 x 1024."""
LEAST_STRIDE = 3
"""Rows of the image for each row of cells. Finer maps belong to masks and images, and probing them takes long."""


@dataclass(frozen=True, kw_only=True)
class DescribedDetector:
    """The decoding of a detector whose head is understood.

    Attributes:
        specification: how boxes and scores are decoded (`deploy.contract.detection`), for a model that ends at its last
            convolutions, with one output for each part of each map.
        box_error: the largest difference between the boxes of the file and those of the decoding, as a fraction of the
            image or the box; None if the file does not decode its boxes.
        notes: what was assumed or left out, as sentences.
    """

    specification: Mapping[str, Any]
    classes: int
    box_error: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RecognizedDetector(DescribedDetector):
    """A detector with the roles of the channels of each map, the finest map first."""

    maps: tuple[MapRoles, ...]


def recognize(network: Network, family: str = "auto", *, rounded: bool = False) -> RecognizedDetector | None:
    """Return the detector that a network is; None if its outputs are not those of a detector.

    Args:
        network: in single steps (`compress.model.ir.passes.fold.unfolded`), with one input of a fixed size.
        family: the name of a preset, which says what the file leaves open.
        rounded: whether the weights and the constants are those of a quantized file.
    """
    preset = PRESETS[family]
    sources = list(tensors_in(network.inputs))
    size = network.shapes[sources[0]][:2]
    if len(sources) != 1 or len(size) != 2 or None in size:
        return None
    tail = tail_of(network)
    if tail is None:
        return None
    finest = max(head.cells[0] for head in tail.maps)
    positions = sum(head.positions for head in tail.maps)
    if finest * LEAST_STRIDE > int(size[0] or 0) or positions > MOST_CELLS:
        return None
    map_probes = probes(tail, np.random.default_rng(SEED))
    if map_probes is None:
        return None
    all_maps = [roles_of(tail, probe, preset) for probe in map_probes]
    maps = [roles for roles in all_maps if roles is not None]
    if not maps or len({(len(roles.anchors[0].scores), len(roles.anchors[0].boxes)) for roles in maps}) != 1:
        return None
    left_out = len(all_maps) - len(maps) + sum(roles.unused > 0 for roles in maps)
    height, width = int(size[0] or 0), int(size[1] or 0)
    close = box_fit.CLOSE_IN_8_BITS if rounded else box_fit.CLOSE
    return _described(maps, preset, (height, width), left_out, close)


def _described(
    maps: Sequence[MapRoles], preset: Preset, input_size: tuple[int, int], left_out: int, close: float
) -> RecognizedDetector | None:
    notes = []
    first = maps[0].anchors[0]
    decoded = bool(first.box_values)
    if decoded:
        fitted = box_fit.fit(maps, input_size, close)
        if fitted is None:
            return None
        settings, error = dict(fitted.settings), fitted.error
        maps = _with_lines(maps, fitted)
        grids = [dict(entry) for entry in fitted.maps]
    else:
        if preset is AUTO and len(maps) == 1 and not first.in_pairs:
            return None  # too little to go by: other models have such outputs too
        assumed = _assumed(maps, preset, input_size)
        if assumed is None:
            return None
        settings, grids, error = assumed[0], assumed[1], None
        code = f"the file does not decode its boxes: the code {settings['code']} with offset {settings['offset']:g} is"
        assumed_from = "assumed from the numbers of channels; name the family in model.detector if it is another one"
        notes.append(f"{code} {assumed_from}" if preset is AUTO else f"{code} that of the family in model.detector")
    if maps[0].assumed_sigmoid:
        notes.append("the file gives scores as raw values: a sigmoid for each class is assumed")
    if maps[0].assumed_background:
        notes.append("the first of the softmax's classes is assumed to be the background")
    if left_out:
        notes.append("outputs that are not boxes, scores or keypoints (such as masks) are left out")
    keypoints = _keypoints(maps, settings, preset)
    if keypoints is not None:
        settings["keypoints"] = keypoints
    settings |= _scores(maps, preset, keypoints)
    specification = {"maps": grids, **settings, "tensors": _tensors(maps)}
    classes = len(first.scores) - (settings.get("background") is not None)
    Detector(specification)
    return RecognizedDetector(
        maps=tuple(maps), specification=specification, classes=classes, box_error=error, notes=tuple(notes)
    )


def _with_lines(maps: Sequence[MapRoles], fitted: box_fit.BoxFit) -> list[MapRoles]:
    """Return the roles with the lines of the channels of boxes."""
    if not fitted.lines:
        return list(maps)
    updated = []
    for roles, of_map in zip(maps, fitted.lines, strict=True):
        lines = dict(roles.lines)
        for anchor, line in zip(roles.anchors, of_map, strict=True):
            pairs = zip(line.slopes.tolist(), line.starts.tolist(), strict=True)
            lines.update(zip(anchor.boxes, pairs, strict=True))
        updated.append(replace(roles, lines=lines))
    return updated


def _assumed(
    maps: Sequence[MapRoles], preset: Preset, input_size: tuple[int, int]
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Return settings and maps of a detector whose file ends at its convolutions."""
    width, anchors = len(maps[0].anchors[0].boxes), len(maps[0].anchors)
    if preset.code is None and anchors > 1:
        counts = tuple(len(roles.anchors) for roles in maps)
        preset = PRESETS[BY_ANCHORS.get((counts, bool(maps[0].anchors[0].keypoints)), "auto")]
    code, offset = preset.code, preset.offset
    if code is None:
        first = maps[0].anchors[0]
        code = "dfl" if width > 4 else "yolox" if first.objectness is not None else "ltrb"
        code = "centernet" if first.in_pairs else code
    if (width > 4) != (code == "dfl") or (preset.code is None and width > 4 and width // 4 not in USUAL_BINS):
        return None
    if offset is None:
        # NanoDet-Plus has four maps and counts from the corners of the cells; other families from their centres.
        corner = code in ("yolox", "centernet") or (code == "dfl" and len(maps) == 4)
        offset = 0.0 if corner else 0.5
    settings: dict[str, Any] = {"code": code, "order": preset.order, "offset": offset}
    if code == "dfl":
        settings["bins"] = width // 4
    if preset.sizes is None:
        plain = anchors == 1 and code not in WITH_ANCHORS
        return (settings, [{"cells": list(roles.probe.head.cells)} for roles in maps]) if plain else None
    grids = []
    for roles in maps:
        stride = _stride(preset.sizes, roles.probe.head.cells, input_size)
        if stride is None or len(preset.sizes[stride]) != len(roles.anchors):
            return None
        sizes = preset.sizes[stride]
        grids.append(_grid(roles.probe.head.cells, stride, sizes, input_size))
    return settings, grids


def _stride(strides: Iterable[int], cells: tuple[int, int], input_size: tuple[int, int]) -> int | None:
    """Return the stride of a map; None if none of the strides makes so many cells, rounded up or down."""
    fitting = [
        stride
        for stride in strides
        if all(abs(length / stride - count) < 1 for length, count in zip(input_size, cells, strict=True))
    ]
    return min(fitting, key=lambda stride: abs(input_size[0] / stride - cells[0]), default=None)


def _grid(cells: tuple[int, int], stride: int, sizes: Sizes, input_size: tuple[int, int]) -> dict[str, Any]:
    """Return a map with anchors of sizes in pixels. If its cells exceed the image, their centres are listed."""
    boxes = [[height / input_size[0], width / input_size[1]] for height, width in sizes]
    if (cells[0] * stride, cells[1] * stride) == input_size:
        return {"cells": list(cells), "boxes": boxes}
    anchors = []
    for row, column in np.ndindex(cells):
        centre = [(row + 0.5) * stride / input_size[0], (column + 0.5) * stride / input_size[1]]
        anchors += [[*centre, *box] for box in boxes]
    return {"anchors": anchors}


def _keypoints(maps: Sequence[MapRoles], settings: Mapping[str, Any], preset: Preset) -> dict[str, Any] | None:
    """Return the settings of keypoints; None without keypoints."""
    roles = maps[0].anchors[0]
    if not roles.keypoints:
        return None
    decoded = len(roles.keypoint_values)
    visibility = decoded > 0 and len(roles.keypoints) * 2 == decoded * 3
    count = len(roles.keypoints) // (3 if visibility else 2)
    keypoints = {"count": count, "visibility": visibility}
    if not decoded:
        if settings["code"] == "ssd":  # RetinaFace: as the centre of its box
            return {**keypoints, "scale": 0.1, "offset": 0.5, "unit": "anchor"}
        return {**keypoints, "scale": 1.0, "offset": 0.0, "unit": preset.keypoint_unit}
    probe = maps[0].probe
    channels = [channel for index, channel in enumerate(roles.keypoints) if not visibility or index % 3 < 2]
    raw = probe.raw[:, 0, channels[0]].astype(np.float64)
    value = probe.answers[:, 0, roles.keypoint_values[0]].astype(np.float64)
    slope, start = np.polyfit(raw, value, 1)
    other = probe.answers[:, 1, roles.keypoint_values[0]].astype(np.float64)
    step = np.polyfit(probe.raw[:, 1, channels[0]].astype(np.float64), other, 1)[1] - start
    return {**keypoints, "scale": _rounded(slope / step), "offset": _rounded(start / step), "unit": "cell"}


def _rounded(value: float) -> float:
    return float(round(value, 3))


def _scores(maps: Sequence[MapRoles], preset: Preset, keypoints: Mapping[str, Any] | None) -> dict[str, Any]:
    roles = maps[0]
    settings: dict[str, Any] = {"scores": "softmax" if roles.softmax else "logits"}
    if roles.background is not None:
        settings["background"] = roles.background
    single_face = keypoints is not None and len(roles.anchors[0].scores) == 1
    if roles.anchors[0].objectness is not None and (preset.root or roles.root or (preset.root is None and single_face)):
        settings["objectness"] = "geometric_mean"  # YuNet, and what follows it
    if preset.overlap is not None:
        settings["overlap"] = preset.overlap
    return settings


def _tensors(maps: Sequence[MapRoles]) -> list[dict[str, Any]]:
    """Return the entries of `tensors`: for each map its boxes, scores, objectness and keypoints."""
    entries = []
    for index, roles in enumerate(maps):
        parts = ["boxes", "scores"]
        parts += ["objectness"] if roles.anchors[0].objectness is not None else []
        parts += ["keypoints"] if roles.anchors[0].keypoints else []
        entries += [{"part": part, "map": index} for part in parts]
    return entries
