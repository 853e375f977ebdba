"""The overlap of boxes, and non-maximum suppression, in numpy."""

from __future__ import annotations

from typing import List

import numpy as np

from deploy.contract.preprocessing import Array

BLOCK = 128
"""Boxes that are compared with each other at once."""


def overlaps(boxes: Array, others: Array) -> Array:
    """Return the intersection over union of all pairs of boxes: float64 [k, m]; 0 for two empty boxes."""
    boxes = np.asarray(boxes, np.float64).reshape(-1, 4)
    others = np.asarray(others, np.float64).reshape(-1, 4)
    shared = intersections(boxes, others)
    areas = [np.prod(np.maximum(corners[:, 2:] - corners[:, :2], 0), axis=1) for corners in (boxes, others)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    return np.where(union > 0, shared / np.where(union > 0, union, 1), 0.0)


def intersections(boxes: Array, others: Array) -> Array:
    """Return the areas that all pairs of boxes have in common: float64 [k, m]."""
    boxes = np.asarray(boxes, np.float64).reshape(-1, 4)
    others = np.asarray(others, np.float64).reshape(-1, 4)
    columns, across = boxes.T[:, :, np.newaxis], others.T[:, np.newaxis, :]
    height = np.minimum(columns[2], across[2]) - np.maximum(columns[0], across[0])
    width = np.minimum(columns[3], across[3]) - np.maximum(columns[1], across[1])
    return np.maximum(height, 0) * np.maximum(width, 0)


def suppressed(boxes: Array, classes: Array, overlap: float, most: int) -> Array:
    """Return the indices of the boxes that remain after greedy non-maximum suppression, int64.

    The boxes are in descending order of their scores. A box is removed if its intersection over union with a remaining
    box of the same class is larger than `overlap`.
    """
    table = np.concatenate([np.asarray(boxes, np.float64).reshape(-1, 4), classes.reshape(-1, 1)], axis=1)
    kept: List[int] = []
    for start in range(0, len(table), BLOCK):
        block = np.arange(start, min(start + BLOCK, len(table)))
        free = block if not kept else block[~_conflicts(table[kept], table[block], overlap).any(axis=0)]
        kept.extend(free[_remaining(_conflicts(table[free], table[free], overlap), most - len(kept))])
        if len(kept) >= most:
            break
    return np.asarray(kept, np.int64)


def _conflicts(rows: Array, others: Array, overlap: float) -> Array:
    """Return which pairs have one class and overlap by more than `overlap`: bool [k, m]; a row has box and class."""
    shared = intersections(rows[:, :4], others[:, :4])
    columns, across = rows.T[:, :, np.newaxis], others.T[:, np.newaxis, :]
    areas, other_areas = (
        (coordinates[2] - coordinates[0]) * (coordinates[3] - coordinates[1]) for coordinates in (columns, across)
    )
    return (shared > overlap * (areas + other_areas - shared)) & (columns[4] == across[4])


def _remaining(conflicts: Array, most: int) -> List[int]:
    """Return the first `most` of those rows that conflict, bool [k, k], with no remaining row before them."""
    # A row of the table is a number whose bits are its conflicts: numpy would need one call for each remaining row.
    packed = np.packbits(conflicts, axis=1)
    width = packed.shape[1] * 8
    rows = [int.from_bytes(row.tobytes(), "big") for row in packed]
    removed = 0
    kept: List[int] = []
    for index, row in enumerate(rows):
        if len(kept) >= most:
            break
        if not removed >> (width - 1 - index) & 1:
            kept.append(index)
            removed |= row
    return kept
