"""Functions for classifiers."""

from __future__ import annotations

from typing import Any, List, NamedTuple

import numpy as np

from coralline_pycoral.adapters import common
from deploy.contract.preprocessing import Array


class Class(NamedTuple):
    """A class, by its index, and its score."""

    id: int
    score: float


def num_classes(interpreter: Any) -> int:
    """Return the number of values of the first output."""
    return np.prod(interpreter.get_output_details()[0]["shape"])  # type: ignore[no-any-return]


def get_scores(interpreter: Any) -> Array:
    """Return the first output of the last inference, flat and dequantized."""
    detail = interpreter.get_output_details()[0]
    stored = common.output_tensor(interpreter, 0).flatten()
    if not np.issubdtype(detail["dtype"], np.integer):
        return stored
    scale, zero_point = detail["quantization"]
    scores: Array = scale * (stored.astype(np.int64) - zero_point)
    return scores


def get_classes_from_scores(
    scores: Array, top_k: float = float("inf"), score_threshold: float = -float("inf")
) -> List[Class]:
    """Return the best classes for flat and dequantized scores, the highest score first."""
    count = min(top_k, len(scores))
    # The order of equal scores is that of pycoral: argpartition, then a stable sort. A count of 0 gives all classes.
    best = np.argpartition(scores, -count)[-count:]  # type: ignore[arg-type]
    classes = [Class(index, scores[index]) for index in best if scores[index] >= score_threshold]
    return sorted(classes, key=lambda prediction: prediction.score, reverse=True)


def get_classes(interpreter: Any, top_k: float = float("inf"), score_threshold: float = -float("inf")) -> List[Class]:
    """Return the best classes of the last inference; see `get_classes_from_scores`."""
    return get_classes_from_scores(get_scores(interpreter), top_k, score_threshold)
