"""The bundle: it is packed and read, and every change to it is detected."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest
from archives import manifest, refused, written
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.contract import bundle
from deploy.contract.bundle import Bundle, BundleError
from deploy.contract.decoding import Decoding, parsed

GOOD = golden.packed()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "tiny.coralline"
    path.write_bytes(GOOD)
    read = bundle.read(str(path))
    assert read.members == golden.members()
    assert list(read.members) == sorted(golden.members())
    assert read.labels == ["café", "tea"]
    assert read.manifest["schema_version"] == 1
    assert {name: read.manifest[name] for name in golden.manifest()} == golden.manifest()
    assert read.preprocessing.digest == golden.EXPECTED["digest"]
    np.testing.assert_array_equal(read.array("golden-input-0.npy"), golden.sample())


def test_any_zip_program_reads_it() -> None:
    with zipfile.ZipFile(io.BytesIO(GOOD)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["manifest.json", *sorted(golden.members())]
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert json.loads(archive.read("manifest.json"))["name"] == "tiny"


def test_equal_content_is_equal_bytes() -> None:
    backwards = dict(reversed(golden.members().items()))
    assert bundle.pack(dict(reversed(golden.manifest().items())), backwards) == GOOD
    read = Bundle(GOOD)
    assert bundle.pack(read.manifest, read.members) == GOOD
    assert bundle.pack(golden.manifest(name="other"), golden.members()) != GOOD


def test_other_keys_travel_along() -> None:
    content = bundle.pack(golden.manifest(tools={"maker": "1.0"}, note=None), golden.members())
    assert Bundle(content).manifest["tools"] == {"maker": "1.0"}


def test_decoding() -> None:
    assert Bundle(GOOD).decoding == Decoding(None, "mix", None)  # of bundles from before this entry existed
    for entry in ({"image_channels": 1}, {"sound_channels": "first", "sound_rate": 16000, "later": [1]}):
        opened = Bundle(bundle.pack(golden.manifest(decoding=entry), golden.members()))
        assert opened.decoding == Decoding(**{key: value for key, value in entry.items() if key != "later"})


def test_the_rate_of_recordings_is_that_of_the_preprocessing_where_nothing_else_is_said() -> None:
    assert parsed({}, 8000) == parsed({"sound_channels": "mix"}, 8000) == Decoding(None, "mix", 8000)
    assert parsed({"sound_rate": 16000}, 8000).sound_rate == 16000


@pytest.mark.parametrize(
    "entry",
    [None, [], {"image_channels": 2}, {"image_channels": True}, {"image_channels": None}, {"sound_channels": "last"},
     {"sound_channels": []}, {"sound_rate": 0}, {"sound_rate": 8000.0}, {"sound_rate": "8000"},
     {"orientation": "upright"}, {"text_bytes": 0}, {"text_bytes": 1 << 17}, {"text_bytes": True}],
)  # fmt: skip
def test_a_decoding_that_cannot_be(entry: Any) -> None:
    refused(written(manifest(decoding=entry)), "the manifest's decoding cannot be used")


# --- damage -----------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [0x01, 0x02, 0x20, 0x80, 0x55])
def test_every_byte_counts(pattern: int) -> None:
    for place, byte in enumerate(GOOD):
        refused(GOOD[:place] + bytes([byte ^ pattern]) + GOOD[place + 1 :])


@pytest.mark.parametrize("more", [b"\0", b"x", b"PK\5\6" + bytes(18), b"PK\1\2", GOOD, bytes(70_000)])
def test_nothing_may_stand_before_or_behind(more: bytes) -> None:
    refused(GOOD + more)
    refused(more + GOOD)


@settings(max_examples=600)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "insert", "delete", "copy"]),
            st.floats(0, 1, exclude_max=True),
            st.sampled_from([b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"\xff" * 4, b"\0" * 4, b"\1\0"])
            | st.binary(min_size=1, max_size=30),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_edits(edits: list[tuple[str, float, bytes]]) -> None:
    content = GOOD
    for what, share, piece in edits:
        place = int(share * (len(content) + 1))
        removed = {"set": len(piece), "insert": 0, "delete": len(piece), "copy": 0}[what]
        new = {"delete": b"", "copy": content[: len(piece) * 9]}.get(what, piece)
        content = content[:place] + new + content[place + removed :]
    if content != GOOD:
        refused(content)


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(sorted(manifest())),
        st.recursive(
            st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["int8", "int8.tflite", "file", "x"]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["int8", "file", "task", "inputs", "outputs", "steps", "digest", "name", "size"]),
                    inner,
                )
            ),
            max_leaves=8,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_manifest(changes: dict[str, Any]) -> None:
    changed = manifest(**changes)
    try:
        Bundle(written(changed))
    except BundleError:
        return
    unchecked = {
        "schema_version": 1,
        **{key: changed[key] for key in ("name", "coralline", "labels", "models", "golden")},
    }
    assert manifest(**unchecked) == changed  # only parts that are not checked may have changed
    assert isinstance(changed["name"], str)


# --- packing ----------------------------------------------------------------------------


def test_what_does_not_fit_together_is_not_packed() -> None:
    lacking = golden.members()
    del lacking["int8.tflite"]
    with pytest.raises(BundleError, match=r"names 'int8\.tflite', which is not in the bundle"):
        bundle.pack(golden.manifest(), lacking)
    with pytest.raises(ValueError, match="JSON"):
        bundle.pack(golden.manifest(note=float("nan")), golden.members())


def test_too_many_members() -> None:
    with pytest.raises(BundleError):
        bundle.pack(golden.manifest(), {**golden.members(), **{f"m{i}": b"" for i in range(bundle.MAX_MEMBERS)}})


def test_too_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "large.coralline"
    path.write_bytes(GOOD)
    monkeypatch.setattr(bundle, "MAX_BYTES", len(GOOD) - 1)
    with pytest.raises(BundleError, match="too large"):
        bundle.read(str(path))
    monkeypatch.setattr(bundle, "MAX_BYTES", len(GOOD))
    assert bundle.read(str(path)).members == golden.members()
    monkeypatch.setattr(bundle, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(BundleError, match="manifest is too large"):
        bundle.read(str(path))


# --- arrays -----------------------------------------------------------------------------


def array_in(content: bytes) -> np.ndarray:
    read = Bundle(GOOD)
    read.members["golden-input-0.npy"] = content
    return read.array("golden-input-0.npy")


@pytest.mark.parametrize("dtype", ["uint8", "int8", "<i2", ">i4", "int64", "float16", "float32", ">f8", "bool"])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (2, 3, 4), (1, 2, 3, 4), (0, 3)])
def test_array_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for given_array in (array, np.asfortranarray(array), array[::-1]):
        back = array_in(bundle.array_bytes(given_array))
        np.testing.assert_array_equal(back, given_array)
        assert back.dtype == array.dtype
        assert back.flags.writeable
        np.testing.assert_array_equal(np.load(io.BytesIO(bundle.array_bytes(given_array))), given_array)


def saved(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


PLAIN = saved(np.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize(
    "content",
    [
        saved(np.array([{}, None], object), allow_pickle=True),
        saved(np.zeros(2, [("a", "f4")])),
        saved(np.array(["text"])),
        saved(np.zeros(2, complex)),
        b"",
        b"\x93NUMPY",
        b"cos\nsystem\n(S'true'\ntR.",
        PLAIN[:-1],
        PLAIN + b"\0",
        PLAIN.replace(b"(3, 4)", b"(3, 5)"),
        PLAIN.replace(b"(3, 4)", b"(9**9)"),
        PLAIN.replace(b"(3, 4), ", b"(3, 99999999999999999999), "),
        PLAIN.replace(b"'<f8'", b"'<f3'"),
        PLAIN.replace(b"False", b"True "),
    ],
)
def test_what_is_no_plain_array(content: bytes) -> None:
    with pytest.raises(BundleError, match=r"golden-input-0\.npy is not an array"):
        array_in(content)


def test_a_member_that_is_absent_is_no_array() -> None:
    with pytest.raises(BundleError, match="not an array"):
        Bundle(GOOD).array("absent.npy")


@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(st.integers(0, 140), st.sampled_from([*b"'\"()[]{}:,0123456789<>fiuOVSL| -+e#\\\n\0\xff"])),
        max_size=4,
    )
)
def test_any_edits_of_an_array(edits: list[tuple[int, int]]) -> None:
    content = bytearray(PLAIN)
    for place, byte in edits:
        content[place] = byte
    try:
        assert array_in(bytes(content)).nbytes == 96
    except BundleError:
        assert bytes(content) != PLAIN
