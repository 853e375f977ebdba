"""Text: the bytes of UTF-8 as a sample, and the preprocessing step that makes token numbers of them.

A sample of text is uint8 [bytes], with zeros after its end. Any bytes are a text: those that are not valid UTF-8 become
U+FFFD.

The number of a token is a hash of it. So the model needs no vocabulary, and no word is unknown:
Weinberger et al., Feature Hashing for Large Scale Multitask Learning, ICML 2009 (arXiv 0902.2206).
"""

from __future__ import annotations

import codecs
import dataclasses
import re
import unicodedata
import zlib
from typing import List, Union

import numpy as np

from deploy.contract.step import Array, Plan, PreprocessingError, Shape, Step, Whole, Word, key

MAX_BYTES = 1 << 14
"""The longest text. CPython's normalization takes quadratic time for many combining characters in a row: 0.1 to 0.3 s
for this length on a PC."""
MAX_LENGTH = 1 << 12
"""The largest number of tokens."""
MAX_BUCKETS = (1 << 24) - 1
"""The largest number of buckets: float32 holds every number up to it."""
_MARK = "\u0300"
"""Any mark, in the text in which words are found."""
_WORD = re.compile("\\w[\\w%s]*" % _MARK)
_LARGEST_BYTE = 255


def sample_of(text: Union[str, bytes, bytearray], size: int) -> Array:
    """Return a text as a sample: uint8 [size]. A longer text is cut after a whole character.

    A byte order mark at the beginning is left out: many editors write it, and tables are read without it.

    Args:
        text: the text, or its bytes in UTF-8.
        size: the bytes of a sample.
    """
    # A lone surrogate, which UTF-8 cannot hold, becomes a question mark.
    content = text.encode("utf-8", "replace") if isinstance(text, str) else bytes(text)
    if content.startswith(codecs.BOM_UTF8):
        content = content[len(codecs.BOM_UTF8) :]
    end = size
    if len(content) > size:
        while end > 0 and size - end < 3 and content[end] & 0xC0 == 0x80:  # the middle of a character
            end -= 1
    content = content[:end]
    return np.frombuffer(content + bytes(size - len(content)), np.uint8).copy()


def text_of(sample: Array) -> str:
    """Return the text of a sample."""
    return np.asarray(sample).astype(np.uint8).tobytes().rstrip(b"\0").decode("utf-8", "replace")


def tokens_of(text: str, unit: str) -> List[str]:
    """Return the tokens of a text, in Unicode's compatibility form (NFKC) without differences of case.

    Versions of Unicode may change lower case, but not case folding (Unicode's stability policy). So it is the same on
    all versions of Python.

    Args:
        text: any text.
        unit: "word": letters, digits and underscores that follow each other, with their marks, such as accents and the
            vowel signs of Indic scripts; "character": every character that is not blank, for languages without blanks
            between words, and for names and codes.
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    if not plain.isascii():
        plain = unicodedata.normalize("NFC", plain)  # case folding decomposes a few letters
    if unit == "character":
        return [character for character in plain if not character.isspace()]
    if plain.isascii():
        return _WORD.findall(plain)
    # `\w` matches no marks.
    marked = "".join(_MARK if unicodedata.category(character)[0] == "M" else character for character in plain)
    return [plain[match.start() : match.end()] for match in _WORD.finditer(marked)]


def number_of(token: str, buckets: int) -> int:
    """Return the number of a token, from 1 to `buckets`: CRC-32 (ISO 3309) of its UTF-8, modulo `buckets`, plus 1."""
    return 1 + (zlib.crc32(token.encode("utf-8", "replace")) & 0xFFFFFFFF) % buckets


@dataclasses.dataclass(frozen=True)
class Tokens(Step):
    """Split a text into tokens, and number them: [length], from 1 to `buckets`, with zeros after the last one.

    An `Embedding` with `input_dim` of `buckets` + 1 takes them. Tokens after the first `length` are ignored.
    """

    length: int = key(Whole(1, MAX_LENGTH))
    """The number of tokens of every sample."""
    buckets: int = key(Whole(1, MAX_BUCKETS))
    """The number of different numbers. Tokens of the same number are the same for the model."""
    unit: str = key(Word("word", "character"), "word")
    """A token. word: letters and digits that follow each other, with their accents. character: every character that is
    not blank."""

    def planned(self, shape: Shape) -> Plan:
        """Return the shape of the result."""
        if len(shape) != 1 or shape[0] > MAX_BYTES:
            what = "tokens takes a text, uint8 [bytes] with at most %d bytes, not %r"
            raise PreprocessingError(what % (MAX_BYTES, list(shape)))
        # NFKC makes up to 18 characters of one (U+FDFA), and Python takes up to 84 bytes for each in a list.
        return Plan((self.length,), self.length + 128 * shape[0])

    def __call__(self, sample: Array) -> Array:
        """Return the numbers of the tokens."""
        if not ((sample >= 0) & (sample <= _LARGEST_BYTE)).all():
            raise PreprocessingError("tokens takes the bytes of a text, from 0 to 255")
        tokens = tokens_of(text_of(sample), self.unit)[: self.length]
        numbers = np.zeros(self.length, np.float32)
        numbers[: len(tokens)] = [number_of(token, self.buckets) for token in tokens]
        return numbers
