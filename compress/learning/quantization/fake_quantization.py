"""Fake quantization in Keras: layers that round activations as the 8-bit file does.

Source: Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, CVPR 2018. Weights are rounded by
`fake_quantized_layers`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from compress.learning.quantization import fake_quantized_layers
from compress.learning.quantization.plan import LEVELS, QuantizationPlan
from compress.model.ir.keras_graph import Layer, LayerOutput, Network
from compress.model.ir.layer_specs import all_specs, spec_of
from compress.model.ir.tensorflow import keras

PACKAGE = "coralline"
FAKE = "FakeQuantize"
SWITCHED = "SwitchedFakeQuantize"
LEARNED = "LearnedFakeQuantize"
FIXED = "FixedFakeQuantize"
AVERAGE = 0.99
"""Part of the old range in the moving average of one training step."""


@cache
def layers() -> dict[str, Any]:
    """Return the layer classes, registered with Keras; defined at the first call, since Keras is imported late."""
    library = keras()
    register = library.saving.register_keras_serializable(PACKAGE)
    plain = _fake_quantize(library)
    classes = {FAKE: register(plain), SWITCHED: register(_switched(plain)), LEARNED: register(_learned(library, plain))}
    classes[FIXED] = register(_fixed(library))
    for spec in all_specs():
        if spec.kernel is not None:
            quantized = fake_quantized_layers.quantized(library, spec.kind, spec.kernel)
            classes[f"Quantized{spec.kind}"] = register(quantized)
    return classes


def _fake_quantize(library: Any) -> Any:
    """Return the class of the layer that rounds activations."""
    import tensorflow

    class FakeQuantize(library.layers.Layer):  # type: ignore[misc]
        """Rounds to 8 bits between `low` and `high`.

        With `average` < 1 the range follows the data in training, as long as the weight `moves` is 1.
        """

        def __init__(self, low: float, high: float, average: float = 1.0, **settings: Any) -> None:
            super().__init__(**settings)
            self.limits, self.average = (low, high), average

        def build(self, shape: Any) -> None:
            del shape
            if self.average == 1.0:  # constants: with variables a conversion takes 20% longer
                return
            for name, start in (("low", self.limits[0]), ("high", self.limits[1]), ("moves", 1.0)):
                constant = library.initializers.Constant(start)
                setattr(self, name, self.add_weight(name=name, shape=(), initializer=constant, trainable=False))

        def compute_output_spec(self, x: Any, training: bool = False) -> Any:
            del training  # Keras infers sparse for some products, which TensorFlow does not round
            return library.KerasTensor(x.shape, dtype=x.dtype)

        def call(self, x: Any, training: bool = False) -> Any:
            if self.average == 1.0:
                return tensorflow.quantization.fake_quant_with_min_max_args(x, *self.limits)
            if training:
                for limit, extreme in ((self.low, library.ops.min(x)), (self.high, library.ops.max(x))):
                    extreme = library.ops.clip(extreme, *((-1e30, 0.0) if limit is self.low else (1e-6, 1e30)))
                    step = self.moves * (1 - self.average)
                    limit.assign(limit + step * (library.ops.stop_gradient(extreme) - limit))
            return tensorflow.quantization.fake_quant_with_min_max_vars(x, self.low, self.high)

        def get_config(self) -> dict[str, Any]:
            low, high = self.limits
            return {**super().get_config(), "low": low, "high": high, "average": self.average}

    return FakeQuantize


def _fixed(library: Any) -> Any:
    """The operation that rounds activations in a range that never moves."""
    import tensorflow

    class FixedFakeQuantize(library.Operation):  # type: ignore[misc]
        """Rounds as FakeQuantize does with `average` 1. No layer, since those take Keras much longer."""

        def __init__(self, low: float, high: float, name: str | None = None) -> None:
            super().__init__(name=name)
            self.limits = low, high

        def compute_output_spec(self, x: Any) -> Any:
            return library.KerasTensor(x.shape, dtype=x.dtype)

        def call(self, x: Any) -> Any:
            with library.name_scope(self.name):
                pass  # layers open theirs twice, once to be built: tensors keep the names that these give them
            with library.name_scope(self.name):
                return tensorflow.quantization.fake_quant_with_min_max_args(x, *self.limits)

        def get_config(self) -> dict[str, Any]:
            return {"name": self.name, "low": self.limits[0], "high": self.limits[1]}

    return FixedFakeQuantize


def _learned(library: Any, rounding: Any) -> Any:
    """Return the class of FakeQuantize with a gradient for both ends of its range."""
    import tensorflow

    class LearnedFakeQuantize(rounding):  # type: ignore[misc]
        """Trains its range by gradient, as long as the weight `moves` is 1; `average` must be 0.

        Source: Bhalgat et al., LSQ+, CVPR workshops 2020: the error of rounding is a gradient for the step, that
        of saturation one for the ends (TensorFlow's own gradient has the second part only). As in Jain et al.,
        Trained Quantization Thresholds, MLSys 2020, logarithms are trained: a step is relative to the range.
        """

        def build(self, shape: Any) -> None:
            super().build(shape)
            self.stretch = self.add_weight(name="stretch", shape=(2,), initializer="zeros")

        def call(self, x: Any, training: bool = False) -> Any:
            rounded = tensorflow.quantization.fake_quant_with_min_max_vars
            if not training:
                return rounded(x, self.low, self.high)
            ops = library.ops
            constant = ops.stop_gradient
            low, high = (limit * ops.exp(self.stretch[end]) for end, limit in enumerate(self.limits))
            for limit, trained in ((self.low, low), (self.high, high)):
                limit.assign(limit + self.moves * (constant(trained) - limit))
            low = self.low + self.moves * (low - constant(low))
            high = self.high + self.moves * (high - constant(high))
            step = (high - low) / LEVELS
            clipped = ops.minimum(ops.maximum(x, low), high)
            return clipped + step * constant((rounded(x, self.low, self.high) - clipped) / step)

    return LearnedFakeQuantize


def _switched(rounding: Any) -> Any:
    """Return the class of FakeQuantize with a switch."""
    import tensorflow

    class SwitchedFakeQuantize(rounding):  # type: ignore[misc]
        """Rounds only while its weight `on` is 1."""

        def build(self, shape: Any) -> None:
            super().build(shape)
            self.on = self.add_weight(name="on", shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            rounded = super().call
            return tensorflow.cond(self.on > 0.5, lambda: rounded(x, training), lambda: tensorflow.identity(x))

    return SwitchedFakeQuantize


def insert(
    network: Network,
    points: Mapping[LayerOutput, str],
    plan: QuantizationPlan,
    following: Collection[str] = (),
    *,
    learned: bool = False,
) -> Network:
    """Return the network with a FakeQuantize after every point; tensors of one name share one layer.

    The range of the points that are `following` follows the data in training, or is `learned` by gradient instead.
    """
    layers()
    names = layer_names(network, points)
    calls: dict[str, list[LayerOutput]] = {name: [] for name in names}
    for tensor, name in points.items():
        calls[name].append(tensor)
    moved = {
        tensor: LayerOutput(names[name], call) for name, tensors in calls.items() for call, tensor in enumerate(tensors)
    }
    rerouted = network.edited({}, moved)
    added = {
        names[name]: _layer(
            names[name],
            tensors,
            plan.ranges[name],
            (0.0 if learned else AVERAGE) if name in following else 1.0,
        )
        for name, tensors in calls.items()
    }
    shapes = {after: network.shapes[before] for before, after in moved.items()}
    return replace(rerouted, layers={**rerouted.layers, **added}, shapes={**network.shapes, **shapes})


def layer_names(network: Network, points: Mapping[LayerOutput, str]) -> dict[str, str]:
    """Return the name of the FakeQuantize layer of every point."""
    names: dict[str, str] = {}
    for name in dict.fromkeys(points.values()):
        free = f"{name}_quantized".replace(":", "_")
        while free in network.layers or free in names.values():
            free += "_"
        names[name] = free
    return names


def _layer(name: str, tensors: list[LayerOutput], limits: tuple[float, float], average: float) -> Layer:
    config = {"name": name, "low": limits[0], "high": limits[1], "average": average}
    kind = FAKE if average else LEARNED
    calls = tuple({"args": [tensor], "kwargs": {}} for tensor in tensors)
    return Layer(name, kind, _entry(kind, config), calls, ())


def _entry(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the serialized form of a layer or operation of `layers`."""
    return {"module": None, "class_name": kind, "config": config, "registered_name": f"{PACKAGE}>{kind}"}


def switched(network: Network) -> Network:
    """Return the network with every FakeQuantize off until its weight `on` is set to 1."""
    rounding = [layer for layer in network.layers.values() if layer.kind == FAKE]
    changed = {layer.name: replace(layer, kind=SWITCHED, entry=_entry(SWITCHED, layer.config)) for layer in rounding}
    return network.edited(changed, {})


def fixed(network: Network) -> Network:
    """Return the network with every FakeQuantize as an operation without weights, for ranges that are final."""
    changed = {}
    for layer in network.layers.values():
        if layer.kind == FAKE:
            config = {name: layer.config[name] for name in ("name", "low", "high")}
            changed[layer.name] = replace(layer, kind=FIXED, entry=_entry(FIXED, config))
    return network.edited(changed, {})


def with_rounded_weights(network: Network) -> Network:
    """Return the network with every layer that has a kernel replaced by one that rounds it in training."""
    layers()
    changed = {}
    for layer in network.layers.values():
        if spec_of(layer).kernel is not None:
            kind = f"Quantized{layer.kind}"
            changed[layer.name] = replace(layer, kind=kind, entry={**layer.entry, **_entry(kind, layer.config)})
    return network.edited(changed, {})
