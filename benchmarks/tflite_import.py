"""Import of float .tflite files: `python benchmarks/tflite_import.py [NAME ...] [--list] [--no-files]`.

Networks of keras.applications, and others with further layers, get random weights and batch norm statistics and are
converted to float .tflite files. Each file is imported and compared with the TFLite runtime on random samples.

Without names, all networks run, then the float files of CORALLINE_SHARED. Prints a table: operators of the file,
layers, and the largest difference relative to the largest output, or the operators without a Keras layer. The exit code
is 1 if a file is refused because its outputs differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import repository  # noqa: F401 - the search path

import networks
from paths import SHARED

from compress.core.errors import ModelError
from compress.learning.quantization import export
from compress.model.importers.tflite import tflite_file
from compress.model.ir.tensorflow import keras as door

SIZES = {
    **dict.fromkeys(("MobileNet", "MobileNetV2", "MobileNetV3Small", "MobileNetV3Large", "EfficientNetB0"), 64),
    **dict.fromkeys(("EfficientNetV2B0", "ResNet50", "ResNet50V2", "DenseNet121", "NASNetMobile", "ConvNeXtTiny"), 64),
    **dict.fromkeys(("Xception", "InceptionV3"), 96),
}


def unet(keras: Any) -> Any:
    """Return a U-Net with transposed convolution, bilinear resize and concatenations."""
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
    """Return a transformer block."""
    layers = keras.layers
    rows = keras.Input((16, 24))
    x = layers.LayerNormalization()(rows)
    x = layers.Add()([rows, layers.MultiHeadAttention(4, 8)(x, x)])
    y = layers.Dense(48, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.GlobalAveragePooling1D()(layers.Add()([x, layers.Dense(24)(y)]))
    return keras.Model(rows, layers.Dense(5, activation="softmax")(x))


def dilated(keras: Any) -> Any:
    """Return a network of causal, dilated convolutions along time."""
    layers = keras.layers
    rows = x = keras.Input((64, 3))
    for rate in (1, 2, 4):
        x = layers.Conv1D(8, 3, padding="causal", dilation_rate=rate, activation="relu")(x)
    return keras.Model(rows, layers.Dense(5)(layers.Flatten()(layers.MaxPooling1D()(x))))


def recurrent(kind: str, unroll: bool) -> networks.Builder:
    """Return the builder of an LSTM or GRU over 8 steps."""

    def build(keras: Any) -> Any:
        rows = keras.Input((8, 6))
        return keras.Model(rows, keras.layers.Dense(5)(getattr(keras.layers, kind)(8, unroll=unroll)(rows)))

    return build


def application(name: str, size: int) -> networks.Builder:
    """Return the builder of a network of keras.applications."""
    return lambda keras: getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)


CASES: dict[str, Callable[[Any], Any]] = {
    **{builder.__name__: builder for builder in (*networks.ALL, unet, attention, dilated)},
    **{f"{kind}, unrolled": recurrent(kind, True) for kind in ("LSTM", "GRU")},
    "LSTM": recurrent("LSTM", False),
    **{name: application(name, size) for name, size in SIZES.items()},
}


def converted(names: Sequence[str], folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and .tflite file of each network; every file replaces the one before."""
    keras = door(0)
    path = folder / "model.tflite"
    for name in names:
        path.write_bytes(export.convert_float(networks.randomized(CASES[name](keras))))
        yield name, path


def row(name: str, path: Path) -> tuple[str, bool] | None:
    """Import a file; return its row of the table, and False if its outputs differ. None: the file is quantized."""
    file = tflite_file.read(path)
    if file.imported is None:
        return None
    operators = len(file.graph.operators)
    if file.problems:
        listed = "; ".join(map(str, file.problems[:3]))
        return f"| {name} | {operators} | none | {len(file.problems)} without layers: {listed} |", True
    try:
        model, parity = tflite_file.load(file)
    except ModelError as error:
        return f"| {name} | {operators} | none | {error} |", False
    return f"| {name} | {operators} | {len(model.layers)} | {parity.max_rel:.1e} |", True


def main() -> int:
    """Import the networks and files that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks (default: all, and the shared files)")
    parser.add_argument("--list", action="store_true", help="print the names of the networks, and end")
    parser.add_argument("--no-files", action="store_true", help="leave out the files of CORALLINE_SHARED")
    options = parser.parse_args()
    unknown = sorted({*options.names} - {*CASES})
    if unknown:
        parser.error(f"unknown networks {unknown}; allowed: {', '.join(CASES)}")
    if options.list:
        print("\n".join(CASES))
        return 0
    warnings.simplefilter("ignore")
    shared = [] if options.names or options.no_files else sorted(SHARED.glob("models/**/*.tflite"))
    print("| model | operators | layers | difference |\n|---|---|---|---|")
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        files = chain(converted(options.names or [*CASES], Path(folder)), ((path.name, path) for path in shared))
        for name, path in files:
            result = row(name, path)
            if result is not None:
                print(result[0], flush=True)
                different += not result[1]
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
