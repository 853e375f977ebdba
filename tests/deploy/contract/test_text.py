"""Texts as samples, the step `tokens`, and the lookup of an embedding outside of a model."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.contract import text
from deploy.contract.preprocessing import Preprocessing, PreprocessingError
from deploy.contract.tensors import Lookup, TensorDescription

TOKENS = Preprocessing([{"tokens": {"length": 6, "buckets": 1000}}])
INPUT = TensorDescription("x", "x", (1, 4, 3), "int8", 0.5, 0)
TABLE = np.arange(15, dtype=np.int8).reshape(5, 3)


def numbers(content: str | bytes, step: Preprocessing = TOKENS, size: int = 64) -> list[int]:
    return step(text.sample_of(content, size)).astype(int).tolist()


def test_tokens_are_numbered_by_a_fixed_hash() -> None:
    """The numbers are part of every trained model: they must never change."""
    tokens = numbers("Let there be light!")
    assert tokens == [1 + zlib.crc32(word) % 1000 for word in (b"let", b"there", b"be", b"light")] + [0, 0]
    assert text.number_of("123456789", 16384) == 1 + 0xCBF43926 % 16384  # the check value of CRC-32
    assert text.number_of("", 7) == 1


def test_case_and_compatible_forms_are_the_same() -> None:
    assert numbers("GRÜN, \N{LATIN SMALL LIGATURE FI}t 1\N{SUPERSCRIPT TWO}") == numbers("grün fit 12")
    assert numbers("gru\N{COMBINING DIAERESIS}n fit 12") == numbers("grün fit 12")
    assert numbers("STRASSE ΟΔΟΣ") == numbers("Straße οδος")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("ọ̀rọ̀ ọjọ́", ["ọ̀rọ̀", "ọjọ́"]),  # no single characters exist for these
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
        ("İZMİR ταΐζω", ["i̇zmi̇r", "ταΐζω"]),  # case folding decomposes both
        ("ok ❤️ cat❤️dog \N{COMBINING ACUTE ACCENT}", ["ok", "cat", "dog"]),
    ],
)
def test_a_word_has_its_marks(content: str, words: list[str]) -> None:
    assert text.tokens_of(content, "word") == words


def test_a_long_text_is_cut_and_a_short_one_is_filled_up() -> None:
    assert numbers("a b c d e f g h") == numbers("a b c d e f")
    assert numbers("") == [0] * 6
    characters = Preprocessing([{"tokens": {"length": 5, "buckets": 9, "unit": "character"}}])
    assert numbers("日 本語", characters)[3:] == [0, 0]


@pytest.mark.parametrize("size", range(1, 9))
def test_a_text_is_cut_after_a_whole_character(size: int) -> None:
    decoded = text.text_of(text.sample_of("aä日𝄞", size))
    assert "aä日𝄞".startswith(decoded)
    assert len(decoded.encode()) > size - 4


@given(st.binary(max_size=80), st.integers(1, 90))
def test_any_bytes_are_a_text(content: bytes, size: int) -> None:
    sample = text.sample_of(content, size)
    assert (sample.shape, sample.dtype) == ((size,), np.uint8)
    tokens = TOKENS(sample)
    assert (tokens.shape, tokens.dtype) == ((6,), np.float32)
    assert ((tokens >= 0) & (tokens <= 1000)).all()


@pytest.mark.parametrize("content", ["", "a cat", "日本語", "a lone surrogate: \ud800"])
def test_any_string_is_a_text(content: str) -> None:
    np.testing.assert_array_equal(text.sample_of(content, 40), text.sample_of(content.encode("utf-8", "replace"), 40))


@pytest.mark.parametrize(
    "sample", [np.zeros((4, 4), np.uint8), np.full(4, -1.0), np.full(4, np.nan), np.zeros(1 << 17)]
)
def test_what_is_not_a_text_is_refused(sample: np.ndarray) -> None:
    with pytest.raises(PreprocessingError, match="tokens takes"):
        TOKENS(sample)


def test_rows_are_looked_up() -> None:
    lookup = Lookup(TABLE, INPUT)
    assert lookup.shape == (4,)
    rows = lookup(np.array([0, 4.9, 1.0, 0]))
    assert (rows.shape, rows.dtype) == ((1, 4, 3), np.int8)
    np.testing.assert_array_equal(rows[0, :, 0], [0, 12, 3, 0])


@pytest.mark.parametrize("number", [-1, 5, np.nan, np.inf, 1e30])
def test_a_number_without_a_row_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 4"):
        Lookup(TABLE, INPUT)(np.array([0, number, 0, 0], np.float32))


@pytest.mark.parametrize("table", [TABLE[:, :2], TABLE.astype(np.uint8), TABLE[:0], TABLE[0]])
def test_a_table_that_does_not_fit_is_refused(table: np.ndarray) -> None:
    with pytest.raises(ValueError, match="does not fit an input of int8"):
        Lookup(table, INPUT)
