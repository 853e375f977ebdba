"""TensorFlow functions and graph nodes of Keras 2 models: their counterparts and how to call them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from compress.core.errors import cause_of
from compress.model.importers.common.graph_builder import MATH, NN, NUMPY, NotImportedError
from compress.model.importers.keras import keras2_operations as operations
from compress.model.importers.keras import keras2_shapes as shapes
from compress.model.importers.keras.keras2_operations import FunctionCall, Rule, TfFunction, plain


def _gelu(step: FunctionCall, x: Any, approximate: bool = False) -> Any:
    return step.operation(NN, "Gelu", {"approximate": bool(approximate)}, [x])


def _leaky_relu(step: FunctionCall, x: Any, alpha: float = 0.2) -> Any:
    return step.layer("LeakyReLU", {"negative_slope": float(plain(alpha))}, [x])


def _add_n(step: FunctionCall, values: Any) -> Any:
    return step.layer("Add", {}, [list(values)]) if len(values) > 1 else values[0]


_TWO: Mapping[str, Rule] = {
    **{
        name: partial(operations.arithmetic, kind=name.title(), layer=True)
        for name in ("add", "subtract", "multiply", "maximum", "minimum")
    },
    "divide": partial(operations.arithmetic, kind="Divide"),
    "truediv": partial(operations.arithmetic, kind="Divide"),
    "pow": partial(operations.arithmetic, kind="Power"),
    "floordiv": partial(operations.arithmetic, kind="FloorDivide"),
    "squared_difference": operations.squared_difference,
}
_ONE: Mapping[str, Rule] = {
    **{f"nn.{name}": operations.activation(name) for name in ("relu", "relu6", "elu", "selu", "softplus", "softsign")},
    **{f"nn.{name}": operations.activation(name) for name in ("sigmoid", "tanh", "log_softmax")},
    **{f"math.{name}": operations.activation(name) for name in ("sigmoid", "softplus", "tanh")},
    **{f"math.{name}": operations.unary(NUMPY, name.title()) for name in ("exp", "log", "sqrt", "sin", "cos")},
    **{f"math.{name}": operations.unary(NUMPY, name.title()) for name in ("floor", "ceil", "sign", "round", "log1p")},
    "math.abs": operations.unary(NUMPY, "Absolute"),
    "math.reciprocal": operations.unary(NUMPY, "Reciprocal"),
    "math.rsqrt": operations.unary(MATH, "Rsqrt"),
    "math.erf": operations.unary(MATH, "Erf"),
    "math.square": lambda step, x: step.layer("Multiply", {}, [[x, x]]),  # only a product has an 8-bit form
    "math.negative": lambda step, x: step.operation(NUMPY, "Multiply", {}, [x, -1.0]),
    "identity": lambda step, x: x,
    "stop_gradient": lambda step, x: x,
}
_REDUCTION = "x|input_tensor axis|reduction_indices keepdims|keep_dims"
_REDUCED = {"mean": "Mean", "sum": "Sum", "max": "Max", "min": "Min", "prod": "Prod", "variance": "Var", "std": "Std"}

FUNCTIONS: Mapping[str, TfFunction] = {
    **{f"math.{name}": TfFunction(rule, "x y") for name, rule in _TWO.items()},
    "__operators__.add": TfFunction(_TWO["add"], "x y"),
    **{name: TfFunction(rule, "x|features|input|logits") for name, rule in _ONE.items()},
    **{
        f"math.reduce_{name}": TfFunction(partial(shapes.reduced, kind=kind), _REDUCTION)
        for name, kind in _REDUCED.items()
    },
    "nn.silu": TfFunction(operations.silu, "x|features beta"),
    "nn.swish": TfFunction(operations.silu, "x|features beta"),
    "nn.gelu": TfFunction(_gelu, "x|features approximate"),
    "nn.leaky_relu": TfFunction(_leaky_relu, "x|features alpha"),
    "nn.softmax": TfFunction(operations.softmax, "x|logits axis|dim"),
    "clip_by_value": TfFunction(operations.clip, "x|t low|clip_value_min high|clip_value_max"),
    "math.add_n": TfFunction(_add_n, "values|inputs"),
    "cast": TfFunction(operations.cast, "x dtype"),
    "linalg.matmul": TfFunction(operations.matmul, "a b transpose_a transpose_b"),
    "math.l2_normalize": TfFunction(operations.l2_normalize, "x axis|dim epsilon"),
    **shapes.RULES,
}
"""Counterparts by the canonical name in TensorFlow, without `tf.` and `compat.v1.`."""

_ALIASES = {
    "linalg.l2_normalize": "math.l2_normalize",
    "nn.l2_normalize": "math.l2_normalize",
    "nn.max_pool": "nn.max_pool2d",
    "nn.avg_pool": "nn.avg_pool2d",
    "image.resize_images": "image.resize",
    "keras.activations.relu": "nn.relu",
}


def function(name: object) -> TfFunction | None:
    """Return the counterpart of a function by its name in a configuration, or None."""
    if not isinstance(name, str):
        return None
    for known in (name, name.removeprefix("compat.v1.")):
        if (known := _ALIASES.get(known, known)) in FUNCTIONS:
            return FUNCTIONS[known]
    return None


_NODES: Mapping[str, str] = {
    **dict.fromkeys(("Add", "AddV2"), "math.add"),
    "Sub": "math.subtract", "Mul": "math.multiply", "RealDiv": "math.divide", "Maximum": "math.maximum",
    "Minimum": "math.minimum", "Pow": "math.pow", "SquaredDifference": "math.squared_difference",
    "FloorDiv": "math.floordiv", "BiasAdd": "nn.bias_add", "MatMul": "linalg.matmul", "AddN": "math.add_n",
    "BatchMatMulV2": "linalg.matmul", "Relu": "nn.relu", "Relu6": "nn.relu6", "Elu": "nn.elu", "Selu": "nn.selu",
    "Softplus": "nn.softplus", "Softsign": "nn.softsign", "Sigmoid": "math.sigmoid", "Tanh": "math.tanh",
    "LeakyRelu": "nn.leaky_relu", "Softmax": "nn.softmax", "LogSoftmax": "nn.log_softmax", "Exp": "math.exp",
    "Log": "math.log", "Sqrt": "math.sqrt", "Rsqrt": "math.rsqrt", "Square": "math.square", "Abs": "math.abs",
    "Neg": "math.negative", "Sin": "math.sin", "Cos": "math.cos", "Floor": "math.floor", "Ceil": "math.ceil",
    "Sign": "math.sign", "Round": "math.round", "Log1p": "math.log1p", "Erf": "math.erf", "Cast": "cast",
    "Inv": "math.reciprocal", "Reciprocal": "math.reciprocal", "Identity": "identity",
    "StopGradient": "stop_gradient", "Mean": "math.reduce_mean", "Sum": "math.reduce_sum",
    "Max": "math.reduce_max", "Min": "math.reduce_min", "Prod": "math.reduce_prod", "Reshape": "reshape",
    "Transpose": "transpose", "ExpandDims": "expand_dims", "Squeeze": "squeeze", "ConcatV2": "concat",
    "Pack": "stack", "Unpack": "unstack", "Slice": "slice", "StridedSlice": "strided_slice", "Pad": "pad",
    "PadV2": "pad", "MirrorPad": "pad", "Tile": "tile", "GatherV2": "gather", "Shape": "shape",
    "Split": "split", "SplitV": "split", "ResizeBilinear": "image.resize_bilinear",
    "ResizeNearestNeighbor": "image.resize_nearest_neighbor", "DepthToSpace": "nn.depth_to_space",
    "SpaceToDepth": "nn.space_to_depth", "AvgPool": "nn.avg_pool2d", "MaxPool": "nn.max_pool2d",
}  # fmt: skip
"""Function that computes the same as the operator of a node."""
_LISTS = {"ConcatV2", "Pack", "AddN"}
_ATTRIBUTES = {
    "keep_dims": "keepdims", "squeeze_dims": "axis", "DstT": "dtype", "alpha": "alpha", "axis": "axis", "mode": "mode",
    "block_size": "block_size", "ksize": "ksize", "strides": "strides", "padding": "padding", "num": "num",
    "align_corners": "align_corners", "half_pixel_centers": "half_pixel_centers", "begin_mask": "begin_mask",
    "end_mask": "end_mask", "ellipsis_mask": "ellipsis_mask", "new_axis_mask": "new_axis_mask",
    "shrink_axis_mask": "shrink_axis_mask", "transpose_a": "transpose_a", "transpose_b": "transpose_b",
    "adj_x": "transpose_a", "adj_y": "transpose_b", "batch_dims": "batch_dims", "num_split": "num_or_size_splits",
}  # fmt: skip
"""Attributes of nodes, and the equivalent arguments."""


def node(operator: object) -> TfFunction | None:
    """Return the counterpart of a graph node by its operator, or None."""
    return FUNCTIONS[_NODES[operator]] if isinstance(operator, str) and operator in _NODES else None


def call(layer: Any, step: FunctionCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the Keras 3 output of one call of an op layer of tf_keras."""
    kind = type(layer).__name__
    try:
        if kind != "TensorFlowOpLayer":
            name = layer.get_config()["function"]
            counterpart = function(name)
            if counterpart is None:
                raise NotImportedError(f"tf.{name} has no counterpart")
            return counterpart.call(step, args, kwargs)
        return _node_call(layer, step, args[0])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NotImportedError(cause_of(error)) from error


def _node_call(layer: Any, step: FunctionCall, call_inputs: Any) -> Any:
    """Call a node: constants are inserted among its inputs by their positions, and options are attributes."""
    operator, attributes = layer.node_def.op, dict(layer.node_def.attr)  # a copy: asking it for one would add it
    data_format = attributes["data_format"].s if "data_format" in attributes else b""
    counterpart = node(operator)
    if counterpart is None or data_format not in (b"", b"NHWC", b"N"):
        raise NotImportedError(f"the node {operator} {data_format.decode(errors='replace')} has no counterpart")
    inputs = list(call_inputs) if isinstance(call_inputs, list | tuple) else [call_inputs]
    for index, constant in sorted(layer.constants.items()):
        inputs.insert(index, constant)
    settings = {_ATTRIBUTES[name]: _attribute(value) for name, value in attributes.items() if name in _ATTRIBUTES}
    if operator in _LISTS:
        inputs = [inputs[:-1], inputs[-1]] if operator == "ConcatV2" else [inputs]
    elif operator == "Split":
        inputs = [inputs[1], settings.pop("num_or_size_splits"), inputs[0]]
    elif operator == "GatherV2":
        inputs, settings = inputs[:2], {**settings, "axis": inputs[2]}
    elif operator == "PadV2":
        inputs, settings = inputs[:2], {**settings, "constant_values": inputs[2]}
    return counterpart.call(step, inputs, settings)


def _attribute(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "list":
        return list(value.list.i)
    if kind == "type":
        import tensorflow as tf

        return tf.dtypes.as_dtype(value.type).name
    content = getattr(value, kind) if kind else None
    return content.decode() if isinstance(content, bytes) else content
