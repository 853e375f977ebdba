"""Segmentation from PNG masks: person against the rest, trained from scratch and quantized.

    python benchmarks/segmentation_masks.py [--work FOLDER]

The 100 photos of coco128's training part with a mask, and the 100 of its validation part as test photos; 128x128,
letterboxed; pixels without a label do not count. Prints the mean intersection over union and the pixel accuracy of the
float model and of the int8 file, and writes benchmarks/results/segmentation_masks.json.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project).
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import compress

SHARED = Path(os.environ.get("CORALLINE_SHARED", Path(__file__).parent.parent.parent / "shared"))
RESULTS = Path(__file__).parent / "results" / "segmentation_masks.json"
SIDE = 128
MASKS = "semantic_segmentation/masks"
PARTS = {"train2017": "train", "val2017": "test"}
BUILDER = """
import keras

layers = keras.layers


def block(x, filters, stride=1):
    x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))


def joined(low, high, filters):
    return block(layers.Concatenate()([layers.UpSampling2D(2, interpolation="nearest")(low), high]), filters)


def unet(input_shape, classes):
    image = keras.Input(input_shape)
    half = block(image, 16, 2)
    quarter = block(block(half, 32, 2), 32)
    eighth = block(block(quarter, 64, 2), 64)
    sixteenth = block(block(eighth, 96, 2), 96)
    x = joined(sixteenth, eighth, 64)
    x = joined(x, quarter, 32)
    x = joined(x, half, 16)
    scores = layers.Conv2D(classes, 1)(x)
    return keras.Model(image, layers.UpSampling2D(2, interpolation="nearest")(scores))
"""


def unpack(folder: Path) -> None:
    """Write the photos with masks to images/ and masks/, each in the folders train/ and test/."""
    with tarfile.open(SHARED / "data" / "coco128.tar") as archive:
        names = {member.name: member for member in archive if member.isfile()}
        for mask in (name for name in names if name.startswith(MASKS)):
            part, stem = mask.removesuffix(".png").split("/")[-2:]
            copies = {mask: f"masks/{PARTS[part]}/{stem}.png"}
            copies[f"images/{part}/{stem}.jpg"] = f"images/{PARTS[part]}/{stem}.jpg"
            for source, target in copies.items():
                stream = archive.extractfile(names[source])
                assert stream is not None
                path = folder / target
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(stream.read())
        classes = archive.extractfile(names["semantic_segmentation/classes.yaml"])
        assert classes is not None
        (folder / "classes.yaml").write_bytes(classes.read())


def pipeline() -> dict[str, Any]:
    """Return the pipeline as plain values."""
    source = {"path": "photos", "keep": {"person": ["person"]}, "ignore": ["unlabeled"]}
    resize = {"size": [SIDE, SIDE], "antialias": True, "fit": "letterbox", "fill": 114}
    return {
        "schema_version": 1,
        "name": "person",
        "model": {"builder": "unet.py:unet", "trust": True},
        "data": {"source": {"masks": source}, "preprocess": [{"resize": resize}, {"scale": {"from": [0, 255]}}]},
        "stages": [{"train": {"epochs": 60, "batch_size": 8, "early_stopping": 15}}, {"quantize": {}}],
        "measure": {"latency": {"runs": 10}},
    }


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/coralline-masks"))
    work: Path = parser.parse_args().work
    unpack(work / "photos")
    (work / "unet.py").write_text(BUILDER)
    (work / "p.yaml").write_text(json.dumps(pipeline()))
    start = time.monotonic()
    result = compress.run(work / "p.yaml", out=work / "runs")
    figures: dict[str, Any] = {"seconds": round(time.monotonic() - start)}
    for metric in ("miou", "pixel_accuracy"):
        before, after = result.original[metric].value, result.result[metric].value
        assert before is not None
        assert after is not None
        figures[metric] = {"float": before, "int8": after}
        print(f"{metric}: float {before:.4f}, int8 {after:.4f}, difference {100 * (after - before):+.2f} points")
    agreement = result.record.to_json()["comparison"]["measurements"]["agreement"]["value"]
    figures["agreement"] = agreement
    print(f"pixels of the same class: {agreement:.4f}; {figures['seconds']} s")
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
