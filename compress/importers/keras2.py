"""Models of Keras 2 (`tf_keras`) rebuilt in Keras 3, layer by layer.

Keras 3 reads many old configurations wrongly or not at all. tf_keras knows them all, so it
loads the file; here every call in its graph is repeated with the Keras 3 layer of the same
name, the weights are copied, and both models must then answer the same inputs alike.
What changes: `/` in layer names becomes `_` (Keras 3 forbids it), a Sequential becomes a
Functional, and mixed precision becomes float32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import ModelError
from compress.training import tensorflow

if TYPE_CHECKING:
    import keras
    import tf_keras

#: Largest difference of the outputs, relative to max(1, largest output).
TOLERANCE = 1e-5
INPUT = "give it an Input layer with a shape before saving it"
REPLACE = "replace them in the original code and save the model again"

#: What Keras 3 has under another name.
_RENAMED = {"SyncBatchNormalization": "BatchNormalization", "ThresholdedReLU": "ReLU"}
#: What only Keras 2 has.
_ONLY = """AbstractRNNCell AddLoss AddMetric ClassMethod CuDNNGRU CuDNNLSTM DenseFeatures DeviceWrapper DropoutWrapper
InstanceMethod InstanceProperty LinearModel LocallyConnected1D LocallyConnected2D RadialConstraint RandomHeight
RandomWidth ResidualWrapper SequenceFeatures SlicingOpLambda SyncBatchNormalization TFOpLambda TensorFlowOpLayer
ThresholdedReLU WideDeepModel"""
#: ... and nothing can stand for. Never given to tf_keras: the op layers would run any TensorFlow function.
REFUSED = set(_ONLY.split()) - set(_RENAMED)
_ND = """AdaptiveAveragePooling AdaptiveMaxPooling AveragePooling AvgPool Conv ConvLSTM Convolution Cropping
DepthwiseConv GlobalAveragePooling GlobalAvgPool GlobalMaxPool GlobalMaxPooling MaxPool MaxPooling SeparableConv
SeparableConvolution SpatialDropout UpSampling ZeroPadding"""
_CLASSES = """Activation ActivityRegularization Add AdditiveAttention AlphaDropout Attention AugMix AutoContrast
Average BatchNormalization BatchNormalizationV1 BatchNormalizationV2 Bidirectional CategoryEncoding CenterCrop
Concatenate Constant Constraint ContrastLimitedAdaptiveHistogramEqualization Conv1DTranspose Conv2DTranspose
Conv3DTranspose Convolution1DTranspose Convolution2DTranspose Convolution3DTranspose CutMix DTypePolicy DTypePolicyMap
Dense Discretization Dot Dropout ELU EinsumDense Embedding Equalization Flatten FloatDTypePolicy Functional GRU
GRUCell GRUCellV1 GRUCellV2 GRUV1 GRUV2 GaussianDropout GaussianNoise GlorotNormal GlorotUniform GroupNormalization
GroupQueryAttention GroupedQueryAttention HashedCrossing Hashing HeNormal HeUniform Identity IdentityInitializer
Initializer InputLayer InputSpec IntegerLookup L1 L1L2 L2 LSTM LSTMCell LSTMCellV1 LSTMCellV2 LSTMV1 LSTMV2 Layer
LayerNormalization LayerScale LeakyReLU LecunNormal LecunUniform Masking MaxNorm MaxNumBoundingBoxes Maximum
MelSpectrogram MinMaxNorm Minimum MixUp Model MultiHeadAttention Multiply NonNeg Normalization Ones Orthogonal
OrthogonalInitializer OrthogonalRegularizer PReLU Permute Pipeline Policy PolicyV1 QuantizedDTypePolicy
QuantizedFloat8DTypePolicy RMSNormalization RNN RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter
RandomContrast RandomCrop RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale RandomHue
RandomInvert RandomNormal RandomPerspective RandomPosterization RandomRotation RandomSaturation RandomSharpness
RandomShear RandomTranslation RandomUniform RandomZoom ReLU Regularizer RepeatVector Rescaling Reshape Resizing
ReversibleEmbedding STFT STFTInitializer STFTSpectrogram Sequential SimpleRNN SimpleRNNCell Softmax Solarization
SpectralNormalization StackedRNNCells StochasticDepth StringLookup Subtract SyncBatchNormalization TextVectorization
ThresholdedReLU TimeDistributed TruncatedNormal UnitNorm UnitNormalization VarianceScaling Wrapper Zeros
__tensor__ __numpy__ __bytes__ __ellipsis__ __slice__ __keras_tensor__ __tuple__ TensorShape"""
#: Every class of Keras 2 and 3 that only computes, and every activation.
KNOWN = {f"{name}{rank}D" for name in _ND.split() for rank in (1, 2, 3)} | set(f"{_CLASSES} {_ONLY}".split())
_ACTIVATIONS = """celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu
linear log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign sparse_plus
sparse_sigmoid sparsemax squareplus swish tanh tanh_shrink threshold"""
ACTIVATIONS = set(_ACTIVATIONS.split())
_OPTIONS = {
    "LeakyReLU": {"alpha": "negative_slope"},
    "ThresholdedReLU": {"theta": "threshold"},
}
#: Options of Keras 2 that do not change what a layer computes, or that the graph repeats.
_WITHOUT_EFFECT = {
    "batch_input_shape", "fused", "implementation", "input_length", "key_shape", "query_shape", "ragged", "rng_type",
    "softmax_robust_masking", "trainable", "value_shape", "vocabulary_size",
}  # fmt: skip
#: Options that a layer of Keras 2 inherits and does not use.
_INHERITED = {"kernel_constraint", "kernel_initializer", "kernel_regularizer"}


def missing(names: Iterable[str], where: str) -> ModelError:
    """The error that lists everything Keras 3 has no counterpart for."""
    return ModelError(f"Keras 3 has no counterpart for: {'; '.join(names)}", where=where, todo=REPLACE)


def rebuild(old: tf_keras.Model, where: str) -> keras.Model:
    """The same model in Keras 3: same layer names, weights and outputs.

    Args:
        old: the model, with defined inputs. Mixed precision layers in it are set to float32.
        where: the file, for messages.

    Raises:
        ModelError: it has no defined inputs, something in it has no counterpart (all such
            things are listed), or the outputs differ.
    """
    if not getattr(old, "_is_graph_network", False) or not old.inputs:
        raise ModelError("the model has no defined inputs", where=where, todo=INPUT)
    for layer in old._flatten_layers():
        if layer.dtype_policy.name.startswith("mixed_"):
            layer._set_dtype_policy("float32")
    rebuilding = _Rebuilding()
    rebuilding.survey(old)
    if rebuilding.problems:
        raise missing(dict.fromkeys(rebuilding.problems), where)
    new = rebuilding.model(old)
    rebuilding.copy_weights()
    found = difference(old, new)
    if not found <= TOLERANCE:
        how = f"by {found:.2g} of the largest output" if np.isfinite(found) else "in shape, or not with finite numbers"
        raise ModelError(
            f"the Keras 3 rebuild answers differently, {how}",
            where=where,
            allowed=f"{TOLERANCE:g}",
            todo="find the layer that changed between Keras 2 and 3, and replace it in the original code",
        )
    return new


def difference(old: tf_keras.Model, new: keras.Model) -> float:
    """Largest difference of the outputs for random inputs, relative to max(1, largest output)."""
    import tensorflow as tf

    for size in (32, 96, 224):  # of every side that the model leaves open
        inputs = _random_inputs(old, size)
        try:
            expected = tf.nest.flatten(old(inputs, training=False))
            break
        except (ValueError, tf.errors.InvalidArgumentError):
            if size == 224 or all(None not in tensor.shape[1:] for tensor in old.inputs):
                raise
    actual = tensorflow.keras().tree.flatten(new(inputs, training=False))
    largest = 0.0
    for wanted, given in zip(map(np.asarray, expected), map(np.asarray, actual), strict=True):
        if wanted.shape != given.shape:
            return float("inf")
        same = (wanted == given) | (np.isnan(wanted) & np.isnan(given))
        finite = np.abs(wanted[np.isfinite(wanted)])
        scale = max(1.0, float(finite.max(initial=0)))
        apart = np.where(same, 0.0, np.abs(np.subtract(wanted, given, dtype=np.float64)) / scale)
        largest = max(largest, float(np.nan_to_num(apart, nan=np.inf).max(initial=0)))
    return largest


def _random_inputs(old: tf_keras.Model, size: int) -> Any:
    """Standard normal values; whole numbers where the model looks them up or asks for them."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    limits = [getattr(layer, "input_dim", getattr(layer, "num_tokens", None)) for layer in old._flatten_layers()]
    bound = min((limit for limit in limits if limit), default=0)
    values = []
    for tensor in old.inputs:
        batch, *sides = tensor.shape
        shape = [2 if batch is None else batch, *(size if side is None else side for side in sides)]
        whole = bound or not tensor.dtype.is_floating
        value = random.integers(0, bound or 2, shape) if whole else random.standard_normal(shape)
        values.append(tf.constant(value.astype(tensor.dtype.as_numpy_dtype)))
    return tf.nest.pack_sequence_as(old._nested_inputs, values)


def _layers(model: tf_keras.Model) -> Iterator[Any]:
    """Every layer of a graph that gets a counterpart of its own."""
    import tf_keras

    for layer in (*model._input_layers, *model.layers):
        while isinstance(layer, tf_keras.layers.TimeDistributed):
            yield layer
            layer = layer.layer
        yield layer
        if isinstance(layer, tf_keras.Model):
            yield from _layers(layer)


class _Rebuilding:
    """One rebuild: what each layer becomes, and what stands in the way."""

    def __init__(self) -> None:
        self.keras = tensorflow.keras()
        self.problems: list[str] = []
        self._recipes: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._made: dict[int, tuple[Any, Any]] = {}
        self._names: dict[str, int] = {}

    def survey(self, old: tf_keras.Model) -> None:
        """Decides what every layer becomes; what cannot be expressed goes into `problems`."""
        import tf_keras

        for layer in _layers(old):
            self._names.setdefault(layer.name, id(layer))
            if isinstance(layer, tf_keras.Model):
                if not layer._is_graph_network:
                    self.problems.append(f"model {layer.name!r} (no defined inputs, or not made of layers)")
                continue
            if isinstance(layer, tf_keras.layers.InputLayer):
                if type(layer.output).__name__ != "KerasTensor" or layer.output.dtype.name == "string":
                    self.problems.append(f"input {layer.name!r} (sparse, ragged or text)")
                continue
            if any(node.call_kwargs.get("training") is True for node in layer.inbound_nodes):
                self.problems.append(f"{_title(layer)} called with training=True")
            if id(layer) not in self._recipes:
                self._recipes[id(layer)] = self._recipe(layer)

    def _recipe(self, old: Any) -> tuple[Any, dict[str, Any]]:
        """The Keras 3 class of a layer, and its configuration."""
        kind = type(old).__name__
        if type(old).__module__.startswith("tf_keras."):
            new = getattr(self.keras.layers, _RENAMED.get(kind, kind), None)
        else:
            import tf_keras

            name = tf_keras.saving.get_registered_name(type(old))
            new = self.keras.saving.get_registered_object(name)
        if not isinstance(new, type):
            self.problems.append(_title(old))
            return None, {}
        if issubclass(new, self.keras.layers.Lambda):
            return new, {"function": old.function, "arguments": old.arguments, "name": old.name}
        config = old.get_config()
        if issubclass(new, self.keras.layers.TimeDistributed):
            del config["layer"]
        return new, self._cleaned(kind, new, config, _title(old))

    def _cleaned(self, kind: str, new: Any, config: dict[str, Any], title: str) -> dict[str, Any]:
        """A layer's configuration without what only Keras 2 knows."""
        accepted, cleaned = _parameters(new), {}
        for key, value in config.items():
            name = _OPTIONS.get(kind, {}).get(key, key)
            if name == "dtype":
                value = value if isinstance(value, str) or value is None else value["config"]["name"]
                value = "float32" if value is not None and value.startswith("mixed_") else value
            elif name == "axis" and new is self.keras.layers.BatchNormalization and isinstance(value, list | tuple):
                if len(value) > 1:
                    self.problems.append(f"{title} over several axes")
                value = value[0]
            elif name.endswith("activation") and value == "hard_sigmoid":  # 0.2 x + 0.5 then, x / 6 + 0.5 now
                self.problems.append(f"{title} with the activation hard_sigmoid, which Keras 3 defines differently")
            if name in accepted:
                cleaned[name] = self._converted(value, title)
            elif not (name in _WITHOUT_EFFECT | _INHERITED or value in (None, False) or (name, value) == ("groups", 1)):
                self.problems.append(f"{title} with {name}={value!r}")
        return cleaned

    def _converted(self, value: Any, title: str) -> Any:
        """A value of a configuration: plain numbers, and layers inside layers cleaned too."""
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        if isinstance(value, list | tuple):
            items = [self._converted(item, title) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if not isinstance(value, dict):
            return value
        kind, config = value.get("class_name"), value.get("config")
        if not isinstance(kind, str) or not isinstance(config, dict):
            return {key: self._converted(item, title) for key, item in value.items()}
        new = getattr(self.keras.layers, _RENAMED.get(kind, kind), None)
        if not (isinstance(new, type) and issubclass(new, self.keras.layers.Layer)):
            return value
        inner = self._cleaned(kind, new, config, f"{kind} in {title}")
        return {"module": "keras.layers", "class_name": new.__name__, "config": inner, "registered_name": None}

    def _layer(self, old: Any) -> Any:
        """The counterpart of a layer; the same one whenever it is asked for."""
        import tf_keras

        if isinstance(old, tf_keras.Model):
            return self.model(old)
        if id(old) not in self._made:
            new, config = self._recipes[id(old)]
            config = {**config, "name": self._name(old)}
            if issubclass(new, self.keras.layers.TimeDistributed):
                made = new(self._layer(old.layer), **config)
            elif issubclass(new, self.keras.layers.Lambda):
                made = new(**config)
            else:
                made = new.from_config(config)
            self._made[id(old)] = old, made
        return self._made[id(old)][1]

    def _name(self, old: Any) -> str:
        """The name of a layer, without what Keras 3 forbids in one."""
        name = stem = old.name.replace("/", "_")
        number = 1
        while self._names.setdefault(name, id(old)) != id(old) and name != old.name:
            name, number = f"{stem}_{number}", number + 1
        return str(name)

    def model(self, old: tf_keras.Model) -> keras.Model:
        """The counterpart of a model: its calls repeated, from the inputs on."""
        import tensorflow as tf

        if id(old) not in self._made:
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
            self._made[id(old)] = old, self.keras.Model(inputs, outputs, name=self._name(old))
        return self._made[id(old)][1]

    def _call(self, node: Any, tensors: dict[int, Any]) -> None:
        """Repeats one call of a layer, and notes the tensors that come out."""
        import tensorflow as tf
        import tf_keras

        layer = self._layer(node.layer)
        args, kwargs = tf.nest.map_structure(
            lambda leaf: tensors.get(id(leaf), leaf), (tuple(node.call_args), dict(node.call_kwargs))
        )
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        if isinstance(node.layer, tf_keras.Model):
            flat = node.layer._flatten_to_reference_inputs(args[0])
            args = (tf.nest.pack_sequence_as(node.layer._nested_inputs, flat), *args[1:])
        recurrent = tf_keras.layers.RNN | tf_keras.layers.Bidirectional
        if isinstance(node.layer, recurrent) and isinstance(args[0], list | tuple):
            kwargs["initial_state"] = list(args[0][1:])  # tf_keras puts it behind the sequence
            args = (args[0][0], *args[1:])
        outputs = self.keras.tree.flatten(layer(*args, **kwargs))
        for old, new in zip(tf.nest.flatten(node.outputs), outputs, strict=True):
            tensors[id(old)] = new

    def copy_weights(self) -> None:
        """Copies the weights of every layer that was made."""
        import tf_keras

        for old, new in self._made.values():
            if isinstance(old, tf_keras.Model | tf_keras.layers.TimeDistributed):
                continue  # what is inside was made too
            if isinstance(old, tf_keras.layers.Bidirectional):
                new.forward_layer.set_weights(old.forward_layer.get_weights())
                new.backward_layer.set_weights(old.backward_layer.get_weights())
                continue
            new.set_weights(old.get_weights())
            if isinstance(new, self.keras.layers.Normalization):
                new.finalize_state()


def _title(layer: Any) -> str:
    return f"{type(layer).__name__} {layer.name!r}"


@functools.cache
def _parameters(layer: Any) -> frozenset[str]:
    """The options that a Keras 3 layer takes."""
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
