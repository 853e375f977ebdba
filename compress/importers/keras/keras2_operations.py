"""TensorFlow functions in the graph of a Keras 2 model, and the layers and operations of Keras 3 they become.

What stood between layers in tf.keras (`x * 2`, `tf.nn.relu6(x)`, `x[:, 1:]`) is stored as a layer that names a
function: TFOpLambda and SlicingOpLambda since TensorFlow 2.4, TensorFlowOpLayer with a GraphDef node before.
tf_keras looks the function up by its name and runs it, so only those that are listed here are ever given to it.

Source: tensorflow.org/api_docs/python/tf (2.4 to 2.15) for functions, tensorflow.org/api_docs/cc for nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

NUMPY, NN, CORE, IMAGE = (f"keras.src.ops.{module}" for module in ("numpy", "nn", "core", "image"))
"""Where Keras says its operations come from, in the files that it writes."""
MOST_CONSTANTS = 200_000
"""Numbers of a constant that is no weight: Keras stores it as text."""


Rule = Callable[..., Any]
"""(step, tensors and settings) -> what is made: a tensor, several, or a known size."""


class NotRebuiltError(Exception):
    """A function was called in a way that has no counterpart; the message says which, in a few words."""


@dataclass(frozen=True)
class FunctionCall:
    """One call of a function.

    Attributes:
        library: Keras 3.
        fresh: a name that no layer has yet, made of the old layer's.
    """

    library: Any
    fresh: Callable[[], str]

    def layer(self, kind: str, given: Any, **config: Any) -> Any:
        """Return the output of a Keras layer for a tensor or a list of tensors."""
        return getattr(self.library.layers, kind)(name=self.fresh(), **config)(given)

    def operation(self, module: str, kind: str, *given: Any, **config: Any) -> Any:
        """Return the output of a Keras operation, for functions that no layer computes."""
        config["name"] = self.fresh()
        entry = {"module": module, "class_name": kind, "config": config, "registered_name": kind}
        return self.library.saving.deserialize_keras_object(entry)(*given)

    def computed(self, value: Any) -> bool:
        """Whether a value comes from the model's inputs."""
        return isinstance(value, self.library.KerasTensor)

    def reshaped(self, given: Any, shape: Sequence[int | None]) -> Any:
        """The same numbers of each sample in another shape; one side may be open."""
        shape = tuple(shape)
        if shape == tuple(given.shape):
            return given
        sides = [-1 if side is None else side for side in shape[1:]]
        known = None not in given.shape[1:]
        fits = known and -1 not in sides and prod(given.shape[1:]) == prod(sides)
        if not sides or sides.count(-1) > 1 or not (fits or -1 in sides):
            raise NotRebuiltError(f"it makes {list(shape)} of {list(given.shape)}")
        if len(sides) == 1 and known and len(given.shape) > 2:
            return self.layer("Flatten", given)
        return self.layer("Reshape", given, target_shape=tuple(sides))


def plain(value: Any) -> Any:
    """A constant as numpy, from a configuration or from TensorFlow; small enough to be stored as text."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" or array.size > MOST_CONSTANTS:
        raise NotRebuiltError(f"a constant of type {array.dtype} with {array.size:,} numbers")
    return array


def integers(value: Any) -> list[int]:
    """A constant of structure: axes, sizes."""
    try:
        array = plain(value)
    except (TypeError, ValueError) as error:
        raise NotRebuiltError("its sizes or axes are computed") from error
    if array.dtype.kind not in "iu" and array.size:
        raise NotRebuiltError("its sizes or axes are not integers")
    return [int(each) for each in array.reshape(-1)]


def axes_of(given: Any, axis: Any) -> list[int]:
    """Axes, counted from the front; None stands for all."""
    rank = len(given.shape)
    axes = list(range(rank)) if axis is None else integers(axis)
    if any(not -rank <= each < rank for each in axes):
        raise NotRebuiltError(f"{axes} are no axes of {list(given.shape)}")
    return sorted({each % rank for each in axes})


def _operand(value: Any, other: Any) -> Any:
    """A constant beside a tensor: a number, or an array of the tensor's type."""
    array = plain(value)
    if array.ndim == 0:
        return float(array) if "float" in other.dtype else int(array)
    if array.ndim >= len(other.shape) and array.shape[-len(other.shape)] != 1:
        raise NotRebuiltError("its constant differs from sample to sample")
    return array.astype(other.dtype)


def arithmetic(kind: str, layer: bool = False) -> Rule:
    """Two operands, element by element: a layer for two tensors alike, otherwise an operation."""

    def rule(step: FunctionCall, x: Any, y: Any) -> Any:
        tensors = [each for each in (x, y) if step.computed(each)]
        if not tensors:
            return _known(kind, x, y)
        if len(tensors) == 2:
            if layer and len(x.shape) == len(y.shape):
                return step.layer(kind, [x, y])
            return step.operation(NUMPY, kind, x, y)
        operands = [each if step.computed(each) else _operand(each, tensors[0]) for each in (x, y)]
        return step.operation(NUMPY, kind, *operands)

    return rule


def _known(kind: str, x: Any, y: Any) -> Any:
    """The same of two sizes that are known, or None where one of them is the batch."""
    if x is None or y is None:
        return None
    functions = {"Add": np.add, "Subtract": np.subtract, "Multiply": np.multiply, "FloorDivide": np.floor_divide}
    if kind not in functions:
        raise NotRebuiltError("both of its operands are sizes")
    return functions[kind](plain(x), plain(y)).tolist()


def unary(module: str, kind: str, **config: Any) -> Rule:
    """An operation on one tensor, element by element."""
    return lambda step, x: step.operation(module, kind, x, **config)


def activation(name: str) -> Rule:
    """An activation by Keras' name."""
    return lambda step, x: step.layer("Activation", x, activation=name)


def silu(step: FunctionCall, x: Any, beta: Any = 1.0) -> Any:
    """SiLU, x * sigmoid(beta x); Keras knows a beta of 1."""
    if float(plain(beta)) != 1:
        raise NotRebuiltError(f"its beta is {float(plain(beta)):g}")
    return step.layer("Activation", x, activation="silu")


def gelu(step: FunctionCall, x: Any, approximate: bool = False) -> Any:
    """GELU, exact or not."""
    return step.operation(NN, "Gelu", x, approximate=bool(approximate))


def leaky_relu(step: FunctionCall, x: Any, alpha: float = 0.2) -> Any:
    """Leaky ReLU."""
    return step.layer("LeakyReLU", x, negative_slope=float(plain(alpha)))


def softmax(step: FunctionCall, x: Any, axis: Any = None) -> Any:
    """Softmax over one axis, the last by default."""
    (axis,) = [-1] if axis is None else integers(axis)
    return step.layer("Softmax", x, axis=axis)


def clip(step: FunctionCall, x: Any, low: Any, high: Any) -> Any:
    """Between two numbers: a ReLU where the lower one is 0."""
    low, high = float(plain(low)), float(plain(high))
    if low == 0 and np.isfinite(high):
        return step.layer("ReLU", x, max_value=high)
    return step.operation(NUMPY, "Clip", x, x_min=low, x_max=high)


def squared_difference(step: FunctionCall, x: Any, y: Any) -> Any:
    """(x - y)^2."""
    difference = arithmetic("Subtract")(step, x, y)
    return step.layer("Multiply", [difference, difference])


def square(step: FunctionCall, x: Any) -> Any:
    """A product, which has an 8-bit form."""
    return step.layer("Multiply", [x, x])


def negative(step: FunctionCall, x: Any) -> Any:
    """Likewise."""
    return step.operation(NUMPY, "Multiply", x, -1.0)


def add_n(step: FunctionCall, values: Any) -> Any:
    """The sum of several tensors."""
    return step.layer("Add", list(values)) if len(values) > 1 else values[0]


def same(step: FunctionCall, x: Any) -> Any:
    """Return the argument: for identity and stopped gradients."""
    del step
    return x


def cast(step: FunctionCall, x: Any, dtype: Any) -> Any:
    """To another type of number."""
    if not step.computed(x):
        return x
    name = getattr(dtype, "name", dtype)
    if not isinstance(name, str):
        raise NotRebuiltError("its type is no type")
    return x if name == x.dtype else step.operation(CORE, "Cast", x, dtype=name)


def matmul(step: FunctionCall, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """A product of matrices; with one constant matrix on the right a dense layer."""
    if transpose_a or not step.computed(a):
        raise NotRebuiltError("its left matrix is transposed, or a constant")
    if step.computed(b):
        if transpose_b or len(a.shape) < 3 or len(b.shape) < 3:
            raise NotRebuiltError("it mixes the samples of a batch, or its right matrix is transposed")
        return step.operation(NUMPY, "Matmul", a, b)
    right = plain(b).astype(np.float32)
    right = right.T if transpose_b else right
    if right.ndim != 2:
        raise NotRebuiltError(f"its right side has the shape {list(right.shape)}")
    dense = step.library.layers.Dense(right.shape[1], use_bias=False, name=step.fresh())
    made = dense(a)
    dense.set_weights([right])
    return made


def l2_normalize(step: FunctionCall, x: Any, axis: Any = None, epsilon: Any = 1e-12) -> Any:
    """Vectors of length 1; Keras' epsilon is the same."""
    if axis is None or float(plain(epsilon)) > 1e-9 or 0 in axes_of(x, axis):
        raise NotRebuiltError("it normalizes over the batch, or with a large epsilon")
    return step.layer("UnitNormalization", x, axis=[axis - len(x.shape) for axis in axes_of(x, axis)])


@dataclass(frozen=True)
class TfFunction:
    """A function of TensorFlow that has a counterpart.

    Attributes:
        rule: makes it.
        parameters: those of the rule in the function's order, each with the names that TensorFlow has for it
            or had ("x|features axis|dim").
    """

    rule: Rule
    parameters: str

    def call(self, step: FunctionCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the output for the arguments of one call.

        Raises:
            NotRebuiltError: the rule has no counterpart for these.
        """
        names = [each.split("|") for each in self.parameters.split()]
        place = {alias: aliases[0] for aliases in names for alias in aliases}
        if len(args) > len(names):
            raise NotRebuiltError(f"it is called with {len(args)} arguments")
        given = {aliases[0]: value for aliases, value in zip(names, args, strict=False)}
        for name, value in kwargs.items():
            if name in place and value is not None:
                given[place[name]] = value
            elif name not in place and name != "name" and value not in (None, False, "NHWC"):
                raise NotRebuiltError(f"it is called with {name}={str(value)[:40]}")
        return self.rule(step, **given)
