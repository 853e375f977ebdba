"""Archives made to deceive: each is refused with a BundleError, and nothing is unpacked."""

from __future__ import annotations

import builtins
import io
import json
import os
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import golden
import numpy as np
import pytest
from archives import manifest, refused, table, written

from deploy.contract import bundle
from deploy.contract.bundle import Bundle, BundleError
from deploy.contract.preprocessing import Preprocessing

GOOD = golden.packed()


def archive(change: Callable[[zipfile.ZipInfo], None] = lambda info: None, **options: Any) -> bytes:
    """Return the golden bundle packed again, with a change to every entry of its table."""
    extra: list[tuple[str, bytes]] = options.pop("extra", [])
    comment = options.pop("comment", b"")
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", **options) as packed:
        warnings.simplefilter("ignore")  # duplicate names
        members = [("manifest.json", written_manifest()), *sorted(golden.members().items())]
        for name, content in members + extra:
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, 0o100644 << 16
            change(info)
            packed.writestr(info, content)
        packed.comment = comment
    return stream.getvalue()


def written_manifest() -> bytes:
    with zipfile.ZipFile(io.BytesIO(GOOD)) as opened:
        return opened.read("manifest.json")


def test_the_helpers_write_good_bundles() -> None:
    assert archive() == GOOD
    assert written(manifest()) == GOOD
    assert Bundle(written(manifest())).labels == ["café", "tea"]


# --- the zip ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "\\\\host\\share",
        "folder/",
        ".npy",
        "x" * 200,
        "caf\u00e9.npy",
        "a\n",
        "",
    ],
)
def test_names(name: str) -> None:
    members = {**golden.members(), name: b"x"}
    refused(written(manifest(members=table(members)), members), "member name")


def test_a_name_that_stands_twice() -> None:
    refused(archive(extra=[("int8.tflite", b"another")]), "not allowed")
    refused(archive(extra=[("int8.tflite", golden.members()["int8.tflite"])]), "not allowed")
    refused(archive(extra=[("manifest.json", written_manifest())]), "not allowed")


def test_symbolic_links_and_other_attributes() -> None:
    for mode in (0o120777 << 16, 0o100755 << 16, 0o040755 << 16 | 0x10, 0):
        refused(archive(lambda info, mode=mode: setattr(info, "external_attr", mode)))
    refused(archive(lambda info: setattr(info, "create_system", 0)))
    refused(archive(lambda info: setattr(info, "date_time", (2026, 1, 1, 0, 0, 0))))
    refused(archive(lambda info: setattr(info, "extra", b"\x55\x54\x00\x00")))
    refused(archive(lambda info: setattr(info, "comment", b"hello")))
    refused(archive(comment=b"hello"))
    refused(GOOD[:-2] + b"\5\0hello")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members(method: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(lambda info: setattr(info, "compress_type", method))
    monkeypatch.delattr(zipfile.ZipFile, "read")  # members are not even unpacked
    refused(content, "compressed")


def test_a_bomb_of_members_that_share_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says that every member reaches to the end of the file; nothing of that size is read."""
    size = 1_000_000
    local = b"".join(
        struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 33, 0, size, size, len(name), 0) + name
        for name in (b"manifest.json", b"a", b"b", b"c")
    )
    places = [0, 43, 74, 105]
    table_of_contents = b"".join(
        struct.pack(
            "<4s4B4H3I5H2I", b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 33, 0, size, size, len(name), 0, 0, 0, 0, 0, place
        )
        + name
        for name, place in zip((b"manifest.json", b"a", b"b", b"c"), places, strict=True)
    )
    body = local + bytes(size)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 4, 4, len(table_of_contents), len(body), 0)
    content = body + table_of_contents + end
    assert zipfile.ZipFile(io.BytesIO(content)).namelist() == ["manifest.json", "a", "b", "c"]
    read: list[int] = []
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda self, info: read.append(info.file_size) or b"")
    refused(content, "overlaps another member")
    assert sum(read) <= len(content)


def test_the_manifest_comes_first() -> None:
    members = {"a.npy": b"x", **golden.members()}
    names = ["a.npy", "manifest.json", *sorted(golden.members())]
    everything = {**members, "manifest.json": written_manifest()}
    refused(bundle.archive_of({name: everything[name] for name in names}), "first member must be manifest")
    refused(bundle.archive_of(golden.members()), "first member must be manifest")
    refused(bundle.archive_of({}), "first member must be manifest")


def test_nothing_is_written_and_nothing_else_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {**golden.members(), "../../escaped": b"x", "/tmp/escaped": b"x"}
    hostile = [
        written(manifest(members=table(members)), members),
        archive(lambda info: setattr(info, "external_attr", 0o120777 << 16)),
        archive(extra=[("int8.tflite", b"another")]),
    ]

    def touched(*arguments: Any, **options: Any) -> None:
        raise AssertionError(f"touches a file: {arguments}")

    for place, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "mkdir"), (os, "symlink")):
        monkeypatch.setattr(place, name, touched)
    for content in hostile:
        refused(content)


# --- the members ------------------------------------------------------------------------


def test_members_that_the_manifest_does_not_list_in_this_order() -> None:
    differ = "differ from those that the manifest lists"
    refused(written(manifest(), {**golden.members(), "z.bin": b""}), differ)
    backwards = dict(sorted(golden.members().items(), reverse=True))
    refused(bundle.archive_of({"manifest.json": written_manifest(), **backwards}), differ)


def test_a_member_that_is_not_there() -> None:
    lacking = {name: content for name, content in golden.members().items() if name != "int8.tflite"}
    refused(written(manifest(), lacking), "differ from those that the manifest lists")
    refused(written(manifest(members=table(lacking)), lacking), r"names 'int8\.tflite', which is not in the bundle")


def test_other_content() -> None:
    members = {**golden.members(), "int8.tflite": b"another model whatever"}
    refused(written(manifest(), members), r"int8\.tflite was changed")
    same_size = {**golden.members(), "int8.tflite": b"NOT REALLY A MODEL"}
    refused(written(manifest(), same_size), r"int8\.tflite was changed")


@pytest.mark.parametrize("value", [None, "", 0, [], {}, "int8.tflite", 1e300])
@pytest.mark.parametrize("key", ["name", "size", "sha256"])
def test_the_table_of_members(key: str, value: Any) -> None:
    rows = manifest()["members"]
    changed = [{**row, key: value} for row in rows]
    if changed != rows:
        refused(written(manifest(members=changed)))
    refused(written(manifest(members=[{k: v for k, v in row.items() if k != key} for row in rows])))


# --- the manifest -----------------------------------------------------------------------


def test_another_schema() -> None:
    for version in (0, 2, -1, "1", None, [], {}, 1.5):
        refused(written(manifest(schema_version=version)), r"has schema .* reads 1")


def test_a_manifest_that_is_no_map() -> None:
    for content in (None, [], "text", 1, True, [manifest()]):
        refused(written(content), "no schema_version")


def test_a_manifest_that_is_no_json() -> None:
    for text in (b"", b"{", b"\xff\xfe", b"{'a': 1}", b"NaN", b"\0", b'{"a": 1} {"b": 2}'):
        refused(written(text))
    text = json.dumps(manifest(note="@"), indent=1, sort_keys=True).encode() + b"\n"
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        refused(written(text.replace(b'"@"', number)), "not JSON")


def test_one_way_to_write_it() -> None:
    text = written_manifest()
    for other in (
        json.dumps(manifest()).encode(),
        text.rstrip(),
        text + b"\n",
        b"\xef\xbb\xbf" + text,
        text.replace(b'"name": "tiny"', b'"name": "other",\n "name": "tiny"'),
        text.replace(b"caf\\u00e9", "café".encode()),
        text.replace(b'"schema_version": 1', b'"schema_version": 1.0'),
        text.replace(b'"schema_version": 1', b'"schema_version": true'),
    ):
        assert other != text
        refused(written(other))


@pytest.mark.parametrize(
    "place", ["note", "schema_version", "labels", "steps", "size", "inputs", "file", "members", "models"]
)
def test_deep_nesting(place: str) -> None:
    for depth in (*range(790, 1010, 23), 100_000):
        changed = manifest()
        if place in ("steps", "size"):
            changed["preprocessing"]["steps"] = "@" if place == "steps" else [{"resize": {"size": "@"}}]
        elif place in ("inputs", "file"):
            changed["golden"]["inputs"] = "@" if place == "inputs" else ["@"]
        else:
            changed[place] = "@"
        text = json.dumps(changed, indent=1, sort_keys=True).encode() + b"\n"
        refused(written(text.replace(b'"@"', b"[" * depth + b"]" * depth)))


MISSING = [
    ("name",),
    ("coralline",),
    ("labels",),
    ("preprocessing",),
    ("preprocessing", "digest"),
    ("preprocessing", "steps"),
    ("models",),
    ("models", "int8", "file"),
    ("task",),
    ("models", "int8", "inputs"),
    ("models", "int8", "outputs"),
    ("models", "int8", "inputs", 0, "name"),
    ("models", "int8", "inputs", 0, "shape"),
    ("models", "int8", "inputs", 0, "dtype"),
    ("models", "int8", "outputs", 0, "scale"),
    ("models", "int8", "outputs", 0, "zero_point"),
    ("golden",),
    ("golden", "inputs"),
    ("golden", "outputs"),
    ("members",),
]


def named(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def changed_at(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return the manifest with another value at a path, or without it (Ellipsis)."""
    content = manifest()
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


@pytest.mark.parametrize("path", MISSING, ids=named)
def test_a_part_that_is_missing_or_of_another_type(path: tuple[str | int, ...]) -> None:
    allowed = {"scale": (None, 1), "zero_point": (1,)}.get(str(path[-1]), ())
    for value in (..., None, 1, [[]], {"a": {}}, True, [None]):
        if isinstance(value, bool) or value not in allowed:
            refused(written(changed_at(path, value)))


TENSOR = manifest()["models"]["int8"]["outputs"][0]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([], "a list of 1 to 64 outputs for the int8 model"),
        ([TENSOR] * 65, "a list of 1 to 64 outputs for the int8 model"),
        ([TENSOR, TENSOR], "two outputs of the int8 model have the same name"),
        ([{**TENSOR, "shape": [1, -2]}], r"outputs of the int8 model cannot be used: shape cannot be \[1, -2\]"),
        ([{**TENSOR, "shape": [1, 2.0]}], "shape cannot be"),
        ([{**TENSOR, "shape": [1 << 20, 1 << 20]}], "shape cannot be"),
        ([{**TENSOR, "shape": [1] * 9}], "shape cannot be"),
        ([{**TENSOR, "dtype": "complex64"}], "dtype cannot be 'complex64'"),
        ([{**TENSOR, "scale": 0}], "scale cannot be 0"),
        ([{**TENSOR, "scale": 10**400}], "scale cannot be"),
        ([{**TENSOR, "zero_point": 1 << 40}], "zero_point cannot be"),
        (["x"], "'x' is not a map"),
    ],
)
def test_tensors_that_cannot_be_used(tensors: Any, says: str) -> None:
    refused(written(changed_at(("models", "int8", "outputs"), tensors)), says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": "translation"}, "has the task 'translation', and this runner knows classification, .*newer runner"),
        ({"task": []}, "has the task list"),
        ({"task": "detection"}, "a detector needs the entry detection"),
        ({"detection": {}}, "a detector needs the entry detection, and other models must not have it"),
        ({"task": "detection", "detection": {}}, "detection cannot be used: a detector's specification must be a map"),
        ({"binary": "maybe"}, "binary is not one of: probability, logit"),
        ({"binary": ["logit"]}, "binary is not one of"),
    ],
)
def test_tasks_that_do_not_fit(changes: dict[str, Any], says: str) -> None:
    refused(written(manifest(**changes)), says)


def test_one_value_for_two_labels_needs_its_meaning() -> None:
    changed = changed_at(("models", "int8", "outputs", 0, "shape"), [1, 1])
    refused(written(changed), "has one value for 2 labels, and no entry binary")
    assert Bundle(written({**changed, "binary": "logit"})).models["int8"].output_layout.size == 1


def test_files_that_are_named_but_absent() -> None:
    for path, value in (
        (("models", "int8", "file"), "other.tflite"),
        (("golden", "inputs"), ["absent.npy"]),
        (("golden", "outputs"), {"int8": "absent.npy"}),
        (("golden", "inputs"), ["../../etc/passwd"]),
        (("golden", "inputs"), ["manifest.json"]),
    ):
        refused(written(changed_at(path, value)), "which is not in the bundle")


def test_files_that_are_named_in_another_way() -> None:
    refused(written(changed_at(("golden", "inputs"), {"golden-input-0.npy": 0})), "does not match schema 1")
    refused(written(changed_at(("golden", "outputs"), ["golden-output-int8.npy"])), "incomplete")
    refused(written(changed_at(("models",), [manifest()["models"]["int8"]])), "incomplete")


def test_roles_and_tools() -> None:
    entry = manifest()["models"]["int8"]
    refused(written(changed_at(("models",), {"other": entry})), "does not match schema 1")
    refused(
        written(changed_at(("golden", "outputs"), {"original": "golden-output-int8.npy"})), "does not match schema 1"
    )
    refused(written(manifest(models={}, golden={"inputs": [], "outputs": {}})), "does not match schema 1")
    refused(evaluated({**EVALUATION, "outputs": {"original": "evaluation-labels.npy"}}), "does not match schema 1")
    for tools in (None, 1, "", []):
        refused(written(manifest(tools=tools)), "does not match schema 1")
    assert Bundle(written(changed_at(("models",), {"int8": entry, "original": entry}))).manifest["models"]


# --- preprocessing ----------------------------------------------------------------------


def test_preprocessing_must_be_what_its_digest_says() -> None:
    other = Preprocessing([{"resize": {"size": [5, 7]}}])
    refused(written(changed_at(("preprocessing", "digest"), other.digest)), "in another way")
    refused(written(changed_at(("preprocessing", "steps"), other.specification)), "in another way")
    both = {"version": 1, "digest": other.digest, "steps": other.specification}
    assert Bundle(written(changed_at(("preprocessing",), both))).preprocessing.digest == other.digest


def test_preprocessing_that_cannot_be_used() -> None:
    says = "preprocessing cannot be used.*; it was packed by Coralline 0.0: use a newer runner"
    refused(written(changed_at(("preprocessing", "steps"), [{"grayscale": {}}])), says)


# --- the evaluation sample --------------------------------------------------------------

LABEL_EACH, AXES = "with a label each", "without two to four axes"
INPUTS, LABELS = np.zeros((2, 3, 3), np.uint8), np.array([0, 1])
EVALUATION = {
    "split": "test",
    "inputs": ["evaluation-inputs-0.npy"],
    "labels": "evaluation-labels.npy",
    "outputs": {"int8": "evaluation-output-int8.npy"},
    "metrics": {},
}


def evaluated(entry: Any, inputs: Any = INPUTS, labels: Any = LABELS) -> bytes:
    arrays = {"inputs-0": inputs, "labels": labels, "output-int8": np.zeros((2, 2), np.int8)}
    more = {f"evaluation-{name}.npy": bundle.array_bytes(np.asarray(array)) for name, array in arrays.items()}
    members = {**golden.members(), **more}
    return written(manifest(evaluation=entry, members=table(members)), members)


def test_an_evaluation_sample() -> None:
    samples, labels = Bundle(evaluated(EVALUATION)).evaluation()
    assert [sample.shape for sample in samples] == [(3, 3)] * 2
    assert labels.tolist() == [0, 1]
    assert Bundle(evaluated(None)).evaluation()[0] == Bundle(GOOD).evaluation()[0] == []


@pytest.mark.parametrize("value", [None, 1, "", "int8.tflitf", [[]], {"a": {}}, True, [None], ["../../etc/passwd"]])
def test_an_evaluation_entry_of_another_type(value: Any) -> None:
    refused(evaluated(value if value is not None else []))
    for key in ("inputs", "labels", "outputs", "metrics"):
        if (key, type(value)) not in (("metrics", dict), ("labels", type(None))):
            refused(evaluated({**EVALUATION, key: value}))


@pytest.mark.parametrize("key", ["inputs", "outputs", "metrics"])
def test_an_evaluation_entry_without_a_part(key: str) -> None:
    refused(evaluated({name: part for name, part in EVALUATION.items() if name != key}))


def test_an_evaluation_without_labels() -> None:
    opened = Bundle(evaluated({name: part for name, part in EVALUATION.items() if name != "labels"}))
    with pytest.raises(BundleError, match="has no labels"):
        opened.evaluation()
    assert len(opened.samples(opened.manifest["evaluation"])) == 2


@pytest.mark.parametrize(
    ("inputs", "labels", "says"),
    [
        (INPUTS, [0], LABEL_EACH),
        (INPUTS, [0, 1, 1], LABEL_EACH),
        (INPUTS, [0, 2], LABEL_EACH),
        (INPUTS, [-1, 0], LABEL_EACH),
        (INPUTS, [0.0, 1.0], LABEL_EACH),
        (INPUTS, [[0], [1]], LABEL_EACH),
        (INPUTS[0, 0], [0, 1, 1], AXES),
        (INPUTS[:0], [], AXES),
        (INPUTS[:, None, None], [0, 1], AXES),
    ],
)
def test_an_evaluation_sample_that_does_not_fit(inputs: Any, labels: Any, says: str) -> None:
    opened = Bundle(evaluated(EVALUATION, inputs, labels))
    with pytest.raises(BundleError, match=says):
        opened.evaluation()
