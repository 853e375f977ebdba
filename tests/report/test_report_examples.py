"""The section with examples: pictures in the page, a list of files in Markdown."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from run_records import NASTY, Record, full, markdown_of

from compress import report
from compress.report import examples
from compress.results.run import RunRecord

CONTENT = b"\xff\xd8\xff\xe0 a picture"


def picture(shows: str, text: str, file: str) -> Record:
    return {"shows": shows, "file": file, "sha256": hashlib.sha256(CONTENT).hexdigest(), "text": text}


def with_examples(text: str = "cup 0.90", name: str = "photos/7.jpg") -> Record:
    rows = []
    for number, kind in enumerate(("different", "typical"), 1):
        shown = [
            picture(shows, f"{text} {shows}", f"{number}-{shows}.jpg") for shows in ("label", "original", "result")
        ]
        rows.append(
            {"sample": 7 * number, "name": name, "kind": kind, "difference": "1 of 3 objects", "pictures": shown}
        )
    return full() | {"examples": {"note": "Boxes are drawn.", "samples": 1200, "examples": rows}}


def contents(record: Record) -> dict[str, bytes]:
    return dict.fromkeys(examples.files(RunRecord.from_json(record)), CONTENT)


def page_of(record: Record, pictures: Any) -> str:
    return report.render(RunRecord.from_json(record), pictures)["report.html"].decode()


def test_pictures_are_in_the_page_with_the_reason_for_each_sample() -> None:
    record = with_examples()
    html = page_of(record, contents(record))
    source = f"data:image/jpeg;base64,{base64.b64encode(CONTENT).decode()}"
    assert html.count(f'<img src="{source}"') == 6
    assert 'alt="Result: cup 0.90 result"' in html
    assert "img-src data:" in html
    assert "2 of 1,200 test samples: 1 with the largest difference between original and result, then 1 typical" in html
    assert "photos/7.jpg (test sample 7), a large difference: 1 of 3 objects." in html
    assert "photos/7.jpg (test sample 14), typical: " in html


def test_the_json_has_names_and_digests_but_no_pictures() -> None:
    record = with_examples()
    text = report.render(RunRecord.from_json(record), contents(record))["report.json"].decode()
    assert json.loads(text)["examples"] == record["examples"]
    assert "base64" not in text


def test_markdown_lists_the_files() -> None:
    text = markdown_of(with_examples())
    assert "## Examples" in text
    assert "- Original, examples/1-original.jpg: cup 0.90 original" in text
    assert "base64" not in text


def test_a_missing_or_changed_file_is_not_shown() -> None:
    record = with_examples()
    pictures = contents(record) | {"1-label.jpg": CONTENT + b"!"}
    del pictures["2-result.jpg"]
    html = page_of(record, pictures)
    assert html.count("<img") == 4
    for name in ("1-label.jpg", "2-result.jpg"):
        assert f"The file examples/{name} is missing or was changed." in html


def test_names_and_texts_are_not_trusted(tmp_path: Path) -> None:
    record = with_examples(NASTY, NASTY)
    record["examples"]["examples"][0]["pictures"][0]["file"] = "../../secret.jpg"
    html = page_of(record, contents(record))
    assert "<script" not in html
    assert "onerror=alert(1)>" not in html
    (tmp_path / "examples").mkdir()
    (tmp_path / "secret.jpg").write_bytes(CONTENT)
    (tmp_path / "examples" / "1-result.jpg").write_bytes(CONTENT)
    assert examples.read(tmp_path / "examples" / "..", RunRecord.from_json(record)) == {"1-result.jpg": CONTENT}


def test_runs_without_examples_have_no_section() -> None:
    for record in (full(), full() | {"examples": None}):
        assert "Examples" not in page_of(record, {})
    equal = with_examples()
    equal["examples"]["examples"] = equal["examples"]["examples"][1:]
    assert "Original and result give equal answers to all samples." in page_of(equal, {})
