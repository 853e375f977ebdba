"""The lookup table in the metadata of a file: it is kept by edits, and used by the programs that run the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import text_bundles
import tiny

from compress.core.errors import ModelError
from compress.model.tflite import edit, graph, lookup
from compress.model.tflite.interpreter import LoadedModel
from compress.targets import load


def loaded(folder: Path, content: bytes) -> LoadedModel:
    (folder / "model.tflite").write_bytes(content)
    return LoadedModel(folder / "model.tflite", reproducible=True)


def test_a_file_with_a_table_takes_numbers(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 21, (5, text_bundles.WORDS)).astype(np.float32)
    (tmp_path / "without").mkdir()
    model = loaded(tmp_path, text_bundles.model())
    plain = loaded(tmp_path / "without", text_bundles.model(with_table=False))
    assert model.input_layout.shapes == ((text_bundles.WORDS,),)
    (tensor,) = model.input_tensors
    vectors = tensor.real(text_bundles.table())[numbers.astype(int)]
    assert plain.lookup is None
    np.testing.assert_array_equal(model.scores(numbers), plain.scores(vectors))
    with pytest.raises(ModelError, match=r"from 0 to 20.*buckets"):
        model.feed(np.full(text_bundles.WORDS, 21, np.float32))
    with pytest.raises(ModelError, match=r"takes \[1, 4\], but the data gives \[1, 4, 3\]"):
        model.feed(vectors[0])


def test_edits_keep_the_table() -> None:
    parsed = graph.parse(text_bundles.model())
    edited = load("edgetpu").legalize(parsed, parsed.feeds(np.zeros((2, 4, 3), np.float32)), io="UINT8").graph
    for variant in (parsed, edited, edit.compact(parsed)):
        table = lookup.table_of(graph.parse(graph.serialize(variant)))
        np.testing.assert_array_equal(table, text_bundles.table())


def test_a_part_with_other_inputs_has_no_table() -> None:
    parsed = graph.parse(text_bundles.model())
    full_graph = edit.extract(parsed, range(len(parsed.operators)), parsed.inputs, parsed.outputs)
    rest = edit.extract(parsed, [], parsed.outputs, parsed.outputs)
    assert lookup.table_of(full_graph) is not None
    assert lookup.table_of(rest) is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros((4, 5), np.int8), "does not fit"),
        (np.zeros((4, 3), np.float32), "does not fit"),
        (np.zeros((4, 3, 1), np.int8), "is an array of 3 axes"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, table: np.ndarray, message: str) -> None:
    parsed = graph.parse(text_bundles.model(with_table=False))
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path, graph.serialize(lookup.with_table(parsed, table)))


def test_damaged_metadata_is_refused(tmp_path: Path) -> None:
    content = text_bundles.model()
    start = content.index(b"\x93NUMPY")
    with pytest.raises(ModelError, match=r"model\.tflite: the metadata .* is not an array of numbers"):
        loaded(tmp_path, content[:start] + b"\0" + content[start + 1 :])


def test_the_check_says_what_the_cpu_does_first() -> None:
    checked = load("edgetpu").check(graph.parse(text_bundles.model()))
    assert checked.lookup_table == text_bundles.table().shape
    assert "on the CPU, before the first operator: a table of 21 rows of 3 values" in checked.describe()
    assert load("edgetpu").check(graph.parse(tiny.classifier())).to_json()["lookup_table"] is None


def test_metadata_without_its_buffer_is_refused(tmp_path: Path) -> None:
    parsed = graph.parse(text_bundles.model())
    parsed.source.metadata[-1].buffer = len(parsed.source.buffers)
    with pytest.raises(ModelError, match="a buffer of the metadata does not exist"):
        loaded(tmp_path, graph.serialize(parsed))
