"""Rebuild of Keras 2 models (`tf_keras`) in Keras 3, layer by layer.

Keras 3 reads many old configurations incorrectly or not at all. Therefore tf_keras loads the file. Every call in its
graph is repeated with the Keras 3 layer of the same name, the weights are copied, and the outputs of both models are
compared. Changes: `/` in layer names becomes `_` (Keras 3 forbids it), a Sequential model becomes a Functional one, and
mixed precision becomes float32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.core.errors import ModelError
from compress.model.importers.common import verification
from compress.model.importers.common.batches import OPEN_SIZES
from compress.model.importers.common.graph_builder import NotImportedError
from compress.model.importers.common.guarded_calls import MOST_ELEMENTS, elements
from compress.model.importers.common.unsupported import Refused, carrying, listed
from compress.model.importers.common.verification import Parity
from compress.model.importers.keras import keras2_functions
from compress.model.importers.keras.keras2_operations import FunctionCall
from compress.model.importers.keras.keras_config import OPERATIONS
from compress.model.ir import tensorflow

if TYPE_CHECKING:
    import keras
    import tf_keras

TOLERANCE = 1e-5
"""Largest difference of the outputs, relative to max(1, largest output): both models run in TensorFlow."""
INPUT = "give it an Input layer with a shape before saving it"
REPLACE = "replace them in the original code and save the model again"

#: Layers with another name in Keras 3.
_RENAMED = {"SyncBatchNormalization": "BatchNormalization", "ThresholdedReLU": "ReLU"}
_OPTIONS = {"LeakyReLU": {"alpha": "negative_slope"}, "ThresholdedReLU": {"theta": "threshold"}}
#: Options of Keras 2 that do not change the output of a layer, or that the graph contains too.
_WITHOUT_EFFECT = {
    "batch_input_shape", "fused", "implementation", "input_length", "key_shape", "query_shape", "ragged", "rng_type",
    "softmax_robust_masking", "trainable", "value_shape", "vocabulary_size",
}  # fmt: skip
#: Options that layers of Keras 2 inherit but do not use.
_INHERITED = {"kernel_constraint", "kernel_initializer", "kernel_regularizer"}


def missing(refused: Iterable[Refused], where: str) -> ModelError:
    """Return the error that lists everything without a counterpart in Keras 3."""
    layers = list(dict.fromkeys(refused))
    return carrying(ModelError(f"Keras 3 has no counterpart for: {listed(layers)}", where=where, hint=REPLACE), layers)


def rebuild(old: tf_keras.Model, where: str, samples: Any = None) -> tuple[keras.Model, Parity]:
    """Rebuild a model in Keras 3 with the same layer names and weights, and compare the outputs.

    Args:
        old: the model, with defined inputs. Mixed precision layers in it are set to float32.
        where: the file, for messages.
        samples: real samples [n, ...] of a model with one input, for the comparison, in addition to random ones.

    Raises:
        ModelError: the model has no defined inputs, layers have no counterpart (all of them are listed), or the
            outputs differ.
    """
    if not getattr(old, "_is_graph_network", False) or not old.inputs:
        raise ModelError("the model has no defined inputs", where=where, hint=INPUT)
    for layer in old._flatten_layers():
        if layer.dtype_policy.name.startswith("mixed_"):
            layer._set_dtype_policy("float32")
    rebuilding = _Rebuilding()
    rebuilding.survey(old)
    if rebuilding.problems:
        raise missing(rebuilding.problems, where)
    new = rebuilding.model(old)
    if rebuilding.problems:
        raise missing(rebuilding.problems, where)
    rebuilding.copy_weights()
    pairs, count = output_pairs(old, new, samples)
    relative = _largest_difference(pairs)
    if not relative <= TOLERANCE:
        how = f"by {relative:.2g} of the largest output" if np.isfinite(relative) else "in shape, or are not finite"
        raise ModelError(
            f"the outputs of the Keras 3 rebuild differ {how}",
            where=where,
            allowed=f"{TOLERANCE:g}",
            hint="find the layer that changed between Keras 2 and 3, and replace it in the original code",
        )
    import tf_keras

    differences = [verification.compare_output(*pair) for pair in pairs]
    return new, verification.summarize(differences, f"tf-keras {tf_keras.__version__}", count)


def difference(old: tf_keras.Model, new: keras.Model) -> float:
    """Return the largest difference of the outputs for random inputs, relative to max(1, largest output)."""
    return _largest_difference(output_pairs(old, new, None)[0])


def _largest_difference(pairs: list[tuple[Any, Any]]) -> float:
    return verification.largest_relative(verification.compare_output(*pair, minimum_scale=1.0) for pair in pairs)


def _layers(model: tf_keras.Model) -> Iterator[Any]:
    """Yield every layer of a graph that needs a counterpart."""
    import tf_keras

    for layer in (*model._input_layers, *model.layers):
        while isinstance(layer, tf_keras.layers.TimeDistributed):
            yield layer
            layer = layer.layer
        yield layer
        if isinstance(layer, tf_keras.Model):
            yield from _layers(layer)


class _Rebuilding:
    """One rebuild: the counterpart of each layer, and the problems."""

    def __init__(self) -> None:
        self.keras = tensorflow.keras()
        self.problems: list[Refused] = []
        self._recipes: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._counterparts: dict[int, tuple[Any, Any]] = {}
        self._names: dict[str, int] = {}
        self._hard: set[int] = set()
        self._unknown: dict[int, Any] = {}

    def survey(self, old: tf_keras.Model) -> None:
        """Choose the counterpart of every layer; layers without one go into `problems`."""
        import tf_keras

        for layer in _layers(old):
            if type(layer).__name__ in OPERATIONS:
                continue
            self._names.setdefault(layer.name, id(layer))
            if isinstance(layer, tf_keras.Model):
                if not layer._is_graph_network:
                    self._problem(layer, "has no defined inputs, or is not made of layers")
                continue
            if isinstance(layer, tf_keras.layers.InputLayer):
                if type(layer.output).__name__ != "KerasTensor" or layer.output.dtype.name == "string":
                    self._problem(layer, "is sparse, ragged or text")
                continue
            if any(node.call_kwargs.get("training") is True for node in layer.inbound_nodes):
                self._problem(layer, "is called with training=True")
            if id(layer) not in self._recipes:
                self._recipes[id(layer)] = self._recipe(layer)

    def _problem(self, old: Any, reason: str, kind: str = "") -> None:
        """Record a problem; `kind` is the class of a part of the layer."""
        of_part = f"its {kind} {reason}" if kind and kind != type(old).__name__ else reason
        self.problems.append(Refused(old.name, type(old).__name__, of_part))

    def _recipe(self, old: Any) -> tuple[Any, dict[str, Any]]:
        kind = type(old).__name__
        if type(old).__module__.startswith("tf_keras."):
            new = getattr(self.keras.layers, _RENAMED.get(kind, kind), None)
        else:
            import tf_keras

            name = tf_keras.saving.get_registered_name(type(old))
            new = self.keras.saving.get_registered_object(name)
        if not isinstance(new, type):
            self._problem(old, "Keras 3 has no such layer")
            return None, {}
        if issubclass(new, self.keras.layers.Lambda):
            return new, {"function": old.function, "arguments": old.arguments, "name": old.name}
        config = old.get_config()
        if config.get("activation") == "hard_sigmoid" and not hasattr(old, "cell"):
            self._hard.add(id(old))
            config["activation"] = "linear"
        if issubclass(new, self.keras.layers.TimeDistributed):
            del config["layer"]
        return new, self._cleaned(old, kind, new, config)

    def _cleaned(self, old: Any, kind: str, new: Any, config: dict[str, Any]) -> dict[str, Any]:
        """Return a layer's configuration without options of Keras 2."""
        accepted, cleaned = _parameters(new), {}
        for key, value in config.items():
            name = _OPTIONS.get(kind, {}).get(key, key)
            if name == "dtype":
                value = value if isinstance(value, str) or value is None else value["config"]["name"]
                value = "float32" if value is not None and value.startswith("mixed_") else value
            elif name == "axis" and new is self.keras.layers.BatchNormalization and isinstance(value, list | tuple):
                if len(value) > 1:
                    self._problem(old, "works over several axes")
                value = value[0]
            elif (
                name.endswith("activation")
                and value == "hard_sigmoid"
                and not (
                    name == "recurrent_activation" and kind in _GATES  # `copied` scales the weights of the gates
                )
            ):
                self._problem(old, "uses hard_sigmoid, which Keras 3 defines differently", kind)
            if name in accepted:
                cleaned[name] = self._converted(value, old)
            elif not (name in _WITHOUT_EFFECT | _INHERITED or value in (None, False) or (name, value) == ("groups", 1)):
                self._problem(old, f"has {name}={value!r:.60}", kind)
        return cleaned

    def _converted(self, value: Any, old: Any) -> Any:
        """Return a value of a configuration as plain values; nested layers are converted too."""
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        if isinstance(value, list | tuple):
            items = [self._converted(item, old) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if not isinstance(value, dict):
            return value
        kind, config = value.get("class_name"), value.get("config")
        if not isinstance(kind, str) or not isinstance(config, dict):
            return {key: self._converted(item, old) for key, item in value.items()}
        new = getattr(self.keras.layers, _RENAMED.get(kind, kind), None)
        if not (isinstance(new, type) and issubclass(new, self.keras.layers.Layer)):
            return value
        inner = self._cleaned(old, kind, new, config)
        return {"module": "keras.layers", "class_name": new.__name__, "config": inner, "registered_name": None}

    def _layer(self, old: Any) -> Any:
        """Return the counterpart of a layer, always the same object."""
        import tf_keras

        if isinstance(old, tf_keras.Model):
            return self.model(old)
        if id(old) not in self._counterparts:
            new, config = self._recipes[id(old)]
            config = {**config, "name": self._name(old)}
            if issubclass(new, self.keras.layers.TimeDistributed):
                new_layer = new(self._layer(old.layer), **config)
            elif issubclass(new, self.keras.layers.Lambda):
                new_layer = new(**config)
            else:
                new_layer = new.from_config(config)
            self._counterparts[id(old)] = old, new_layer
        return self._counterparts[id(old)][1]

    def _name(self, old: Any) -> str:
        """Return the name of a layer, without characters that Keras 3 forbids."""
        name = stem = old.name.replace("/", "_")
        number = 1
        while self._names.setdefault(name, id(old)) != id(old) and name != old.name:
            name, number = f"{stem}_{number}", number + 1
        return str(name)

    def _fresh(self, stem: str) -> str:
        name = stem = stem.replace("/", "_")
        number = 1
        while name in self._names:
            name, number = f"{stem}_{number}", number + 1
        self._names[name] = 0
        return name

    def model(self, old: tf_keras.Model) -> keras.Model:
        """Return the counterpart of a model: its calls are repeated, from the inputs on."""
        import tensorflow as tf

        if id(old) not in self._counterparts:
            tensors: dict[int, Any] = {}
            for tensor, layer in zip(old.inputs, old._input_layers, strict=True):
                shape = tuple(tensor.shape)
                tensors[id(tensor)] = self.keras.Input(
                    batch_shape=shape, dtype=tensor.dtype.name, name=self._name(layer)
                )
            for depth in sorted(old._nodes_by_depth, reverse=True):
                for node in old._nodes_by_depth[depth]:
                    if not node.is_input:
                        self._call(node, tensors)
            inputs, outputs = tf.nest.map_structure(
                lambda tensor: tensors[id(tensor)], (old._nested_inputs, old._nested_outputs)
            )
            if self.problems:  # nothing leads from the inputs to the outputs
                inputs = outputs = self.keras.Input((1,))
            self._counterparts[id(old)] = old, self.keras.Model(inputs, outputs, name=self._name(old))
        return self._counterparts[id(old)][1]

    def _call(self, node: Any, tensors: dict[int, Any]) -> None:
        import tensorflow as tf

        args, kwargs = tf.nest.map_structure(
            lambda leaf: tensors.get(id(leaf), leaf), (tuple(node.call_args), dict(node.call_kwargs))
        )
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        old_outputs = tf.nest.flatten(node.outputs)
        if type(node.layer).__name__ in OPERATIONS:
            results = self._function(node, args, kwargs)
            outputs = list(results) if isinstance(results, list) else [results]
        else:
            outputs = self.keras.tree.flatten(self._repeated(node.layer, args, kwargs))
        for old, new in zip(old_outputs, outputs, strict=True):
            if max(elements(old), elements(new)) > MOST_ELEMENTS:
                what = f"layer {node.layer.name!r} makes {list(old.shape)}"
                raise ValueError(f"{what}, more than {MOST_ELEMENTS:,} values of one sample")
            tensors[id(old)] = new

    def _repeated(self, old: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import tensorflow as tf
        import tf_keras

        if isinstance(old, tf_keras.Model):
            flat = old._flatten_to_reference_inputs(args[0])
            args = (tf.nest.pack_sequence_as(old._nested_inputs, flat), *args[1:])
        recurrent = tf_keras.layers.RNN | tf_keras.layers.Bidirectional
        if isinstance(old, recurrent) and isinstance(args[0], list | tuple):
            kwargs["initial_state"] = list(args[0][1:])  # tf_keras puts it behind the sequence
            args = (args[0][0], *args[1:])
        output = self._layer(old)(*args, **kwargs)
        if id(old) in self._hard:  # 0.2 x + 0.5 then, x / 6 + 0.5 now
            output = self.keras.layers.Rescaling(0.2, 0.5, name=self._fresh(f"{old.name}_scaled"))(output)
            output = self.keras.layers.ReLU(max_value=1.0, name=self._fresh(f"{old.name}_clipped"))(output)
        return output

    def _function(self, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a TensorFlow function; placeholders of the same shape if it has no counterpart."""
        try:
            step = FunctionCall(self.keras, lambda: self._fresh(node.layer.name))
            return keras2_functions.call(node.layer, step, args, kwargs)
        except NotImportedError as error:
            if not any(id(leaf) in self._unknown for leaf in self.keras.tree.flatten([args, kwargs])):
                self._problem(node.layer, str(error))
        import tensorflow as tf

        placeholders = [
            self.keras.KerasTensor(tuple(output.shape), output.dtype.name) for output in tf.nest.flatten(node.outputs)
        ]
        self._unknown.update({id(placeholder): placeholder for placeholder in placeholders})
        return placeholders if len(placeholders) > 1 else placeholders[0]

    def copy_weights(self) -> None:
        """Copy the weights of every layer."""
        import tf_keras

        for old, new in self._counterparts.values():
            if isinstance(old, tf_keras.Model | tf_keras.layers.TimeDistributed):
                continue  # what is inside was made too
            if isinstance(old, tf_keras.layers.Bidirectional):
                for side in ("forward_layer", "backward_layer"):
                    getattr(new, side).set_weights(copied(getattr(old, side)))
                continue
            tensorflow.set_weights(new, copied(old))


@functools.cache
def _parameters(layer: Any) -> frozenset[str]:
    names: set[str] = set()
    for kind in layer.__mro__:
        if "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(kind.__init__).parameters.values()
        names |= {parameter.name for parameter in parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
        if kind is tensorflow.keras().layers.Layer:
            break
    return frozenset(names - {"self", "kwargs"})


_GATES = {"LSTM": (4, (0, 1, 3)), "GRU": (3, (0, 1)), **{f"ConvLSTM{axes}D": (4, (0, 1, 3)) for axes in (1, 2, 3)}}
"""Number of gates in the last axis of every weight of a layer, and the gates that use `recurrent_activation`.

LSTM: input, forget, cell, output. GRU: update, reset, hidden.
"""
_HARD_SIGMOID_FACTOR = 1.2
"""Factor of the weights: `hard_sigmoid` is clip(0.2 x + 0.5) in Keras 2, and clip(x / 6 + 0.5) in Keras 3."""


def copied(old: tf_keras.layers.Layer) -> list[Any]:
    """Return the weights of a layer for its counterpart in Keras 3."""
    weights = list(old.get_weights())
    if type(old).__name__ not in _GATES or old.get_config()["recurrent_activation"] != "hard_sigmoid":
        return weights
    parts, gates = _GATES[type(old).__name__]
    factors = [_HARD_SIGMOID_FACTOR if part in gates else 1.0 for part in range(parts)]
    return [weight * np.repeat(np.array(factors, np.float32), weight.shape[-1] // parts) for weight in weights]


def rotate_kernels(old: tf_keras.Model) -> None:
    """Rotate the kernels of convolutions by 180 degrees: Theano convolves, and TensorFlow correlates.

    Source: keras 2.2, utils/conv_utils.py, convert_kernel, and engine/saving.py, for the layers.
    """
    for layer in old._flatten_layers():
        if type(layer).__name__ in ("Conv1D", "Conv2D", "Conv3D", "Conv2DTranspose", "ConvLSTM2D"):
            weights = layer.get_weights()
            for index, weight in enumerate(weights):
                if weight.ndim > 2:
                    weights[index] = np.flip(weight, tuple(range(weight.ndim - 2)))
            layer.set_weights(weights)


def output_pairs(old: tf_keras.Model, new: keras.Model, samples: Any) -> tuple[list[tuple[Any, Any]], int]:
    """Return each output of both models for random inputs and for the samples, and the number of samples."""
    import tensorflow as tf

    for size in OPEN_SIZES:
        inputs = _random_inputs(old, size)
        try:
            expected = tf.nest.flatten(old(inputs, training=False))
            break
        except (ValueError, tf.errors.InvalidArgumentError):
            if size == OPEN_SIZES[-1] or all(None not in tensor.shape[1:] for tensor in old.inputs):
                raise
    pairs = list(zip(map(np.asarray, expected), _outputs(new, inputs), strict=True))
    count = len(tf.nest.flatten(inputs)[0])
    if samples is not None and len(old.inputs) == 1 and old.inputs[0].shape.is_compatible_with(samples.shape):
        real = tf.nest.pack_sequence_as(old._nested_inputs, [tf.cast(samples, old.inputs[0].dtype)])
        pairs += zip(map(np.asarray, tf.nest.flatten(old(real, training=False))), _outputs(new, real), strict=True)
        count += len(samples)
    return pairs, count


def _outputs(new: keras.Model, inputs: Any) -> list[Any]:
    """Return the outputs of a rebuild, whose inputs are in a structure of their own."""
    tree = tensorflow.keras().tree
    packed = tree.pack_sequence_as(new.input, tree.flatten(inputs))
    return [np.asarray(output) for output in tree.flatten(new(packed, training=False))]


def _random_inputs(old: tf_keras.Model, size: int) -> Any:
    """Return standard normal values, or integers for an embedding or an integer input."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    limits = [getattr(layer, "input_dim", getattr(layer, "num_tokens", None)) for layer in old._flatten_layers()]
    bound = min((limit for limit in limits if limit), default=0)
    values = []
    value: Any
    for tensor in old.inputs:
        batch, *dimensions = tensor.shape
        shape = [2 if batch is None else batch, *(size if dimension is None else dimension for dimension in dimensions)]
        if bound or not tensor.dtype.is_floating:
            value = random.integers(0, bound or 2, shape)
        else:
            value = random.standard_normal(shape)
        values.append(tf.constant(value.astype(tensor.dtype.as_numpy_dtype)))
    return tf.nest.pack_sequence_as(old._nested_inputs, values)
