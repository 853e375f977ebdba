"""PoseNet's .tflite files without their decoder.

The vendor's files end with the custom operator PosenetDecoderOp. TFLite runtimes do not have it: it is in a library of
the vendor, for few processors. `without_decoder` removes it from the bytes of a file and returns its settings. The
outputs of the file are then heatmaps, short offsets and mid offsets.

Layout of the bytes: FlexBuffers internals (google/flatbuffers) and TensorFlow Lite's schema.fbs.
"""

from __future__ import annotations

import struct
from typing import Dict, Optional, Tuple, Union

from coralline_pycoral.flat_tables import ByteString, field, tables, u32, vector
from coralline_pycoral.posenet import DecoderSettings
from deploy.contract.errors import LoadError

DECODER = b"PosenetDecoderOp"
# Indices of the fields in the tables of schema.fbs.
_MODEL_OPERATOR_CODES = 1
_MODEL_SUBGRAPHS = 2
_CODE_CUSTOM_CODE = 1
_SUBGRAPH_OUTPUTS = 2
_SUBGRAPH_OPERATORS = 3
_OPERATOR_CODE = 0
_OPERATOR_INPUTS = 1
_OPERATOR_CUSTOM_OPTIONS = 5
_LIMITS = {"max_detections": 1000, "score_threshold": 0.999, "stride": 1024, "nms_radius": 10000}
"""The largest value of each setting of the decoder."""
_FLEX_MAP = 9
_FLEX_FORMATS = {
    1: {1: "<b", 2: "<h", 4: "<i", 8: "<q"},
    2: {1: "<B", 2: "<H", 4: "<I", 8: "<Q"},
    3: {4: "<f", 8: "<d"},
}
"""Formats of signed, unsigned and floating-point numbers by their type in FlexBuffers and their width."""


def without_decoder(content: bytes) -> Tuple[bytes, Optional[DecoderSettings]]:
    """Return a .tflite file without the decoder, and the settings of the decoder; None: the file has no decoder.

    Raises:
        LoadError: the file is damaged, or its decoder has instance masks.
    """
    if DECODER not in content:
        return content, None
    try:
        return _without_decoder(bytearray(content))
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise LoadError("the PoseNet file cannot be read: %s" % error)


def _without_decoder(data: bytearray) -> Tuple[bytes, Optional[DecoderSettings]]:
    model = u32(data, 0)
    codes = tables(data, vector(data, model, _MODEL_OPERATOR_CODES))
    names = [_custom_code(data, code) for code in codes]
    (subgraph,) = tables(data, vector(data, model, _MODEL_SUBGRAPHS))
    operators = vector(data, subgraph, _SUBGRAPH_OPERATORS)
    for index, operator in enumerate(tables(data, operators)):
        code = field(data, operator, _OPERATOR_CODE)
        if names[u32(data, code) if code else 0] == DECODER:
            settings = _settings(data, operator)
            _replace_outputs(data, subgraph, operator)
            _remove(data, operators, index)
            return bytes(data), settings
    return bytes(data), None


def _settings(data: bytearray, operator: int) -> DecoderSettings:
    options = vector(data, operator, _OPERATOR_CUSTOM_OPTIONS)
    values = _flex_map(bytes(data[options + 4 : options + 4 + u32(data, options)]))
    for name, most in _LIMITS.items():
        if not 0 <= values[name] <= most:  # also refuses NaN
            raise ValueError("its decoder has %s %r; allowed: 0 to %g" % (name, values[name], most))
    return DecoderSettings(
        max_detections=int(values["max_detections"]),
        score_threshold=float(values["score_threshold"]),
        stride=max(int(values["stride"]), 1),
        nms_radius=float(values["nms_radius"]),
    )


def _replace_outputs(data: bytearray, subgraph: int, operator: int) -> None:
    """Make the inputs of the decoder the outputs of the file, in the place of its four outputs."""
    inputs = vector(data, operator, _OPERATOR_INPUTS)
    outputs = vector(data, subgraph, _SUBGRAPH_OUTPUTS)
    if (u32(data, inputs), u32(data, outputs)) != (3, 4):
        raise ValueError("a decoder with instance masks is not supported")
    data[outputs : outputs + 16] = data[inputs : inputs + 16]


def _remove(data: bytearray, elements: int, first: int) -> None:
    """Remove a table from a vector of tables. An element is an offset from its own position."""
    count = u32(data, elements)
    for index in range(first, count - 1):
        position = elements + 4 + 4 * index
        struct.pack_into("<I", data, position, u32(data, position + 4) + 4)
    struct.pack_into("<I", data, elements, count - 1)


def _custom_code(data: ByteString, code: int) -> bytes:
    """Return the name of a custom operator; empty for other operators."""
    if not field(data, code, _CODE_CUSTOM_CODE):
        return b""
    text = vector(data, code, _CODE_CUSTOM_CODE)
    return bytes(data[text + 4 : text + 4 + u32(data, text)])


def _flex_map(data: bytes) -> Dict[str, Union[int, float]]:
    """Return the numbers of a FlexBuffers map by key. Its last bytes are: position of the map, type, width of both."""
    root_width = data[-1]
    if data[-2] >> 2 != _FLEX_MAP:
        raise ValueError("the settings of the decoder are not a map")
    width = 1 << (data[-2] & 3)
    root = len(data) - 2 - root_width
    values = root - _flex_uint(data, root, root_width)
    count = _flex_uint(data, values - width, width)
    keys = values - 3 * width
    keys -= _flex_uint(data, keys, width)
    keys_width = _flex_uint(data, values - 2 * width, width)
    fields: Dict[str, Union[int, float]] = {}
    for index in range(count):
        key = keys + index * keys_width
        key -= _flex_uint(data, key, keys_width)
        name = data[key : data.index(b"\0", key)].decode("ascii")
        kind = data[values + count * width + index] >> 2
        if kind in _FLEX_FORMATS:
            position = values + index * width
            fields[name] = struct.unpack_from(_FLEX_FORMATS[kind][width], data, position)[0]
    return fields


def _flex_uint(data: ByteString, position: int, width: int) -> int:
    return int.from_bytes(data[position : position + width], "little")
