"""The cache: it finds its entries, and ignores everything else in its folder."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from stand_in import LOG, VERSION

from compress.targets.edgetpu.compiler.cache import MAX_HEAD_BYTES, Cache
from compress.targets.edgetpu.compiler.host import CompilerRun

OUT = ("model_edgetpu.tflite",)
DONE = CompilerRun(0, LOG, {OUT[0]: b"compiled" * 1000})
Found = Callable[..., list[tuple[str, CompilerRun]]]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "shared" / "cache")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def find(cache: Cache, notes: list[str]) -> Found:
    def find(model: bytes = b"model", *, options: tuple[str, ...] = ("-s",), version: str = "16.0") -> object:
        entries = cache.find(model, options, version, OUT, notes.append)
        return [(path.name.rpartition("-")[2], outcome) for path, outcome in entries]

    return find  # type: ignore[return-value]


def entry(cache: Cache) -> Path:
    (name,) = cache.names
    return cache.folder / name


def test_what_is_kept_is_found(cache: Cache, find: Found, notes: list[str]) -> None:
    assert find() == []
    cache.keep(b"model", ["-s"], VERSION, DONE)
    assert find() == [(VERSION, DONE)]
    assert find(version=VERSION) == [(VERSION, DONE)]
    assert find(b"another") == find(options=("-s", "-a")) == find(version="15.0") == find(version="16.0.3") == []
    assert notes == []
    assert entry(cache).name.endswith(f"-{VERSION}")
    assert entry(cache).stat().st_mode & 0o777 == 0o644

    failed = CompilerRun(1, "it failed\u2713\n", {})
    cache.keep(b"model", ["-s"], VERSION, failed)
    assert find() == [(VERSION, failed)]


def test_the_newest_version_first(cache: Cache, find: Found) -> None:
    for version in ("16.0.9", "16.0.10", "15.0.340273435", "16.0.2"):
        cache.keep(b"model", ["-s"], version, DONE)
    assert [version for version, _ in find()] == ["16.0.10", "16.0.9", "16.0.2"]
    assert [version for version, _ in find(version="16.0.9")] == ["16.0.9"]


def test_without_a_version_nothing_is_kept(cache: Cache) -> None:
    for version in (None, "", "../16.0", "16.0/..", "16", "sixteen"):
        cache.keep(b"model", ["-s"], version, DONE)
        assert not cache.folder.exists()


def test_nothing_half_written(cache: Cache, find: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted write leaves no entry, or the previous one."""
    cache.keep(b"model", ["-s"], VERSION, CompilerRun(0, LOG, {OUT[0]: b"first"}))

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.keep(b"model", ["-s"], VERSION, DONE)
    assert [outcome.files[OUT[0]] for _, outcome in find()] == [b"first"]
    assert os.listdir(cache.folder) == cache.names


def test_many_writers_and_readers(cache: Cache, find: Found, notes: list[str]) -> None:
    def write() -> None:
        for _ in range(20):
            cache.keep(b"model", ["-s"], VERSION, DONE)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert find() in ([], [(VERSION, DONE)])
    for thread in threads:
        thread.join()
    assert find() == [(VERSION, DONE)]
    assert notes == []


# --- invalid entries --------------------------------------------------------------------


def rewritten(path: Path, **changes: object) -> None:
    """Change fields in the first line of an entry."""
    line, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps({**json.loads(line), **changes}).encode() + b"\n" + rest)


def head(path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(path.read_bytes().partition(b"\n")[0])["parts"]
    return rows


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-9] + b"X" + path.read_bytes()[-8:]),
    "no json": lambda path: path.write_bytes(b"compiled\n" * 10),
    "a list": lambda path: path.write_bytes(b"[]\n"),
    "deep": lambda path: path.write_bytes(b"[" * 60_000 + b"\n"),
    "a long line": lambda path: path.write_bytes(b" " * (MAX_HEAD_BYTES + 1) + path.read_bytes()),
    "another format": lambda path: rewritten(path, format=2),
    "no exit code": lambda path: rewritten(path, exit_code="0"),
    "true": lambda path: rewritten(path, exit_code=True),
    "no parts": lambda path: rewritten(path, parts=[]),
    "a name": lambda path: rewritten(path, parts=[head(path)[0], {**head(path)[1], "name": "../../x"}]),
    "a float": lambda path: rewritten(path, parts=[{**head(path)[0], "bytes": 1.5}, head(path)[1]]),
    "a hash": lambda path: rewritten(path, parts=[{**head(path)[0], "sha256": None}, head(path)[1]]),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.rename(path.parent / ".real"), path.symlink_to(path.parent / ".real")),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "large": lambda path: os.truncate(path, (1 << 30) + 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_a_miss_and_made_anew(cache: Cache, find: Found, notes: list[str], damage: str) -> None:
    cache.keep(b"model", ["-s"], VERSION, DONE)
    DAMAGE[damage](entry(cache))
    assert find() == []
    assert len(notes) == 1
    assert "is damaged and not used" in notes[0]
    if damage != "a folder":
        cache.keep(b"model", ["-s"], VERSION, DONE)
        assert find() == [(VERSION, DONE)]


def test_names_that_are_no_entries(cache: Cache, find: Found, notes: list[str]) -> None:
    cache.keep(b"model", ["-s"], VERSION, DONE)
    key = entry(cache).name.removesuffix(VERSION)
    for name in (f"{key}16.0.x", f"{key}16.0", "README", f"{key}", f"{key}16.0.1.2.3.4", f".{key}16.0.7.tmp"):
        (cache.folder / name).write_text("x")
    assert [version for version, _ in find()] == [VERSION]
    assert len(notes) == 1  # "16.0" alone might be a version
