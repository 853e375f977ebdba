"""Texts on the device: a bundle with a lookup, its samples from files, lines and requests."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import text_bundles
from serving import Slow

from compress.bundling.recognition import RecognitionSettings
from compress.core.errors import DataError
from compress.data.dataset import Dataset
from compress.data.sources import TextTable
from deploy.contract import bundle
from deploy.contract.decoding import Decoding
from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.preprocessing import Preprocessing
from deploy.contract.text import MAX_BYTES
from deploy.runner import images, samples
from deploy.runner.model import Model
from deploy.service.worker import Job, Worker


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("texts") / "texts.csv"
    rows = [f"{text},{text_bundles.LABELS[index % 3]}" for index, text in enumerate(text_bundles.TEXTS * 5)]
    path.write_text("\n".join(["text,label", *rows]))
    return Dataset(TextTable(file=str(path)), Preprocessing(text_bundles.STEPS), None)


@pytest.fixture(scope="module")
def content(data: Dataset) -> bytes:
    return text_bundles.packed(data)


def changed(content: bytes, change: Any) -> bytes:
    """Return a bundle with a changed manifest."""
    members = bundle.read_archive(content)
    manifest = json.loads(members.pop(bundle.MANIFEST))
    change(manifest, members)
    return bundle.pack(manifest, members)


def test_a_text_gives_the_outputs_of_the_host(content: bytes) -> None:
    opened = bundle.Bundle(content)
    assert opened.decoding.text_bytes == 512
    golden = opened.manifest["golden"]
    expected = opened.array(golden["outputs"]["int8"])
    with Model(opened, kernels="reproducible") as model:
        for name, outputs in zip(golden["inputs"], expected, strict=True):
            sample = opened.array(name)
            np.testing.assert_array_equal(model.run(model.prepare(sample))[0][0], outputs)
            as_text = sample.tobytes().rstrip(b"\0").decode()
            for same in (as_text, as_text.encode(), "\ufeff" + as_text):
                np.testing.assert_array_equal(model.prepare(same)[0], model.prepare(sample)[0])
        answer = model("dogs bark")
        assert answer.label in text_bundles.LABELS
        assert len(opened.samples(opened.manifest["evaluation"])) == 6
        for wrong in (np.zeros((3, 3)), np.full(5, 300.0)):
            with pytest.raises(ImageError, match=r"tokens takes .*; to do: pass a text"):
                model(wrong)


def test_unknown_images_are_not_for_texts(content: bytes, data: Dataset, tmp_path: Path) -> None:
    unknown = bundle.Bundle(content).manifest["confidence"]["measured"]["unknown"]
    assert "the samples are texts" in unknown["false_accept"]["note"]
    with pytest.raises(DataError, match="takes images, and the samples are texts"):
        text_bundles.packed(data, recognition=RecognitionSettings(unknown=tmp_path))


def test_a_number_without_a_row_is_an_error(content: bytes) -> None:
    def more_buckets(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        del members
        steps = [{"tokens": {"length": text_bundles.WORDS, "buckets": 10**6}}]
        manifest["preprocessing"].update(steps=steps, digest=Preprocessing(steps).digest)

    error = pytest.raises(ImageError, match="from 0 to 20, the rows of the lookup table")
    with Model(bundle.Bundle(changed(content, more_buckets))) as model, error:
        model("dogs bark")


def two_inputs(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    del members
    first = manifest["models"]["int8"]["inputs"][0]
    manifest["models"]["int8"]["inputs"].append({**first, "name": "other"})


def table(content: bytes) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    """Return the change of the lookup table of a bundle."""
    return lambda manifest, members: members.update({manifest["models"]["int8"]["lookup"]: content})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (two_inputs, "must have one input"),
        (table(bundle.array_bytes(np.zeros((4, 99), np.int8))), "does not fit"),
        (table(b"\x93NUMPY"), "cannot be used"),
        (lambda manifest, members: members.pop(manifest["models"]["int8"]["lookup"]), "not in the bundle"),
    ],
)
def test_a_lookup_that_does_not_fit_is_refused(content: bytes, change: Any, message: str) -> None:
    with pytest.raises(bundle.BundleError, match=message):
        changed(content, change)


def test_files_are_texts(content: bytes, tmp_path: Path) -> None:
    opened = bundle.Bundle(content)
    for name, written in (("a.txt", b"dogs bark"), ("b", b"\xff\xd8\xff"), ("c.wav", b"RIFF....WAVE")):
        (tmp_path / name).write_bytes(written)
        ((_, sample),) = samples.named([str(tmp_path / name)], opened)
        assert (sample.shape, sample[: len(written)].tobytes()) == ((512,), written)


def test_a_folder_has_texts(content: bytes, tmp_path: Path) -> None:
    decoding = bundle.Bundle(content).decoding
    for name in ("a.txt", "b/c.TXT", "photo.jpg", "d.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    paths = samples.listed([str(tmp_path)], decoding)
    assert paths == [str(tmp_path / name) for name in ("a.txt", "d.npy", "b/c.TXT")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match=r"needs files of \.txt, \.npy"):
        samples.listed([str(tmp_path / "empty")], decoding)


def test_lines_of_stdin_are_texts(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = bundle.Bundle(content)
    lines = b"dogs bark\n\n  \n a cat\r\n" + b"x" * 200_000 + b"\n\xff\nlast"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    named_texts = [(name, bytes(sample).rstrip(b"\0")) for name, sample in samples.named(["-"], opened)]
    texts = [b"dogs bark", b" a cat", b"x" * 512, b"\xff", b"last"]
    assert named_texts == [(f"line-{number:06}", text) for number, text in zip((1, 4, 5, 6, 7), texts, strict=True)]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\n\n")))
    with pytest.raises(ImageError, match="stdin has no text"):
        list(samples.named(["-"], opened))
    with pytest.raises(ArgumentError, match="--frame-size belongs to images, and the bundle takes texts"):
        list(samples.named(["-"], opened, "3x3"))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ArgumentError, match="stdin is closed"):
        list(samples.named(["-"], opened))


def test_a_request_is_a_text(content: bytes) -> None:
    decoding = bundle.Bundle(content).decoding
    sample = images.decode_body(b"PK\x03\x04 is a text", decoding=decoding)
    assert bytes(sample).rstrip(b"\0") == b"PK\x03\x04 is a text"
    np.testing.assert_array_equal(images.decode_body(bundle.array_bytes(sample), decoding=decoding), sample)


@pytest.mark.parametrize(
    ("content_type", "complaint"),
    [
        ("", None),
        ("Text/Plain; Charset=UTF-8", None),
        ("application/x-www-form-urlencoded", None),
        ("application/json", "the body is JSON"),
        ('text/plain; charset="ISO-8859-1"', "the encoding of the text is iso-8859-1"),
    ],
)
def test_a_request_of_another_type_is_refused(content_type: str, complaint: str | None) -> None:
    service = Worker(Slow(), 1, Decoding(text_bytes=8))
    job = Job(b"a text", {"content-type": content_type}, bool)
    assert service.offer(job)
    assert job.finished.wait(20)
    assert service.close(20)
    assert (job.error is None) == (complaint is None)
    assert complaint is None or complaint in str(job.error)


def test_a_long_line_is_cut_after_a_whole_character(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        del members
        manifest["decoding"]["text_bytes"] = MAX_BYTES

    opened = bundle.Bundle(changed(content, longest))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"x" + "é".encode() * MAX_BYTES)))
    ((_, sample),) = samples.named(["-"], opened)
    assert bytes(sample).rstrip(b"\0") == b"x" + "é".encode() * (MAX_BYTES // 2 - 1)
