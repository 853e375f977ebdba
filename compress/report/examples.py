"""The section "Examples": test samples with the answers of original and result drawn into them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from compress.report.blocks import Block, Picture, Pictures, Section, Text, joined
from compress.report.wording import MAX_PROSE, shorten
from compress.results.evaluation import EXAMPLES, ExamplesRecord, PictureRecord
from compress.results.run import RunRecord

MAX_EXAMPLES = 12  # chosen; twice as many as a run draws
TITLES = {"label": "Label", "original": "Original", "result": "Result"}
REASONS = {"different": "a large difference", "typical": "typical"}


def files(record: RunRecord) -> list[str]:
    """Return the names of the pictures in the folder EXAMPLES."""
    examples = () if record.examples is None else record.examples.examples
    return [Path(picture.file).name for example in examples for picture in example.pictures]


def read(run: Path, record: RunRecord) -> dict[str, bytes]:
    """Return the content of the pictures in the folder of a run by name, without those that are missing.

    Raises:
        OSError: a picture cannot be read.
    """
    paths = {name: run / EXAMPLES / name for name in files(record)}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def sections(record: RunRecord, contents: Mapping[str, bytes]) -> Iterator[Section]:
    """Yield the section, if the run has examples.

    Args:
        record: the record.
        contents: the content of the pictures by name; one with another digest than in the record is not shown.
    """
    if record.examples is None or not record.examples.examples:
        return
    blocks: list[Block] = [Text(_introduction(record.examples))]
    for example in record.examples.examples[:MAX_EXAMPLES]:
        name = f"{shorten(example.name, 100)} (test sample {example.sample})"
        caption = f"{name}, {REASONS[example.kind]}: {shorten(example.difference, MAX_PROSE)}."
        blocks.append(Pictures([_picture(picture, contents) for picture in example.pictures], caption))
    yield Section("Examples", blocks)


def _introduction(examples: ExamplesRecord) -> str:
    different = sum(example.kind == "different" for example in examples.examples)
    typical = len(examples.examples) - different
    parts = [f"{different} with the largest difference between original and result"] if different else []
    parts += [f"{typical} typical, with a difference near the median"] if typical else []
    chosen = f"{len(examples.examples)} of {examples.samples:,} test samples: {', then '.join(parts)}."
    equal = "" if different else "Original and result give equal answers to all samples."
    return joined(" ", chosen, equal, shorten(examples.note, MAX_PROSE))


def _picture(picture: PictureRecord, contents: Mapping[str, bytes]) -> Picture:
    name = Path(picture.file).name
    content = contents.get(name, b"")
    source = ""
    if hashlib.sha256(content).hexdigest() == picture.sha256:
        source = f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
    title = TITLES.get(picture.shows, shorten(picture.shows))
    return Picture(title, shorten(picture.text, MAX_PROSE), f"{EXAMPLES}/{name}", source)
