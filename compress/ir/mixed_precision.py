"""Training in 16 bits: a twin of a model that computes with fewer bits, and keeps its weights in 32; and the way back.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from compress.errors import ModelError
from compress.ir.layer_specs import spec_of_live
from compress.ir.tensorflow import keras, set_weights

NARROW = re.compile(r"(mixed_)?b?float16")
"""Policies and types of 16 bits."""
NARROW_INPUTS = ("uint8", "float16", "bfloat16")
"""Types of inputs that can be float32 as well; whole numbers of more bits are more than pixels."""


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
        is_layer = isinstance(layer, keras().layers.Layer)
        fit = is_layer and not spec_of_live(layer).float32_only and layer.name not in ends
        return {**config, "dtype": policy} if fit and "dtype" in config else config

    return _twin(model, changed)


def single(model: Any) -> Any:
    """The model itself where all is in 32 bits; else a twin that computes, and keeps its weights, in float32.

    Inputs of bytes, as of images, become float32 too: samples are.

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
    narrow = any(NARROW.fullmatch(policy) for policy in policies.values())
    if not narrow and not any(tensor.dtype in NARROW_INPUTS for tensor in model.inputs):
        return model
    return _twin(model, lambda layer, config: _in_single(config), NARROW_INPUTS)


def _in_single(value: Any, policy: bool = False) -> Any:
    """A configuration in which every 16-bit or mixed policy, at any depth, is float32.

    Args:
        value: it, or a part.
        policy: whether it is of a policy, whose name says what it is; other names are only names.
    """
    if isinstance(value, str):
        return "float32" if NARROW.fullmatch(value) else value
    if isinstance(value, list | tuple):
        return type(value)(map(_in_single, value))
    if not isinstance(value, dict):
        return value
    inside = value.get("class_name") == "DTypePolicy"
    return {key: item if key == "name" and not policy else _in_single(item, inside) for key, item in value.items()}


def _twin(
    model: Any, changed: Callable[[Any, dict[str, Any]], dict[str, Any]], inputs_in_float32: Collection[str] = ()
) -> Any:
    """The model made again from changed configurations of its layers and operations, with its weights.

    Args:
        model: a functional or sequential Keras model.
        changed: the configuration of a layer or operation, as it is to be.
        inputs_in_float32: types of inputs that become float32.
    """
    library = keras()

    def entrance(tensor: Any) -> Any:
        dtype = "float32" if tensor.dtype in inputs_in_float32 else tensor.dtype
        return library.Input(batch_shape=tensor.shape, dtype=dtype, name=tensor._keras_history.operation.name)

    def copied(layer: Any) -> Any:
        return type(layer).from_config(changed(layer, layer.get_config()))

    entrances = library.tree.map_structure(
        entrance, model.inputs if isinstance(model, library.Sequential) else model.input
    )
    twin = library.models.clone_model(model, entrances, clone_function=copied, recursive=True)
    set_weights(twin, [each.astype(np.float32) if each.dtype.itemsize == 2 else each for each in model.get_weights()])
    return twin
