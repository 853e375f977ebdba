"""numpy's files, .npz and pairs of .npy: their content, memory mapping, and error messages about invalid files."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset

from compress.core.errors import DataError
from compress.data import files
from compress.data.sources import Npy, Npz

X = np.arange(30 * 4 * 5, dtype=np.uint16).reshape(30, 4, 5).astype(np.uint8)
Y = np.arange(30) % 3
SPLITS = np.array(["train"] * 18 + ["validation"] * 6 + ["test"] * 6)


# --- npz --------------------------------------------------------------------------------


def npz(folder: Path, settings: dict[str, Any] | None = None, **arrays: Any) -> Npz:
    arrays = {"x": X, "y": Y} | arrays
    np.savez(folder / "data.npz", **{name: array for name, array in arrays.items() if array is not None})
    return Npz(file=str(folder / "data.npz"), **settings or {})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("shape", [(30, 4, 5), (30, 4, 5, 1), (30, 4, 5, 3)])
def test_npz(tmp_path: Path, save: Any, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).random(shape)
    save(tmp_path / "data.npz", x=x, y=Y)
    samples = Npz(file=str(tmp_path / "data.npz")).load()
    assert samples.class_names == ("0", "1", "2")
    assert samples.labels.dtype == np.int64
    np.testing.assert_array_equal(samples.labels, Y)
    np.testing.assert_array_equal(samples.read(7), x[7])
    assert samples.splits == {}
    assert dataset(Npz(file=str(tmp_path / "data.npz"))).inputs("train").shape[1:] == (4, 5, *(shape[3:] or (1,)))


def test_npz_arrays_of_other_names(tmp_path: Path) -> None:
    source = npz(tmp_path, {"x": "images", "y": "targets"}, x=None, y=None, images=X, targets=Y[::-1])
    np.testing.assert_array_equal(source.load().labels, Y[::-1])


def test_npz_names_as_labels(tmp_path: Path) -> None:
    names = np.array(["tea", "coffee", "water"])[Y]
    samples = npz(tmp_path, y=names).load()
    assert samples.class_names == ("coffee", "tea", "water")
    np.testing.assert_array_equal(np.array(samples.class_names)[samples.labels], names)
    ordered = npz(tmp_path, {"classes": ("water", "tea", "coffee", "milk")}, y=names).load()
    assert ordered.class_names == ("water", "tea", "coffee", "milk")
    np.testing.assert_array_equal(np.array(ordered.class_names)[ordered.labels], names)


NAN = X.astype(np.float32)
NAN[24, 1, 2] = np.nan
BAD_NPZ: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("no x", {}, {"x": None}, "has no array 'x'; allowed: y; name the arrays"),
    ("no y", {}, {"y": None}, "has no array 'y'; allowed: x"),
    ("no arrays", {}, {"x": None, "y": None}, "none: it is empty"),
    ("no split", {"split": "of"}, {}, "has no array 'of'; allowed: x, y"),
    ("text samples", {}, {"x": np.full((30, 4, 5), "a")}, "array 'x' is <U1"),
    ("flat samples", {}, {"x": X.reshape(30, 20)}, "sample 0: resize takes an image"),
    ("5-D samples", {}, {"x": X[..., None, None]}, r"array 'x' is uint8 \[30, 4, 5, 1, 1\]"),
    ("scalar samples", {}, {"x": np.float32(1)}, "array 'x' is float32"),
    ("fewer labels", {}, {"y": Y[:29]}, r"array 'y' is int64 \[29\]; allowed: .* each of the 30 samples"),
    ("fewer arrays", {}, {"y": Y[:29, None]}, r"array 'y' is int64 \[29, 1\]"),
    ("float labels", {}, {"y": Y / 2}, "array 'y' is float64"),
    ("bool labels", {}, {"y": Y > 0}, "array 'y' is bool"),
    ("the same array", {"y": "x"}, {}, "the array 'x' cannot be both samples and labels"),
    ("object samples", {}, {"x": np.array([{}] * 30, object)}, "not a usable .npz file: Object arrays cannot"),
    ("negative labels", {}, {"y": Y - 1}, "label -1 of sample 0 is out of range; allowed: 0 to 1"),
    ("only negative labels", {}, {"y": Y - 10}, "label -10 of sample 0 is out of range; allowed: class indices from 0"),
    (
        "labels beyond classes",
        {"classes": ("a", "b")},
        {},
        r"y\[2\]: the label 2 is out .*: 0 to 1 \(2 classes: a, b\)",
    ),
    ("names beyond them", {"classes": ("a", "b")}, {"y": np.array(["a", "b", "c"])[Y]}, "unknown class 'c'; allowed"),
    ("huge labels", {}, {"y": Y + 10**9}, "label 1000000002 is out of range"),
    ("unsigned labels", {}, {"y": Y.astype(np.uint64) + 2**63}, "label 9223372036854775810 is out of range"),
    ("classes of one name", {"classes": ("a", "b", "a")}, {}, r"npz.classes\[2\]: lists the class 'a' twice"),
    ("one class", {}, {"y": Y * 0}, "there are 1 classes; a classifier needs two or more"),
    ("no samples", {}, {"x": X[:0], "y": Y[:0]}, "contains no samples"),
    ("too few samples", {}, {"x": X[:2], "y": Y[:2]}, "the validation split is empty: 2 samples are too few"),
    ("no height", {}, {"x": X[:, :0]}, "sample 0: a sample must be numbers"),
    ("NaN", {"split": "of"}, {"x": NAN, "of": SPLITS}, "sample 24: has values that are NaN or infinite"),
    ("infinity", {}, {"x": np.full((30, 4, 5), -np.inf)}, "sample .*: has values that are NaN or infinite"),
    ("beyond float32", {}, {"x": np.full((30, 4, 5), 1e300)}, "sample .*: has values that are NaN or infinite"),
    ("short split", {"split": "of"}, {"of": SPLITS[:29]}, "array 'of' is <U10 .29.; allowed: the name"),
    ("split of numbers", {"split": "of"}, {"of": Y}, "array 'of' is int64"),
    ("unknown split", {"split": "of"}, {"of": np.full(30, "odd")}, "unknown split 'odd'; allowed: train, val"),
    ("only a test split", {"split": "of"}, {"of": np.full(30, "test")}, "has no train split, only test"),
]


@pytest.mark.parametrize(("settings", "arrays", "message"), [case[1:] for case in BAD_NPZ], ids=[c[0] for c in BAD_NPZ])
def test_bad_npz(tmp_path: Path, settings: dict[str, Any], arrays: dict[str, Any], message: str) -> None:
    data = dataset(npz(tmp_path, settings, **arrays), {"resize": {"size": [8, 8]}})
    with pytest.raises(DataError, match=message):
        [data.inputs(split) for split in ("train", "validation", "test")]


@pytest.mark.parametrize("path", ["absent.npz", ".", "a\0b.npz", "file/inside.npz"])
def test_npz_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot be read: .*; check data\.source"):
        Npz(file=path).fingerprint()
    with pytest.raises(DataError):
        Npz(file=path).load()


def archive(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, content in members.items():
            packed.writestr(name.replace("_", "."), content)
    return stream.getvalue()


def header(descr: str = "|u1", shape: str = "(30, 4, 5)", version: bytes = b"\x01\x00") -> bytes:
    """Return the header of a .npy file."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text


def array(values: Any, **changes: bytes) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    content = stream.getvalue()
    for old, new in changes.items():
        assert old.encode() in content
        content = content.replace(old.encode(), new)
    return content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a zip",
        array(X),
        archive(x=b"bytes", y=b"bytes"),
        archive(x_npy=b"", y_npy=b""),
        archive(x_npy=array(X)[:-5], y_npy=array(Y)),
        archive(x_npy=array(X, descr=b"desc\\"), y_npy=array(Y)),
        archive(x_npy=array(X, shape=b"sha(e"), y_npy=array(Y)),
        archive(x_npy=array(X, **{" 'shape'": b"b'shape'"}), y_npy=array(Y)),
        archive(x_npy=array(X, **{"|u1": b",u1"}), y_npy=array(Y)),
        archive(x_npy=header(shape=f"({2**50},)"), y_npy=array(Y)),
        archive(x_npy=array(X, u1=b"\0\0"), y_npy=array(Y)),
        archive(x_npy=array(X, **{"False": b"'''  "}), y_npy=array(Y)),
        archive(x_npy=array(X, **{"(30, 4, 5)": b"(9**9999,)"}), y_npy=array(Y)),
        archive(x_npy=array(X), y_npy=array(Y))[:-6] + b"\xff\xff\xff\x7f\0\0",  # where the directory begins
    ],
    ids=range(15),
)
def test_a_file_that_is_no_npz(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(DataError):
        Npz(file=str(path)).load()


def test_a_file_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = npz(tmp_path)
    monkeypatch.setattr(files, "MAX_UNPACKED", 500)
    with pytest.raises(DataError, match=r"unpacks to [\d,]+ bytes; allowed: 500"):
        source.load()


# --- npy --------------------------------------------------------------------------------


def npy(folder: Path, x: Any = X, y: Any = Y, **settings: Any) -> Npy:
    for name, value in (("x", x), ("y", y)):
        path = folder / f"{name}.npy"
        path.write_bytes(value) if isinstance(value, bytes) else np.save(path, value)
    return Npy(**{"x": "x.npy", "y": "y.npy"} | settings).with_paths_from(folder)


@pytest.mark.parametrize("x", [X, np.asfortranarray(X), X[..., None].astype(">f4")], ids=["C", "Fortran", "big-endian"])
def test_samples_stay_in_their_file(tmp_path: Path, x: np.ndarray) -> None:
    samples = npy(tmp_path, x).load()
    (array,) = samples.read.__closure__[0].cell_contents  # type: ignore[index]
    assert isinstance(array, np.memmap)
    np.testing.assert_array_equal(samples.read(7), x[7])
    assert samples.labels.tolist() == Y.tolist()
    data = dataset(npy(tmp_path, x))
    assert data.inputs("train").shape == (21, 4, 5, 1)


def test_names_splits_and_classes(tmp_path: Path) -> None:
    np.save(tmp_path / "split.npy", np.array(["train", "val", "test"] * 10))
    npy_source = npy(tmp_path, y=np.array(["b", "a"])[Y % 2], split="split.npy", classes=("b", "a"))
    data = dataset(npy_source)
    assert data.class_names == ("b", "a")
    assert len(data.labels("validation")) == 10
    assert set(npy_source.files()) == {"x", "y", "split"}


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


BAD_NPY: dict[str, tuple[Any, str]] = {
    "empty": (b"", "is not a usable .npy file"),
    "text": (b"no array at all", "is not a usable .npy file"),
    "pickle": (pickle.dumps(Evil()), "is not a usable .npy file"),
    "objects": (header("|O") + pickle.dumps(Evil()), "it contains Python objects"),
    "cut short": (array(X)[:-1], "needs 600 bytes of data, there are 599"),
    "too long": (array(X) + b"x", "needs 600 bytes of data, there are 601"),
    "absurd": (header(shape="(1000000000000, 4, 5)"), "needs 20,000,000,000,000 bytes"),
    "beyond 64 bits": (header(shape="(9999999999999999999999, 9)"), "is not a usable .npy file"),
    "negative": (header(shape="(-1, 4, 5)") + bytes(20), "is not a usable .npy file"),
    "code for a shape": (header(shape="(9**9**9,)"), "is not a usable .npy file"),
    "deep": (header(shape="(" * 3000 + ")" * 3000), "is not a usable .npy file"),
    "long header": (header(shape="(" + "1," * 30_000 + ")"), "is not a usable .npy file"),
    "no bytes": (header("|V0"), "is not a usable .npy file"),
    "version": (array(X).replace(b"NUMPY\x01", b"NUMPY\x09"), "is not a usable .npy file"),
    "text samples": (np.full((30, 4, 5), "a"), "array 'x' is <U1"),
    "scalar": (np.float32(1), "array 'x' is float32"),
    "flat": (Y, r"array 'x' is int64 \[30\]; allowed: numbers \[n, samples\]"),
    "fewer": (X[:29], r"array 'y' is int64 \[30\]"),
}


@pytest.mark.parametrize(("x", "message"), BAD_NPY.values(), ids=BAD_NPY)
def test_bad_npy(tmp_path: Path, capsys: pytest.CaptureFixture[str], x: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        npy(tmp_path, x).load()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["x", "y"])
def test_files_that_are_none(tmp_path: Path, name: str) -> None:
    npy_source = npy(tmp_path)
    (tmp_path / f"{name}.npy").unlink()
    with pytest.raises(DataError, match=f"{name}.npy: cannot be read"):
        npy_source.load()
    (tmp_path / f"{name}.npy").mkdir()
    with pytest.raises(DataError, match="it is a folder"):
        npy_source.load()
