"""Fake quantization in Keras: layers that round in training as the 8-bit file will.

Source: Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, CVPR 2018. Weights are rounded by `kernels`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from compress.quantization import kernels
from compress.quantization.plan import LEVELS, QuantizationPlan
from compress.training.network import Layer, Network, Tensor
from compress.training.tensorflow import keras

PACKAGE = "coralline"
FAKE = "FakeQuantize"
SWITCHED = "SwitchedFakeQuantize"
AVERAGE = 0.99
"""Share of a range that stays in one training step, where it follows the data."""
#: Weighted layers and the axes of their kernel that one scale runs over.
SCALE_AXES = {
    "Conv1D": (0, 1),
    "Conv2D": (0, 1, 2),
    "Conv1DTranspose": (0, 2),
    "Conv2DTranspose": (0, 1, 3),
    "DepthwiseConv1D": (0,),
    "DepthwiseConv2D": (0, 1),
    "Dense": (0, 1),
}


@cache
def layers() -> dict[str, Any]:
    """The layer classes, registered with Keras. Made when first asked, since Keras is imported late."""
    library = keras()
    register = library.saving.register_keras_serializable(PACKAGE)
    plain = _fake_quantize(library)
    made = {FAKE: register(plain), SWITCHED: register(_switched(plain))}
    for kind, axes in SCALE_AXES.items():
        made[f"Quantized{kind}"] = register(kernels.quantized(library, kind, axes))
    return made


def _fake_quantize(library: Any) -> Any:
    """The layer that rounds activations."""
    import tensorflow

    class FakeQuantize(library.layers.Layer):  # type: ignore[misc]
        """Rounds to 8 bits between `low` and `high`.

        With `average` < 1 the range follows the data in training; where it is `learnt`, its gradient. Either
        only while the weight `moves` is 1.
        """

        def __init__(
            self, low: float, high: float, average: float = 1.0, learnt: bool = False, **settings: Any
        ) -> None:
            super().__init__(**settings)
            self.limits, self.average, self.learnt = (low, high), average, learnt

        def build(self, shape: Any) -> None:
            del shape
            if self.average == 1.0 and not self.learnt:  # constants: with variables a conversion takes a fifth longer
                return
            constant = library.initializers.Constant
            self.low = self.add_weight(name="low", shape=(), initializer=constant(self.limits[0]), trainable=False)
            self.high = self.add_weight(name="high", shape=(), initializer=constant(self.limits[1]), trainable=False)
            self.moves = self.add_weight(name="moves", shape=(), initializer="ones", trainable=False)
            if self.learnt:
                self.stretch = self.add_weight(name="stretch", shape=(2,), initializer="zeros")

        def compute_output_spec(self, x: Any, training: bool = False) -> Any:
            del training  # Keras takes some products for sparse; TensorFlow would not round those
            return library.KerasTensor(x.shape, dtype=x.dtype)

        def call(self, x: Any, training: bool = False) -> Any:
            if self.average == 1.0 and not self.learnt:
                return tensorflow.quantization.fake_quant_with_min_max_args(x, *self.limits)
            if not training:
                return tensorflow.quantization.fake_quant_with_min_max_vars(x, self.low, self.high)
            if self.learnt:
                return self.rounded_in_learnt_range(x)
            for limit, found in ((self.low, library.ops.min(x)), (self.high, library.ops.max(x))):
                found = library.ops.clip(found, *((-1e30, 0.0) if limit is self.low else (1e-6, 1e30)))
                step = self.moves * (1 - self.average)
                limit.assign(limit + step * (library.ops.stop_gradient(found) - limit))
            return tensorflow.quantization.fake_quant_with_min_max_vars(x, self.low, self.high)

        def rounded_in_learnt_range(self, x: Any) -> Any:
            """Rounded as by TensorFlow, with a gradient for both ends of the range.

            Source: Bhalgat et al., LSQ+, CVPR workshops 2020: the error of rounding is a gradient for the step, that
            of saturation one for the ends (TensorFlow's own gradient has the second part only). As in Jain et al.,
            Trained Quantization Thresholds, MLSys 2020, logarithms are learnt: a step is a share of the range.
            """
            ops, still = library.ops, library.ops.stop_gradient
            low, high = (limit * ops.exp(self.stretch[end]) for end, limit in enumerate(self.limits))
            for limit, learnt in ((self.low, low), (self.high, high)):
                limit.assign(limit + self.moves * (still(learnt) - limit))
            low, high = self.low + self.moves * (low - still(low)), self.high + self.moves * (high - still(high))
            step, inside = (high - low) / LEVELS, ops.minimum(ops.maximum(x, low), high)
            made = tensorflow.quantization.fake_quant_with_min_max_vars(x, self.low, self.high)
            return inside + step * still((made - inside) / step)

        def get_config(self) -> dict[str, Any]:
            low, high = self.limits
            own = {"low": low, "high": high, "average": self.average, "learnt": self.learnt}
            return {**super().get_config(), **own}

    return FakeQuantize


def _switched(rounding: Any) -> Any:
    """FakeQuantize with a switch."""

    class SwitchedFakeQuantize(rounding):  # type: ignore[misc]
        """Rounds only while its weight `on` is 1."""

        def build(self, shape: Any) -> None:
            super().build(shape)
            self.on = self.add_weight(name="on", shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            return x + self.on * (super().call(x, training) - x)

    return SwitchedFakeQuantize


def insert(
    network: Network,
    points: Mapping[Tensor, str],
    plan: QuantizationPlan,
    following: Collection[str] = (),
    *,
    learnt: bool = False,
) -> Network:
    """The network with a FakeQuantize behind every point; tensors of one name share one layer.

    Args:
        network: in canonical form.
        points: what `points.find` found.
        plan: a range for every point.
        following: the points whose range follows the data in training.
        learnt: whether it follows its gradient instead.
    """
    layers()
    names = layer_names(network, points)
    calls: dict[str, list[Tensor]] = {name: [] for name in names}
    for tensor, name in points.items():
        calls[name].append(tensor)
    moved = {
        tensor: Tensor(names[name], call) for name, tensors in calls.items() for call, tensor in enumerate(tensors)
    }
    rerouted = network.edited({}, moved)
    added = {
        names[name]: _layer(
            names[name],
            tensors,
            plan.ranges[name],
            average=AVERAGE if name in following and not learnt else 1.0,
            learnt=name in following and learnt,
        )
        for name, tensors in calls.items()
    }
    shapes = {after: network.shapes[before] for before, after in moved.items()}
    return replace(rerouted, layers={**rerouted.layers, **added}, shapes={**network.shapes, **shapes})


def layer_names(network: Network, points: Mapping[Tensor, str]) -> dict[str, str]:
    """The name of the FakeQuantize layer of every point."""
    names: dict[str, str] = {}
    for name in dict.fromkeys(points.values()):
        free = f"{name}_quantized".replace(":", "_")
        while free in network.layers or free in names.values():
            free += "_"
        names[name] = free
    return names


def _layer(name: str, tensors: list[Tensor], limits: tuple[float, float], **settings: Any) -> Layer:
    config = {"name": name, "low": limits[0], "high": limits[1], **settings}
    entry = {"module": None, "class_name": FAKE, "config": config, "registered_name": f"{PACKAGE}>{FAKE}"}
    calls = tuple({"args": [tensor], "kwargs": {}} for tensor in tensors)
    return Layer(name, FAKE, entry, calls, ())


def switched(network: Network) -> Network:
    """The network with every FakeQuantize off until its weight `on` is set to 1."""
    changed = {}
    for layer in network.layers.values():
        if layer.kind == FAKE:
            entry = {**layer.entry, "class_name": SWITCHED, "registered_name": f"{PACKAGE}>{SWITCHED}"}
            changed[layer.name] = replace(layer, kind=SWITCHED, entry=entry)
    return network.edited(changed, {})


def with_rounded_weights(network: Network) -> Network:
    """The network with every weighted layer replaced by one that rounds its kernel in training."""
    layers()
    changed = {}
    for layer in network.layers.values():
        if layer.kind in SCALE_AXES:
            kind = f"Quantized{layer.kind}"
            entry = {**layer.entry, "module": None, "class_name": kind, "registered_name": f"{PACKAGE}>{kind}"}
            changed[layer.name] = replace(layer, kind=kind, entry=entry)
    return network.edited(changed, {})
