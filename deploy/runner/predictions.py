"""The command `run`: the answers of a model for samples, as text or JSON, and drawn into images.

The answers for the frames of a video are printed one by one, and none is kept: the video may have no end.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from deploy.contract.detection import BOX_ORDER
from deploy.contract.durable_files import write_atomically
from deploy.contract.errors import ArgumentError, DeviceError, FileError, ImageError, file_error
from deploy.runner import drawing, samples, tiles
from deploy.runner.answers import to_json
from deploy.runner.drawing import DrawnFiles
from deploy.runner.model import Model

Row = Dict[str, Any]
Show = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of the command.

    Args:
        samples: files, folders, or `samples.STDIN`; none: the golden inputs of the bundle.
        tiles: the tiles that a detector runs on; None: on the image as it is.
        draw: the file or the folder of the images with answers; None: nothing is drawn.
        least_score: objects with a lower score are not drawn.
        frame_size: WIDTHxHEIGHT of the frames from stdin; None: they are JPEG images.

    Raises:
        ArgumentError: a value is out of range.
    """

    samples: Sequence[str] = ()
    top: int = 3
    tiles: Optional[tiles.Tiles] = None
    draw: Optional[str] = None
    least_score: float = drawing.LEAST_SCORE
    frame_size: Optional[str] = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ArgumentError("--top is %d, and must be at least 1" % self.top, "use --top 1 or more")
        if not 0 <= self.least_score <= 1:  # also for NaN
            raise ArgumentError("--least-score is %r; allowed: 0 to 1" % self.least_score, "use 0.4")

    @property
    def is_stream(self) -> bool:
        """Whether the samples are the frames of a video."""
        return samples.STDIN in self.samples


class Prediction(NamedTuple):
    """The answer for one sample, as a row for JSON and as a line of text."""

    row: Row
    line: str


def parsed(arguments: Any) -> RunSettings:
    """Return the settings from the command line.

    Raises:
        ArgumentError: an option is invalid, or useless without another one.
    """
    if arguments.tile_overlap is not None and arguments.tiles is None:
        raise ArgumentError("--tile-overlap belongs to --tiles", "add --tiles 2x3")
    if arguments.least_score is not None and arguments.draw is None:
        raise ArgumentError("--least-score belongs to --draw", "add --draw")
    return RunSettings(
        tuple(arguments.images),
        arguments.top,
        None if arguments.tiles is None else tiles.parsed(arguments.tiles, arguments.tile_overlap),
        arguments.draw,
        drawing.LEAST_SCORE if arguments.least_score is None else arguments.least_score,
        arguments.frame_size,
        arguments.json,
    )


def run(model: Model, settings: RunSettings, show: Show) -> Row:
    """Run a model on samples; return the answers for JSON. The answers for a stream are only shown and counted.

    If one of several files cannot be used, it gets an error instead of an answer; `failed` has their number.
    `show` prints a line: each answer as text, or the answers for a stream as JSON.

    Raises:
        ArgumentError: the settings do not suit the bundle.
        ImageError: the only sample, or a frame of a stream, cannot be used.
    """
    if settings.tiles is not None:
        tiles.refuse_others(model.bundle)
    files = samples.listed(settings.samples, model.bundle.decoding)
    target = _target(model, settings, files)
    rows: List[Row] = []
    count = unusable = 0
    for name, sample in _samples(model, settings, files):
        path = None if target is None else target.path(count, name)
        try:
            prediction = _prediction(model, settings, (name, sample), path)
        except (ImageError, FileError) as error:
            if len(files) < 2:
                raise
            unusable += 1
            prediction = Prediction({"image": name, "error": error.to_json()}, error.what)
        count += 1
        if settings.is_stream and settings.as_json:
            show(json.dumps(prediction.row, allow_nan=False))
        elif not settings.as_json:
            show(prediction.line)
        if not settings.is_stream:
            rows.append(prediction.row)
    if settings.is_stream:
        return {"answers": rows, "frames": count, "is_stream": True}
    if not unusable:
        return {"answers": rows}
    failed = ImageError("%d of %d samples cannot be used" % (unusable, count), "replace or remove these files")
    return {"answers": rows, "failed": failed.to_json()}


def _samples(model: Model, settings: RunSettings, files: Sequence[str]) -> Iterator[Tuple[str, Any]]:
    """Yield samples with their names; of several files, an error instead of a sample that cannot be read."""
    if len(files) < 2 or settings.is_stream:
        yield from samples.named(files, model.bundle, settings.frame_size)
        return
    for path in files:
        try:
            _, sample = next(samples.named([path], model.bundle, settings.frame_size))
        except ImageError as error:
            sample = error
        except OSError as error:
            sample = file_error(error)
        yield path, sample


def _target(model: Model, settings: RunSettings, files: Sequence[str]) -> Optional[DrawnFiles]:
    if settings.draw is None:
        return None
    drawing.check(model.bundle)
    is_single = len(files) == 1 and not settings.is_stream and not os.path.isdir(settings.samples[0])
    target = DrawnFiles(settings.draw, [] if settings.is_stream else files, is_single)
    target.create_folder()
    return target


def _prediction(model: Model, settings: RunSettings, sample: Tuple[str, Any], path: Optional[str]) -> Prediction:
    """Return the answer for a sample with its name; draw it into a file if there is a path."""
    name, values = sample
    if isinstance(values, DeviceError):
        raise values
    try:
        answer = model(values) if settings.tiles is None else model.tiled(values, settings.tiles)
        entry = to_json(answer, settings.top)
        row = dict(entry, image=name)
        if path is not None:
            image = drawing.drawn(values, answer, model.bundle, settings.least_score)
            write_atomically(path, drawing.encoded(image, os.path.splitext(path)[1]), durable=False)
            row["drawn"] = path
    except ImageError as error:
        raise ImageError("%s: %s" % (name, error.what), error.hint)
    parts = [_row_text(prediction, settings.top) for prediction in next(iter(entry.values()))]
    unknown = "unknown; the best guesses: " if entry.get("unknown") else ""
    return Prediction(row, "%s: %s%s" % (name, unknown, ", ".join(parts) or "nothing"))


def _row_text(row: Row, count: int) -> str:
    """Return a row of an answer as text: a class and its score, an object with its box, or an output."""
    if "values" in row:
        return "%s %r %s" % (row["name"], row["shape"], _values_text(row["values"], count))
    text = "%s %s" % (row["label"], _number_text(row["score"]))
    if "box" not in row:
        return text
    sides = ["%s %s" % (name, _number_text(value, "%.3f")) for name, value in zip(BOX_ORDER, row["box"])]
    return "%s at %s" % (text, " ".join(sides))


def _values_text(values: Any, count: int) -> str:
    while isinstance(values, list) and values and isinstance(values[0], list):
        values = values[0]
    if not isinstance(values, list):
        values = [values]
    shown = [_number_text(value) for value in values[:count]]
    return "[%s%s]" % (", ".join(shown), ", ..." if len(values) > count else "")


def _number_text(value: Optional[float], form: str = "%.4g") -> str:
    return "not a number" if value is None else form % value
