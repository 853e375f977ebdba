"""Pairs of .npy files: memory mapping, checks against each other, and errors."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.core.errors import DataError
from compress.data.dataset import Dataset
from compress.data.sources import Npy
from deploy.contract.preprocessing import Preprocessing

X = np.arange(30 * 4 * 5, dtype=np.uint16).reshape(30, 4, 5).astype(np.uint8)
Y = np.arange(30) % 3


def source(folder: Path, x: Any = X, y: Any = Y, **settings: Any) -> Npy:
    for name, value in (("x", x), ("y", y)):
        path = folder / f"{name}.npy"
        path.write_bytes(value) if isinstance(value, bytes) else np.save(path, value)
    return Npy(**{"x": "x.npy", "y": "y.npy"} | settings).with_paths_from(folder)


@pytest.mark.parametrize("x", [X, np.asfortranarray(X), X[..., None].astype(">f4")], ids=["C", "Fortran", "big-endian"])
def test_samples_stay_in_their_file(tmp_path: Path, x: np.ndarray) -> None:
    samples = source(tmp_path, x).load()
    (array,) = samples.read.__closure__[0].cell_contents  # type: ignore[index]
    assert isinstance(array, np.memmap)
    np.testing.assert_array_equal(samples.read(7), x[7])
    assert samples.labels.tolist() == Y.tolist()
    data = Dataset(source(tmp_path, x), Preprocessing([]), None)
    assert data.inputs("train").shape == (21, 4, 5, 1)


def test_names_splits_and_classes(tmp_path: Path) -> None:
    np.save(tmp_path / "split.npy", np.array(["train", "val", "test"] * 10))
    npy_source = source(tmp_path, y=np.array(["b", "a"])[Y % 2], split="split.npy", classes=("b", "a"))
    data = Dataset(npy_source, Preprocessing([]), None)
    assert data.class_names == ("b", "a")
    assert len(data.labels("validation")) == 10
    assert set(npy_source.files()) == {"x", "y", "split"}


def header(descr: str = "|u1", shape: str = "(30, 4, 5)", version: bytes = b"\x01\x00") -> bytes:
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text


def saved(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


BAD: dict[str, tuple[Any, str]] = {
    "empty": (b"", "is not a usable .npy file"),
    "text": (b"no array at all", "is not a usable .npy file"),
    "pickle": (pickle.dumps(Evil()), "is not a usable .npy file"),
    "objects": (header("|O") + pickle.dumps(Evil()), "it contains Python objects"),
    "cut short": (saved(X)[:-1], "needs 600 bytes of data, there are 599"),
    "too long": (saved(X) + b"x", "needs 600 bytes of data, there are 601"),
    "absurd": (header(shape="(1000000000000, 4, 5)"), "needs 20,000,000,000,000 bytes"),
    "beyond 64 bits": (header(shape="(9999999999999999999999, 9)"), "is not a usable .npy file"),
    "negative": (header(shape="(-1, 4, 5)") + bytes(20), "is not a usable .npy file"),
    "code for a shape": (header(shape="(9**9**9,)"), "is not a usable .npy file"),
    "deep": (header(shape="(" * 3000 + ")" * 3000), "is not a usable .npy file"),
    "long header": (header(shape="(" + "1," * 30_000 + ")"), "is not a usable .npy file"),
    "no bytes": (header("|V0"), "is not a usable .npy file"),
    "version": (saved(X).replace(b"NUMPY\x01", b"NUMPY\x09"), "is not a usable .npy file"),
    "text samples": (np.full((30, 4, 5), "a"), "array 'x' is <U1"),
    "scalar": (np.float32(1), "array 'x' is float32"),
    "flat": (Y, r"array 'x' is int64 \[30\]; allowed: numbers \[n, samples\]"),
    "fewer": (X[:29], r"array 'y' is int64 \[30\]"),
}


@pytest.mark.parametrize(("x", "message"), BAD.values(), ids=BAD)
def test_bad_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str], x: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source(tmp_path, x).load()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["x", "y"])
def test_files_that_are_none(tmp_path: Path, name: str) -> None:
    npy_source = source(tmp_path)
    (tmp_path / f"{name}.npy").unlink()
    with pytest.raises(DataError, match=f"{name}.npy: cannot be read"):
        npy_source.load()
    (tmp_path / f"{name}.npy").mkdir()
    with pytest.raises(DataError, match="it is a folder"):
        npy_source.load()
