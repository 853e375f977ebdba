"""Decoding of PoseNet's outputs to the poses of several people, in numpy.

PoseNet has three outputs for a grid over the image: heatmaps (logits of the keypoints), short offsets (from a cell to
the keypoint near it) and mid offsets (from a keypoint to its neighbours in the skeleton). A pose grows from the
keypoint with the best score along the skeleton (Papandreou et al., PersonLab, 2018). Limits and refinement are those
of libcoral's decoder.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Dict, List, NamedTuple, Tuple

import numpy as np

from deploy.contract.preprocessing import Array

KEYPOINTS = 17
EDGES = (
    (0, 1),
    (1, 3),
    (0, 2),
    (2, 4),
    (0, 5),
    (5, 7),
    (7, 9),
    (5, 11),
    (11, 13),
    (13, 15),
    (0, 6),
    (6, 8),
    (8, 10),
    (6, 12),
    (12, 14),
    (14, 16),
)
"""The skeleton: keypoints by their numbers in `pose_engine.KeypointType`, parent first."""
REFINEMENTS = 5
"""The number of times that a position follows the short offsets."""


@dataclasses.dataclass(frozen=True)
class DecoderSettings:
    """The settings of the decoder; the defaults are those of the vendor's models.

    Attributes:
        max_detections: the largest number of poses.
        score_threshold: the lowest score of a pose, and of the keypoint that it grows from.
        stride: pixels of the input for each cell of the grid.
        nms_radius: the distance in pixels below which two keypoints of a kind are the same.
    """

    max_detections: int = 20
    score_threshold: float = 0.2
    stride: int = 16
    nms_radius: float = 10.0


class DecodedPoses(NamedTuple):
    """The poses of an image, the highest score first.

    Attributes:
        keypoints: float32 [poses, 17, 2], y and x in pixels of the input.
        keypoint_scores: float32 [poses, 17].
        scores: float32 [poses].
    """

    keypoints: Array
    keypoint_scores: Array
    scores: Array


class _Grid(NamedTuple):
    """The dequantized outputs. Offsets are in cells: [height, width, 2, kinds], y first.

    `mid` has the 16 edges from the parent, then the 16 edges from the child.
    """

    heatmaps: Array
    short: Array
    mid: Array

    def clipped(self, position: Array) -> Array:
        height, width = self.heatmaps.shape[:2]
        limits = np.array([height - 1, width - 1], np.float32)
        clipped: Array = np.minimum(np.maximum(position, np.float32(0)), limits)
        return clipped


def _neighbours() -> Dict[int, List[Tuple[int, int]]]:
    """Return the neighbours of each keypoint, with the number of the edge to them."""
    neighbours: Dict[int, List[Tuple[int, int]]] = {keypoint: [] for keypoint in range(KEYPOINTS)}
    for edge, (parent, child) in enumerate(EDGES):
        neighbours[parent].append((child, edge))
        neighbours[child].append((parent, len(EDGES) + edge))
    return neighbours


_NEIGHBOURS = _neighbours()


def decode_poses(heatmaps: Array, short_offsets: Array, mid_offsets: Array, settings: DecoderSettings) -> DecodedPoses:
    """Return the poses of one image.

    Args:
        heatmaps: float32 [height, width, 17], logits.
        short_offsets: float32 [height, width, 34], in pixels: y of all keypoints, then x.
        mid_offsets: float32 [height, width, 64], in pixels: from parents y then x of all edges, from children y then x.
        settings: the settings.
    """
    height, width = heatmaps.shape[:2]
    stride = np.float32(settings.stride)
    short = np.asarray(short_offsets, np.float32).reshape(height, width, 2, KEYPOINTS) / stride
    mid = np.asarray(mid_offsets, np.float32).reshape(height, width, 2, 2, len(EDGES)) / stride
    mid = mid.transpose(0, 1, 3, 2, 4).reshape(height, width, 2, 2 * len(EDGES))
    grid = _Grid(np.asarray(heatmaps, np.float32), short, mid)
    radius = (settings.nms_radius / settings.stride) ** 2
    positions, logits = _grown_poses(grid, settings, radius)
    keypoint_scores = _sigmoid(np.array(logits, np.float32).reshape(-1, KEYPOINTS))
    keypoints = np.array(positions, np.float32).reshape(-1, KEYPOINTS, 2)
    scores = _unshared_scores(keypoints, keypoint_scores, radius)
    order = np.argsort(-scores, kind="mergesort")
    order = order[scores[order] >= settings.score_threshold]
    return DecodedPoses(keypoints[order] * stride, keypoint_scores[order], scores[order])


def _grown_poses(grid: _Grid, settings: DecoderSettings, radius: float) -> Tuple[List[Array], List[Array]]:
    """Return the keypoints and logits of poses that have different starts and enough score."""
    positions: List[Array] = []
    logits: List[Array] = []
    for root, keypoint in _roots(grid, settings.score_threshold):
        if len(positions) == settings.max_detections:
            break
        if any(np.sum((pose[keypoint] - root) ** 2) <= radius for pose in positions):
            continue
        pose, pose_logits = _grown_pose(grid, root, keypoint)
        if _sigmoid(pose_logits).mean() >= settings.score_threshold:
            positions.append(pose)
            logits.append(pose_logits)
    return positions, logits


def _roots(grid: _Grid, score_threshold: float) -> List[Tuple[Array, int]]:
    """Return the positions and types of keypoints that are the best of their 3 x 3 cells, the best score first."""
    heatmaps = grid.heatmaps
    height, width = heatmaps.shape[:2]
    padded = np.pad(heatmaps, ((1, 1), (1, 1), (0, 0)), "constant", constant_values=-np.inf)
    shifted = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
    # libcoral adds 1e-6 to the threshold, so that 0 has a logit.
    least = -np.log(1 / (score_threshold + 1e-6) - 1)
    rows, columns, keypoints = np.nonzero((heatmaps >= np.max(shifted, axis=0)) & (heatmaps >= least))
    order = np.argsort(-heatmaps[rows, columns, keypoints], kind="mergesort")
    cells = np.stack([rows, columns], axis=1).astype(np.float32)
    refined = grid.clipped(cells + grid.short[rows, columns, :, keypoints])
    return [(refined[index], int(keypoints[index])) for index in order]


def _grown_pose(grid: _Grid, root: Array, keypoint: int) -> Tuple[Array, Array]:
    """Return the keypoints [17, 2] and logits [17] of the pose that has a keypoint at `root`."""
    positions = np.zeros((KEYPOINTS, 2), np.float32)
    logits = np.zeros(KEYPOINTS, np.float32)
    decoded = set()
    # A heap has the lowest value first; the second value keeps the order of equal scores.
    pushed = 0
    heap = [(-float(_sample(grid.heatmaps, root)[keypoint]), pushed, keypoint, root)]
    while heap:
        negative_logit, _, keypoint, position = heapq.heappop(heap)
        if keypoint in decoded:
            continue
        decoded.add(keypoint)
        positions[keypoint] = position
        logits[keypoint] = -negative_logit
        for neighbour, edge in _NEIGHBOURS[keypoint]:
            if neighbour in decoded:
                continue
            there = grid.clipped(position + _sample(grid.mid[..., edge], position))
            for _ in range(REFINEMENTS):
                there = grid.clipped(there + _sample(grid.short[..., neighbour], there))
            logit = float(_sample(grid.heatmaps[..., neighbour], there))
            pushed += 1
            heapq.heappush(heap, (-logit, pushed, neighbour, there))
    return positions, logits


def _sample(values: Array, position: Array) -> Array:
    """Return values [height, width, ...] at a position between cells, by bilinear interpolation."""
    low = np.floor(position).astype(np.intp)
    high = np.ceil(position).astype(np.intp)
    y, x = (position - low).astype(np.float32)
    top = (1 - x) * values[low[0], low[1]] + x * values[low[0], high[1]]
    bottom = (1 - x) * values[high[0], low[1]] + x * values[high[0], high[1]]
    sampled: Array = (1 - y) * top + y * bottom
    return sampled


def _unshared_scores(keypoints: Array, keypoint_scores: Array, radius: float) -> Array:
    """Return the scores of poses: means over keypoints; a keypoint that a better pose also has counts as 0."""
    order = np.argsort(-keypoint_scores.mean(axis=1), kind="mergesort")
    scores = np.zeros(len(keypoints), np.float32)
    for rank, pose in enumerate(order):
        better = order[:rank]
        distances = np.sum((keypoints[better] - keypoints[pose]) ** 2, axis=2)
        free = (distances > radius).all(axis=0)
        scores[pose] = np.sum(keypoint_scores[pose] * free) / KEYPOINTS
    return scores


def _sigmoid(logits: Array) -> Array:
    values: Array = 1 / (1 + np.exp(-np.clip(logits, -80, 80)))
    return values.astype(np.float32)
