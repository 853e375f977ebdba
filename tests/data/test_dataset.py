"""The data set: splits, preprocessing, digest, and lazy loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from compress.data.dataset import Dataset, Splitting
from compress.data.source import Samples, Source
from compress.data.sources import Digits, ImageFolder, Npz
from compress.data.splits import spread, stratified
from compress.data.types import SPLITS
from deploy.contract.preprocessing import Preprocessing

X = np.random.default_rng(0).random((40, 3, 3)).astype(np.float32)
Y = np.arange(40) % 4
SCALE = {"scale": {"from": [0, 2]}}


def npz(path: Path, x: np.ndarray = X, y: np.ndarray = Y, **settings: Any) -> Npz:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=x, y=y)
    return Npz(file=str(path), **settings)


# --- splitting --------------------------------------------------------------------------

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(lambda values: np.array(values, np.int64))


@given(LABELS, st.floats(0.01, 0.99), st.integers(0, 2**32 - 2), st.randoms(use_true_random=False))
def test_stratified(labels: np.ndarray, share: float, seed: int, random: Any) -> None:
    indices = np.array(sorted(random.sample(range(len(labels)), random.randint(1, len(labels)))))
    rest, taken = stratified(labels, indices, share, seed)
    np.testing.assert_array_equal(np.sort(np.concatenate([rest, taken])), indices)  # complete and disjoint
    assert (np.diff(rest) > 0).all()
    assert (np.diff(taken) > 0).all()
    for label in np.unique(labels[indices]):
        count, here = int((labels[indices] == label).sum()), int((labels[taken] == label).sum())
        assert count - here >= 1  # the rest keeps at least one of each class
        assert here >= 1 or count == 1
        assert abs(here - share * count) <= 1
    again = stratified(labels, indices, share, seed)
    np.testing.assert_array_equal(rest, again[0])
    np.testing.assert_array_equal(taken, again[1])


def test_the_seed_decides() -> None:
    divisions = {tuple(stratified(Y, np.arange(40), 0.3, seed)[1]) for seed in range(5)}
    assert len(divisions) == 5


def test_the_division_is_fixed() -> None:
    """The split is the same with every numpy. A change would change the test split of every user."""
    np.testing.assert_array_equal(stratified(Y, np.arange(40), 0.25, 0)[1], [7, 8, 10, 13, 14, 21, 27, 32])


@given(LABELS, st.integers(0, 2**32 - 1))
def test_spread(labels: np.ndarray, seed: int) -> None:
    order = spread(labels, seed)
    np.testing.assert_array_equal(np.sort(order), np.arange(len(labels)))
    classes, counts = np.unique(labels, return_counts=True)
    for length in range(len(labels) + 1):
        here = np.array([(labels[order[:length]] == label).sum() for label in classes])
        share = counts / len(labels)
        assert (np.abs(here - length * share) <= 0.5 + share * len(classes) / 2 + 1e-9).all()
    np.testing.assert_array_equal(order, spread(labels, seed))


def test_the_order_is_fixed() -> None:
    """The order is the same with every numpy. A change would change the evaluation sample of every bundle."""
    assert spread(Y)[:8].tolist() == [8, 13, 10, 27, 32, 21, 14, 7]


def test_splits_are_disjoint_and_complete(tmp_path: Path) -> None:
    marked = np.arange(40, dtype=np.float32)[:, None, None] * np.ones((1, 2, 2), np.float32)
    data = dataset(npz(tmp_path / "d.npz", marked))
    seen = [data.inputs(split)[:, 0, 0, 0].astype(int) for split in SPLITS]
    assert sorted(np.concatenate(seen)) == list(range(40))
    assert [len(part) for part in seen] == [28, 4, 8]
    for split, part in zip(SPLITS, seen, strict=True):
        np.testing.assert_array_equal(data.labels(split), Y[part])


def test_shares_that_are_asked_for(tmp_path: Path) -> None:
    data = dataset(npz(tmp_path / "d.npz"), splitting=Splitting(validation=0.5, test=0.5))
    assert [len(data.labels(split)) for split in SPLITS] == [12, 8, 20]


def test_splitting_overrules_the_source() -> None:
    data = dataset(Digits(), splitting=Splitting())
    assert [len(data.labels(split)) for split in SPLITS] != [999, 169, 629]
    assert sum(len(data.labels(split)) for split in SPLITS) == 1797


@pytest.mark.parametrize("settings", [{"test": 0.0}, {"test": 1.0}, {"validation": -0.1}, {"seed": -1}, {"tset": 0.1}])
def test_bad_splitting(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Splitting(**settings)


# --- preprocessed and raw samples -------------------------------------------------------


def test_inputs_are_preprocessed_and_raw_is_not(tmp_path: Path) -> None:
    data = dataset(npz(tmp_path / "d.npz"), SCALE, {"resize": {"size": [6, 5]}})
    inputs = data.inputs("validation")
    assert inputs.shape == (4, 6, 5, 1)
    assert inputs.dtype == np.float32
    assert data.input_shape == (6, 5, 1)
    assert data.preprocessing == [SCALE, {"resize": {"size": [6, 5]}}]
    raw = data.raw("validation", np.array([2, 0]))
    assert [sample.shape for sample in raw] == [(3, 3), (3, 3)]
    preprocessing = Preprocessing(data.preprocessing)
    np.testing.assert_array_equal(preprocessing(raw[0]), inputs[2])
    np.testing.assert_array_equal(preprocessing(raw[1]), inputs[0])


# --- laziness ---------------------------------------------------------------------------


class Watched(Source):
    """A source that records the calls of its methods."""

    def load(self) -> Samples:
        done.append("load")
        return Samples(np.arange(40) % 2, ("a", "b"), lambda index: done.append("read") or X[index])

    def fingerprint(self) -> dict[str, Any]:
        done.append("fingerprint")
        return {}


Watched.name = "watched"
done: list[str] = []


def test_nothing_is_loaded_before_it_is_needed() -> None:
    done.clear()
    data = dataset(Watched())
    assert done == []
    assert len(data.digest) == 64
    assert data.digest == data.digest
    assert done == ["fingerprint"]
    assert data.class_names == ("a", "b")
    assert len(data.labels("test")) == 8
    assert done == ["fingerprint", "load"]
    data.inputs("validation")
    data.inputs("validation")
    assert done == ["fingerprint", "load"] + ["read"] * 4


# --- the digest -------------------------------------------------------------------------


def test_what_changes_the_digest(tmp_path: Path) -> None:
    changed_x, changed_y = X.copy(), Y.copy()
    changed_x[39, 2, 2] += 1e-3
    changed_y[0] = 1
    path = tmp_path / "d.npz"
    digests = {
        "plain": dataset(npz(path)).digest,
        "a sample": dataset(npz(path, x=changed_x)).digest,
        "a label": dataset(npz(path, y=changed_y)).digest,
        "a type": dataset(npz(path, x=X.astype(np.float64))).digest,
        "an array": dataset(Npz(file=str(path), x="y")).digest,
        "a step": dataset(npz(path), SCALE).digest,
        "another step": dataset(npz(path), {"scale": {"from": [0, 3]}}).digest,
        "class names": dataset(npz(path, classes=("a", "b", "c", "d"))).digest,
        "own split": dataset(npz(path), splitting=Splitting()).digest,
        "seed": dataset(npz(path), splitting=Splitting(seed=1)).digest,
        "share": dataset(npz(path), splitting=Splitting(test=0.3)).digest,
        "split array": dataset(npz(path, split="y")).digest,
        "digits": dataset(Digits()).digest,
    }
    assert len(set(digests.values())) == len(digests)
    assert dataset(npz(path)).digest == digests["plain"]
    assert dataset(npz(path), {"scale": {"from": [0.0, 2.0], "to": [0, 1]}}).digest == digests["a step"]


def test_preprocessing_does_not_change_the_digest_of_the_samples(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    plain = dataset(npz(path)).samples_digest
    assert dataset(npz(path), SCALE).samples_digest == plain
    changed_y = Y.copy()
    changed_y[0] = 1
    others = {
        dataset(npz(path), splitting=Splitting(seed=1)).samples_digest,
        dataset(npz(path, classes=("a", "b", "c", "d"))).samples_digest,
        dataset(npz(path, y=changed_y)).samples_digest,
    }
    assert len(others) == 3
    assert plain not in others


def pictures(root: Path) -> Path:
    for kind in ("cat", "dog"):
        (root / kind).mkdir(parents=True)
        for index in range(3):
            Image.new("L", (4, 4), index).save(root / kind / f"{index}.png")
    return root


def test_digest_of_a_folder(tmp_path: Path) -> None:
    root = pictures(tmp_path / "one")
    first = dataset(ImageFolder(path=str(root))).digest
    assert dataset(ImageFolder(path=str(pictures(tmp_path / "two")))).digest == first
    assert dataset(ImageFolder(path=str(root), channels=1)).digest != first
    seen = {first}

    def changed() -> None:
        digest = dataset(ImageFolder(path=str(root))).digest
        assert digest not in seen
        seen.add(digest)

    content = bytearray((root / "cat" / "0.png").read_bytes())
    content[-20] ^= 1
    (root / "cat" / "0.png").write_bytes(content)
    changed()
    (root / "cat" / "1.png").rename(root / "dog" / "9.png")  # changes a label
    changed()
    (root / "dog" / "9.png").unlink()
    changed()
    for split in ("train", "test"):  # changes the splits
        (root / split).mkdir()
        for kind in ("cat", "dog"):
            (root / split / kind).mkdir()
    for kind in ("cat", "dog"):
        (root / kind / "2.png").rename(root / "test" / kind / "2.png")
        for path in (root / kind).iterdir():
            path.rename(root / "train" / kind / path.name)
        (root / kind).rmdir()
    changed()
    (root / "test" / "dog" / "2.png").rename(root / "train" / "dog" / "2.png")
    changed()


# --- samples in two splits ---------------------------------------------------------------


@pytest.mark.parametrize(("flat", "values"), [(False, 64), (True, 64), (False, 9)])
def test_samples_in_two_splits_are_a_warning(flat: bool, values: int) -> None:
    """Samples of one value, or of few values, show too little."""
    random = np.random.default_rng(0)
    x = np.zeros((40, values)) if flat else random.random((40, values))
    y = np.arange(40) % 2
    others = random.random((6, values)), y[:6]
    data = Dataset.from_arrays((x, y), others, (np.concatenate([x[4:6], others[0][2:] + 1]), y[:6]), class_names="ab")
    for split in SPLITS:
        data.inputs(split)
    expected = "2 of 6 test samples are also in the training or validation split, for example sample 46: the measured"
    assert [warning.startswith(expected) for warning in data.warnings] == [True] * (values == 64 and not flat)
