"""The models of benchmarks/other_tools.py with their samples, written into folders that every tool reads.

    python benchmarks/others/subjects.py NAME FOLDER

A folder has the model, subject.json, samples.npz (see `exchange.Job`), and reference.npz: the outputs of the float
model for the test samples, by onnxruntime or by Keras. Photos are from coco128: calibration samples from its training
part, test samples from its validation part. Each model is a separate process: some need tf-keras, others Keras 3.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import repository  # noqa: F401 - the search path

import numpy as np
from networks_in_tf_keras import build
from numpy.typing import NDArray
from paths import ROOT, SHARED
from PIL import Image

Floats = NDArray[np.float32]
Samples = dict[str, NDArray[Any]]
CALIBRATION = 200
"""Chosen: the number of calibration samples that every tool gets."""
CROPS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.5))
"""Where five square crops of a photo are: the corners and the centre; a classifier sees each as a sample."""
CROP_SIDE = 0.8
"""The side of a crop as a fraction of the shorter side of the photo."""
NETWORKS = ROOT / "runs" / "benchmark_networks"
"""Networks that benchmarks/quantization.py trained are used again."""
EPOCHS, BATCH_SIZE, LEARNING_RATE = 40, 32, 0.004


@dataclass(frozen=True)
class Subject:
    """A model, and how its samples are made.

    Attributes:
        name: of the row in the tables.
        what: one line about the model and its samples.
        file: in the shared folder; "" for a network that is trained here.
        samples: makes the samples: calibration and test; with labels also those of the training.
        layout: "nhwc", "nchw" or "series" ([time, features]).
        network: how a trained network is built (`networks_in_tf_keras.build`).
        recipe: its training in benchmarks/quantization_subjects.py; "" for the training here.
        classes: the number of classes, if the samples have labels.
        detector: the family of a detector, for Coralline.
    """

    name: str
    what: str
    samples: Callable[[], Samples]
    file: str = ""
    layout: str = "nhwc"
    network: str = ""
    recipe: str = ""
    classes: int = 0
    detector: str = ""

    @property
    def format(self) -> str:
        """The format of the file."""
        suffix = Path(self.file).suffix
        return {"": "keras", ".hdf5": "h5"}.get(suffix, suffix[1:])


@cache
def photos(split: str) -> list[Image.Image]:
    """Return the photos of a split of coco128: "train2017" or "val2017"."""
    found = []
    with tarfile.open(SHARED / "data" / "coco128.tar") as archive:
        members = {member.name: member for member in archive.getmembers()}
        for name in sorted(members):
            if f"images/{split}/" in name and name.endswith(".jpg"):
                stream = archive.extractfile(members[name])
                assert stream is not None
                found.append(Image.open(io.BytesIO(stream.read())).convert("RGB"))
    return found


def crops(split: str, side: int, mode: str = "RGB") -> Floats:
    """Return five crops of each photo [n, side, side, channels], 0 to 255; neighbours are of different photos."""
    found = []
    for column, row in CROPS:
        for image in photos(split):
            size = CROP_SIDE * min(image.size)
            left, top = (image.width - size) * column, (image.height - size) * row
            crop = image.convert(mode).resize(
                (side, side), Image.Resampling.BILINEAR, (left, top, left + size, top + size)
            )
            found.append(np.asarray(crop, np.float32).reshape(side, side, -1))
    return np.stack(found)


def cropped(side: int, scale: tuple[float, float], *, mode: str = "RGB", first: bool = False) -> Samples:
    """Return crops of photos as samples, 0 to 255 scaled to a range; `first`: channels first."""
    low, high = scale
    made: Samples = {}
    for name, split, count in (("calibration", "train2017", CALIBRATION), ("test", "val2017", None)):
        values = crops(split, side, mode)[:count] / np.float32(255) * np.float32(high - low) + np.float32(low)
        made[name] = np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if first else values
    return made


def whole(width: int, height: int, change: Callable[[Floats], Floats], *, bgr: bool, letterbox: bool) -> Samples:
    """Return whole photos as samples [n, channels, height, width] for detectors."""
    made: Samples = {}
    for name, split in (("calibration", "train2017"), ("test", "val2017")):
        rows = []
        for image in photos(split):
            scale = min(width / image.width, height / image.height)
            size = (int(image.width * scale), int(image.height * scale)) if letterbox else (width, height)
            canvas = np.full((height, width, 3), 114, np.float32)  # the border in the training of YOLOX
            canvas[: size[1], : size[0]] = np.asarray(image.resize(size, Image.Resampling.BILINEAR), np.float32)
            rows.append((canvas[..., ::-1] if bgr else canvas).transpose(2, 0, 1))
        made[name] = change(np.stack(rows))
    return made


def written_digits() -> Samples:
    """Return scikit-learn's digits as MNIST has them: [n, 1, 28, 28], 0 to 255, a digit of 20 x 20 in the middle."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.zeros((len(digits.images), 1, 28, 28), np.float32)
    for image, small in zip(images, digits.images, strict=True):
        large = Image.fromarray((small * (255 / 16)).astype(np.uint8)).resize((20, 20), Image.Resampling.BICUBIC)
        image[0, 4:24, 4:24] = np.asarray(large, np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order].astype(np.int64)
    return {"calibration": images[:CALIBRATION], "test": images[CALIBRATION:], "test_labels": labels[CALIBRATION:]}


def with_labels(parts: Mapping[str, tuple[Floats, NDArray[np.int64]]]) -> Samples:
    """Return labelled samples: the calibration samples are the first of the training."""
    made: Samples = {f"{part}_x": parts[part][0] for part in ("train", "validation")}
    made |= {f"{part}_y": parts[part][1] for part in ("train", "validation")}
    made |= {"calibration": parts["train"][0][:CALIBRATION], "calibration_y": parts["train"][1][:CALIBRATION]}
    return made | {"test": parts["test"][0], "test_labels": parts["test"][1]}


def groceries() -> Samples:
    """Return photos of groceries, 48 x 48, 0 to 1, with their official split."""
    import quantization_subjects

    return with_labels(quantization_subjects.photos(48))


def words() -> Samples:
    """Return spoken digits as log-mel spectrograms, with their official split."""
    import quantization_subjects

    return with_labels(quantization_subjects.spoken())


def gestures() -> Samples:
    """Return the strokes of a magic wand [n, 160, 2], -1 to 1; the last fifth of each digit is the test."""
    with np.load(SHARED / "data" / "magic_wand_digits.npz") as arrays:
        points, lengths, labels = arrays["x"], arrays["length"], arrays["y"].astype(np.int64)
    series = np.zeros((len(points), 160, 2), np.float32)
    for row, stroke, length in zip(series, points, lengths, strict=True):
        row[:length] = 2 * stroke[:length]
    bounds = {"train": (0.0, 0.7), "validation": (0.7, 0.8), "test": (0.8, 1.0)}
    parts: dict[str, list[int]] = {name: [] for name in bounds}
    for digit in np.unique(labels):
        members = np.flatnonzero(labels == digit)
        for name, (first, last) in bounds.items():
            parts[name] += members[round(first * len(members)) : round(last * len(members))].tolist()
    shuffled = {name: np.random.default_rng(0).permutation(members) for name, members in parts.items()}
    return with_labels({name: (series[members], labels[members]) for name, members in shuffled.items()})


SUBJECTS = {
    each.name: each
    for each in (
        Subject(
            "vww_96",
            "person detection of MLPerf Tiny, MobileNetV1; crops of photos",
            partial(cropped, 96, (0.0, 1.0)),
            "models/keras/vww_96.h5",
        ),
        Subject(
            "mini_xception",
            "emotions, separable convolutions; grey crops of photos",
            partial(cropped, 64, (-1.0, 1.0), mode="L"),
            "models/keras/fer2013_mini_XCEPTION.102-0.66.hdf5",
        ),
        Subject(
            "groceries",
            "43 classes of photos, depthwise-separable; trained here",
            groceries,
            network="separable",
            recipe="grocery_separable",
            classes=43,
        ),
        Subject(
            "groceries_gated",
            "43 classes of photos, hard-swish and gates; trained here",
            groceries,
            network="gated",
            recipe="grocery_gated",
            classes=43,
        ),
        Subject(
            "spoken_digits",
            "10 words as spectrograms, depthwise-separable; trained here",
            words,
            network="separable",
            recipe="fsdd",
            classes=10,
        ),
        Subject(
            "gestures",
            "10 gestures as time series, 1-D convolutions; trained here",
            gestures,
            layout="series",
            network="conv_1d",
            classes=10,
        ),
        Subject(
            "mobilenet_v2",
            "5 flowers, width 0.35; crops of photos",
            partial(cropped, 128, (-1.0, 1.0), first=True),
            "models/onnx/stm_mobilenet_v2_0.35_128_tfs_channel_first.onnx",
            "nchw",
        ),
        Subject("mnist", "10 digits; scikit-learn's digits", written_digits, "models/onnx/ort_mnist.onnx", "nchw"),
        Subject(
            "ultraface",
            "faces, 2 outputs; photos",
            partial(whole, 320, 240, lambda x: (x - 127) / np.float32(128), bgr=False, letterbox=False),
            "models/onnx/ultraface_version-RFB-320_simplified.onnx",
            "nchw",
        ),
        Subject(
            "yunet",
            "faces, 12 outputs; photos",
            partial(whole, 320, 320, lambda x: x, bgr=True, letterbox=True),
            "models/onnx/yunet_s_320_320.onnx",
            "nchw",
        ),
        Subject(
            "yolox_nano",
            "80 classes of objects (COCO), SiLU; photos",
            partial(whole, 416, 416, lambda x: x, bgr=True, letterbox=True),
            "models/onnx/yolox_nano.onnx",
            "nchw",
            detector="yolox",
        ),
    )
}


def trained(subject: Subject, samples: Samples, folder: Path) -> Any:
    """Return the trained network; its .keras file, and its weights for tf-keras, are written."""
    if subject.recipe:
        import quantization_subjects

        model = quantization_subjects.SUBJECTS[subject.recipe](NETWORKS, 0).model
    else:
        model = fitted(subject, samples)
    model.save(folder / "model.keras")
    np.savez(folder / "weights.npz", *model.get_weights())
    return model


def fitted(subject: Subject, samples: Samples) -> Any:
    """Return a network trained with the epochs of models/gestures.yaml."""
    import keras

    keras.utils.set_random_seed(0)
    x, y = samples["train_x"], samples["train_y"]
    model = build(subject.network, keras, list(x.shape[1:]), subject.classes)
    rate = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, EPOCHS * -(-len(x) // BATCH_SIZE))
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy")
    model.fit(x, y, BATCH_SIZE, EPOCHS, verbose=0)
    return model


def keras_outputs(model: Any, samples: Floats) -> list[Floats]:
    """Return the outputs of a model of Keras 3 or tf-keras."""
    found = model.predict(samples, batch_size=32, verbose=0)
    return [np.asarray(each) for each in (found if isinstance(found, list) else [found])]


def legacy_outputs(path: Path, samples: Floats) -> list[Floats]:
    """Return the outputs of a Keras 2 file by tf-keras."""
    import tf_keras

    return keras_outputs(tf_keras.models.load_model(path, compile=False), samples)


def onnx_outputs(path: Path, samples: Floats) -> tuple[str, list[Floats]]:
    """Return the name of the input, and the outputs by onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options)
    name = session.get_inputs()[0].name
    rows = [session.run(None, {name: sample[np.newaxis]}) for sample in samples]
    return name, [np.concatenate(each) for each in zip(*rows, strict=True)]


def prepare(subject: Subject, folder: Path) -> None:
    """Write the folder of a subject; subject.json is the last file, so a folder that has it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "subject.json").unlink(missing_ok=True)
    samples = subject.samples()
    file = f"model.{subject.format}"
    about: dict[str, Any] = {"name": subject.name, "what": subject.what, "format": subject.format, "file": file}
    about |= {"layout": subject.layout, "classes": subject.classes, "labelled": bool(subject.network)}
    about |= {"network": subject.network, "detector": subject.detector, "input_name": ""}
    about["input_shape"] = list(samples["test"].shape[1:])
    if subject.file:
        shutil.copyfile(SHARED / subject.file, folder / file)
    if subject.network:
        outputs = keras_outputs(trained(subject, samples, folder), samples["test"])
    elif subject.format == "h5":
        outputs = legacy_outputs(folder / file, samples["test"])
    else:
        about["input_name"], outputs = onnx_outputs(folder / file, samples["test"])
    np.savez(folder / "samples.npz", allow_pickle=False, **samples)
    np.savez(folder / "reference.npz", *outputs)
    about["samples"] = {"calibration": len(samples["calibration"]), "test": len(samples["test"])}
    (folder / "subject.json").write_text(json.dumps(about, indent=1))


def main() -> None:
    """Prepare one subject."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SUBJECTS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    prepare(SUBJECTS[options.name], options.folder)


if __name__ == "__main__":
    main()
