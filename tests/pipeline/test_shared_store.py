"""A store that is shared through a bucket, with a real server on localhost."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3
import tiny
from compress.pipeline.bucket import Bucket, S3Client, new_client

from compress.core.artifact import Artifact, Kind
from compress.core.errors import PipelineError, StoreError
from compress.core.files import digest_of
from compress.pipeline import runner
from compress.pipeline.schema import load
from compress.pipeline.shared_store import MANIFEST_BYTES, UNSHARED, BucketConnection, SharedStore, connected

KEY = "k" * 64
OTHER = "o" * 64
CONTENT = b"content" * 1000
LARGE = 20 * 1024**2
"""A size in bytes that boto3 sends in more than one part."""
PREFIXES = itertools.count()
SCRIPT = """
import os, signal, sys
from pathlib import Path
from compress.core.artifact import Kind
from compress.pipeline.shared_store import SharedStore, connected
from compress.core.progress import SilentProgress

class Interrupts(SilentProgress):
    def update(self, done, total, **metrics):
        if done:
            os.kill(os.getpid(), signal.SIGINT)

store = SharedStore(Path(sys.argv[1]), connected(sys.argv[2]))
store.prepare()
def publish(key, content):
    with store.scratch() as work:
        (work / "model.tflite").write_bytes(content)
        return store.publish(key, Kind.TFLITE, work, {}, 1.0)
"""


@pytest.fixture(scope="module")
def running() -> Iterator[s3.Server]:
    if s3.MISSING:
        pytest.skip(s3.MISSING)
    with s3.serving() as server:
        yield server


@pytest.fixture
def server(running: s3.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Server]:
    """The server, with boto3 configured for it."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    yield running
    running.start()


@pytest.fixture(scope="module")
def client(running: s3.Server) -> S3Client:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        return new_client()


@pytest.fixture
def bucket(client: S3Client) -> Bucket:
    """A prefix that no other test uses."""
    return Bucket(f"s3://{s3.BUCKET}/team/{next(PREFIXES)}", client)


@pytest.fixture
def location(bucket: Bucket) -> str:
    return bucket.location


@pytest.fixture
def machine(server: s3.Server, bucket: Bucket, tmp_path: Path) -> Callable[[str], SharedStore]:
    """Return a function that opens the store of a new process on a machine."""

    def of(name: str) -> SharedStore:
        store = SharedStore(tmp_path / name / ".store", BucketConnection(bucket))
        store.prepare()
        return store

    return of


def publish(store: SharedStore, key: str = KEY, content: bytes = CONTENT) -> Artifact:
    with store.scratch() as work:
        (work / "model.tflite").write_bytes(content)
        (work / "plan.json").write_text("{}")
        return store.publish(key, Kind.TFLITE, work, {"accuracy": 0.5}, 1.25)


def share(store: SharedStore, key: str = KEY, content: bytes = CONTENT) -> tuple[Artifact, tiny.Notes]:
    notes = tiny.Notes()
    artifact = publish(store, key, content)
    store.share(key, artifact, notes, replace=True)
    return artifact, notes


def fetch(store: SharedStore, key: str = KEY) -> tuple[Artifact | None, list[str]]:
    notes = tiny.Notes()
    with store.lock(key, lambda: pytest.fail("nobody else makes this")):
        return store.fetch(key, notes), notes.noted


# --- from one machine to another --------------------------------------------------------


@pytest.mark.parametrize("content", [CONTENT, bytes(LARGE)], ids=["small", "in parts"])
def test_what_one_machine_has_made_another_downloads(machine: Callable[[str], SharedStore], content: bytes) -> None:
    first, second = machine("a"), machine("b")
    published, notes = share(first, content=content)
    assert notes.noted == []
    assert second.find(KEY) is None
    looked = second.look(KEY)
    assert looked is not None
    assert looked.digest == published.digest
    fetched, noted = fetch(second)
    assert fetched == second.find(KEY)
    assert fetched is not None
    assert (fetched.digest, fetched.facts, fetched.seconds) == (published.digest, {"accuracy": 0.5}, 1.25)
    assert fetched.file("model.tflite").read_bytes() == content
    assert noted == []
    assert fetch(second, OTHER) == (None, [])
    assert second.look(OTHER) is None
    assert tiny.unsound(second.folder) == []


def test_an_artifact_without_files_is_shared(machine: Callable[[str], SharedStore]) -> None:
    store = machine("a")
    with store.scratch() as work:
        artifact = store.publish(KEY, Kind.FINDINGS, work, {"size": 3}, 0.0)
    store.share(KEY, artifact, tiny.Notes(), replace=True)
    fetched = fetch(machine("b"))[0]
    assert fetched is not None
    assert fetched.facts == {"size": 3}


def test_a_result_from_before_is_uploaded_once(machine: Callable[[str], SharedStore]) -> None:
    store = machine("a")
    artifact = publish(store)
    assert not store.is_shared(KEY)
    store.share(KEY, artifact, tiny.Notes())
    assert store.is_shared(KEY)
    assert fetch(machine("b"))[0] is not None


@pytest.mark.usefixtures("server")
def test_the_second_machine_runs_no_stage(bucket: Bucket, tmp_path: Path) -> None:
    log = tmp_path / "log"
    path = tiny.project(tmp_path, [{"remade": {"log": str(log)}}, "compile", "package"])
    results: list[Any] = []
    for name in ("a", "b"):
        notes = tiny.Notes()
        store = SharedStore(tmp_path / name / ".store", BucketConnection(bucket))
        pipeline = load(path, tiny.STAGES)
        before = {entry.id: status for entry, status in runner.preview(pipeline, tmp_path / name, store=store)}
        assert set(before.values()) == ({"to do"} if name == "a" else {"cached"})
        record = runner.run(pipeline, tmp_path / name, notes, store=store).to_json()
        results.append((tiny.statuses(record), {name: row["sha256"] for name, row in record["outputs"].items()}))
        assert notes.noted == []
    assert set(results[0][0].values()) == {"done"}
    assert set(results[1][0].values()) == {"cached"}
    assert log.read_text().count("\n") == 1
    assert results[0][1] == results[1][1]


@pytest.mark.usefixtures("server")
def test_a_search_of_two_machines_shares_stages(location: str, tmp_path: Path) -> None:
    """The two machines share no folder."""
    pytest.importorskip("optuna", reason="optuna is not installed: pip install -e '.[search]'")
    log = tmp_path / "log"
    path = tiny.project(
        tmp_path,
        [{"remade": {"log": str(log)}}, "compile"],
        search={"trials": 3, "settings": {"remade.weights": [1, 2, 3]}, "objectives": ["accuracy", "size_bytes"]},
    )
    for name, extra in (("a", ["--join"]), ("b", [])):
        database = f"sqlite:///{tmp_path / 'search.db'}"
        arguments = ("search", path, "--storage", database, "--store", location, "--out", tmp_path / name, *extra)
        done = subprocess.run(tiny.command(*arguments), env=tiny.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert len(set(log.read_text().splitlines())) == log.read_text().count("\n")  # the front repeated no stage
    assert (tmp_path / "b" / "tiny" / "search" / "search.html").exists()


# --- an unavailable server --------------------------------------------------------------


class KillsServer(tiny.Notes):
    """Notes that kill the server after the first part of a transfer."""

    def __init__(self, server: s3.Server) -> None:
        super().__init__()
        self._server = server

    def update(self, done: int, total: int, **metrics: float) -> None:
        if done:
            self._server.kill()


def test_an_upload_that_is_cut_off_is_made_by_the_next_run(
    server: s3.Server, location: str, machine: Callable[[str], SharedStore]
) -> None:
    first = machine("a")
    notes = KillsServer(server)
    artifact = publish(first, content=os.urandom(LARGE))
    first.share(KEY, artifact, notes, replace=True)
    assert first.find(KEY) == artifact
    assert len(notes.noted) == 1
    assert "a result cannot be uploaded" in notes.noted[0]
    assert "uploaded by the next run" in notes.noted[0]
    assert share(first, OTHER)[1].noted == []  # the note is shown only once
    assert not server.file(location, f"keys/{KEY}").exists()
    assert sorted(path.name for path in (first.folder / UNSHARED).iterdir()) == [KEY, OTHER]

    server.start()
    assert fetch(machine("b")) == (None, [])
    again = machine("a")
    again.share(KEY, artifact, tiny.Notes())
    assert list((again.folder / UNSHARED).iterdir()) == []
    for key in (KEY, OTHER):
        assert fetch(machine("b"), key)[0] == machine("b").find(key)


def test_a_download_that_is_cut_off_leaves_nothing(server: s3.Server, machine: Callable[[str], SharedStore]) -> None:
    share(machine("a"), content=os.urandom(LARGE))
    store, notes = machine("b"), KillsServer(server)
    assert store.fetch(KEY, notes) is None
    assert store.find(KEY) is None
    assert list((store.folder / "scratch").iterdir()) == []
    assert len(notes.noted) == 1
    assert notes.noted[0].endswith("it is made here")
    server.start()
    assert fetch(store) == (None, [])  # this store does not try again yet
    assert fetch(machine("b"))[0] is not None


@pytest.mark.parametrize(
    "code", ["store.share(KEY, made, Interrupts(), replace=True)", "store.fetch(KEY, Interrupts())"]
)
def test_ctrl_c_leaves_nothing_that_looks_complete(
    code: str, server: s3.Server, location: str, machine: Callable[[str], SharedStore], tmp_path: Path
) -> None:
    if "fetch" in code:
        share(machine("a"), content=os.urandom(LARGE))
    setup = f"KEY = {KEY!r}; made = 'share' in {code!r} and publish(KEY, os.urandom({LARGE}));"
    command = [sys.executable, "-c", SCRIPT + setup + code, str(tmp_path / "b" / ".store"), location]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT, done.stderr
    if "fetch" in code:
        assert machine("b").find(KEY) is None
        assert list((tmp_path / "b" / ".store" / "artifacts").iterdir()) == []
        assert list((tmp_path / "b" / ".store" / "scratch").iterdir()) == []
    else:
        assert not server.file(location, f"keys/{KEY}").exists()
        assert machine("b").find(KEY) is not None


def test_two_machines_publish_the_same_keys(
    server: s3.Server, location: str, machine: Callable[[str], SharedStore], tmp_path: Path
) -> None:
    """The contents differ, as those of two trainings may."""
    code = """
print("ready", flush=True); sys.stdin.readline()
for number in range(20):
    key = f"{number:064d}"
    store.share(key, publish(key, sys.argv[1].encode() + bytes([number])), SilentProgress(), replace=True)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT + code, str(tmp_path / name / ".store"), location],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.communicate("go\n", timeout=60)
        assert process.returncode == 0
    third = machine("c")
    fetched = [fetch(third, f"{number:064d}") for number in range(20)]
    contents = [tmp_path / name / ".store" for name in ("a", "b")]
    for number, (artifact, noted) in enumerate(fetched):
        assert noted == []
        assert artifact is not None
        assert artifact.file("model.tflite").read_bytes() in [
            str(folder).encode() + bytes([number]) for folder in contents
        ]


# --- damaged and hostile objects --------------------------------------------------------


def rewrite(bucket: Bucket, artifact: Artifact, change: Callable[[dict[str, Any]], Any]) -> None:
    """Give the key of an artifact another manifest, with a correct digest."""
    content = json.loads((artifact.folder / "artifact.json").read_bytes())
    change(content)
    digest = digest_of({name: content[name] for name in ("kind", "files", "facts")})
    for name in artifact.files:
        bucket.put(f"artifacts/{digest}/{name}", artifact.file(name).read_bytes())
    bucket.put(f"artifacts/{digest}/artifact.json", json.dumps(content).encode())
    bucket.put(f"keys/{KEY}", digest.encode() + b"\n")


def named(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["files"].update({name: "0" * 64})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (named("../outside"), "names or values that are not allowed"),
        (named("/etc/outside"), "names or values that are not allowed"),
        (named(".."), "names or values that are not allowed"),
        (named("artifact.json"), "names or values that are not allowed"),
        (named("sub/file"), "names or values that are not allowed"),
        (named("absent.bin"), "absent.bin is missing"),
        (lambda content: content["files"].update({"plan.json": "0" * 64}), "plan.json is damaged"),
        (lambda content: content.update(kind="a poem"), "artifact.json is invalid"),
        (lambda content: content.update(seconds=float("nan")), "artifact.json is invalid"),
        (lambda content: content.update(files=[]), "artifact.json is invalid"),
    ],
)
def test_a_hostile_manifest_is_refused(
    bucket: Bucket, machine: Callable[[str], SharedStore], change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    rewrite(bucket, share(machine("a"))[0], change)
    store = machine("b")
    fetched, noted = fetch(store)
    assert fetched is None
    assert len(noted) == 1
    assert reason in noted[0]
    assert noted[0].endswith("it is made again")
    assert list((store.folder / "artifacts").iterdir()) == []
    assert store.find(KEY) is None
    assert share(store)[1].noted == []  # made again
    assert fetch(machine("c"))[0] is not None


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("keys/" + KEY, b"../../elsewhere", "the key is damaged"),
        ("keys/" + KEY, b"0" * 64 + b"\n", "artifact.json is missing"),
        ("keys/" + KEY, bytes(1000), "the key is damaged"),
        ("artifact.json", b"[" * 100_000, "artifact.json is invalid"),
        ("artifact.json", bytes(MANIFEST_BYTES + 1), "is larger than"),
        ("model.tflite", b"other", "model.tflite is damaged"),
    ],
)
def test_a_damaged_object_counts_as_missing(
    bucket: Bucket, machine: Callable[[str], SharedStore], name: str, content: bytes, reason: str
) -> None:
    artifact, _ = share(machine("a"))
    path = name if name.startswith("keys") else f"artifacts/{artifact.digest}/{name}"
    bucket.put(path, content)
    store = machine("b")
    fetched, noted = fetch(store)
    assert fetched is None
    assert reason in noted[0]
    assert store.look(KEY) is None or name == "model.tflite"
    share(store)
    assert fetch(machine("c"))[0] is not None


def test_a_result_larger_than_the_disk_is_not_downloaded(
    machine: Callable[[str], SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    share(machine("a"))
    usage = shutil.disk_usage("/")._replace(free=300 * 1024**2)
    monkeypatch.setattr("compress.pipeline.shared_store.RESERVE_BYTES", 300 * 1024**2 - 100)
    monkeypatch.setattr("compress.pipeline.shared_store.shutil.disk_usage", lambda path: usage)
    fetched, noted = fetch(machine("b"))
    assert fetched is None
    assert "has space for 100" in noted[0]


# --- errors before any work is done -----------------------------------------------------


def refused(location: str, **environment: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(StoreError) as caught:
            connected(location)
    message = str(caught.value)
    assert s3.SECRET_KEY not in message
    assert "hidden" not in message
    return message


def test_a_bucket_that_cannot_be_used_is_an_error_at_the_start(server: s3.Server, location: str) -> None:
    assert connected(None) is None
    assert connected(location) is not None
    assert "the bucket does not exist; create it" in refused("s3://absent")
    assert "the secret key is wrong" in refused(location, AWS_SECRET_ACCESS_KEY="hidden")
    assert "the access key is unknown" in refused(location, AWS_ACCESS_KEY_ID="hidden")
    closed = refused(location, AWS_ENDPOINT_URL="http://someone:hidden@127.0.0.1:1")
    assert "the server at 127.0.0.1:1 cannot be reached" in closed
    assert "AWS_ENDPOINT_URL" in refused(location, AWS_ENDPOINT_URL="no address hidden")
    for port in ("abc", "90000"):
        assert "127.0.0.1" in refused(location, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    assert "AWS_ACCESS_KEY_ID" in refused(location, AWS_SECRET_ACCESS_KEY="", AWS_ACCESS_KEY_ID="")
    server.kill()
    assert "cannot be reached" in refused(location)


@pytest.mark.parametrize(
    "location",
    [
        "runs",
        "s3://",
        "s3:///prefix",
        "s3://name:hidden@bucket",
        "s3://bucket/a b",
        "https://host/bucket",
        "s3://b/x?y",
    ],
)
def test_an_invalid_location_is_refused(location: str) -> None:
    with pytest.raises(PipelineError, match="s3://BUCKET/PREFIX") as caught:
        connected(location)
    assert "hidden" not in str(caught.value)


@pytest.mark.usefixtures("server")
def test_the_command_refuses_before_any_stage(tmp_path: Path) -> None:
    path = tiny.project(tmp_path)
    arguments = (path, "--out", tmp_path / "out", "--store", "s3://absent")
    done = subprocess.run(tiny.command(*arguments), env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 6, done.stderr
    assert "s3://absent: the shared store cannot be used: the bucket does not exist" in done.stderr
    assert not (tmp_path / "out").exists()
