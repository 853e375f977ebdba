"""A store that machines share: on fsspec's local and in-memory file systems, and on a real S3 server."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3
import tiny

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: pip install -e '.[s3]'")

from compress.core.artifact import Artifact, Kind  # noqa: E402
from compress.core.errors import PipelineError, StoreError  # noqa: E402
from compress.core.files import digest_of  # noqa: E402
from compress.pipeline import runner  # noqa: E402
from compress.pipeline.resolution import preview  # noqa: E402
from compress.pipeline.schema import load  # noqa: E402
from compress.pipeline.shared_store import MANIFEST_BYTES, SharedStore, store_in  # noqa: E402

KEY = "k" * 64
OTHER = "o" * 64
CONTENT = b"content" * 1000
NUMBERS = itertools.count()
Machine = Callable[[str], SharedStore]


@pytest.fixture(params=["memory", "file"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty shared store."""
    if request.param == "memory":
        address = f"memory://team/{next(NUMBERS)}"
        fsspec.filesystem("memory").makedirs(address.removeprefix("memory:/"))
        return address
    (tmp_path / "shared").mkdir()
    return str(tmp_path / "shared")


@pytest.fixture
def machine(location: str, tmp_path: Path) -> Machine:
    """A function that opens the store of a new process on a machine."""

    def of(name: str) -> SharedStore:
        store = SharedStore(tmp_path / name / ".store", location)
        store.prepare()
        return store

    return of


def publish(store: SharedStore, key: str = KEY, content: bytes = CONTENT) -> Artifact:
    with store.scratch() as work:
        (work / "model.tflite").write_bytes(content)
        (work / "plan.json").write_text("{}")
        return store.publish(key, Kind.TFLITE, work, {"accuracy": 0.5}, 1.25)


def share(store: SharedStore, key: str = KEY, content: bytes = CONTENT) -> tuple[Artifact, list[str]]:
    notes = tiny.Notes()
    artifact = publish(store, key, content)
    store.share(key, artifact, notes, replace=True)
    return artifact, notes.noted


def fetch(store: SharedStore, key: str = KEY) -> tuple[Artifact | None, list[str]]:
    notes = tiny.Notes()
    with store.lock(key, lambda: pytest.fail("nobody else makes this")):
        return store.fetch(key, notes), notes.noted


def put(location: str, name: str, content: bytes) -> None:
    options = {} if "://" in location else {"auto_mkdir": True}
    fsspec.core.url_to_fs(location, **options)[0].pipe_file(f"{location}/{name}", content)


def test_what_one_machine_has_made_another_downloads(machine: Machine) -> None:
    first, second = machine("a"), machine("b")
    published = publish(first)
    assert not first.is_shared(KEY)
    first.share(KEY, published, tiny.Notes())
    assert first.is_shared(KEY)
    assert second.find(KEY) is None
    looked = second.look(KEY)
    assert looked is not None
    assert looked.digest == published.digest
    fetched, noted = fetch(second)
    assert fetched == second.find(KEY)
    assert fetched is not None
    assert (fetched.digest, fetched.facts, fetched.seconds) == (published.digest, {"accuracy": 0.5}, 1.25)
    assert fetched.file("model.tflite").read_bytes() == CONTENT
    assert noted == []
    assert fetch(second, OTHER) == (None, [])
    assert second.look(OTHER) is None
    assert tiny.unsound(second.folder) == []


def test_an_artifact_without_files_is_shared(machine: Machine) -> None:
    store = machine("a")
    with store.scratch() as work:
        artifact = store.publish(KEY, Kind.FINDINGS, work, {"size": 3}, 0.0)
    store.share(KEY, artifact, tiny.Notes(), replace=True)
    fetched = fetch(machine("b"))[0]
    assert fetched is not None
    assert fetched.facts == {"size": 3}


def test_the_second_machine_runs_no_stage(location: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    path = tiny.project(tmp_path, [{"remade": {"log": str(log)}}, "compile", "package"])
    results: list[Any] = []
    for name in ("a", "b"):
        notes = tiny.Notes()
        store = store_in(tmp_path / name, location)
        pipeline = load(path, tiny.STAGES)
        before = {entry.id: status for entry, status in preview(pipeline, tmp_path / name, store=store)}
        assert set(before.values()) == ({"to do"} if name == "a" else {"cached"})
        record = runner.run(pipeline, tmp_path / name, notes, store=store).to_json()
        results.append((tiny.statuses(record), {name: row["sha256"] for name, row in record["outputs"].items()}))
        assert notes.noted == []
    assert set(results[0][0].values()) == {"done"}
    assert set(results[1][0].values()) == {"cached"}
    assert log.read_text().count("\n") == 1
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("location", ["file"], indirect=True)
def test_a_search_of_two_machines_shares_stages(location: str, tmp_path: Path) -> None:
    """The two machines share no other folder, and no process runs at the same time."""
    pytest.importorskip("optuna", reason="optuna is not installed: pip install -e '.[search]'")
    log = tmp_path / "log"
    search = {"trials": 3, "settings": {"remade.weights": [1, 2, 3]}, "objectives": ["accuracy", "size_bytes"]}
    path = tiny.project(tmp_path, [{"remade": {"log": str(log)}}, "compile"], search=search)
    for name in ("a", "b"):
        database = f"sqlite:///{tmp_path / 'search.db'}"
        arguments = ("search", path, "--storage", database, "--store", location, "--out", tmp_path / name)
        done = subprocess.run(tiny.command(*arguments), env=tiny.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert len(set(log.read_text().splitlines())) == log.read_text().count("\n") == 3  # the front repeated no stage
    assert (tmp_path / "b" / "tiny" / "search" / "search.html").exists()


# --- a shared store that is away --------------------------------------------------------


@pytest.mark.parametrize("name", ["model.tflite", "plan.json", "artifact.json", "keys"])
def test_an_upload_that_is_cut_off_is_made_by_the_next_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = machine("a")
    artifact = publish(first)
    put_file, pipe_file = first._files.put_file, first._files.pipe_file

    def fails(transfer: Callable[..., None], position: int) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            if name in str(arguments[position]):
                raise OSError("the connection was lost")
            transfer(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(first._files, "put_file", fails(put_file, 1))
        patch.setattr(first._files, "pipe_file", fails(pipe_file, 0))
        notes = tiny.Notes()
        first.share(KEY, artifact, notes, replace=True)
        (noted,) = notes.noted
        assert "a result cannot be uploaded: the connection was lost; it stays in" in noted
    assert share(first, OTHER)[1] == []  # this store does not try again
    assert fetch(machine("b")) == (None, [])
    again = machine("a")
    assert not again.is_shared(KEY)
    again.share(KEY, artifact, tiny.Notes())
    assert fetch(machine("b"))[0] == machine("b").find(KEY)


def test_a_download_that_is_cut_off_leaves_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    share(machine("a"))
    store = machine("b")

    def lost(remote: str, local: str) -> None:
        Path(local).write_bytes(b"half")
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "get_file", lost)
        fetched, noted = fetch(store)
    assert fetched is None
    assert noted[0].endswith("TimeoutError; it is made here")
    assert store.find(KEY) is None
    assert list((store.folder / "scratch").iterdir()) == []
    assert fetch(store) == (None, [])  # this store does not try again
    assert fetch(machine("b"))[0] is not None


# --- damaged and hostile stores ---------------------------------------------------------


def named(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["files"].update({name: "0" * 64})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (named("../outside"), "names or values that are not allowed"),
        (named("artifact.json"), "names or values that are not allowed"),
        (named("sub/file"), "names or values that are not allowed"),
        (named("absent.bin"), "absent.bin is missing"),
        (lambda content: content["files"].update({"plan.json": "0" * 64}), "plan.json is damaged"),
        (lambda content: content.update(kind="a poem"), "artifact.json is invalid"),
        (lambda content: content.update(seconds=float("nan")), "artifact.json is invalid"),
    ],
)
def test_a_hostile_manifest_is_refused(
    location: str, machine: Machine, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    """The digest in the key is that of the changed manifest."""
    artifact, _ = share(machine("a"))
    content = json.loads((artifact.folder / "artifact.json").read_bytes())
    change(content)
    digest = digest_of({name: content[name] for name in ("kind", "files", "facts")})
    for name in artifact.files:
        put(location, f"artifacts/{digest}/{name}", artifact.file(name).read_bytes())
    put(location, f"artifacts/{digest}/artifact.json", json.dumps(content).encode())
    put(location, f"keys/{KEY}", digest.encode() + b"\n")
    store = machine("b")
    fetched, noted = fetch(store)
    assert fetched is None
    assert len(noted) == 1
    assert reason in noted[0]
    assert noted[0].endswith("it is made again")
    assert list((store.folder / "artifacts").iterdir()) == []
    assert store.find(KEY) is None
    assert share(store)[1] == []  # made again
    assert fetch(machine("c"))[0] is not None


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("keys/" + KEY, b"../../elsewhere", "the key is damaged"),
        ("keys/" + KEY, b"0" * 64 + b"\n", "artifact.json is missing"),
        ("keys/" + KEY, bytes(1000), "the key is damaged"),
        ("artifact.json", b"[" * 100_000, "artifact.json is invalid"),
        ("artifact.json", b"[]", "artifact.json is invalid"),
        ("artifact.json", bytes(MANIFEST_BYTES + 1), "artifact.json is invalid"),
        ("model.tflite", b"other", "model.tflite is damaged"),
    ],
)
def test_a_damaged_object_counts_as_missing(
    location: str, machine: Machine, name: str, content: bytes, reason: str
) -> None:
    artifact, _ = share(machine("a"))
    put(location, name if name.startswith("keys") else f"artifacts/{artifact.digest}/{name}", content)
    store = machine("b")
    fetched, noted = fetch(store)
    assert fetched is None
    assert reason in noted[0]
    assert store.look(KEY) is None or name == "model.tflite"
    share(store)
    assert fetch(machine("c"))[0] is not None


def test_a_result_larger_than_the_disk_is_not_downloaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    share(machine("a"))
    usage = shutil.disk_usage("/")._replace(free=300 * 1024**2)
    monkeypatch.setattr("compress.pipeline.shared_store.RESERVE_BYTES", 300 * 1024**2 - 100)
    monkeypatch.setattr("compress.pipeline.shared_store.shutil.disk_usage", lambda path: usage)
    fetched, noted = fetch(machine("b"))
    assert fetched is None
    assert "has space for 100" in noted[0]


# --- errors before any work is done -----------------------------------------------------


@pytest.mark.parametrize(
    "location",
    ["s3://name:hidden@bucket", "s3://bucket/../other", "simplecache::s3://bucket", "nonsense://hidden"],
    ids=str,
)
def test_an_invalid_location_is_refused(tmp_path: Path, location: str) -> None:
    with pytest.raises(PipelineError, match=r"the location of the store is invalid.*s3://BUCKET/PREFIX") as caught:
        store_in(tmp_path, location)
    assert "hidden" not in str(caught.value)


def test_a_folder_that_does_not_exist_is_refused_before_any_stage(tmp_path: Path) -> None:
    path = tiny.project(tmp_path)
    arguments = (path, "--out", tmp_path / "out", "--store", tmp_path / "absent")
    done = subprocess.run(tiny.command(*arguments), env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 6, done.stderr
    assert "absent: the shared store cannot be used: No such file or directory; create it" in done.stderr
    assert not (tmp_path / "out").exists()


# --- S3 ---------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Server]:
    if s3.MISSING:
        pytest.skip(s3.MISSING)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with s3.serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").clear_instance_cache()
        yield server
        fsspec.filesystem("s3").clear_instance_cache()


def test_s3(server: s3.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are shared through S3; a bucket or a server that cannot be used is an error before the first stage."""
    address = f"s3://{s3.BUCKET}/team"
    first, second = (SharedStore(tmp_path / name / ".store", address) for name in ("a", "b"))
    first.prepare()
    second.prepare()
    assert share(first)[1] == []
    assert fetch(second)[0] == second.find(KEY)
    assert fetch(second, OTHER) == (None, [])
    put(address, f"keys/{KEY}", b"")
    assert fetch(second)[1][0].endswith("the key is damaged; it is made again")
    with pytest.raises(StoreError, match="s3://absent: the shared store cannot be used"):
        store_in(tmp_path, "s3://absent")
    server.kill()
    assert "a result cannot be uploaded" in share(second, OTHER)[1][0]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(StoreError, match="the shared store cannot be used") as caught:
        store_in(tmp_path, address)
    assert "hidden" not in str(caught.value)
