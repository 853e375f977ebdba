"""YAML as plain values: valid files, and errors with their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress.core.errors import PipelineError, nearest, shown
from compress.core.yaml_limits import MAX_BYTES, MAX_DEPTH, MAX_LINES, MAX_NODES
from compress.pipeline.yaml_file import Document, read


@pytest.fixture
def parse(tmp_path: Path) -> Any:
    def parse(content: str | bytes) -> Document:
        path = tmp_path / "file.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read(path)

    return parse


def refusal(parse: Any, content: str | bytes) -> str:
    """Return the message for a refused file, without the folder of the file."""
    with pytest.raises(PipelineError) as caught:
        parse(content)
    message = str(caught.value)
    assert "\n" not in message
    assert "file.yaml" in message
    return "file.yaml" + message.partition("file.yaml")[2]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-0", 0),
        ("017", 17),  # 15 in YAML 1.1
        ("0o17", 15),
        ("0x1F", 31),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775807", 1 - 2**63),
        ("true", True),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("1:30", "1:30"),  # 90 in YAML 1.1
        ("2001-12-31", "2001-12-31"),
        ("'12'", "12"),
        ("<<", "<<"),
        ("caffè ☕", "caffè ☕"),
        ("[1, [2, {a: b}]]", [1, [2, {"a": "b"}]]),
    ],
)
def test_values_are_those_of_yaml_1_2(parse: Any, text: str, value: Any) -> None:
    parsed = parse(f"key: {text}\n").value
    assert parsed == {"key": value}
    assert type(parsed["key"]) is type(value)


def test_numbers_as_keys_stay_words(parse: Any) -> None:
    assert parse("1: a\n1.0: b\ntrue: c\n").value == {"1": "a", "1.0": "b", "true": "c"}


def test_lines_of_nested_keys_and_items(parse: Any) -> None:
    document = parse("# a comment\na:\n  b:\n    - x\n    -\n      c: 1\n      d: {e: 2,\n        f: 3}\n\ng: 4\n")
    assert document.lines == {
        (): 2,
        ("a",): 2,
        ("a", "b"): 3,
        ("a", "b", 0): 4,
        ("a", "b", 1): 6,
        ("a", "b", 1, "c"): 6,
        ("a", "b", 1, "d"): 7,
        ("a", "b", 1, "d", "e"): 7,
        ("a", "b", 1, "d", "f"): 8,
        ("g",): 10,
    }


def test_where_names_the_key_and_the_line_of_what_should_hold_it(parse: Any, tmp_path: Path) -> None:
    document = parse("a:\n  b:\n    - {c: 1}\n")
    path = tmp_path / "file.yaml"
    assert document.where(()) == f"{path}:1"
    assert document.where(("a", "b", 0, "c")) == f"{path}:3: a.b[0].c"
    assert document.where(("a", "b", 0, "missing")) == f"{path}:3: a.b[0].missing"
    assert document.where(("a", "missing", "too")) == f"{path}:1: a.missing.too"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_do_not_depend_on_the_end_of_line(parse: Any, newline: str) -> None:
    assert parse(newline.join(["a: 1", "b:", "  c: 2", ""])).lines[("b", "c")] == 3


def test_byte_order_mark_is_no_content(parse: Any) -> None:
    assert parse("\ufeffa: 1\n").value == {"a": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "file.yaml:3: the key 'a' occurs twice (first in line 1)"),
        ("x:\n  a: 1\n  a: 1\n", "file.yaml:3: the key 'a' occurs twice (first in line 2)"),
        ("x: {a: 1, a: 2}\n", "file.yaml:1: the key 'a' occurs twice"),
        ("a: 1\nb: *x\n", "file.yaml:2: anchors and aliases"),
        ("a: 1\nb:\n  <<: {c: 1}\n", "file.yaml:3: a key must be a plain word; merging (<<)"),
        ("a: 1\n? [b, c]\n: 2\n", "file.yaml:2: a key must be a plain word"),
        ('a: 1\n"b\\nc": 2\n', "file.yaml:2: a key must be a plain word"),
        ("a: 1\nb: !!python/object:os.system x\n", "file.yaml:2: the tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("a: !!int 3\n", "file.yaml:1: the tag 'tag:yaml.org,2002:int' is not allowed"),
        ("a: 1\n---\nb: 1\n", "file.yaml:2: a second document (---) is not allowed"),
        ("%YAML 1.1\n---\na: no\n", "the version in the %YAML line is not allowed; allowed: 1.2"),
        ("a: 1\nb: [1, 2\nc: 3\n", "file.yaml:3: is not valid YAML"),
        ("a: [1, 2\n\n\n", "(begun in line 1)"),
        ("a:\n\tb: 1\n", "file.yaml:2: is not valid YAML"),
        ('a: "\\U00110000"\n', "file.yaml: is not valid YAML: an escape sequence is not a valid character"),
        ("a: 1\nb: 1e999\n", "file.yaml:2: '1e999' is infinite or not a number"),
        ("a: 1\nb: -.inf\n", "file.yaml:2: '-.inf' is infinite or not a number"),
        ("a: 1\nb: .nan\n", "file.yaml:2: '.nan' is infinite or not a number"),
        ("a: 1\nb: 9223372036854775808\n", "file.yaml:2: '9223372036854775808' is too large"),
        ("a: 0x" + "f" * 5000, "file.yaml:1: '0xfff"),
        ("a: " + "9" * 5000, "file.yaml:1: '9999"),
        ('a: 1\nb: "x\\0y"\n', "file.yaml:2: the text contains the character '\\x00'"),
        ('a: 1\nb: "\\ud800"\n', "file.yaml:2: the text contains the character '\\ud800'"),
        ("a: |\n  two\n  lines\n", "file.yaml:1: the text contains the character '\\n'"),
        ("a: 1\nb: '\u2028'\n", "file.yaml:2: the text contains the character '\\u2028'"),
        (b"a: 1\nb: \x00\n", "file.yaml:2: is not valid YAML: unacceptable character #x0000"),
        (b"a: 1\nb: \xff\n", "file.yaml:2: is not a text file in UTF-8"),
        ("a: 1\n".encode("utf-16"), "file.yaml:1: is not a text file in UTF-8"),
        (b"", "file.yaml: is empty"),
        ("[" * 2000 + "]" * 2000, f"file.yaml:1: is nested too deeply; allowed: {MAX_DEPTH} levels"),
    ],
)
def test_what_is_refused(parse: Any, content: str | bytes, message: str) -> None:
    actual = refusal(parse, content)
    assert actual.startswith(message) if message.startswith("file.yaml") else message in actual
    assert len(actual) < 300


def test_depth_up_to_the_limit_is_read(parse: Any) -> None:
    value = parse("[" * MAX_DEPTH + "]" * MAX_DEPTH).value
    for _ in range(MAX_DEPTH - 1):
        (value,) = value
    assert value == []
    assert "nested too deeply" in refusal(parse, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("".join(f"k{index}: 1\n" for index in range(40_000)), f"has too many keys and values; allowed: {MAX_NODES:,}"),
        ("a: [" + "1," * 60_000 + "]", f"has too many keys and values; allowed: {MAX_NODES:,}"),
        ("\n" * (MAX_LINES + 1) + "a: 1", f"has too many lines; allowed: {MAX_LINES:,}"),
    ],
    ids=["keys", "items", "lines"],
)
def test_more_than_a_pipeline_has(parse: Any, content: str, message: str) -> None:
    assert message in refusal(parse, content)


def test_size_up_to_the_limit_is_read(parse: Any) -> None:
    padding = "#" * (MAX_BYTES - len("a: 1\n"))
    assert parse(f"a: 1\n{padding}").value == {"a": 1}
    assert refusal(parse, f"a: 1\n{padding}#").startswith(
        f"file.yaml: is too large for a pipeline file; allowed: {MAX_BYTES}"
    )


def test_a_device_without_end_is_too_large() -> None:
    with pytest.raises(PipelineError, match="too large"):
        read(Path("/dev/zero"))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"nothing\.yaml: cannot be read: No such file or directory; give the path"):
        read(tmp_path / "nothing.yaml")
    with pytest.raises(PipelineError, match="cannot be read: Is a directory"):
        read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PipelineError, match="cannot be read: Not a directory"):
        read(tmp_path / "file" / "pipeline.yaml")


def test_values_in_messages_are_short_and_as_in_yaml() -> None:
    assert [shown(value) for value in (None, True, "x", 1.5)] == ["null", "true", "'x'", "1.5"]
    assert len(shown(["x"] * 10_000)) < 120


def test_nearest_names_a_close_word_and_nothing_otherwise() -> None:
    assert nearest("epoch", ["epochs", "id"]) == "did you mean 'epochs'?"
    assert nearest("EPOCHS", ["epochs", "id"]) == "did you mean 'epochs'?"
    assert nearest("xyz", ["epochs", "id"]) == ""


def test_content_that_was_not_read_from_a_file_has_no_lines() -> None:
    document = Document(Path("x.yaml"), {"stages": [{}]}, {})
    assert document.where(("stages", 0, "prune")) == "x.yaml: stages[0].prune"
