"""Samples from a Python function: trusted, run, and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset

from compress.core.errors import DataError
from compress.data.sources import PythonFunction

HEAD = "import numpy as np\nX = np.arange(480.).reshape(30, 4, 4)\nY = np.arange(30) % 3\n"


def source(folder: Path, text: str, name: str = "data.py", **settings: Any) -> PythonFunction:
    (folder / "data.py").write_text(HEAD + text)
    return PythonFunction(**{"file": name, "trust": True} | settings).with_paths_from(folder)


GIVEN = {
    "a pair": "def load(): return X, Y",
    "a map": "def load(): return {'x': X, 'y': Y}",
    "names": "def load(): return X, [f'class {y}' for y in Y]",
    "lists": "def load(): return list(X), Y.tolist()",
    "pairs": "def load(): return [(x, y) for x, y in zip(X, Y)]",
    "a generator": "def load():\n    for x, y in zip(X, Y): yield x, y",
    "something with indices": (
        "class Lazy:\n    def __len__(self): return 30\n    def __getitem__(self, i): return X[i]\n"
        "def load(): return Lazy(), Y"
    ),
}


@pytest.mark.parametrize("text", GIVEN.values(), ids=GIVEN)
def test_what_may_be_given(tmp_path: Path, text: str) -> None:
    samples = source(tmp_path, text).load()
    assert len(samples.class_names) == 3
    assert samples.labels.tolist() == [0, 1, 2] * 10
    np.testing.assert_array_equal(samples.read(7), np.arange(480.0).reshape(30, 4, 4)[7])


@pytest.mark.parametrize(
    "text",
    [
        "def load(): return {'x': X, 'y': Y, 'split': ['train', 'val', 'test'] * 10, 'classes': ['a', 'b', 'c']}",
        "def load(): return [(x, 'abc'[y], ('train', 'val', 'test')[y]) for x, y in zip(X, Y)]",
    ],
)
def test_splits_and_classes(tmp_path: Path, text: str) -> None:
    data = dataset(source(tmp_path, text))
    assert data.class_names == ("a", "b", "c")
    assert data.labels("test").tolist() == [2] * 10


def test_another_name(tmp_path: Path) -> None:
    assert len(source(tmp_path, "def mine(): return X, Y", "data.py:mine").load().labels) == 30


def test_nothing_is_run_without_trust(tmp_path: Path) -> None:
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef load(): return X, Y"
    for settings in ({}, {"name": "data.py:load"}):
        function_source = source(tmp_path, text, trust=False, **settings)
        for ask in (function_source.fingerprint, function_source.load):
            with pytest.raises(DataError, match=r"loading would run the function 'load' of the program .*data\.py; if"):
                ask()
    assert not (tmp_path / "ran").exists()


def test_what_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "values.bin").write_bytes(b"1")
    text = "def load(): return X, Y\ndef other(): return X, Y"
    function_source = source(tmp_path, text, reads=("values.bin",))
    seen = [function_source.fingerprint()]
    (tmp_path / "values.bin").write_bytes(b"2")
    seen.append(function_source.fingerprint())
    seen.append(source(tmp_path, text + "\n", reads=("values.bin",)).fingerprint())
    seen.append(source(tmp_path, text + "\n", "data.py:other", reads=("values.bin",)).fingerprint())
    assert all(one != other for place, one in enumerate(seen) for other in seen[:place])
    with pytest.raises(DataError, match="absent: cannot be read"):
        source(tmp_path, text, reads=("absent",)).fingerprint()


BAD = {
    "no function": ("x = 1", "has no function 'load'"),
    "no Python": ("def load(", "failed: SyntaxError"),
    "an error": ("def load(): return 1 / 0", "failed: ZeroDivisionError: division by zero"),
    "an error later": ("def load():\n    yield X[0], 0\n    raise OSError('gone')", "failed: OSError: gone"),
    "a number": ("def load(): return 5", "returned int; allowed: a map with x and y"),
    "text": ("def load(): return 'x'", "returned str"),
    "nothing": ("def load(): return []", "returned no samples"),
    "other keys": ("def load(): return {'x': X, 'z': Y}", "returned the keys x, z"),
    "arrays in a list": ("def load(): return [X, Y]", "item 0 is ndarray"),
    "mixed": ("def load(): return [(X[0], 0), (X[1], 1, 'train')]", "item 1 is tuple"),
    "no length": ("def load(): return iter(X), Y", "x is "),
    "fewer labels": ("def load(): return X, Y[:29]", r"y is int64 \[29\]"),
    "float labels": ("def load(): return X, Y / 2", "y is float64"),
    "short split": ("def load(): return {'x': X, 'y': Y, 'split': ['train']}", "split has 1 words"),
    "unknown split": ("def load(): return {'x': X, 'y': Y, 'split': ['odd'] * 30}", "unknown split 'odd'"),
    "an exit": ("import sys\ndef load(): sys.exit(0)", "failed: SystemExit: 0"),
    "an exit later": ("def load():\n    yield X[0], 0\n    raise SystemExit", "failed: SystemExit"),
    "a length that fails": (
        "class Lazy:\n    def __len__(self): raise SystemExit(0)\n    def __getitem__(self, i): return X[i]\n"
        "def load(): return Lazy(), Y",
        "len.x. failed: SystemExit: 0",
    ),
    "ragged labels": ("def load(): return X, [[1], [1, 2]] * 15", "y as an array failed: ValueError"),
    "split of a number": ("def load(): return {'x': X, 'y': Y, 'split': 5}", "split is int; allowed: a list of names"),
    "classes of a number": ("def load(): return {'x': X, 'y': Y, 'classes': 5}", "classes is int; allowed: a list of"),
    "classes of text": ("def load(): return {'x': X, 'y': Y, 'classes': 'abc'}", "classes is str; allowed: a list of"),
    "classes that fail": (
        "def load(): return {'x': X, 'y': Y, 'classes': np.array(5)}",
        "classes as a list failed: Ty",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_bad_functions(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source(tmp_path, text).load()


def test_an_error_in_one_sample_names_it(tmp_path: Path) -> None:
    text = (
        "class Lazy:\n    def __len__(self): return 30\n"
        "    def __getitem__(self, i): return X[i] if i < 29 else 1 / 0\n"
        "def load(): return {'x': Lazy(), 'y': Y, 'split': ['train', 'val', 'test'] * 10}"
    )
    data = dataset(source(tmp_path, text))
    data.inputs("train")
    with pytest.raises(DataError, match=r"sample 29.*x\[29\] failed: ZeroDivisionError"):
        data.inputs("test")


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ("'a.png'", r"sample \d+: is <U5, allowed: integers, floats or bools"),
        ("[[None]]", r"sample \d+: is object, allowed"),
        ("X[0] * 1j", r"sample \d+: is complex128, allowed"),
        ("[[1], [1, 2]]", r"sample \d+.*x\[\d+\] failed: ValueError"),
    ],
)
def test_samples_that_are_no_numbers(tmp_path: Path, sample: str, message: str) -> None:
    data = dataset(source(tmp_path, f"def load(): return [{sample}] * 30, Y"))
    for ask in (data.summary, lambda: data.inputs("train")):
        with pytest.raises(DataError, match=message):
            ask()


def test_what_a_function_prints_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "print('imported')\nclass Lazy:\n    def __len__(self): return 30\n"
        "    def __getitem__(self, i): print('read'); return X[i]\n"
        "def load(): print('called'); return Lazy(), Y"
    )
    dataset(source(tmp_path, text)).summary()
    out, err = capsys.readouterr()
    assert out == ""
    assert {"imported", "called", "read"} <= set(err.splitlines())
