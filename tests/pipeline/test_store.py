"""The store: an artifact is complete or absent, whatever happens to the processes, the files and the disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from compress.core.artifact import Artifact, Kind
from compress.core.errors import StoreError
from compress.core.files import digest_of, explain, file_digest
from compress.pipeline.store import Store
from deploy.contract.durable_files import write_atomically

KEY = "k" * 64
OTHER = "o" * 64
FACTS = {"accuracy": 0.5, "history": [1, 2.5, None], "names": {"b": True, "a": "é"}}

SCRIPT = """
import os, sys, time
from pathlib import Path
from compress.pipeline.stage import Kind
from compress.pipeline.store import Store

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.002)

store = Store(Path(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / ".store"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a process with a `store` and piped stdin and stdout; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT + code, str(folder), *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def publish(store: Store, key: str = KEY, content: bytes = b"content" * 1000, facts: Any = FACTS) -> Artifact:
    store.prepare()
    with store.scratch() as work:
        (work / "model.tflite").write_bytes(content)
        (work / "plan.json").write_text("{}")
        return store.publish(key, Kind.TFLITE, work, facts, 1.23456)


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


# --- find and publish -------------------------------------------------------------------


def test_what_is_published_is_found(folder: Path) -> None:
    published = publish(Store(folder))
    artifact = Store(folder).find(KEY)
    assert artifact == published
    assert artifact is not None
    assert (artifact.kind, artifact.facts, artifact.seconds) == (Kind.TFLITE, FACTS, 1.235)
    assert artifact.file("model.tflite").read_bytes() == b"content" * 1000
    assert artifact.files == {name: file_digest(artifact.folder / name) for name in ("model.tflite", "plan.json")}
    assert Store(folder).find(OTHER) is None
    assert tiny.unsound(folder) == []
    with pytest.raises(KeyError, match=r"a quantized tflite model has no model\.keras; it has model\.tflite"):
        artifact.file("model.keras")


def test_looking_creates_nothing(tmp_path: Path) -> None:
    assert Store(tmp_path / "no" / "store").find(KEY) is None
    assert everything(tmp_path) == []


def test_keys_name_contents(folder: Path) -> None:
    store = Store(folder)
    first = publish(store, KEY)
    assert publish(store, OTHER) == first  # two keys may have one answer
    assert len(list((folder / "artifacts").iterdir())) == 1
    others = [publish(store, OTHER, b"other"), publish(store, OTHER, facts={"accuracy": 0.6})]
    assert len({artifact.digest for artifact in (first, *others)}) == 3
    assert (store.find(KEY), store.find(OTHER)) == (first, others[1])  # a new answer replaces the old
    assert others[0].file("model.tflite").read_bytes() == b"other"  # and removes nothing


def test_digests_are_those_of_earlier_versions() -> None:
    """A change of the digests would make every existing store useless."""
    expected = "098dac5985569565abd2e7f5e2fffcb9"
    assert digest_of({"b": [1, 0.1, None, True, "é"], "a": {}})[:32] == expected


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest_of({"a": 1, "b": {"c": 2, "d": 3}}) == digest_of({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest_of({"a": [1, 2]}) != digest_of({"a": [2, 1]})
    assert digest_of({"a": 1}) != digest_of({"a": "1"})
    with pytest.raises(ValueError, match="Out of range"):
        digest_of({"a": float("nan")})


# --- damage -----------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


ARTIFACT_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped bit": lambda folder: flip(folder / "model.tflite"),
    "empty file": lambda folder: os.truncate(folder / "plan.json", 0),
    "missing file": lambda folder: (folder / "plan.json").unlink(),
    "truncated manifest": lambda folder: os.truncate(folder / "artifact.json", 50),
    "missing manifest": lambda folder: (folder / "artifact.json").unlink(),
    "binary manifest": lambda folder: (folder / "artifact.json").write_bytes(b"\xff\0"),
    "manifest without facts": lambda folder: (folder / "artifact.json").write_text('{"kind": "bundle"}'),
    "changed facts": lambda folder: rewrite(folder / "artifact.json", facts={"accuracy": 1.0}),
    "without time": lambda folder: (folder / "artifact.json").write_text(
        json.dumps({k: v for k, v in json.loads((folder / "artifact.json").read_text()).items() if k != "seconds"})
    ),
    "missing folder": lambda folder: shutil.rmtree(folder),
    "a file instead": lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
    "empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize("damage", ARTIFACT_DAMAGE)
def test_a_damaged_artifact_counts_as_none_and_can_be_published_again(folder: Path, damage: str) -> None:
    store = Store(folder)
    published = publish(store)
    ARTIFACT_DAMAGE[damage](published.folder)
    assert store.find(KEY) is None
    assert publish(store) == published
    assert store.find(KEY) == published
    assert tiny.unsound(folder) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\xff\xfe", b"\0" * 65, b"../../artifacts\n", b"f" * 64 + b"\n", b"f" * 5000, b"F" * 64 + b"\n"],
)
def test_a_damaged_key_counts_as_none_and_can_be_published_again(folder: Path, content: bytes) -> None:
    store = Store(folder)
    published = publish(store)
    (folder / "keys" / KEY).write_bytes(content)
    assert store.find(KEY) is None
    assert publish(store) == published
    assert store.find(KEY) == published


def test_a_failure_while_working_leaves_nothing(folder: Path) -> None:
    store = Store(folder)
    store.prepare()

    def fail() -> None:
        with store.scratch() as work:
            (work / "half").write_bytes(b"half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    with pytest.raises(ValueError, match="Out of range"), store.scratch() as work:
        store.publish(KEY, Kind.TFLITE, work, {"loss": float("inf")}, 0.0)
    assert everything(folder / "scratch") == everything(folder / "artifacts") == everything(folder / "keys") == []


# --- several processes ------------------------------------------------------------------

PUBLISHER = """
names = sys.argv[3:]
store.prepare()
print("ready", flush=True)
wait_for(sys.argv[2])
for key in names:
    with store.scratch() as work:
        (work / "model.tflite").write_bytes(b"content of " + key.encode())
        artifact = store.publish(key, Kind.TFLITE, work, {"key": key}, 0.0)
    assert store.find(key) == artifact, key
print("done", flush=True)
"""


def test_processes_that_publish_the_same_keys_at_once_all_end_right(
    folder: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    keys = [digest_of(number) for number in range(40)]
    processes = [start(folder, PUBLISHER, tmp_path / "go", *keys) for _ in range(3)]
    assert [line(process) for process in processes] == ["ready"] * 3
    (tmp_path / "go").touch()
    assert [line(process) for process in processes] == ["done"] * 3
    assert [process.wait() for process in processes] == [0] * 3
    assert tiny.unsound(folder) == []
    assert all(Store(folder).find(key) for key in keys)


HOLDER = """
store.prepare()
with store.lock(sys.argv[2], lambda: print("waiting", flush=True)):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_key_is_held_by_one_process_at_a_time(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    holder = start(folder, HOLDER, KEY)
    assert line(holder) == "held"
    store = Store(folder)
    store.prepare()
    messages: list[str] = []

    def waiting() -> None:
        assert holder.poll() is None
        messages.append("waiting")
        assert holder.stdin is not None
        holder.stdin.close()  # the holder ends

    with store.lock(KEY, waiting):
        assert messages == ["waiting"]
        assert holder.wait() == 0
    with store.lock(KEY, lambda: messages.append("again")):
        assert messages == ["waiting"]


def test_other_keys_and_the_lock_of_a_killed_process_are_free(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    holder = start(folder, HOLDER, KEY)
    assert line(holder) == "held"
    with Store(folder).lock(OTHER, lambda: pytest.fail("waits for another key")):
        assert holder.poll() is None
    holder.kill()
    holder.wait()
    with Store(folder).lock(KEY, lambda: pytest.fail("waits for a process that is gone")):
        pass


WORKER = """
store.prepare()
with store.scratch() as work:
    (work / "half").write_bytes(b"half")
    print(work, flush=True)
    sys.stdin.read()
    (work / "half").write_bytes(b"whole")
    store.publish(sys.argv[2], Kind.TFLITE, work, {}, 0.0)
print("published", flush=True)
"""


def test_scratch_of_a_killed_process_is_cleared_by_the_next_that_is_alone(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    killed, working = start(folder, WORKER, KEY), start(folder, WORKER, OTHER)
    left, kept = Path(line(killed)), Path(line(working))
    killed.kill()
    killed.wait()
    assert (left / "half").exists()
    Store(folder).prepare()
    assert (kept / "half").exists()  # a process is still working, and it is unknown which folder is its own
    assert working.stdin is not None
    working.stdin.close()
    assert line(working) == "published"
    assert working.wait() == 0
    Store(folder).prepare()
    assert everything(folder / "scratch") == []
    assert Store(folder).find(OTHER) is not None
    assert Store(folder).find(KEY) is None


def test_a_store_that_is_still_used_here_is_not_cleared(folder: Path) -> None:
    first, second = Store(folder), Store(folder)
    first.prepare()
    with first.scratch() as work:
        second.prepare()
        assert work.is_dir()


# --- disks and folders ------------------------------------------------------------------


def refused(function: Callable[[], Any]) -> str:
    with pytest.raises(StoreError) as caught:
        function()
    assert caught.value.exit_code == 6
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    message = refused(Store(tmp_path / "runs" / ".store").prepare)
    assert message.startswith(f"{tmp_path}/runs/.store")
    assert "the store cannot be written: a part of the path is a file, not a folder; choose another folder" in message
    assert (tmp_path / "runs").read_text() == "a file"
    assert "a file" in refused(Store(tmp_path / "runs").prepare)
    message = refused(lambda: Store(tmp_path / "runs").find(KEY))
    assert "the store cannot be read: a part of the path is a file, not a folder" in message


def test_a_store_that_became_read_only_is_still_read(mounted: Callable[..., Path]) -> None:
    folder = mounted()
    published = publish(Store(folder / "store"))
    mounted(options="remount,ro")
    assert Store(folder / "store").find(KEY) == published
    message = refused(lambda: publish(Store(folder / "store"), OTHER))
    assert "the file system is read-only; choose another folder with --out" in message


def test_a_full_disk(mounted: Callable[..., Path]) -> None:
    folder = mounted()
    store = Store(folder / "store")
    store.prepare()
    with store.scratch() as work:
        (work / "model.tflite").write_bytes(b"content")
        tiny.fill(folder)
        facts = {"text": "x" * 10_000}
        message = refused(lambda: store.publish(KEY, Kind.TFLITE, work, facts, 0.0))
    assert message.startswith(f"{folder}/store")
    assert "the store cannot be written: the disk is full; free some space and run again" in message
    assert tiny.unsound(folder / "store") == []
    assert store.find(KEY) is None
    (folder / "filler").unlink()
    assert store.find(KEY) is None
    published = publish(store)
    assert store.find(KEY) == published
    assert tiny.unsound(folder / "store") == []


def test_a_disk_without_room_for_another_file(mounted: Callable[..., Path]) -> None:
    folder = mounted()
    store = Store(folder / "store")
    store.prepare()
    tiny.fill(folder)
    for number in range(100_000):  # a new, empty file needs an inode
        try:
            (folder / f"inode-{number}").touch()
        except OSError:
            break
    message = refused(lambda: store.lock(KEY, lambda: None).__enter__())
    assert "the store cannot be written: the disk is full" in message


# --- single files -----------------------------------------------------------------------


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert everything(tmp_path) == [path]


def test_a_file_that_cannot_be_replaced_leaves_no_other(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "report.json", b"new")
    assert everything(tmp_path) == [tmp_path / "report.json"]


def test_a_full_disk_keeps_the_old_file(mounted: Callable[..., Path]) -> None:
    folder = mounted()
    write_atomically(folder / "report.json", b"old")
    tiny.fill(folder)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(folder / "report.json", b"new" * 10_000)
    assert (folder / "report.json").read_bytes() == b"old"
    assert sorted(path.name for path in folder.iterdir()) == ["filler", "report.json"]


@pytest.mark.parametrize("operation", ["fsync", "chmod", "replace"])
def test_an_error_names_the_file_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The error does not name the temporary file, which is removed. If that fails too, the first error is reported."""

    def fail(*names: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", *names[:1])

    monkeypatch.setattr(os, operation, fail)
    monkeypatch.setattr(os, "unlink", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(tmp_path / "report.json", b"new")
    assert str(explain(caught.value, "not written")).startswith(f"{tmp_path / 'report.json'}: not written: the disk is")


def test_a_file_system_that_cannot_flush_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = os.fsync

    def of_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(handle)

    monkeypatch.setattr(os, "fsync", of_files)
    write_atomically(tmp_path / "report.json", b"new")
    assert (tmp_path / "report.json").read_bytes() == b"new"
