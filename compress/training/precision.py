"""Training in 16 bits: a twin of a model that computes with fewer bits, and keeps its weights in 32.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from __future__ import annotations

from typing import Any

from compress.training.tensorflow import keras

EXACT = ("BatchNormalization", "InputLayer", "Softmax", "Normalization")
"""What stays in 32 bits: sums over many numbers, and probabilities."""


def lowered(model: Any, policy: str) -> Any:
    """The model itself for float32; else a twin with the same weights, in the same order.

    Layers that make the model's outputs stay in 32 bits.

    Args:
        model: a functional or sequential Keras model.
        policy: Keras' name of a precision.
    """
    if policy == "float32":
        return model
    library = keras()
    ends = {tensor._keras_history.operation.name for tensor in model.outputs}

    def copied(layer: Any) -> Any:
        if not isinstance(layer, library.layers.Layer):
            return layer  # an operation without weights computes as its inputs are
        config = layer.get_config()
        if type(layer).__name__ not in EXACT and layer.name not in ends and "dtype" in config:
            config["dtype"] = policy
        return type(layer).from_config(config)

    twin = library.models.clone_model(model, clone_function=copied, recursive=True)
    twin.set_weights(model.get_weights())
    return twin
