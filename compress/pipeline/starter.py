"""A first pipeline file for a data set, and a trained model if there is one: `python -m compress init`.

The data is recognized by its files, and some samples are read; then every choice (task, size, stages, number of epochs)
follows from numbers, and the file says which. No stage is run here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError, reason_of
from compress.core.files import NUMPY_ERRORS, array_headers
from compress.core.measurement import Measurement, proportion
from compress.core.resources import manual
from compress.data.dataset import Dataset
from compress.data.file_tree import tree
from compress.data.label_tables import TABLE_SUFFIXES, recognize
from compress.data.preprocessed import Range, alternatives
from compress.data.source import REPAIR, SKIP
from compress.data.sources import SOURCES
from compress.data.sources import text as texts
from compress.data.splits import spread
from compress.data.types import SPLITS
from compress.model.importers import model_file
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.ir.keras_graph import read as read_network
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.tensorflow import flattened, run
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline.data_section import IMAGES, SOUNDS, ModelInputs, inputs_of, value_range, with_range
from compress.tasks import task_of
from compress.tasks.classification import Classification
from compress.tasks.findings import class_order
from deploy.contract.preprocessing import Preprocessing
from deploy.contract.text import text_of, tokens_of

LOOKED_AT = 64
"""Number of samples whose shapes and values are read."""
SMALLEST, LARGEST = 32, 224
"""Sides of images that are suggested, in pixels, without a model that says it."""
GRAIN = 32
"""Sides are multiples of this: five halvings of the image leave whole numbers."""
ENLARGED = 5 / 3
"""Photos that are smaller than those a model was trained with are enlarged by up to this factor: its features are of
larger objects (benchmarks/results/transfer.json: 0.713, 0.740, 0.771 with 96, 128, 160 pixels from photos of 96)."""
TINY_SIDE = 40
"""Images up to this size get the small builder of the shipped example."""
STEPS_NEW, STEPS_HEAD, STEPS_TEXT = 4000, 1500, 1500
"""Number of steps (batches) of a training from random weights, of one that starts from a trained model, and of one of a
network for texts, which knows its training samples by heart early."""
EPOCHS_NEW, EPOCHS_HEAD, EPOCHS_TEXT = (20, 150), (8, 40), (5, 40)
"""Limits of the number of epochs."""
BATCHES = (32, 64)
"""Batch size below and from LARGE_SPLIT training samples."""
LARGE_SPLIT = 4000
"""Training samples; chosen: batches of 32 give 125 steps in an epoch there, and 64 are enough for larger splits."""
AUGMENT = {"flip": True, "shift": 0.1, "zoom": 0.2, "brightness": 0.1, "contrast": 0.2, "saturation": 0.2}
"""Random changes of training images."""
WORTH_PRUNING_MACS = 50_000_000
"""Multiply-accumulates above which pruning is suggested: below, the time of one inference is mostly transfer."""
BUCKETS = 16_384
"""Numbers of words; with more, fewer words share one (docs/text.md)."""
MOST_TOKENS = 256
MEL_BINS, MEL_FRAME_S, MEL_STEP_S = 40, 0.032, 0.016
"""Log-mel features of sounds: 40 bins, frames of 32 ms every 16 ms."""


@dataclass(frozen=True)
class Starter:
    """A first pipeline.

    Attributes:
        text: the content of the file: YAML with comments.
        messages: what was recognized, as sentences for the user.
    """

    text: str
    messages: tuple[str, ...]


@dataclass
class _Draft:
    """The parts of the file, each with its comments.

    Attributes:
        model: the section `model`.
        data: the section `data`.
        stages: the stages, with the reason for each; a stage of None is only a comment.
        comments: a comment for each part, by name.
        messages: sentences for the user.
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    stages: list[tuple[dict[str, Any] | None, str]] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


def starter(
    data: Path,
    model: Path | None,
    folder: Path,
    name: str,
    *,
    label: str | None = None,
    learns: bool = False,
    chosen_range: Range | None = None,
    trust: bool = False,
) -> Starter:
    """Return a first pipeline for data and, if there is one, a trained model.

    Args:
        data: a file or folder of samples.
        model: a model file or SavedModel folder; None to train a new model.
        folder: the folder of the pipeline file: paths in it are relative to this one where possible.
        name: the name of the run.
        label: the column of a table that has the labels; None to recognize it.
        learns: whether the device shall learn new classes.
        chosen_range: the values of a black and of a white pixel in the input of the model; None to find them.
        trust: whether code in the model may run.

    Raises:
        DataError: the data is not recognized, or cannot be read.
        ModelError: the model cannot be read.
    """
    draft = _Draft()
    source = recognized(data, folder, label)
    draft.data["source"] = source
    dataset = _examined(draft, folder)
    if learns and (reason := task_of(dataset).why_not(("embedding",))) is not None:
        raise DataError(f"a device cannot learn new classes: {reason.what}", where=str(data), hint="leave out --learn")
    if model is None:
        _new_model(draft, dataset)
    else:
        file = model_file.read(model)
        floating = model_file.in_float(file)  # a quantized file, if all of its operators have layers
        inputs = with_range(inputs_of(file if floating.refused else floating, trust=trust), chosen_range)
        _trained_model(draft, dataset, inputs, model, folder, trust=trust)
    _closing_stages(draft, learns=learns)
    return Starter(_yaml(draft, name, _command(data, model, label, learns=learns)), tuple(draft.messages))


# --- the data ----------------------------------------------------------------------------


def recognized(path: Path, folder: Path, label: str | None = None) -> dict[str, Any]:
    """Return the section `data.source` for a file or folder of samples.

    Every source that could fit is tried; the first one that opens is taken.

    Raises:
        DataError: none fits; the message has the reason of each.
    """
    if not path.exists():
        raise DataError("does not exist", where=str(path), hint="check the path")
    shown = _relative(path, folder)
    errors: dict[str, DataError] = {}
    for source in _candidates(path, shown, label):
        try:
            _resolved(source, folder).load()
            return source
        except DataError as error:
            errors.setdefault(next(iter(source)), error)
    if len(errors) == 1:
        ((_, only),) = errors.items()
        only.hint = "; ".join(part for part in (only.hint, "or name the column of labels with --label COLUMN") if part)
        raise only
    reasons = [f"as {name}: {error}" for name, error in errors.items()]
    raise DataError(
        "contains no samples that are recognized" + (f" ({'; '.join(reasons)})" if reasons else ""),
        where=str(path),
        allowed="class folders of photos or WAV files, photos with a table of labels, VOC, COCO or YOLO annotations, "
        "images with masks, or the same in a .tar archive; .npz, or a table of texts",
        hint=f"other data needs a pipeline file written by hand: {manual('data.md')}",
    )


def _candidates(path: Path, shown: str, label: str | None) -> Iterator[dict[str, Any]]:
    """Yield the sources that could fit, the most specific first."""
    suffix = path.suffix.lower()
    if suffix == ".npz":
        yield {"npz": {"file": shown, **_npz_arrays(path)}}
    elif suffix == ".json":
        yield {"coco": {"file": shown}}
    elif suffix in (".yaml", ".yml"):
        yield {"yolo": {"file": shown}}
    elif suffix in TABLE_SUFFIXES:
        yield {"text": {**texts.recognized(path, label), "file": shown}}
    else:
        yield from _folder_candidates(path, shown, label)


def _folder_candidates(path: Path, shown: str, label: str | None) -> Iterator[dict[str, Any]]:
    files = tree(path)
    names = [name.lower() for name in files.names]
    if any(name.endswith(".xml") for name in names):
        yield {"voc": {"path": shown}}
    if any(name.endswith("data.yaml") or "labels/" in name for name in names):
        yield {"yolo": {"file": f"{shown}/data.yaml"} if (path / "data.yaml").is_file() else {"folder": shown}}
    if any("masks/" in name for name in names):
        yield {"masks": {"path": shown}}
    for kind, suffixes in (("wav", SOUNDS), ("folder", IMAGES)):
        if not any(name.endswith(suffixes) for name in names):
            continue
        settings = {"path": shown, **(_wav_settings(path) if kind == "wav" else {})}
        labels = {} if label is None else {"labels": _labels(path, suffixes, label)}
        yield {kind: {**settings, **labels}}
        # Samples in several folders, or with a table, have labels: what is wrong with them must be said.
        is_flat = len(files.folders) <= 1
        if is_flat and not any(name.endswith(TABLE_SUFFIXES) for name in names):
            yield {kind: {**settings, "labels": "none"}}


def _labels(path: Path, suffixes: tuple[str, ...], label: str) -> dict[str, str]:
    """Return the settings of the table that has a column with labels."""
    tables = recognize(tree(path), suffixes, None, label)
    if len(tables) != 1:
        raise DataError(f"{len(tables)} tables have labels for the samples", where=str(path), allowed="one table")
    settings = tables[0].settings
    return {"table": settings.table, "file": settings.file, "label": label}


def _npz_arrays(path: Path) -> dict[str, str]:
    """Return the names of samples and labels in an .npz file, if they are not the usual x and y."""
    try:
        shapes = {name: (shape, dtype.kind) for name, (shape, dtype) in array_headers(path).items()}
    except (OSError, *NUMPY_ERRORS) as error:
        raise DataError(
            f"cannot be read: {reason_of(error)}", where=str(path), allowed="an .npz file without pickles"
        ) from error
    if "x" in shapes:
        return {} if "y" in shapes else {"y": ""}
    samples = [name for name, (shape, kind) in shapes.items() if len(shape) >= 2 and kind in "fiu"]
    if not samples:
        return {}
    x = max(samples, key=lambda name: np.prod(shapes[name][0]))
    labels = [name for name, (shape, _) in shapes.items() if shape == shapes[x][0][:1]]
    return {"x": x, **({"y": labels[0]} if labels else {})}


def _wav_settings(path: Path) -> dict[str, Any]:
    """Return sample rate and length of recordings: the most frequent rate, and the length that most of them reach."""
    from compress.data.sources import wav

    files = tree(path)
    names = [name for name in files.names if name.lower().endswith(SOUNDS)]
    rates, seconds = [], []
    for name in names[:: max(len(names) // LOOKED_AT, 1)]:
        try:
            with files.open(name) as stream:
                sound = wav.opened(stream, name)
        except DataError:
            continue
        rates.append(sound.rate)
        seconds.append(sound.frames / sound.rate)
    if not rates:
        raise DataError("contains no readable WAV file", where=str(path))
    rate = max(set(rates), key=rates.count)
    several = {"resample": True} if len(set(rates)) > 1 else {}
    return {"rate": rate, "seconds": round(float(np.quantile(seconds, 0.9)), 2), **several}


def _resolved(source: Mapping[str, Any], folder: Path) -> Any:
    """Return the source with its settings checked, and its paths resolved."""
    ((name, settings),) = source.items()
    return SOURCES[name].model_validate_json(json.dumps(settings), strict=True).with_paths_from(folder)


def _relative(path: Path, folder: Path) -> str:
    """Return a path relative to a folder if it is inside of it, otherwise the absolute path."""
    try:
        return path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        return str(path.resolve())


def _examined(draft: _Draft, folder: Path) -> Dataset:
    """Read every sample of the source; return the readable ones, and have the file leave out the others.

    Raises:
        DataError: samples are unreadable, and the source cannot leave them out.
    """
    ((_, settings),) = draft.data["source"].items()
    source = _resolved(draft.data["source"], folder)
    data = Dataset(source, Preprocessing([]), None).tolerant()
    unreadable = data.corrupt
    if unreadable and "corrupt" not in type(source).model_fields:
        raise DataError(f"{len(unreadable)} samples cannot be used: {'; '.join(unreadable)}", hint=REPAIR)
    draft.messages.append(_about(data, draft.data["source"]))
    if unreadable:
        settings["corrupt"] = "skip"
        left_out = f"{len(unreadable):,} samples cannot be read, and {SKIP} leaves them out"
        draft.comments["data"] = f"{left_out}; without it, a run refuses them"
        draft.messages += [f"{left_out}:", *(f"  {reason}" for reason in unreadable)]
    draft.messages += [f"warning: {text}" for text in data.warnings]
    return data


def _about(data: Dataset, source: Mapping[str, Any]) -> str:
    """Return what the data is, in a sentence."""
    counts = {split: len(data.labels(split)) for split in SPLITS}
    (name,) = source
    parts = ", ".join(f"{count:,} for {split}" for split, count in counts.items())
    classes = f"{len(data.class_names)} classes" if data.class_names else "no labels"
    return f"data: the source {name}, task {data.task}, {classes}; samples: {parts}"


# --- choices -----------------------------------------------------------------------------


def _some_samples(data: Dataset) -> list[NDArray[Any]]:
    """Return up to LOOKED_AT training samples before preprocessing, from all parts of the split."""
    count = len(data.labels("train"))
    indices = np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(np.int64))
    return data.raw("train", indices)


def _raw_shapes(data: Dataset) -> list[tuple[int, ...]]:
    return [tuple(sample.shape) for sample in _some_samples(data)]


def _new_model(draft: _Draft, data: Dataset) -> None:
    """Choose a builder and the stages for a training from random weights.

    Raises:
        DataError: the samples have no labels to train with, or no builder fits them.
    """
    shapes = _raw_shapes(data)
    rank, task = len(shapes[0]), task_of(data)
    if task.learns_from_original:
        raise DataError(
            "the samples have no labels, so there is nothing to train",
            allowed="samples without labels together with a trained model: --model FILE",
            hint="put the photos of each class into a folder with its name, or give a model",
        )
    training: tuple[int, tuple[int, int], dict[str, float]] = (STEPS_NEW, EPOCHS_NEW, {"learning_rate": 0.003})
    if "text" in draft.data["source"]:
        draft.model = {"builder": "text_cnn", "arguments": {"tokens": BUCKETS}}
        draft.comments["model"] = "vectors of the words, which the CPU looks up, and convolutions for the Edge TPU"
        _tokens(draft, data)
        training = (STEPS_TEXT, EPOCHS_TEXT, {"learning_rate": 0.002, "warmup": 0.05})
    elif task.reads_specification:
        side = 320
        draft.model = {"builder": "anchor_free"}
        draft.comments["model"] = "an anchor-free detector of full convolutions, which the Edge TPU runs best"
        _resize(draft, side, (-1, 1), letterbox=True)
    elif rank == 3 and shapes[0][-1] in (1, 3) and task.one_vector:
        short = float(np.median([min(shape[:2]) for shape in shapes]))
        side = int(np.clip(np.ceil(short / GRAIN) * GRAIN, SMALLEST, LARGEST))
        tiny = side <= TINY_SIDE
        draft.model = (
            {"builder": "digits_cnn"} if tiny else {"builder": "fused_bottleneck", "arguments": {"width": 1.0}}
        )
        draft.comments["model"] = (
            "a small network; with a trained model (init --model FILE), a few photos give much better results"
        )
        _resize(draft, side, (-1, 1))
    elif rank in (1, 2) and task.one_vector:
        draft.model = {"builder": "conv_1d"}
        draft.comments["model"] = "1-D convolutions over time, for sound and motion"
        _series(draft, data)
    else:
        raise DataError(
            f"no builder is suggested for samples {list(shapes[0])} and the task {task.name}",
            allowed="images or series with classes, images with boxes",
            hint=f"give a trained model with --model, or write a builder: {manual('models.md')}",
        )
    _training(draft, data, *training)
    draft.stages.append(({"quantize": {"method": "ptq"}}, "8-bit integers, by post-training quantization"))


def _trained_model(draft: _Draft, data: Dataset, inputs: ModelInputs, path: Path, folder: Path, *, trust: bool) -> None:
    """Choose what to do with a trained model: use it as it is if it fits the data, otherwise give it a new head."""
    draft.model = {"file": _relative(path, folder), **({"trust": True} if trust else {})}
    was_quantized = model_file.read(path).becomes == "tflite"
    classes = len(data.class_names)
    task = task_of(data)
    fits = not task.one_vector or inputs.output_sizes[:1] in ((classes,), (1,) if classes == 2 else (classes,))
    if task.reads_specification:
        draft.model["detector"] = "auto"
    shape = inputs.shapes[0]
    if inputs.is_image:
        side = shape[0] if fits else _side_for_features(shape[0], _raw_shapes(data))
        size = [shape[0], shape[1]] if fits else [side, side]
        if shape[-1] == 1:
            ((_, settings),) = draft.data["source"].items()
            settings["channels"] = 1
        _resize(draft, size, value_range(inputs, _photos(data, inputs)))
    elif _raw_shapes(data)[0] != shape:
        raise DataError(
            f"the samples have the shape {list(_raw_shapes(data)[0])}, and the model takes {list(shape)}",
            allowed="photos for a model of images, or samples of the model's shape",
            hint=f"write a pipeline file with data.preprocess, such as log_mel: {manual('preprocessing.md')}",
        )
    tried = _tried(draft, inputs, path, folder) if fits and task.name == Classification.name else None
    if tried is not None:
        draft.messages.append(f"model: {path.name} {tried.text}")
    elif fits:
        draft.messages.append(f"model: {path.name} has the outputs that the data needs; the run measures its quality")
    if fits and (tried is None or tried.is_useful or was_quantized):
        draft.comments["model"] = "used as it is; `train: {fine_tune: true}` would train it further"
        if not was_quantized:
            _worth_pruning(draft, inputs)
            draft.stages.append(({"quantize": {"method": "ptq"}}, "8-bit integers, by post-training quantization"))
    else:
        draft.model["head"] = "new"
        was = ", ".join(map(str, inputs.output_sizes))
        reason = f"{was} outputs, and the data has {classes} classes" if tried is None else tried.text
        head = "it gets a new head, and its features are trained further (transfer learning)"
        if tried is None:
            draft.messages.append(f"model: {path.name} has {reason}: {head}")
        else:
            draft.messages.append(f"model: {head}")
        draft.comments["model"] = f"{reason}: the last layers are replaced"
        _training(draft, data, STEPS_HEAD, EPOCHS_HEAD, {"learning_rate": 0.001, "warmup": 0.05, "backbone_rate": 0.5})
        _worth_pruning(draft, inputs)
        draft.stages.append(({"quantize": {"method": "ptq"}}, "8-bit integers, by post-training quantization"))


@dataclass(frozen=True)
class _TriedClasses:
    """The answers of a model to some samples of the data.

    Attributes:
        text: how many are right, as a predicate.
        is_useful: whether the classes of the model are those of the data, perhaps in another order.
    """

    text: str
    is_useful: bool


def _tried(draft: _Draft, inputs: ModelInputs, path: Path, folder: Path) -> _TriedClasses:
    """Try the classes of a model on samples of each class; a preprocessing that makes it useful is added to the draft.

    An equal number of outputs does not show that the classes are the same.
    """
    data = Dataset(_resolved(draft.data["source"], folder), Preprocessing([]), None)
    indices = np.sort(spread(data.labels("train"))[:LOOKED_AT])
    labels, preprocess = data.labels("train")[indices], Preprocessing(draft.data.get("preprocess", []))
    samples = np.stack([preprocess(sample) for sample in data.raw("train", indices)]).astype(np.float32)
    guessing = float(np.bincount(labels).max()) / len(labels)

    def right(values: NDArray[np.float32]) -> Measurement:
        return proportion(int((_answers(inputs, path, values) == labels).sum()), len(labels))

    first = right(samples)
    if order := class_order(labels, _answers(inputs, path, samples), data.class_names):
        return _TriedClasses(f"{_recognizes(first, len(labels), guessing)}: {order[0].text}", is_useful=True)
    if _above(first, guessing):
        return _TriedClasses(f"{_recognizes(first, len(labels), guessing)}; it is not trained further", is_useful=True)
    others = [(right(other(samples)), other) for other in alternatives(samples)]
    best, added = max(others, key=lambda pair: pair[0].value or 0.0, default=(first, None))
    if added is not None and _above(best, guessing):
        draft.data["preprocess"] = [*draft.data.get("preprocess", []), *added.steps]
        text = f"{_recognizes(best, len(labels), guessing)} with {added.description}; it is not trained further"
        return _TriedClasses(text, is_useful=True)
    text = (
        f"has as many outputs as the data has classes, but {_recognizes(first, len(labels), guessing)}: its classes "
        "are not those of the data, or it needs another preprocessing; `model: {head: new}` replaces the classes"
    )
    return _TriedClasses(text, is_useful=False)


def _above(share: Measurement, guessing: float) -> bool:
    return share.low is not None and share.low > guessing


def _recognizes(share: Measurement, count: int, guessing: float) -> str:
    interval = f"{share.low:.2f} to {share.high:.2f}"
    return f"recognizes {share.value:.2f} of {count} samples ({interval}; guessing: {guessing:.2f})"


def _answers(inputs: ModelInputs, path: Path, samples: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the class that a model answers for each sample."""
    if inputs.model is None:
        rows = LoadedModel(path, reproducible=True).scores(samples)
    else:
        rows = flattened(run(inputs.model, samples))
    if rows.shape[1] == 1:
        return (rows[:, 0] > (0.5 if rows.min() >= 0 and rows.max() <= 1 else 0.0)).astype(np.int64)
    return np.asarray(rows.argmax(axis=1))


def _side_for_features(side: int, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the side of images for a model with a new head: that of the model, or less if the photos are small."""
    short = float(np.median([min(shape[:2]) for shape in shapes]))
    enlarged = int(np.ceil(short * ENLARGED / GRAIN)) * GRAIN
    return max(SMALLEST, min(side, enlarged))


def _photos(data: Dataset, inputs: ModelInputs) -> Any:
    """Return some photos with the size of the model's input, and values from 0 to 1."""
    height, width, channels = inputs.shapes[0]
    resize = Preprocessing([{"resize": {"size": [height, width], "filter": "bilinear"}}])
    photos = np.stack([resize(sample) for sample in _some_samples(data)]) / np.float32(255)
    return photos[..., :channels].astype(np.float32)


def _resize(draft: _Draft, size: Any, limits: tuple[float, float], *, letterbox: bool = False) -> None:
    size = [size, size] if isinstance(size, int) else list(size)
    settings = {"size": size, "filter": "bilinear", **({"fit": "letterbox"} if letterbox else {})}
    steps: list[dict[str, Any]] = [{"resize": settings}]
    if tuple(limits) != (0.0, 255.0):
        values = [int(limit) if float(limit).is_integer() else limit for limit in limits]
        steps.append({"scale": {"from": [0, 255], "to": values}})
    draft.data["preprocess"] = steps


def _series(draft: _Draft, data: Dataset) -> None:
    ((name, settings),) = draft.data["source"].items()
    if name == "wav":
        rate, seconds = settings["rate"], settings["seconds"]
        mel = {
            "rate": rate,
            "frame": round(rate * MEL_FRAME_S),
            "step": round(rate * MEL_STEP_S),
            "bins": MEL_BINS,
        }
        draft.data["preprocess"] = [{"length": {"samples": round(rate * seconds)}}, {"log_mel": mel}]
    else:
        samples = np.stack(data.raw("train", np.arange(min(len(data.labels("train")), LOOKED_AT))))
        axes = tuple(range(samples.ndim - 1)) if samples.ndim > 2 else None
        mean, deviation = np.mean(samples, axis=axes), np.std(samples, axis=axes) + 1e-6
        draft.data["preprocess"] = [{"normalize": {"mean": _numbers(mean), "std": _numbers(deviation)}}]


def _tokens(draft: _Draft, data: Dataset) -> None:
    """Choose the step `tokens`: words, or characters where there are no blanks between words."""
    texts = [text_of(sample) for sample in _some_samples(data)]
    counts = {unit: [len(tokens_of(text, unit)) for text in texts] for unit in ("word", "character")}
    unit = "word" if np.median(counts["word"]) > 2 else "character"
    length = int(np.clip(8 * np.ceil(np.quantile(counts[unit], 0.95) / 8), 8, MOST_TOKENS))
    settings = {"length": length, "buckets": BUCKETS, **({} if unit == "word" else {"unit": unit})}
    draft.data["preprocess"] = [{"tokens": settings}]


def _numbers(values: Any) -> Any:
    rounded = [float(f"{value:.4g}") for value in np.atleast_1d(values)]
    return rounded if len(rounded) > 1 else rounded[0]


def _training(draft: _Draft, data: Dataset, steps: int, limits: tuple[int, int], settings: Mapping[str, Any]) -> None:
    """Add the stage `train` with enough epochs for a number of steps."""
    count = len(data.labels("train"))
    batch = BATCHES[count >= LARGE_SPLIT]
    epochs = int(np.clip(round(steps * batch / count), *limits))
    train: dict[str, Any] = {"epochs": epochs, "batch_size": batch, **settings}
    task = task_of(data)
    if len(_raw_shapes(data)[0]) == 3 and task.why_not(("augmentation",)) is None:
        mixed = {"erase": 0.2, "mixup": 0.2} if task.why_not(("mixup",)) is None else {}
        train["augment"] = {**AUGMENT, **mixed}
    if task.why_not(("label smoothing",)) is None:
        train["label_smoothing"] = 0.1
    draft.stages.append(({"train": train}, f"about {epochs * -(-count // batch):,} steps for {count:,} samples"))


def _worth_pruning(draft: _Draft, inputs: ModelInputs) -> None:
    """Add a comment about pruning, if the model is large enough for it to help."""
    if inputs.model is None:
        return
    count = _macs(read_network(inputs.model))
    if count >= WORTH_PRUNING_MACS:
        text = f"removes channels, which helps models as large as this one ({count / 1e6:,.0f} million MACs)"
        draft.stages.append((None, f"- prune: {{keep_macs: 0.5}}  # {text}"))


def _macs(network: Network) -> int:
    """Return the multiply-accumulates of the layers with one kernel, for one sample."""
    total = 0
    for layer, call in network.in_order():
        if spec_of(layer).kernel is not None:
            positions = network.shapes[LayerOutput(layer.name, call)][:-1]
            total += layer.weights[0].size * int(np.prod([size or 1 for size in positions]))
    return total


def _closing_stages(draft: _Draft, *, learns: bool) -> None:
    if learns:
        draft.stages.append(({"expose_embedding": {}}, "a second output, from which the device learns new classes"))
    draft.stages.append(({"compile": {}}, "with the vendor's compiler if it is installed; otherwise a static check"))
    draft.stages.append(({"package": {}}, "the bundle for the device, with labels, preprocessing and test vectors"))


# --- the file ----------------------------------------------------------------------------


def _command(data: Path, model: Path | None, label: str | None, *, learns: bool) -> str:
    """Return the command that wrote the file."""
    words = ["python", "-m", "compress", "init", str(data)]
    words += [] if model is None else ["--model", str(model)]
    words += [] if label is None else ["--label", label]
    return shlex.join(words + (["--learn"] if learns else []))


def _yaml(draft: _Draft, name: str, command: str) -> str:
    """Return the file's text."""
    lines = [
        f"# Written by `{command}`. Edit it: every choice is a suggestion.",
        "# All settings of a stage: `python -m compress stages`. Check the file: `--dry-run`.",
        "schema_version: 1",
        f"name: {name}",
        "seed: 0",
        "target: edgetpu  # or cpu",
        *_commented(draft.comments.get("model", "")),
        f"model: {_flow(draft.model)}",
        *_commented(draft.comments.get("data", "")),
        "data:",
        f"  source: {_flow(draft.data['source'])}",
    ]
    if draft.data.get("preprocess"):
        lines += ["  # the same steps in training, calibration, evaluation and on the device", "  preprocess:"]
        lines += [f"    - {_bare(step)}" for step in draft.data["preprocess"]]
    lines.append("stages:")
    for stage, reason in draft.stages:
        lines += [f"  # {reason}"] + ([] if stage is None else [f"  - {_bare(stage)}"])
    lines += ["# exit code 7 if the result loses more than this:", "# budget: {accuracy_drop: 0.02}"]
    return "\n".join(lines) + "\n"


def _commented(text: str) -> list[str]:
    return [f"# {text}"] if text else []


def _bare(entry: Mapping[str, Any]) -> str:
    ((name, settings),) = entry.items()
    return f"{name}: {_flow(settings)}"


def _flow(value: Any) -> str:
    """Return a value as YAML in flow style; texts are quoted where YAML would read something else."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        is_plain = value.replace("_", "").replace("-", "").replace(".", "").isalnum() and value[0].isalpha()
        return value if is_plain and value not in ("null", "true", "false") else json.dumps(value)
    return json.dumps(value)
