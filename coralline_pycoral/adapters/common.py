"""Functions for every model with one image as its input.

Images are arrays [height, width, channels] or images of Pillow.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import numpy as np

from coralline_pycoral.utils.edgetpu import BundledInterpreter, bundle_of
from deploy.contract.preprocessing import Array


def output_tensor(interpreter: Any, i: int) -> Array:
    """Return the memory of an output tensor."""
    tensor: Array = interpreter.tensor(interpreter.get_output_details()[i]["index"])()
    return tensor


def input_details(interpreter: Any, key: str) -> Any:
    """Return a property of the input, such as `shape`, `dtype` or `quantization`."""
    return interpreter.get_input_details()[0][key]


def input_size(interpreter: Any) -> Tuple[int, int]:
    """Return the width and height of the input."""
    _, height, width, _ = input_details(interpreter, "shape")
    return width, height


def input_tensor(interpreter: Any) -> Array:
    """Return the memory of the input, [height, width, channels].

    Do not keep it: the runtime refuses to run while a reference exists.
    """
    tensor: Array = interpreter.tensor(input_details(interpreter, "index"))()
    return tensor[0]


def set_input(interpreter: Any, data: Any) -> None:
    """Write an image of the right size into the input.

    If the interpreter comes from a bundle whose input is not uint8, a uint8 image is preprocessed as the bundle says.
    Otherwise the values are written as they are.
    """
    opened = _preprocessing_bundle(interpreter, data)
    if opened is None:
        input_tensor(interpreter)[:, :] = data
    else:
        input_tensor(interpreter)[:, :] = _preprocessed(opened, np.asarray(data))


def set_resized_input(
    interpreter: Any, size: Tuple[int, int], resize: Callable[[Tuple[int, int]], Any]
) -> Tuple[Any, Tuple[float, float]]:
    """Write an image into the input with its aspect ratio, at the top left; the rest becomes 0.

    Args:
        interpreter: the interpreter.
        size: the width and height of the image.
        resize: a function from a width and height to the image in this size.

    Returns:
        The resized image, and its scale along x and y.
    """
    width, height = input_size(interpreter)
    image_width, image_height = size
    scale = min(width / image_width, height / image_height)
    new_width = int(image_width * scale)
    new_height = int(image_height * scale)
    channels = int(input_details(interpreter, "shape")[3])
    result = resize((new_width, new_height))
    pixels = np.reshape(result, (new_height, new_width, channels))
    opened = _preprocessing_bundle(interpreter, pixels)
    if opened is None:
        tensor = input_tensor(interpreter)
        tensor.fill(0)
        tensor[:new_height, :new_width] = pixels
    else:
        padded = np.zeros((height, width, channels), np.uint8)
        padded[:new_height, :new_width] = pixels
        input_tensor(interpreter)[:, :] = _preprocessed(opened, padded)
    return result, (scale, scale)


def _preprocessing_bundle(interpreter: Any, data: Any) -> Optional[BundledInterpreter]:
    """Return the bundle that preprocesses an image; None: the image is written as it is."""
    opened = bundle_of(interpreter)
    if opened is None or input_details(interpreter, "dtype") == np.uint8:
        return None
    return opened if np.asarray(data).dtype == np.uint8 else None


def _preprocessed(opened: BundledInterpreter, image: Array) -> Array:
    tensor = opened.bundle.models[opened.role].inputs[0]
    values = opened.bundle.preprocessing(image)
    return tensor.stored(values.reshape(-1)).reshape(tensor.shape[1:])
