"""Networks for texts that benchmarks/text.py compares with `models/text_cnn.py`: a transformer encoder, and a mixer.

A builder file: `model: {builder: text_networks.py, arguments: {kind: transformer}}`.

transformer: Devlin et al., BERT, 2018 (arXiv 1810.04805), with 2 layers; positions from a depthwise convolution.
mixer: Tolstikhin et al., MLP-Mixer, 2021 (arXiv 2105.01601), with batch norms and ReLU6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def build(
    input_shape: Sequence[int],
    classes: int,
    tokens: int,
    kind: str,
    width: int = 64,
    blocks: int = 2,
    heads: int = 4,
    dropout: float = 0.5,
) -> Any:
    """Return the model; arguments that are also in `models/text_cnn.py` have the same meaning."""
    layers = keras.layers
    text = keras.Input(input_shape, name="tokens")
    x = layers.Embedding(tokens + 1, width, name="embedding")(text)
    x = layers.Dropout(0.6 * dropout)(x)
    if kind == "transformer":
        x = layers.Add()([x, layers.DepthwiseConv1D(3, padding="same", name="positions")(x)])
    for index in range(blocks):
        if kind == "transformer":
            x = _encoder(x, width, heads, f"block{index}")
        else:
            x = _mixer(x, input_shape[0], width, f"block{index}")
    x = layers.GlobalAveragePooling1D(name="pooling")(x)
    x = layers.Dropout(dropout)(x)
    return keras.Model(text, layers.Dense(classes, activation="softmax", name="scores")(x), name=kind)


def _encoder(x: Any, width: int, heads: int, name: str) -> Any:
    layers = keras.layers
    attended = layers.MultiHeadAttention(heads, width // heads, dropout=0.1, name=f"{name}_attention")(x, x)
    x = layers.LayerNormalization(name=f"{name}_norm0")(layers.Add()([x, attended]))
    y = layers.Dense(4 * width, activation="gelu", name=f"{name}_up")(x)
    y = layers.Dense(width, name=f"{name}_down")(y)
    return layers.LayerNormalization(name=f"{name}_norm1")(layers.Add()([x, y]))


def _mixer(x: Any, length: int, width: int, name: str) -> Any:
    layers = keras.layers
    for part, channels in (("positions", length), ("channels", 4 * width)):
        y = layers.Permute((2, 1), name=f"{name}_{part}_turn")(x) if part == "positions" else x
        y = layers.Conv1D(channels, 1, use_bias=False, name=f"{name}_{part}_up")(y)
        y = layers.BatchNormalization(momentum=0.9, name=f"{name}_{part}_up_norm")(y)
        y = layers.ReLU(6.0, name=f"{name}_{part}_relu")(y)
        back = length if part == "positions" else width
        y = layers.Conv1D(back, 1, use_bias=False, name=f"{name}_{part}_down")(y)
        y = layers.BatchNormalization(momentum=0.9, name=f"{name}_{part}_down_norm")(y)
        if part == "positions":
            y = layers.Permute((2, 1), name=f"{name}_{part}_back")(y)
        x = layers.Add(name=f"{name}_{part}_add")([x, y])
    return x
