"""Transfer learning: which layers of a model keep their weights, which start later, and which learn more slowly.

The *backbone* of a model is every layer up to the features that its head reads (`compress.model.ir.passes.cut_head`).

Sources: Yosinski et al., How transferable are features in deep neural networks?, 2014 (freezing); Howard and Ruder,
Universal Language Model Fine-tuning for Text Classification, 2018 (gradual unfreezing, one learning rate per layer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from compress.core.errors import ModelError, listing, nearest
from compress.core.settings import Settings
from compress.learning.training.loop import Rate
from compress.model.ir import keras_graph
from compress.model.ir.passes import cut_head
from compress.model.ir.tensorflow import keras, set_weights

BACKBONE = "backbone"
"""The value of `freeze` for all layers of the backbone."""
MAX_LISTED = 40
"""The most layers that a message lists."""


class TransferSettings(Settings):
    """Settings of a training that starts from trained layers."""

    freeze: str | None = None
    """Layers that keep their weights and the statistics of their batch norms: `backbone`, which is every layer before
    the head; or the name of a layer or of a nested model, which is frozen with all layers before it. A layer of a
    nested model has the name of the model before its own: `base_conv1`."""
    unfreeze_until: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Gradual unfreezing: the layers of the backbone start to train one after another, the last one first, and all of
    them train after this fraction of the steps."""
    backbone_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate for the layers of the backbone."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate from one layer of the backbone to the layer before it."""

    @property
    def changes_rates(self) -> bool:
        """Whether layers of the backbone have learning rates of their own."""
        return self.unfreeze_until > 0 or self.backbone_rate < 1 or self.layer_decay < 1


@dataclass(frozen=True)
class _NamedLayers:
    """The layers of a model, those of nested models included.

    Attributes:
        network: the model without nested models.
        live: the Keras layers and operations, by their names in the network.
        nested: the names in the network of the layers of each nested model, by the name of the model.
    """

    network: keras_graph.Network
    live: Mapping[str, Any]
    nested: Mapping[str, Sequence[str]]

    def up_to(self, tensors: Sequence[keras_graph.LayerOutput]) -> list[Any]:
        """Return the Keras layers that some tensors depend on, in order of computation."""
        used = {name for name, _ in keras_graph.used_calls(keras_graph.subnetwork(self.network, list(tensors)))}
        order = dict.fromkeys(layer.name for layer, _ in self.network.in_order() if layer.name in used)
        layers = {id(self.live[name]): self.live[name] for name in order}
        return [layer for layer in layers.values() if isinstance(layer, keras().layers.Layer)]

    def backbone(self) -> list[Any]:
        """Return the Keras layers before the head, in order of computation."""
        return self.up_to([cut_head.feature_map(self.network)])


@contextmanager
def frozen(model: Any, settings: TransferSettings) -> Iterator[int]:
    """Freeze layers of a model for a training, and return their number; afterwards every layer trains again.

    Raises:
        ModelError: the model has no such layer, or would have nothing to train.
    """
    layers = _layers_to_freeze(model, settings.freeze)
    trainable = [layer for layer in layers if layer.trainable]
    for layer in trainable:
        layer.trainable = False
    try:
        if not model.trainable_variables:
            raise ModelError(
                f"freeze: {settings.freeze} leaves no weights to train",
                allowed="a layer before the last one with weights",
            )
        yield len([layer for layer in layers if layer.weights])
    finally:
        for layer in trainable:
            layer.trainable = True


@contextmanager
def flat(model: Any, settings: TransferSettings) -> Iterator[Any]:
    """Yield the model to train: if layers have own rates, of a sequential or nested model a copy without nested models.

    `loop.fit` reads the rates by the paths of the weights. Keras changes the paths when it copies a sequential model,
    and layers of two nested models may have the same. Without an error, the model gets the weights of the copy.

    Raises:
        ModelError: a layer is in several nested models, so that the copy would have it twice.
    """
    layers = _layers(model) if settings.changes_rates else None
    if layers is None or not (layers.nested or isinstance(model, keras().Sequential)):
        yield model
        return
    weighted = {name: layers.live[name] for name, layer in layers.network.layers.items() if layer.weights}
    shared = [name for name, layer in weighted.items() if list(weighted.values()).count(layer) > 1]
    if shared:
        raise ModelError(
            f"{', '.join(shared)} are the same layer, so they cannot have learning rates of their own",
            hint="remove backbone_rate, layer_decay and unfreeze_until",
        )
    copied = keras_graph.build(layers.network)
    yield copied
    for name, layer in weighted.items():
        set_weights(layer, copied.get_layer(name).get_weights())


def rates(model: Any, settings: TransferSettings) -> Mapping[str, Rate]:
    """Return the learning rates of the backbone's weights, by the path of the weight, for a training of this model.

    Raises:
        ModelError: the model has no backbone.
    """
    if not settings.changes_rates:
        return {}
    layers = [layer for layer in reversed(_layers(model).backbone()) if layer.trainable_variables]
    learning_rates = {}
    for depth, layer in enumerate(layers):
        factor = settings.backbone_rate * settings.layer_decay**depth
        start = settings.unfreeze_until * (depth + 1) / len(layers)
        learning_rates.update({variable.path: Rate(factor, start) for variable in layer.trainable_variables})
    return learning_rates


def _layers_to_freeze(model: Any, freeze: str | None) -> Sequence[Any]:
    if freeze is None:
        return []
    layers = _layers(model)
    if freeze == BACKBONE:
        return layers.backbone()
    computed = {layer.name: [layer.name] for layer, _ in layers.network.in_order() if layer.calls}
    names = {**layers.nested, **computed}
    if freeze not in names:
        listed = [*layers.nested, *(name for name in computed if layers.network.layers[name].weights)]
        more = [f"{len(listed) - MAX_LISTED} more"] if len(listed) > MAX_LISTED else []
        raise ModelError(
            f"freeze: the model has no layer {freeze!r}",
            allowed=f"{BACKBONE}, or a layer: {listing([*listed[:MAX_LISTED], *more])}",
            hint=nearest(freeze, [BACKBONE, *names]),
        )
    return layers.up_to([keras_graph.LayerOutput(name) for name in names[freeze]])


def _layers(model: Any) -> _NamedLayers:
    network = keras_graph.read(model)
    live: dict[str, Any] = {}
    nested: dict[str, list[str]] = {}
    for name, (models, operation) in zip(network.layers, _operations(model), strict=True):
        live[name] = operation
        for depth in range(len(models)):
            nested.setdefault("_".join(models[: depth + 1]), []).append(name)
    return _NamedLayers(network, live, nested)


def _operations(model: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the layers and operations of a model with the names of the nested models around them, the outer one first.

    The order is that of `keras_graph.read`: layers of the model itself, then those of nested models without inputs.
    """
    library = keras()
    is_sequential = isinstance(model, library.Sequential)
    operations = (library.Model(model.inputs, model.outputs) if is_sequential else model).operations
    yield from (((), operation) for operation in operations if not isinstance(operation, library.Model))
    for nested in (operation for operation in operations if isinstance(operation, library.Model)):
        for models, operation in _operations(nested):
            if not isinstance(operation, library.layers.InputLayer):
                yield (nested.name, *models), operation
