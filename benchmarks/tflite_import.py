"""Float .tflite files rebuilt with Keras layers: `python benchmarks/tflite_import.py [NAME ...]`.

Networks of keras.applications and some with what these lack, random weights and batch norm statistics, are
converted to float .tflite files. Each file is rebuilt (`compress.importers.tflite.tflite_file`), and both are run on
the same random samples. Real float files of CORALLINE_SHARED come last. Prints a table: operators of the file,
layers, and the largest difference relative to the largest output; or the operators that Keras has no layers for.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import repository  # noqa: F401 - the search path

import networks
from paths import SHARED

from compress.errors import ModelError
from compress.importers.tflite import tflite_file
from compress.ir.tensorflow import keras as door
from compress.quantization import export

SIZES = {
    **dict.fromkeys(("MobileNet", "MobileNetV2", "MobileNetV3Small", "MobileNetV3Large", "EfficientNetB0"), 64),
    **dict.fromkeys(("EfficientNetV2B0", "ResNet50", "ResNet50V2", "DenseNet121", "NASNetMobile", "ConvNeXtTiny"), 64),
    **dict.fromkeys(("Xception", "InceptionV3"), 96),
}


def unet(keras: Any) -> Any:
    """Transposed convolution and bilinear resize up, concatenations across."""
    layers = keras.layers
    image = x = keras.Input((32, 32, 3))
    skips = []
    for filters in (8, 16):
        x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x))
        skips.append(layers.ReLU()(x))
        x = layers.MaxPooling2D()(skips[-1])
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    x = layers.Concatenate()([layers.Conv2DTranspose(16, 3, strides=2, padding="same")(x), skips[1]])
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    x = layers.Concatenate()([layers.UpSampling2D(interpolation="bilinear")(x), skips[0]])
    return keras.Model(image, layers.Conv2D(4, 1, activation="softmax")(x))


def attention(keras: Any) -> Any:
    """A transformer block."""
    layers = keras.layers
    rows = keras.Input((16, 24))
    x = layers.LayerNormalization()(rows)
    x = layers.Add()([rows, layers.MultiHeadAttention(4, 8)(x, x)])
    y = layers.Dense(48, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.GlobalAveragePooling1D()(layers.Add()([x, layers.Dense(24)(y)]))
    return keras.Model(rows, layers.Dense(5, activation="softmax")(x))


def dilated(keras: Any) -> Any:
    """Causal convolutions along time."""
    layers = keras.layers
    rows = x = keras.Input((64, 3))
    for rate in (1, 2, 4):
        x = layers.Conv1D(8, 3, padding="causal", dilation_rate=rate, activation="relu")(x)
    return keras.Model(rows, layers.Dense(5)(layers.Flatten()(layers.MaxPooling1D()(x))))


def recurrent(kind: str, unroll: bool) -> networks.Builder:
    """An LSTM or GRU over 8 steps."""

    def build(keras: Any) -> Any:
        rows = keras.Input((8, 6))
        return keras.Model(rows, keras.layers.Dense(5)(getattr(keras.layers, kind)(8, unroll=unroll)(rows)))

    return build


def application(name: str, size: int) -> networks.Builder:
    """One of keras.applications."""
    return lambda keras: getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)


CASES: dict[str, Callable[[Any], Any]] = {
    **{builder.__name__: builder for builder in (*networks.ALL, unet, attention, dilated)},
    **{f"{kind}, unrolled": recurrent(kind, True) for kind in ("LSTM", "GRU")},
    "LSTM": recurrent("LSTM", False),
    **{name: application(name, size) for name, size in SIZES.items()},
}


def files(names: list[str], folder: Path) -> Iterator[tuple[str, Path]]:
    """The files by name."""
    keras = door(0)
    for name in names or CASES:
        path = folder / "model.tflite"
        path.write_bytes(export.convert_float(networks.randomized(CASES[name](keras))))
        yield name, path
    if not names:
        yield from ((path.name, path) for path in sorted(SHARED.glob("models/**/*.tflite")))


def main() -> None:
    warnings.simplefilter("ignore")
    print("| model | operators | layers | difference |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files(sys.argv[1:], Path(folder)):
            try:
                file = tflite_file.read(path)
                if file.imported is None:
                    continue
                if file.problems:
                    row = f"{len(file.problems)} without layers: {'; '.join(map(str, file.problems[:3]))}"
                    print(f"| {name} | {len(file.graph.operators)} | none | {row} |", flush=True)
                    continue
                model, apart = tflite_file.load(file)
                print(f"| {name} | {len(file.graph.operators)} | {len(model.layers)} | {apart:.1e} |", flush=True)
            except ModelError as error:
                print(f"| {name} | {error} |", flush=True)


if __name__ == "__main__":
    main()
