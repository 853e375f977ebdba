"""TensorFlow functions in the graph of a Keras 2 model, and their layers and operations in Keras 3.

An expression between layers in tf.keras (`x * 2`, `tf.nn.relu6(x)`, `x[:, 1:]`) is stored as a layer that names a
function: TFOpLambda and SlicingOpLambda since TensorFlow 2.4, TensorFlowOpLayer with a GraphDef node before.
tf_keras looks the function up by its name and runs it, so tf_keras gets only functions that are listed here.

Source: tensorflow.org/api_docs/python/tf (2.4 to 2.15) for functions, tensorflow.org/api_docs/cc for nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.importers.common.graph_builder import (
    CORE,
    MOST_IN_CONFIG,
    NUMPY,
    LayerFactory,
    NotImportedError,
    PlacedValue,
)

Rule = Callable[..., Any]
"""(step, tensors and settings) -> the result: a tensor, several, or a known size."""


class PlacedTensor(PlacedValue[Any]):
    """A tensor of Keras, with its dimensions in the order of the function's axes."""

    def like(self, shape: Sequence[int]) -> Any:
        """Return None: Keras itself finds the shape of a result."""
        del shape


@dataclass(frozen=True)
class FunctionCall(LayerFactory[Any]):
    """One call of a function. Values are tensors of Keras 3 (KerasTensor); layers are called at once.

    Attributes:
        fresh: returns a name that no layer has yet, made of the old layer's.
    """

    library: Any
    fresh: Callable[[], str]

    def layer(
        self,
        kind: str,
        config: Mapping[str, Any],
        arguments: Sequence[Any],
        like: Any = None,
        weights: Sequence[NDArray[np.float32]] = (),
    ) -> Any:
        """Return the output of a Keras layer."""
        layer = getattr(self.library.layers, kind)(name=self.fresh(), **config)
        output = layer(*arguments)
        if weights:
            layer.set_weights(weights)
        return output

    def operation(
        self,
        module: str,
        kind: str,
        config: Mapping[str, Any],
        arguments: Sequence[Any],
        like: Any = None,
        weights: Sequence[NDArray[np.float32]] = (),
    ) -> Any:
        """Return the output of a Keras operation, for functions that no layer computes."""
        config = {**config, "name": self.fresh()}
        entry = {"module": module, "class_name": kind, "config": config, "registered_name": kind}
        operation = self.library.saving.deserialize_keras_object(entry)
        return operation(*(tuple(argument) if isinstance(argument, list) else argument for argument in arguments))

    def computed(self, value: Any) -> bool:
        """Return True if a value comes from the model's inputs."""
        return isinstance(value, self.library.KerasTensor)

    def placed(self, value: Any, *axes: int) -> PlacedTensor:
        """Return the tensor; an axis that is the batch is refused."""
        if 0 in axes:
            raise NotImportedError("it mixes the samples of a batch")
        return PlacedTensor(value, tuple(range(len(value.shape))), extra_batch=False)

    def aligned(self, values: Sequence[Any], axis: int) -> list[PlacedValue[Any]]:
        """Return the tensors."""
        return [self.placed(value, axis) for value in values]

    def template(self, shape: Sequence[int]) -> Any:
        """Return None: Keras itself finds the shape of a result."""
        del shape

    def in_shape(self, value: Any, shape: Sequence[int | None]) -> Any:
        """Return the same elements of each sample in another shape; one dimension may be open."""
        shape = tuple(shape)
        if shape == tuple(value.shape):
            return value
        sizes = [-1 if size is None else size for size in shape[1:]]
        is_known = None not in value.shape[1:]
        is_open = sizes.count(-1) == 1
        fits = is_known and -1 not in sizes and prod(value.shape[1:]) == prod(sizes)
        if not sizes or not (fits or is_open):
            raise NotImportedError(f"it changes the shape {list(value.shape)} to {list(shape)}")
        if len(sizes) == 1 and is_known and len(value.shape) > 2:
            return self.layer("Flatten", {}, [value])
        return self.layer("Reshape", {"target_shape": tuple(sizes)}, [value])


def plain(value: Any) -> Any:
    """Return a constant of a configuration or of TensorFlow as an array; small enough to be stored as text."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" or array.size > MOST_IN_CONFIG:
        raise NotImportedError(f"a constant of type {array.dtype} with {array.size:,} values")
    return array


def integers(value: Any) -> list[int]:
    """Return a constant of integers: axes, sizes."""
    try:
        array = plain(value)
    except (TypeError, ValueError) as error:
        raise NotImportedError("its sizes or axes are computed") from error
    if array.dtype.kind not in "iu" and array.size:
        raise NotImportedError("its sizes or axes are not integers")
    return [int(element) for element in array.reshape(-1)]


def axes_of(tensor: Any, axis: Any) -> list[int]:
    """Return axes counted from the front; None means all axes."""
    rank = len(tensor.shape)
    axes = list(range(rank)) if axis is None else integers(axis)
    if any(not -rank <= dimension < rank for dimension in axes):
        raise NotImportedError(f"{axes} are not axes of {list(tensor.shape)}")
    return sorted({dimension % rank for dimension in axes})


def _operand(value: Any, other: Any) -> Any:
    """Return a constant operand as a number, or as an array of the tensor's type."""
    array = plain(value)
    if array.ndim == 0:
        return float(array) if "float" in other.dtype else int(array)
    if array.ndim >= len(other.shape) and array.shape[-len(other.shape)] != 1:
        raise NotImportedError("its constant differs from sample to sample")
    return array.astype(other.dtype)


def arithmetic(step: FunctionCall, x: Any, y: Any, *, kind: str, layer: bool = False) -> Any:
    """Elementwise arithmetic: a layer for two tensors of the same rank, otherwise an operation."""
    tensors = [operand for operand in (x, y) if step.computed(operand)]
    if not tensors:
        return _known(kind, x, y)
    if len(tensors) == 2:
        if layer and len(x.shape) == len(y.shape):
            return step.layer(kind, {}, [[x, y]])
        return step.operation(NUMPY, kind, {}, [x, y])
    operands = [operand if step.computed(operand) else _operand(operand, tensors[0]) for operand in (x, y)]
    return step.operation(NUMPY, kind, {}, operands)


def _known(kind: str, x: Any, y: Any) -> Any:
    """Return the result for two known sizes; None if one of them is the batch."""
    if x is None or y is None:
        return None
    functions = {"Add": np.add, "Subtract": np.subtract, "Multiply": np.multiply, "FloorDivide": np.floor_divide}
    if kind not in functions:
        raise NotImportedError("both of its operands are sizes")
    return functions[kind](plain(x), plain(y)).tolist()


def unary(module: str, kind: str) -> Rule:
    """An elementwise operation on one tensor."""
    return lambda step, x: step.operation(module, kind, {}, [x])


def activation(name: str) -> Rule:
    """An activation by Keras' name."""
    return lambda step, x: step.layer("Activation", {"activation": name}, [x])


def silu(step: FunctionCall, x: Any, beta: Any = 1.0) -> Any:
    """SiLU, x * sigmoid(beta x); Keras supports a beta of 1."""
    if float(plain(beta)) != 1:
        raise NotImportedError(f"its beta is {float(plain(beta)):g}")
    return step.layer("Activation", {"activation": "silu"}, [x])


def softmax(step: FunctionCall, x: Any, axis: Any = None) -> Any:
    """Softmax over one axis, the last by default."""
    (axis,) = [-1] if axis is None else integers(axis)
    return step.layer("Softmax", {"axis": axis}, [x])


def clip(step: FunctionCall, x: Any, low: Any, high: Any) -> Any:
    """tf.clip_by_value: a ReLU if the lower limit is 0."""
    low, high = float(plain(low)), float(plain(high))
    if low == 0 and np.isfinite(high):
        return step.layer("ReLU", {"max_value": high}, [x])
    return step.operation(NUMPY, "Clip", {"x_min": low, "x_max": high}, [x])


def squared_difference(step: FunctionCall, x: Any, y: Any) -> Any:
    """(x - y)^2."""
    difference = arithmetic(step, x, y, kind="Subtract")
    return step.layer("Multiply", {}, [[difference, difference]])


def cast(step: FunctionCall, x: Any, dtype: Any) -> Any:
    """tf.cast."""
    if not step.computed(x):
        return x
    name = getattr(dtype, "name", dtype)
    if not isinstance(name, str):
        raise NotImportedError("its dtype is not a name")
    return x if name == x.dtype else step.operation(CORE, "Cast", {"dtype": name}, [x])


def matmul(step: FunctionCall, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """tf.matmul; a dense layer if the right operand is one constant matrix."""
    if transpose_a or not step.computed(a):
        raise NotImportedError("its left matrix is transposed, or a constant")
    if step.computed(b):
        if transpose_b or len(a.shape) < 3 or len(b.shape) < 3:
            raise NotImportedError("it mixes the samples of a batch, or its right matrix is transposed")
        return step.operation(NUMPY, "Matmul", {}, [a, b])
    right = plain(b).astype(np.float32)
    right = right.T if transpose_b else right
    if right.ndim != 2:
        raise NotImportedError(f"its right side has the shape {list(right.shape)}")
    return step.layer("Dense", {"units": right.shape[1], "use_bias": False}, [a], weights=[right])


def l2_normalize(step: FunctionCall, x: Any, axis: Any = None, epsilon: Any = 1e-12) -> Any:
    """tf.math.l2_normalize, with Keras' epsilon."""
    if axis is None or float(plain(epsilon)) > 1e-9 or 0 in axes_of(x, axis):
        raise NotImportedError("it normalizes over the batch, or with a large epsilon")
    return step.layer("UnitNormalization", {"axis": [dimension - len(x.shape) for dimension in axes_of(x, axis)]}, [x])


@dataclass(frozen=True)
class TfFunction:
    """A TensorFlow function with a counterpart.

    Attributes:
        parameters: parameters of the rule in the function's order, each with its present and former names in
            TensorFlow ("x|features axis|dim").
    """

    rule: Rule
    parameters: str

    def call(self, step: FunctionCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the output for the arguments of one call."""
        names = [parameter.split("|") for parameter in self.parameters.split()]
        canonical_names = {alias: aliases[0] for aliases in names for alias in aliases}
        if len(args) > len(names):
            raise NotImportedError(f"it is called with {len(args)} arguments")
        arguments = {aliases[0]: value for aliases, value in zip(names, args, strict=False)}
        for name, value in kwargs.items():
            if name in canonical_names and value is not None:
                arguments[canonical_names[name]] = value
            elif name not in canonical_names and name != "name" and value not in (None, False, "NHWC"):
                raise NotImportedError(f"it is called with {name}={str(value)[:40]}")
        return self.rule(step, **arguments)
