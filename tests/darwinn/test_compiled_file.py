"""Positions of the parts of a compiled file."""

from __future__ import annotations

import struct

import pytest
import tiny
from packages import compiled

from compress.core.errors import ModelError
from darwinn import compiled_file


def test_positions_are_those_of_the_bytes_in_the_file() -> None:
    file = compiled_file.parse(compiled(tiny.classifier()))
    caching, execution = file.executables
    assert file.bytes_at(caching.parameters) == b"p" * 4096
    assert [file.bytes_at(stream) for stream in execution.instructions] == [b"i" * 100, b"j" * 11]
    assert caching.token_position is not None
    assert struct.unpack_from("<Q", file.content, caching.token_position) == (99,)
    layer = execution.outputs[0]
    assert layer.zero_point_position is not None
    assert layer.scale_position is not None
    assert struct.unpack_from("<i", file.content, layer.zero_point_position) == (7,)
    assert struct.unpack_from("<f", file.content, layer.scale_position) == (0.25,)


def test_a_model_that_is_not_compiled_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"plain\.tflite: has no edgetpu-custom-op"):
        compiled_file.parse(tiny.classifier(), "plain.tflite")
