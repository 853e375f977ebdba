"""Training in 16 bits: a twin of a model that computes with fewer bits, and keeps its weights in 32; and the way back.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from compress.errors import ModelError
from compress.training.tensorflow import keras

EXACT = ("BatchNormalization", "InputLayer", "Softmax", "Normalization")
"""What stays in 32 bits: sums over many numbers, and probabilities."""
NARROW = re.compile(r"(mixed_)?b?float16")
"""Policies and types of 16 bits."""


def lowered(model: Any, policy: str) -> Any:
    """The model itself for float32; else a twin with the same weights, in the same order.

    Layers that make the model's outputs stay in 32 bits.

    Args:
        model: a functional or sequential Keras model.
        policy: Keras' name of a precision.
    """
    if policy == "float32":
        return model
    ends = {tensor._keras_history.operation.name for tensor in model.outputs}

    def changed(layer: Any, config: dict[str, Any]) -> dict[str, Any]:
        fit = type(layer).__name__ not in EXACT and layer.name not in ends and "dtype" in config
        return {**config, "dtype": policy} if fit else config

    return _twin(model, changed)


def single(model: Any) -> Any:
    """The model itself where all is in 32 bits; else a twin that computes, and keeps its weights, in float32.

    Raises:
        ModelError: a layer's weights are quantized.
    """
    policies = {layer.name: layer.dtype_policy.name for layer in model._flatten_layers(include_self=False)}
    quantized = [name for name, policy in policies.items() if not NARROW.fullmatch(policy) and "_from_" in policy]
    if quantized:
        raise ModelError(
            f"the weights of {', '.join(quantized[:5])} are quantized by Keras",
            todo="save the model from before `model.quantize`",
        )
    if not any(NARROW.fullmatch(policy) for policy in policies.values()):
        return model
    return _twin(model, lambda layer, config: _in_single(config))


def _in_single(value: Any) -> Any:
    """A configuration in which every 16-bit or mixed policy, at any depth, is float32."""
    if isinstance(value, str):
        return "float32" if NARROW.fullmatch(value) else value
    if isinstance(value, list | tuple):
        return type(value)(map(_in_single, value))
    return {key: _in_single(item) for key, item in value.items()} if isinstance(value, dict) else value


def _twin(model: Any, changed: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Any:
    """The model made again from changed configurations of its layers, with its weights."""
    library = keras()

    def copied(layer: Any) -> Any:
        if not isinstance(layer, library.layers.Layer):
            return layer  # an operation without weights computes as its inputs are
        return type(layer).from_config(changed(layer, layer.get_config()))

    twin = library.models.clone_model(model, clone_function=copied, recursive=True)
    twin.set_weights([each.astype(np.float32) if each.dtype.itemsize == 2 else each for each in model.get_weights()])
    return twin
