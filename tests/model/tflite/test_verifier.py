"""The verifier's layout of the schema, compared with the generated code; and the files that it reads."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import tiny
from ai_edge_litert import schema_py_generated as schema

from compress.model.tflite import graph, verifier
from compress.model.tflite.verifier import LAYOUT

WIDTHS = {"byte": 1, "text": None, "int16": 2, "word": 4, "int64": 8, "number": 4, "long": 8}


class Recorder:
    """A stand-in for a builder: it records the field that is written as an offset, and the width of list entries."""

    field: int | None = None
    width: int | None = None

    def PrependUOffsetTRelativeSlot(self, field: int, offset: int, default: int) -> None:  # noqa: N802
        self.field = field

    def StartVector(self, width: int, count: int, alignment: int) -> None:  # noqa: N802
        self.width = width

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def offsets() -> dict[tuple[str, int], int | None]:
    """Return the fields that are offsets in all kinds of tables, with the width of a list's entries."""
    widths: dict[tuple[str, int], int | None] = {}
    for kind in [name for name, held in vars(schema).items() if hasattr(held, "GetRootAs")]:
        for name in [name for name in vars(schema) if name.startswith(f"{kind}Add")]:
            recorder = Recorder()
            getattr(schema, name)(recorder, 0)
            if recorder.field is not None:
                start = f"{kind}Start{name.removeprefix(f'{kind}Add')}Vector"
                getattr(schema, start, lambda *arguments: None)(recorder, 0)
                widths[kind, recorder.field] = recorder.width
    return widths


def test_the_layout_is_that_of_the_schema() -> None:
    known = {(kind, field): held for kind, fields in LAYOUT.items() for field, held in fields.items()}
    assert {place: WIDTHS.get(held, 4 if held[0] == "[" else None) for place, held in known.items()} == offsets()
    named = {held.strip("[]") for held in known.values() if held not in WIDTHS and not held.endswith("?")}
    assert named <= LAYOUT.keys()


def test_real_models_leave_much_of_their_allowance(real_model: Path) -> None:
    content = real_model.read_bytes()
    unions = ("BuiltinOptions", "BuiltinOptions2", "QuantizationDetails", "SparseIndexVector")
    left = verifier.verify(content, {name: graph._names(getattr(schema, name)) for name in unions}).left
    assert left > 0.7 * verifier.EXTRA_BYTES


def test_a_text_beyond_the_end() -> None:
    content = bytearray(tiny.classifier())
    model = schema.Model.GetRootAs(content, 0)
    table = model.Subgraphs(0).Tensors(0)._tab
    place = table.Pos + table.Offset(10)
    place += struct.unpack_from("<I", content, place)[0]
    struct.pack_into("<I", content, place, len(content))
    with pytest.raises(ValueError, match="a list beyond the end"):
        verifier.verify(bytes(content), {})
