"""Transfer learning: which layers of a model keep their weights, which start later, and which learn more slowly.

The *backbone* of a model is every layer up to the features that its head reads (`compress.ir.passes.cut_head`).

Sources: Yosinski et al., How transferable are features in deep neural networks?, 2014 (freezing); Howard and Ruder,
Universal Language Model Fine-tuning for Text Classification, 2018 (gradual unfreezing, one learning rate per layer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field

from compress.errors import ModelError
from compress.ir import keras_graph
from compress.ir.passes import cut_head
from compress.settings import Settings
from compress.suggestions import nearest
from compress.training.loop import Rate

BACKBONE = "backbone"
"""The value of `freeze` for all layers of the backbone."""


class TransferSettings(Settings):
    """Settings of a training that starts from trained layers."""

    freeze: str | None = None
    """Layers that keep their weights and the statistics of their batch norms: `backbone`, which is every layer before
    the head; or the name of a layer, which is frozen with all layers before it."""
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


def rates(model: Any, settings: TransferSettings) -> Mapping[str, Rate]:
    """Return the learning rates of the backbone's weights, by the path of the weight.

    Args:
        model: a Keras model.
        settings: the settings.

    Raises:
        ModelError: the model has no backbone.
    """
    if not settings.changes_rates:
        return {}
    layers = [layer for layer in reversed(_backbone(model)) if layer.trainable_variables]
    learning_rates = {}
    for depth, layer in enumerate(layers):
        factor = settings.backbone_rate * settings.layer_decay**depth
        start = settings.unfreeze_until * (depth + 1) / len(layers)
        learning_rates.update({variable.path: Rate(factor, start) for variable in layer.trainable_variables})
    return learning_rates


def _layers_to_freeze(model: Any, freeze: str | None) -> Sequence[Any]:
    if freeze is None:
        return []
    if freeze == BACKBONE:
        return _backbone(model)
    names = [layer.name for layer in model.layers]
    if freeze not in names:
        raise ModelError(
            f"freeze: the model has no layer {freeze!r}",
            allowed=f"{BACKBONE}, or the name of a layer",
            hint=nearest(freeze, [BACKBONE, *names]),
        )
    return _up_to(model, keras_graph.LayerOutput(freeze))


def _backbone(model: Any) -> list[Any]:
    """Return the layers before the head, in order of computation."""
    return _up_to(model, cut_head.feature_map(keras_graph.read(model)))


def _up_to(model: Any, tensor: keras_graph.LayerOutput) -> list[Any]:
    """Return the layers that a tensor depends on, in order of computation."""
    network = keras_graph.read(model)
    used = {name for name, _ in keras_graph.used_calls(keras_graph.subnetwork(network, [tensor]))}
    order = dict.fromkeys(layer.name for layer, _ in network.in_order() if layer.name in used)
    return [model.get_layer(name) for name in order]
