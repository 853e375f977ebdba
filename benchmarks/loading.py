"""Training on more images than fit in memory: `python benchmarks/loading.py [--images 10000] [--side 96] [--epochs 2]`.

Makes JPEG and PNG files with heights and widths of 96 to 256 pixels in a temporary folder, decodes them once into a
file of the store, as every run does, and trains from that file. The results are

- decoding: images per second of the first pass, and its peak memory;
- waiting: the share of the training time in which no batch was ready, for a small network on two cores;
- the loader: the share by which steps take longer than with one batch that is repeated. The loader reads while the
  model trains, so it takes processor time even when training never waits. Rounds with and without the loader
  alternate, so that other load on the machine affects both equally;
- memory: the peak of the training, above that of the process with all imports and the built model.

Writes benchmarks/results/loading.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import repository

import numpy as np
from PIL import Image

from compress.core.progress import SILENT
from compress.data import dataset as datasets
from compress.data import rows
from compress.data.sources import ImageFolder
from compress.pipeline.store import Store
from deploy.contract.preprocessing import Preprocessing

RESULTS = repository.RESULTS / "loading.json"
CLASSES = 10
ROUND = 20
"""Steps with the loader, and then without it, before the next change."""


def make(folder: Path, count: int) -> int:
    """Write images of smooth noise into a folder for each class; return the bytes of all files."""
    random = np.random.default_rng(0)
    total = 0
    for index in range(count):
        width, height = random.integers(96, 257, 2)
        small = Image.fromarray(random.integers(0, 256, (12, 12, 3), np.uint8))
        path = folder / f"class{index % CLASSES}" / f"{index:06d}.{'png' if index % 4 == 0 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        small.resize((int(width), int(height)), Image.Resampling.BICUBIC).save(path)
        total += path.stat().st_size
    return total


def memory() -> dict[str, int]:
    """Return the resident bytes of this process: the peak since `forget`, those now, and those of files."""
    text = Path("/proc/self/status").read_text()
    sizes = {name: int(re.findall(rf"{name}:\s+(\d+) kB", text)[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssFile")}
    return {"peak": sizes["VmHWM"], "now": sizes["VmRSS"], "of_files": sizes["RssFile"]}


def forget() -> int:
    """Reset the peak memory of this process; return its resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory()["now"]


def decoding(data: Any) -> dict[str, Any]:
    before, began, size = forget(), time.perf_counter(), 0
    count = 0
    for split in ("train", "validation", "test"):
        inputs = data.inputs(split)
        size += inputs.nbytes
        count += len(inputs)
        large = inputs.nbytes > datasets.LARGE_BYTES
        assert rows.mapped(inputs) == large
    seconds = time.perf_counter() - began
    return {
        "images": count,
        "decoded_bytes": size,
        "s": round(seconds, 1),
        "images_per_s": round(count / seconds),
        "peak_bytes_beyond": memory()["peak"] - before,
    }


def network(keras: Any, shape: tuple[int, ...]) -> Any:
    layers = keras.layers
    image = x = keras.Input(shape)
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")(x)
    return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def training(data: Any, epochs: int, batch: int) -> dict[str, Any]:
    """Time steps with batches of the loader and with one repeated batch, in turn; return the figures."""
    from compress.learning.training.batches import EpochSettings, batches
    from compress.model.ir.tensorflow import keras

    library = keras(0)
    import tensorflow as tf

    model = network(library, data.input_shape)
    optimizer = library.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = model(images, training=True)
            loss = tf.reduce_mean(library.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    inputs, labels = data.inputs("train"), data.labels("train")
    settings = EpochSettings(epochs=epochs, batch_size=batch)
    same = tf.constant(rows.rows(inputs, np.arange(batch))), tf.constant(labels[:batch])
    for _ in range(5):
        step(*same).numpy()
    before = forget()
    loader = iter(batches(inputs, labels, settings, 0))
    waits, loaded, alone = [], [], []
    for place in range(epochs * settings.batches_per_epoch(len(inputs))):
        began = time.perf_counter()
        images, targets = next(loader)
        ready = time.perf_counter()
        step(images, targets).numpy()
        waits.append(ready - began)
        loaded.append(time.perf_counter() - ready)
        if place % ROUND == ROUND - 1:
            time.sleep(0.1)  # the loader reads ahead now, and not during the steps without it
            for _ in range(ROUND):
                began = time.perf_counter()
                step(*same).numpy()
                alone.append(time.perf_counter() - began)
    rest = slice(ROUND, None)  # without the first round, in which the loader starts
    total = sum(waits[rest]) + sum(loaded[rest])
    full_step_s = median(a + b for a, b in zip(waits[rest], loaded[rest], strict=True))
    return {
        "split_bytes": inputs.nbytes,
        "mapped": rows.mapped(inputs),
        "batch": batch,
        "steps": len(waits),
        "waiting_share": round(sum(waits[rest]) / total, 4),
        "loader_share": round(1 - median(alone) / full_step_s, 4),
        "step_ms": round(median(loaded[rest]) * 1e3, 2),
        "step_alone_ms": round(median(alone) * 1e3, 2),
        "peak_bytes_beyond": memory()["peak"] - before,
        "resident": memory(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loading-") as folder:
        size = make(Path(folder) / "images", options.images)
        store = Store(Path(folder) / "store")
        store.prepare()
        steps = [{"resize": {"size": [options.side] * 2}}, {"scale": {"from": [0, 255]}}]
        data = datasets.Dataset(ImageFolder(path=f"{folder}/images"), Preprocessing(steps), None)
        data.work_in(store, SILENT)
        result = {
            "cores": os.cpu_count(),
            "images": options.images,
            "side": options.side,
            "bytes_of_files": size,
            "decoding": decoding(data),
            "training": training(data, options.epochs, options.batch),
        }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    first, then = result["decoding"], result["training"]
    print("| images | decoded | first pass | memory there | waiting | loader | memory of training |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {options.images:,} | {first['decoded_bytes'] / 2**20:,.0f} MiB "
        f"| {first['s']} s, {first['images_per_s']:,}/s "
        f"| {first['peak_bytes_beyond'] / 2**20:,.0f} MiB | {then['waiting_share']:.1%} | {then['loader_share']:.1%} "
        f"| {then['peak_bytes_beyond'] / 2**20:,.0f} MiB of {then['split_bytes'] / 2**20:,.0f} |"
    )


if __name__ == "__main__":
    main()
