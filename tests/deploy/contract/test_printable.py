"""Labels, names and messages from untrusted sources that are written to a terminal, a log or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fuzz_mutations
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from compress.model.tflite import graph
from compress.surface.cli import output
from compress.surface.cli.console import Console
from compress.surface.cli.main import main
from deploy.contract import printable

TEXTS = st.one_of(
    st.text(), st.sampled_from(fuzz_mutations.HOSTILE_TEXT), st.text(alphabet="\x1b[31m\x9b\u202e\n\r\0a")
)


@given(TEXTS)
def test_nothing_unprintable_is_left(text: str) -> None:
    assert not printable.UNPRINTABLE.search(printable.line(text))
    assert not printable.UNPRINTABLE.search(printable.lines(text).replace("\n", "").replace("\t", ""))


@given(st.text(alphabet=st.characters(categories=("L", "N", "P", "S"), exclude_characters="\ufffc\ufffd")))
def test_text_of_people_stays(text: str) -> None:
    assert printable.lines(text) == printable.line(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("\x1b[2J", "\\x1b[2J"), ("a\nb\tc", "a\\nb\\tc"), ("\u202egnp", "\\u202egnp"), ("\x9b31m", "\\x9b31m")],
)
def test_escapes(text: str, expected: str) -> None:
    assert printable.line(text) == expected


def test_notes_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    output.note("\x1b]0;title\x07 of\na file")
    output.write("a\tb\r\n\u202e")
    captured = capsys.readouterr()
    assert captured.err == "\\x1b]0;title\\x07 of\na file\n"
    assert captured.out == "a\tb\\r\n\\u202e\n"


def test_the_log(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with Console(path) as console:
        console.log("label \x1b[31m\u202e\x1e\x04")
    content = path.read_text(encoding="utf-8")
    assert "label \\x1b[31m\\u202e\\x1e\\x04" in content
    assert "\x1b" not in content


@pytest.mark.parametrize("text", fuzz_mutations.HOSTILE_TEXT)
def test_hostile_names_of_files_in_messages(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that does not exist, and a model with this name for its tensors: no command prints it unchanged."""
    name = text.replace("/", "").replace("\0", "") or "x"
    for command in (["check"], ["import"], ["estimate", "--host", "usb3"], ["inspect"]):
        assert main([command[0], str(tmp_path / f"{name}.tflite"), *command[1:]]) == 4
        captured = capsys.readouterr()
        assert not printable.UNPRINTABLE.search(captured.err.replace("\n", ""))
    named(tmp_path / "m.tflite", text)
    main(["check", str(tmp_path / "m.tflite")])
    captured = capsys.readouterr()
    assert not printable.UNPRINTABLE.search((captured.out + captured.err).replace("\n", "").replace("\t", ""))


def named(path: Path, text: str) -> None:
    model: Any = graph.parse(tiny.classifier())
    for tensor in model.source.subgraphs[0].tensors:
        tensor.name = text.encode("utf-8", "replace")
    path.write_bytes(graph.serialize(model))
