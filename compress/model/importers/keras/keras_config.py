"""Checks of the stored configuration of a Keras model, before any library reads it.

A configuration can contain Python code, or name code to import. Every object in it that is not on the list of known
objects is reported, and so are sizes that no real layer has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compress.model.importers.common import protobuf_wire
from compress.model.importers.common.unsupported import Refused
from compress.model.importers.keras import keras2_functions

MAX_DEPTH = 250
"""Keras builds nested models with a recursion, and Python's limit is 1,000 calls."""
MOST_CALLS = 10_000
"""Largest number of layer calls in a model; layers of a nested model count at each call of it."""
LISTS = {"ListWrapper", "_ListWrapper"}
"""Class names in which TensorFlow wraps lists."""
MOST_PER_SIDE = 2**31
"""TensorFlow stores sizes as int32."""
MOST_REPEATED = 2**12
"""Settings that repeat a computation: a large value would keep Keras busy without end."""
#: Classes that exist only in Keras 2.
_ONLY = """AbstractRNNCell AddLoss AddMetric ClassMethod CuDNNGRU CuDNNLSTM DenseFeatures DeviceWrapper DropoutWrapper
InstanceMethod InstanceProperty LinearModel LocallyConnected1D LocallyConnected2D RadialConstraint RandomHeight
RandomWidth ResidualWrapper SequenceFeatures SlicingOpLambda SyncBatchNormalization TFOpLambda TensorFlowOpLayer
ThresholdedReLU WideDeepModel"""
#: Layers that run a TensorFlow function; tf_keras loads only those with a counterpart (`keras2_functions`).
OPERATIONS = {"SlicingOpLambda", "TFOpLambda", "TensorFlowOpLayer"}
#: Layers without a counterpart in Keras 3.
REFUSED = set(_ONLY.split()) - OPERATIONS - {"SyncBatchNormalization", "ThresholdedReLU"}
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
#: Every class of Keras 2 and 3 that only computes.
KNOWN = {f"{name}{rank}D" for name in _ND.split() for rank in (1, 2, 3)} | set(f"{_CLASSES} {_ONLY}".split())
_ACTIVATIONS = """celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu
linear log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign sparse_plus
sparse_sigmoid sparsemax squareplus swish tanh tanh_shrink threshold"""
ACTIVATIONS = set(_ACTIVATIONS.split())

#: Objects of Keras that run code from the file, or from a file next to it.
RUNS = {
    "Lambda": "runs Python code",
    "TFSMLayer": "runs a SavedModel from another path",
    "TorchModuleWrapper": "unpickles a PyTorch module",
    "JaxLayer": "runs Python code that it contains or names",
    "FlaxLayer": "runs Python code that it contains or names",
    "__lambda__": "is Python code in serialized form",
}
_KERAS_MODULES = re.compile(
    r"(keras|tf_keras|keras_core|tensorflow\.keras|builtins)(\.|$)|tensorflow\.python\.ops\.init_ops"
)
_OPERATIONS = re.compile(r"keras\.(src\.)?(ops|quantizers)(\.|$)")
#: Modules of older releases, and their names today.
_MOVED = (("tensorflow.keras", "keras"), ("keras_core", "keras"), ("keras.engine.", "keras.src.engine."))
_SIZE_NAMES = """
units filters kernel_size strides pool_size target_shape output_dim input_dim input_length depth_multiplier
batch_input_shape batch_shape groups dilation_rate height width num_heads key_dim value_dim num_tokens max_tokens
num_bins sequence_length fft_length num_mel_bins dims axis output_size"""
_SIZES = set(_SIZE_NAMES.split())
_REPEATED = {"size", "n", "padding", "cropping", "output_padding"}


@dataclass(frozen=True)
class Judged:
    """The effects of loading a configuration.

    Attributes:
        untrusted: code that loading would run or import, and files outside that it would read.
        unsupported: layers of Keras 2 without a counterpart in Keras 3.
        problem: why the configuration is refused (invalid, or harmful); "" if it is not.
    """

    untrusted: tuple[Refused, ...] = ()
    unsupported: tuple[Refused, ...] = ()
    problem: str = ""


def shown(value: object) -> str:
    """Return a name from the file in a form that is safe to print: short, quoted, without control characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _bare(value: str) -> str:
    """Return a name as `shown`, but without quotes."""
    return shown(value)[1:-1] if isinstance(value, str) and len(value) < 80 else shown(value).strip("'\"")


def loadable(value: Any) -> Any:
    """Return a configuration without the arguments of `compile`, and with the current module names."""
    if isinstance(value, list):
        return [loadable(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: loadable(item) for key, item in value.items() if key != "compile_config"}
    if "class_name" in kept and isinstance(module := kept.get("module"), str):
        for old, new in _MOVED:
            if module == old or module.startswith(old.rstrip(".") + "."):
                kept["module"] = module = new + module[len(old) :]
    return kept


def normalized(value: Any) -> Any:
    """Return a configuration with plain values and lists, which some releases of Keras 2 wrapped.

    Source: arrays as {"type": "ndarray", "value": …} in Keras 2.0 to 2.2, lists as {"class_name": "ListWrapper",
    "items": …} in TensorFlow 1.14 to 2.3.
    """
    if isinstance(value, list):
        return [normalized(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "ndarray" and set(value) == {"type", "value"}:
        return normalized(value["value"])
    if value.get("class_name") in LISTS and isinstance(value.get("items"), list):
        return normalized(value["items"])
    return {key: normalized(item) for key, item in value.items()}


@dataclass(frozen=True)
class _Position:
    """The position of a value: its key, its layer, its depth, and the number of calls of the layer."""

    key: str = ""
    owner: str = ""
    depth: int = 0
    calls: int = 1


def judged(config: dict[str, Any]) -> Judged:
    """Check a complete configuration; with a loop, because recursion could exhaust the stack."""
    if not isinstance(config.get("class_name"), str) or "config" not in config:
        return Judged(problem="its configuration does not describe a model (no class_name and config)")
    untrusted: list[Refused] = []
    unsupported: list[Refused] = []
    stack: list[tuple[Any, _Position]] = [(config, _Position())]
    calls = 0
    while stack:
        value, position = stack.pop()
        if position.depth > MAX_DEPTH:
            return Judged(problem=f"its configuration is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, str):
            untrusted += _judge_text(position.key, value, position.owner)
        elif isinstance(value, int | float) and (problem := _invalid_size(position.key.removesuffix("[]"), value)):
            return Judged(problem=f"{problem} in {shown(position.owner)}")
        elif isinstance(value, list):
            inside = _Position(
                position.key.removesuffix("[]") + "[]", position.owner, position.depth + 1, position.calls
            )
            stack += [(item, inside) for item in reversed(value)]
        elif isinstance(value, dict):
            position = _entered(value, position)
            calls += position.calls if position.key in ("layers[]", "config[]") else 0
            if calls > MOST_CALLS:
                return Judged(problem=f"its layers are called more than {MOST_CALLS:,} times")
            if "class_name" in value:
                untrusted += _judge(value, position.owner)
                unsupported += _judge_support(value, position.owner)
            inner = [
                (item, _Position(name, position.owner, position.depth + 1, position.calls))
                for name, item in value.items()
            ]
            stack += reversed(inner)
    return Judged(tuple(dict.fromkeys(untrusted)), tuple(dict.fromkeys(unsupported)))


def stateful_layers(config: Any) -> tuple[str, ...]:
    """Return the names of the layers in a configuration that keep their state between calls."""
    return _matching(config, lambda layer: layer.get("stateful") is True)


def channels_first(config: Any) -> tuple[str, ...]:
    """Return the names of the convolutions in a configuration whose channels are the first axis of a sample."""
    return _matching(config, lambda layer: layer.get("data_format") == "channels_first" and "kernel_size" in layer)


def _matching(config: Any, matches: Callable[[dict[str, Any]], bool]) -> tuple[str, ...]:
    """Return the names of the outermost layers in a configuration whose settings match."""
    if isinstance(config, dict) and matches(config):
        return (str(config.get("name")),)
    items = config.values() if isinstance(config, dict) else config if isinstance(config, list) else ()
    return tuple(name for item in items for name in _matching(item, matches))


def _entered(value: dict[str, Any], position: _Position) -> _Position:
    """Return the position with the name and the calls of the layer that begins here, if one does."""
    inner, nodes = value.get("config"), value.get("inbound_nodes")
    name = inner.get("name") if isinstance(inner, dict) else None
    times = max(len(nodes), 1) if isinstance(nodes, list) and "class_name" in value else 1
    owner = name if isinstance(name, str) else position.owner
    return _Position(position.key, owner, position.depth, position.calls * times)


def _invalid_size(key: str, value: float) -> str:
    """Return why a number is not a valid size; "" if it is one."""
    limit = MOST_REPEATED if key in _REPEATED else MOST_PER_SIDE if key in _SIZES else math.inf
    if isinstance(value, int) and abs(value) >= 2**63 and key != "seed":
        return f"it has a number of {value.bit_length()} bits"
    if limit is not math.inf and not abs(value) <= limit:
        return f"{key} is {value:g}, which no layer can have,"
    return ""


def _judge(entry: dict[str, Any], owner: str) -> list[Refused]:
    """Return the code that one serialized object would run: none if it is a known class of Keras."""
    name, module, registered = entry["class_name"], entry.get("module"), entry.get("registered_name")
    is_keras = module is None or _KERAS_MODULES.match(str(module)) is not None
    if not isinstance(name, str):
        return [Refused(owner, shown(name), "has a class without a name")]
    if name in LISTS and set(entry) == {"class_name", "items"}:
        return []
    if name in RUNS:
        code, lacks_code = _code(entry)
        return [Refused(owner, name, f"{RUNS[name]}{code}", lacks_code)]
    if name == "function":
        function = entry.get("config")
        is_activation = isinstance(function, str) and function in ACTIVATIONS
        if is_keras and registered in (None, function, "function") and is_activation:
            return []
        return [Refused(owner, "function", f"calls the function {shown(function)} of module {shown(module)}")]
    is_operation = isinstance(module, str) and _OPERATIONS.match(module)
    if is_keras and registered in (None, name) and (name in KNOWN or is_operation):
        return []
    custom = registered if isinstance(registered, str) else name
    source = f" from module {shown(module)}" if module else ""
    return [Refused(owner, _bare(custom), f"is of the custom class {shown(custom)}{source}")]


def _code(entry: dict[str, Any]) -> tuple[str, bool]:
    """Return a description of a Lambda layer's code (bytecode, or a function's name), and whether the file lacks it."""
    config = entry.get("config")
    config = config if isinstance(config, dict) else {}
    function, module = config.get("function", config), config.get("module", entry.get("module"))
    if isinstance(function, dict) and isinstance(function.get("items"), list):  # a tuple, in a SavedModel
        function = function["items"]
    if isinstance(function, dict) and isinstance(function.get("config"), dict):
        function = function["config"]
    if isinstance(function, dict):
        module = function.get("module", module)
        function = function.get("code", function.get("value", function.get("config")))
    code = function[0] if isinstance(function, list) and function else function
    if isinstance(code, str) and (isinstance(function, list) or len(code) > 60 or not code.isidentifier()):
        return f": {len(code) * 3 // 4:,} bytes of bytecode, whose source is not in the file", False
    if isinstance(code, str):
        return f": the function {shown(code)} of module {shown(module)}, which is not in the file", True
    return " that it contains or names", False


def _judge_support(entry: dict[str, Any], owner: str) -> list[Refused]:
    """Return why a layer of Keras 2 has no counterpart; nothing if it has one."""
    name, config = str(entry["class_name"]), entry.get("config")
    if name in REFUSED:
        return [Refused(owner, name, "Keras 3 has no such layer")]
    if name not in OPERATIONS:
        return []
    config = config if isinstance(config, dict) else {}
    if name == "TensorFlowOpLayer":
        operator = _operator(config.get("node_def"))
        known = keras2_functions.node(operator)
        title = f"the node {shown(operator)}"
    else:
        known = keras2_functions.function(config.get("function"))
        title = f"tf.{_bare(str(config.get('function')))}"
    return [] if known else [Refused(owner, name, f"{title} has no counterpart")]


def _operator(stored: object) -> object:
    """Return the operator of a GraphDef node, stored as JSON or in protobuf's wire format (field 2 of NodeDef)."""
    if isinstance(stored, dict):
        return stored.get("op")
    try:
        return protobuf_wire.text(stored.encode(), 2) if isinstance(stored, str) else None
    except ValueError:
        return None


def _judge_text(key: str, value: str, owner: str) -> list[Refused]:
    """Return what a plain string would run or read where Keras interprets it as a name."""
    if key == "activation" or key.endswith("_activation"):
        known = value in ACTIVATIONS | KNOWN
        return [] if known else [Refused(owner, "function", f"calls the function {shown(value)}")]
    if key.endswith(("_initializer", "_regularizer", "_constraint")) and ">" in value:
        return [Refused(owner, _bare(value), f"is of the custom class {shown(value)}")]
    return [Refused(owner, "vocabulary", f"reads the file {shown(value)}")] if key == "vocabulary" else []
