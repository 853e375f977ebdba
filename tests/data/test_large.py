"""Large splits: they are decoded once, kept in the store, and memory-mapped."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Silence
from pictures import flat

from compress.core.errors import DataError, StoreError
from compress.data import dataset, prefetching, rows
from compress.data.dataset import Dataset
from compress.data.source import CorruptError, Samples, Source
from compress.data.sources import ImageFolder
from compress.pipeline.store import FORGOTTEN_DAYS, Store
from deploy.contract.preprocessing import Preprocessing


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(dataset, "LARGE_BYTES", 1000)
    new_store = Store(tmp_path / "store")
    new_store.prepare()
    return new_store


def opened(source: Source, store: Store | None, *steps: Any) -> Dataset:
    data = Dataset(source, Preprocessing(list(steps)), None)
    if store:
        data.work_in(store, Silence())
    return data


def test_large_splits_are_mapped_and_equal(tmp_path: Path, store: Store) -> None:
    source = ImageFolder(path=str(flat(tmp_path / "images", 40)))
    small, large = opened(source, None), opened(source, store)
    for split in ("train", "validation", "test"):
        assert not isinstance(small.inputs(split), np.memmap)
        assert isinstance(large.inputs(split), np.memmap)
        assert not large.inputs(split).flags.writeable
        np.testing.assert_array_equal(large.inputs(split), small.inputs(split))
    assert large.input_shape == (4, 6, 3)
    assert [*(store.folder / "scratch").iterdir()] == []


def test_small_splits_stay_in_memory(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "LARGE_BYTES", 1 << 20)
    data = opened(ImageFolder(path=str(flat(tmp_path / "images"))), store)
    assert type(data.inputs("train")) is np.ndarray
    assert not list((store.folder / "kept").rglob("*.npy"))


def test_what_was_decoded_is_used_again(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    root = flat(tmp_path / "images", 40)
    first = np.array(opened(ImageFolder(path=str(root)), store).inputs("train"))
    again = opened(ImageFolder(path=str(root)), store)
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "decode", None)  # fails if anything is decoded
        np.testing.assert_array_equal(again.inputs("train"), first)
    other = opened(ImageFolder(path=str(root)), store, {"scale": {"from": [0, 255]}})
    assert other.inputs("train").max() <= 1
    (file,) = {path for path in store.folder.rglob("train.npy") if path.parent.name == again._kept}
    file.write_bytes(file.read_bytes()[:-9])  # damaged
    np.testing.assert_array_equal(opened(ImageFolder(path=str(root)), store).inputs("train"), first)


def test_an_interruption_leaves_nothing_behind(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(ImageFolder(path=str(flat(tmp_path / "images", 40))), store)
    put = rows.Rows.put

    def interrupted(self: Any, index: int, sample: Any) -> None:
        if index == 17:
            raise KeyboardInterrupt
        put(self, index, sample)

    monkeypatch.setattr(rows.Rows, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        data.inputs("train")
    assert not list(store.folder.rglob("*.npy"))
    monkeypatch.setattr(rows.Rows, "put", put)
    assert len(data.inputs("train")) == 58


def test_a_full_disk(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(ImageFolder(path=str(flat(tmp_path / "images", 40))), store)

    def full(self: Any, index: int, sample: Any) -> None:
        raise OSError(28, "No space left on device", "x.npy")

    monkeypatch.setattr(rows.Rows, "put", full)
    with pytest.raises(StoreError, match="decoded samples cannot be kept: the disk is full"):
        data.inputs("train")


def test_what_is_not_used_for_long_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.prepare()
    old, new = store.kept("a" * 64), store.kept("b" * 64)
    (old / "train.npy").write_bytes(b"x")
    ago = time.time() - (FORGOTTEN_DAYS + 1) * 86_400
    os.utime(old, (ago, ago))
    del store
    Store(tmp_path).prepare()
    assert new.exists()
    assert not old.exists()


def test_the_order_is_kept_however_long_each_takes() -> None:
    seen: list[int] = []
    threads = set()

    def read(index: int) -> np.ndarray:
        time.sleep(0.002 if index % 48 < 16 else 0)
        threads.add(threading.get_ident())
        return np.array(index)

    progress = Silence()
    prefetching.decode(read, 500, lambda index, value: seen.append(int(value)), progress)
    assert seen == list(range(500))
    assert threading.get_ident() not in threads
    assert progress.seen[-1][:2] == (500, 500)
    prefetching.decode(read, 0, lambda index, value: seen.append(-1))
    assert len(seen) == 500


def test_not_all_is_decoded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    most = prefetching.CHUNK * prefetching.AHEAD * prefetching.WORKERS + prefetching.CHUNK

    def put(index: int, value: np.ndarray) -> None:
        assert len(done) <= index + most

    prefetching.decode(lambda index: done.append(index) or np.array(index), 2000, put)


class Faulty(Source):
    """A source of which some samples cannot be read."""

    bad: tuple[int, ...] = ()
    skip: bool = False

    def fingerprint(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def load(self) -> Samples:
        return Samples(np.arange(60) % 3, ("a", "b", "c"), self.read, skip=self.skip)

    def read(self, index: int) -> np.ndarray:
        if index in self.bad:
            raise DataError("is broken", where=f"sample {index}")
        return np.full((3, 3), index, np.float32)


Faulty.name = "faulty"


def test_corrupt_samples_are_listed() -> None:
    data = opened(Faulty(bad=tuple(range(0, 60, 2))), None)
    with pytest.raises(DataError, match=r"^\d\d samples cannot be used: data.source.faulty: sample 0: is broken; .*"):
        data.inputs("train")
    every = r"^20 samples cannot be used: (sample \d+: is broken; ){20}remove or repair them, or leave them out with `c"
    with pytest.raises(DataError, match=every):
        prefetching.decode(lambda index: broken(index), 20, lambda index, value: None)
    with pytest.raises(DataError, match="sample 99: is broken; and 20 more; remove or repair them, or leave them out"):
        prefetching.decode(lambda index: broken(index), 120, lambda index, value: None)
    with pytest.raises(DataError, match=r"^sample 5: is broken; mend it, or leave it out with `corrupt: skip`$"):
        prefetching.decode(lambda index: broken(index) if index == 5 else np.array(0), 20, lambda index, value: None)


def broken(index: int) -> Any:
    raise CorruptError("is broken", where=f"sample {index}", hint="mend it")


@pytest.mark.parametrize("kept", [False, True])
def test_corrupt_samples_are_left_out_when_asked(store: Store, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Faulty(bad=(0, 4, 59), skip=True)
    data = opened(source, store if kept else None)
    values = np.concatenate([data.inputs(split)[:, 0, 0, 0] for split in ("train", "validation", "test")])
    assert sorted(values.astype(int)) == [index for index in range(60) if index not in (0, 4, 59)]
    for split in ("train", "validation", "test"):
        np.testing.assert_array_equal(data.labels(split), data.inputs(split)[:, 0, 0, 0] % 3)
    assert len(data.corrupt) == 3
    assert "sample 59: is broken" in data.corrupt[2]
    if kept:
        monkeypatch.setattr(dataset, "corrupt", None)  # corrupt samples are not searched for again
        assert opened(source, store).corrupt == data.corrupt
