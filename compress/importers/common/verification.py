"""Whether a rebuilt model answers as its file does in the runtime that the file was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.ir import keras_graph as networks
from compress.ir import tensorflow
from compress.ir.keras_graph import Network

if TYPE_CHECKING:
    import keras

TOLERANCE = 1e-4
"""Largest difference of a tensor, relative to the largest number in it."""
RANDOM_SAMPLES = 2
Feeds = Sequence[Sequence[NDArray[Any]]]
"""For each run one array for each input."""


def built(network: Network) -> keras.Model:
    """The network as a Keras model.

    Raises:
        ModelError: Keras does not take it, or makes tensors of other shapes than the file says.
    """
    import tensorflow as tf

    own = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError, RuntimeError)
    try:
        model = networks.build(network)
        shapes = networks.read(model).shapes
    except (*own, ValueError, TypeError, tf.errors.OpError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"Keras does not take it: {first[:300]}") from error
    for tensor, shape in network.shapes.items():
        if shapes.get(tensor, shape) != shape:
            raise ModelError(f"layer {tensor.layer!r} makes {list(shapes[tensor])} in Keras, and {list(shape)} here")
    return model


def random(shapes: Sequence[Sequence[int]]) -> list[list[NDArray[np.float32]]]:
    """Samples between 0 and 1, and normal ones, for inputs of these shapes."""
    generator = np.random.default_rng(0)
    draws = (generator.random, generator.standard_normal)
    return [[np.asarray(draw(shape), np.float32) for shape in shapes] for draw in draws for _ in range(RANDOM_SAMPLES)]


def answers(model: Any, feed: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """What a Keras model makes of its inputs.

    Raises:
        ModelError: it cannot be run.
    """
    import tensorflow as tf

    try:
        made = model(list(feed) if len(feed) > 1 else feed[0], training=False)
    except (tf.errors.OpError, ValueError, MemoryError) as error:
        raise ModelError(f"Keras cannot run it: {str(error).strip().splitlines()[0][:300]}") from error
    return [np.asarray(value) for value in tensorflow.keras().tree.flatten(made)]


def relative(wanted: NDArray[Any], made: NDArray[Any], least: float = 1e-6) -> float:
    """The largest difference, relative to the largest finite number that is wanted, or to `least` if that is more."""
    if wanted.size != made.size:
        return float("inf")
    wanted, made = wanted.reshape(-1).astype(np.float64), made.reshape(-1).astype(np.float64)
    same = (wanted == made) | (np.isnan(wanted) & np.isnan(made))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(wanted - made))
    scale = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)) / max(scale, least)


def change(wanted: Feeds, again: Feeds) -> list[float]:
    """For each run how much the answers changed, the largest change of a tensor."""
    return [
        max((relative(one, other) for one, other in zip(before, after, strict=True)), default=0.0)
        for before, after in zip(wanted, again, strict=True)
    ]


def nudged(feeds: Feeds) -> list[list[NDArray[Any]]]:
    """The same inputs with every number changed in its last bit."""
    generator = np.random.default_rng(1)
    signs = (np.float32(-np.inf), np.float32(np.inf))
    return [[np.nextafter(array, generator.choice(signs, array.shape)) for array in feed] for feed in feeds]


def too_far(apart: float, where: str, first: str) -> ModelError:
    """The error for a model that answers differently, and the first place in its file where it does."""
    return ModelError(
        f"rebuilt in Keras it answers differently, by {apart:.2g} of the largest output; first at {first}",
        where=where,
        allowed=f"{TOLERANCE:g}",
        todo="please report it, with the file",
    )
