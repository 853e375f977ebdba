"""The cost of the scales of an earlier file (`quantize: {scales_from: …}`): `python benchmarks/relink_training.py`.

A small network is trained on handwritten digits with several seeds. Each training is quantized with its own ranges, and
with those of the first one. Prints a table, and writes benchmarks/results/relink_training.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import repository

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from compress.learning.quantization import old_scales, post_training
from compress.learning.quantization.search import file_outputs
from compress.learning.quantization.settings import PostTrainingSettings
from compress.model.tflite import graph
from compress.targets import load

RESULTS = repository.RESULTS / "relink_training.json"
SEEDS = range(6)
EPOCHS = 12
SETTINGS = PostTrainingSettings(equalize="off", correct_bias="off")
SAMPLES = 200


def trained(seed: int, images: Any, labels: Any) -> Any:
    """Return a trained network with a shortcut and a depthwise convolution."""
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    first = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(image)))
    second = layers.Conv2D(16, 1)(layers.ReLU()(layers.DepthwiseConv2D(3, padding="same")(first)))
    dense = layers.Dense(32, "relu")(layers.Flatten()(layers.MaxPooling2D()(layers.Add()([first, second]))))
    model = keras.Model(image, layers.Dense(10, "softmax")(dense))
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(images, labels, batch_size=32, epochs=EPOCHS, verbose=0)
    return model


def rewritten(content: bytes) -> bytes:
    return graph.serialize(load("edgetpu").legalize(graph.parse(content)).graph)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    pixels, digits = load_digits(return_X_y=True)
    images = (pixels / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    images, test, labels, test_labels = train_test_split(images, digits, test_size=0.3, random_state=0)
    old, rows = None, []
    for seed in SEEDS:
        model = trained(seed, images, labels)
        quantized = post_training.quantize(model, images[:SAMPLES], images[SAMPLES:], SETTINGS)
        content = rewritten(quantized.content)
        old = old or graph.parse(content)
        plan = old_scales.plan_for(*quantized.calibrated(), old, SETTINGS.io, rewritten)
        result = post_training.quantize(model, images[:SAMPLES], images[SAMPLES:], SETTINGS, plan=plan)
        scaled = old_scales.with_scales(rewritten(result.content), old)
        accuracies = {
            "float": float((model.predict(test, verbose=0).argmax(1) == test_labels).mean()),
            "own_scales": float((file_outputs(content, test).argmax(1) == test_labels).mean()),
            "old_scales": float((file_outputs(scaled.content, test).argmax(1) == test_labels).mean()),
        }
        rows.append({"seed": seed, **accuracies, "clipped_weights": scaled.clipped_weights})
        print(rows[-1], file=sys.stderr)
    RESULTS.write_text(json.dumps({"scales_from_seed": SEEDS[0], "rows": rows}, indent=1) + "\n")
    print("| seed | float | own scales | scales of seed 0 | clipped weights |\n|---|---|---|---|---|")
    for row in rows:
        shown = [f"{row[key]:.3f}" for key in ("float", "own_scales", "old_scales")]
        print(f"| {row['seed']} | {' | '.join(shown)} | {row['clipped_weights']} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
