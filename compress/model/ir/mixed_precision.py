"""Mixed precision: copies of a model that compute in 16 bits with weights in 32 bits, or in 32 bits only.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.core.errors import ModelError
from compress.model.ir.layer_specs import spec_of_live
from compress.model.ir.tensorflow import keras, set_weights

NARROW = re.compile(r"(mixed_)?b?float16")
"""Names of 16-bit policies and types."""
NARROW_INPUTS = ("uint8", "float16", "bfloat16")
"""Input types that can be float32 as well; wider integers may be more than pixels, such as indices."""


def lowered(model: Any, policy: str, *, copy: bool = False) -> Any:
    """Return a copy of a model that computes in another precision, with the same weights; for float32 the model itself.

    Layers that make the model's outputs stay in 32 bits, and so do those before an embedding: it reads indices, and
    16 bits cannot hold all of them. `policy` is Keras' name of a precision; `copy` says that float32 is a copy too.
    """
    if policy == "float32":
        return _copy(model, lambda layer, config: config) if copy else model
    exact = _exact(model)

    def changed(layer: Any, config: dict[str, Any]) -> dict[str, Any]:
        is_layer = isinstance(layer, keras().layers.Layer)
        fit = is_layer and not spec_of_live(layer).float32_only and id(layer) not in exact
        return {**config, "dtype": policy} if fit and "dtype" in config else config

    return _copy(model, changed)


@dataclass(frozen=True)
class _Origin:
    """The way a tensor of a model is computed.

    Attributes:
        operation: the layer or operation; None for an input or output of a nested model, which is another tensor.
    """

    operation: Any
    tensors: list[Any]


def _exact(model: Any) -> set[int]:
    """Return the ids of the layers and operations that stay in 32 bits, also in nested models."""
    origins = _origins(model)
    exact = _operations(origins, model.outputs, all_before=False)
    for origin in list(origins.values()):
        lookup = _lookup(origin.operation)
        if lookup is not None:
            exact |= _operations(origins, origin.tensors, all_before=True)
            if lookup is not origin.operation:  # a layer around an embedding would convert the indices
                exact.add(id(origin.operation))
    return exact


def _origins(model: Any) -> dict[int, _Origin]:
    """Return how each tensor of a model is computed, by the id of the tensor.

    Nested models are looked into: an output has the values of a tensor inside, an input those of the calls' arguments.
    """
    origins: dict[int, _Origin] = {}
    waiting = list(model.outputs)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in origins:
            continue
        operation, call, output = tensor._keras_history
        arguments = list(operation._inbound_nodes[call].input_tensors)
        waiting.extend(arguments)
        if isinstance(operation, keras().Sequential) or hasattr(operation, "operations"):
            # Further arguments are masks.
            for entrance, argument in zip(operation.inputs, arguments, strict=False):
                origins.setdefault(id(entrance), _Origin(None, [])).tensors.append(argument)
            waiting.append(operation.outputs[output])
            origins[id(tensor)] = _Origin(None, [operation.outputs[output]])
        else:
            origins[id(tensor)] = _Origin(operation, arguments)
    return origins


def _operations(origins: Mapping[int, _Origin], tensors: Iterable[Any], *, all_before: bool) -> set[int]:
    """Return the ids of the layers and operations that compute tensors, with `all_before` also of all before them."""
    operations, seen, waiting = set(), set(), list(tensors)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        origin = origins[id(tensor)]
        if origin.operation is not None:
            operations.add(id(origin.operation))
        if origin.operation is None or all_before:
            waiting.extend(origin.tensors)
    return operations


def _lookup(operation: Any) -> Any:
    """Return the embedding that an operation of a model is or has inside; None if there is none."""
    layers = keras().layers
    if not isinstance(operation, layers.Layer):
        return None
    inside = operation._flatten_layers()
    return next((layer for layer in inside if isinstance(layer, layers.Embedding)), None)


def single(model: Any) -> Any:
    """Return a copy of a model with all computations and weights in float32; the model itself if that is so already.

    Inputs of bytes, such as images, become float32 too, as the samples are.

    Raises:
        ModelError: a layer's weights are quantized.
    """
    policies = {layer.name: layer.dtype_policy.name for layer in model._flatten_layers(include_self=False)}
    quantized = [name for name, policy in policies.items() if not NARROW.fullmatch(policy) and "_from_" in policy]
    if quantized:
        raise ModelError(
            f"the weights of {', '.join(quantized[:5])} are quantized by Keras",
            hint="save the model from before `model.quantize`",
        )
    narrow = any(NARROW.fullmatch(policy) for policy in policies.values())
    if not narrow and not any(tensor.dtype in NARROW_INPUTS for tensor in model.inputs):
        return model
    return _copy(model, lambda layer, config: _in_single(config), NARROW_INPUTS)


def _in_single(value: Any, policy: bool = False) -> Any:
    """Return a configuration with every 16-bit or mixed policy, at any depth, replaced by float32.

    With `policy`, `value` is the configuration of a policy, whose `name` is its type and changes too. Other names stay.
    """
    if isinstance(value, str):
        return "float32" if NARROW.fullmatch(value) else value
    if isinstance(value, list | tuple):
        return type(value)(map(_in_single, value))
    if not isinstance(value, dict):
        return value
    inside = value.get("class_name") == "DTypePolicy"
    return {key: item if key == "name" and not policy else _in_single(item, inside) for key, item in value.items()}


def _copy(
    model: Any, changed: Callable[[Any, dict[str, Any]], dict[str, Any]], inputs_in_float32: Collection[str] = ()
) -> Any:
    """Return a copy of a model with the same weights, whose layers and operations have changed configurations.

    Inputs of a type in `inputs_in_float32` become float32.
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
    copied_model = library.models.clone_model(model, entrances, clone_function=copied, recursive=True)
    set_weights(
        copied_model,
        [weight.astype(np.float32) if weight.dtype.itemsize == 2 else weight for weight in model.get_weights()],
    )
    return copied_model
