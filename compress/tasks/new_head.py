"""The head that a trained feature extractor gets for new classes or targets."""

from __future__ import annotations

from typing import Any

from compress.model.ir.tensorflow import keras

LAYER = "new_head"
"""Name of the dense layer."""


def pooled_dense(features: Any, outputs: int, activation: str | None, dropout: float) -> Any:
    """Return the output of an untrained head: the mean over all positions, dropout, and one dense layer.

    Args:
        features: a Keras tensor [n, ..., channels].
        outputs: number of outputs.
        activation: of the dense layer.
        dropout: fraction of the features that the training sets to 0.
    """
    layers = keras().layers
    pooling = {2: None, 3: layers.GlobalAveragePooling1D, 4: layers.GlobalAveragePooling2D}
    kind = pooling.get(len(features.shape), layers.Flatten)
    pooled = features if kind is None else kind(name=f"{LAYER}_pooling")(features)
    if dropout:
        pooled = layers.Dropout(dropout, name=f"{LAYER}_dropout")(pooled)
    return layers.Dense(outputs, activation=activation, name=LAYER)(pooled)
