"""A text classifier, whose input vectors come from a lookup table, and its bundle."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiny

from compress.bundling.packing import Packing, pack
from compress.core.progress import SILENT
from compress.model.tflite import graph, lookup
from compress.tasks import TASKS

WORDS, WIDTH, BUCKETS, CLASSES = 4, 3, 20, 3
STEPS = [{"tokens": {"length": WORDS, "buckets": BUCKETS}}]
TEXTS = ("a cat sat", "dogs bark", "the fish swims far away", "Dogs!", "a bird", "cats and dogs")
LABELS = ("cat", "dog", "fish")


def table() -> np.ndarray[Any, Any]:
    """Return the vectors of the tokens, and one vector for no token."""
    return np.random.default_rng(1).integers(-128, 128, (BUCKETS + 1, WIDTH)).astype(np.int8)


def model(*, with_table: bool = True) -> bytes:
    """Return a dense layer on the vectors of the words, int8."""
    builder = tiny.TfliteBuilder(int8=True)
    x = builder.activation("words", [1, WORDS, WIDTH], (-1.0, 1.0))
    scores = builder.activation("scores", [1, CLASSES], (-6.0, 6.0))
    weights = np.random.default_rng(0).uniform(-1, 1, (CLASSES, WORDS * WIDTH))
    builder.dense(x, weights, np.zeros(CLASSES), scores)
    content = builder.finish([x], [scores])
    return graph.serialize(lookup.with_table(graph.parse(content), table())) if with_table else content


def packed(data: Any = None, **settings: Any) -> bytes:
    """Return the bundle of `model`; with data, it has golden inputs and an evaluation sample."""
    folder = Path(tempfile.mkdtemp())
    (folder / "int8.tflite").write_bytes(model())
    labels = () if data is not None else LABELS
    files = {"int8": folder / "int8.tflite"}
    packing = Packing("texts", files, TASKS["classification"], {}, SILENT, data, labels=labels, **settings)
    content = pack(packing)
    shutil.rmtree(folder)
    return content
