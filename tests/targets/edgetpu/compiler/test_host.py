"""The hosts of the compiler: this machine, Docker and SSH, replaced by programs that record their calls."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import stat
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stand_in import LOG, Answer, Programs

from compress.core.errors import StageError
from compress.targets.edgetpu.compiler.host import Docker, Host, Local, Ssh, _unpacked

MODEL = b"TFL3" * 100_000  # more than a pipe holds
OUT = ("model_edgetpu.tflite",)
HOSTS: dict[str, Callable[[Path], Host]] = {
    "local": lambda here: Local(here.parent / "bin" / "edgetpu_compiler", here),
    "docker": lambda here: Docker("coral", "edgetpu_compiler"),
    "ssh": lambda here: Ssh("me@there", "edgetpu_compiler"),
}


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest, tmp_path: Path, programs: Programs) -> Host:
    programs.ssh()
    programs.docker()
    return HOSTS[request.param](tmp_path / "here")


def nothing_is_left(programs: Programs, tmp_path: Path) -> bool:
    """Return whether all compilers have ended and all folders are gone; remote ones get a moment for it."""
    return programs.ended(tmp_path / "here", tmp_path / "there")


def test_success(host: Host, programs: Programs, tmp_path: Path) -> None:
    """The log names no folder, so it is the same on every host. Keyboard input does not reach the compiler."""
    programs.compiler(Answer(files={OUT[0]: b"compiled", "other": b"not asked for"}))
    done = host.run(MODEL, ["-s", "-i", "a b;'c'/$d"], OUT, 60.0)
    assert (done.exit_code, done.log, dict(done.files)) == (0, LOG, {OUT[0]: b"compiled"})
    (invocation,) = programs.asked()
    assert invocation["arguments"] == ["-s", "-i", "a b;'c'/$d", "model.tflite"]
    assert invocation["model"] == hashlib.sha256(MODEL).hexdigest()
    assert invocation["stdin"] == ""
    assert set(invocation["around"]) <= {"model.tflite", "compiler.log"}
    assert nothing_is_left(programs, tmp_path)


@pytest.mark.parametrize(("exit_code", "there"), [(1, 1), (255, 255), (-6, 134)])
def test_failure(host: Host, programs: Programs, tmp_path: Path, exit_code: int, there: int) -> None:
    """SSH uses the exit code 255 for its own failures, and the compiler may use it, too."""
    programs.compiler(Answer("said\nbefore", {}, exit_code))
    done = host.run(MODEL, ["-s"], OUT, 60.0)
    assert (done.exit_code, done.log, dict(done.files)) == (
        exit_code if isinstance(host, Local) else there,
        "said\nbefore",
        {},
    )
    assert nothing_is_left(programs, tmp_path)


def test_both_outputs_and_what_is_no_text(host: Host, programs: Programs) -> None:
    noise = r"sys.stdout.buffer.write(b'\xff\xfe\x00one\r\n'); sys.stdout.flush(); sys.stderr.write('two\n')"
    programs.write("edgetpu_compiler", noise)
    assert host.run(MODEL, ["-s"], OUT, 60.0).log == "\ufffd\ufffd\0one\r\ntwo\n"


def test_it_takes_too_long(host: Host, programs: Programs, tmp_path: Path) -> None:
    programs.compiler(Answer(seconds=600.0))
    started = time.monotonic()
    with pytest.raises(StageError, match=r"took longer than 3 s; increase compile\.timeout_s") as caught:
        host.run(MODEL, ["-s"], OUT, 3.0)
    assert time.monotonic() - started < 20
    assert caught.value.where == host.where
    assert len(programs.asked()) == 1  # it had started
    assert nothing_is_left(programs, tmp_path)


def test_ctrl_c(host: Host, programs: Programs, tmp_path: Path) -> None:
    programs.compiler(Answer(seconds=600.0))

    def interrupt() -> None:
        while not (programs.folder / "children").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        host.run(MODEL, ["-s"], OUT, 60.0)
    thread.join()
    assert nothing_is_left(programs, tmp_path)


def test_a_client_that_is_killed(programs: Programs, tmp_path: Path) -> None:
    """The other host notices it by the end of its input."""
    programs.ssh()
    programs.compiler(Answer(seconds=600.0))
    ended: list[BaseException] = []

    def run() -> None:
        try:
            Ssh("there", "edgetpu_compiler").run(MODEL, ["-s"], OUT, 60.0)
        except StageError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not (programs.folder / "children").exists():
        time.sleep(0.05)
    clients = [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if _command(path).split("\0")[2:3] == [str(programs.folder / "ssh")]
    ]
    assert len(clients) == 1
    os.kill(clients[0], signal.SIGKILL)
    thread.join(timeout=30)
    del thread
    assert nothing_is_left(programs, tmp_path)
    assert "the compiler cannot be run" in str(ended[0])


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_compiler_that_is_not_there(host: Host) -> None:
    text = "is not an executable program" if isinstance(host, Local) else "the compiler was not found"
    with pytest.raises(StageError, match=text):
        host.run(MODEL, ["-s"], OUT, 60.0)


# --- single hosts -----------------------------------------------------------------------


def test_a_setting_that_names_no_program(programs: Programs, tmp_path: Path) -> None:
    path = programs.compiler(Answer())
    for content in (b"\x7fELF no program", b"#!/nonexistent/interpreter\n"):
        path.write_bytes(content)
        with pytest.raises(StageError, match="the compiler cannot be run"):
            Local(path).run(MODEL, ["-s"], OUT, 60.0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("#!/bin/sh\n")
    for kind in ("absent", "folder", "text"):
        with pytest.raises(StageError, match=r"is not an executable program; check compile\.compiler"):
            Local(tmp_path / kind).run(MODEL, ["-s"], OUT, 60.0)
    assert Local(tmp_path / "absent").identity() == "none"


def test_the_identity_of_a_program(programs: Programs, tmp_path: Path) -> None:
    """The vendor's program is a script; the real program is in a folder next to it."""
    path = programs.write("edgetpu_compiler", "print(1)")
    first = Local(path).identity()
    assert first == hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "link").symlink_to(path)
    assert Local(tmp_path / "link").identity() == first
    real = programs.folder / "edgetpu_compiler_bin" / "edgetpu_compiler"
    real.parent.mkdir()
    real.write_bytes(b"15.0")
    second = Local(path).identity()
    real.write_bytes(b"16.0")
    assert len({first, second, Local(path).identity()}) == 3


def test_what_docker_is_asked(programs: Programs) -> None:
    programs.docker()
    programs.compiler(Answer())
    host = Docker("coral", "edgetpu_compiler")
    assert host.identity() == "sha256:" + "a" * 64
    host.run(MODEL, ["-s"], OUT, 60.0)
    arguments = programs.asked("docker-asked")[-1]["arguments"]
    assert arguments[:3] == ["run", "--rm", "--interactive"]
    assert arguments[arguments.index("--network") + 1] == "none"
    with pytest.raises(StageError, match=r"docker image other.*\(exit code 1\): docker: Error response.*denied"):
        Docker("other", "edgetpu_compiler").run(MODEL, ["-s"], OUT, 60.0)
    assert Docker("other", "edgetpu_compiler").identity() == "none"


def test_a_container_is_removed_by_its_name_after_a_timeout(programs: Programs) -> None:
    programs.docker()
    programs.compiler(Answer(seconds=600.0))
    with pytest.raises(StageError, match="took longer"):
        Docker("coral", "edgetpu_compiler").run(MODEL, ["-s"], OUT, 2.0)
    run, removal = (invocation["arguments"] for invocation in programs.asked("docker-asked"))
    assert removal == ["rm", "--force", run[run.index("--name") + 1]]


@pytest.mark.parametrize("host", [Docker("coral", "x"), Ssh("there", "x")], ids=["docker", "ssh"])
def test_without_the_client(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StageError, match=r"(docker|ssh) was not found"):
        host.run(MODEL, ["-s"], OUT, 60.0)
    assert host.identity() in ("none", "there")


def test_what_ssh_is_asked(programs: Programs) -> None:
    programs.ssh()
    programs.compiler(Answer())
    Ssh("me@there", "edgetpu_compiler").run(MODEL, ["-s"], OUT, 60.0)
    arguments = programs.asked("ssh-asked")[0]["arguments"]
    settings = ["BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15"]
    assert arguments[0] == "-T"
    assert arguments[1:-2:2] == ["-o"] * 3
    assert arguments[2:-2:2] == settings
    assert arguments[-2:] == ["--", "me@there"]


def test_a_host_that_cannot_be_reached_or_answers_something_else(programs: Programs) -> None:
    programs.ssh(refuses=True)
    with pytest.raises(StageError, match=r"ssh there: the compiler cannot be run.*Connection refused") as caught:
        Ssh("there", "edgetpu_compiler").run(MODEL, ["-s"], OUT, 60.0)
    assert caught.value.exit_code == 5
    for answer in ("print('welcome')", "", "sys.stdout.write('x' * 100_000)"):
        programs.write("ssh", answer)
        with pytest.raises(StageError, match="the compiler cannot be run"):
            Ssh("there", "edgetpu_compiler").run(MODEL, ["-s"], OUT, 60.0)


def test_an_archive_is_never_unpacked_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only plain files with the requested names are read from it."""
    monkeypatch.chdir(tmp_path)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind in [("../a", b"0"), ("/tmp/a", b"0"), ("a", b"2"), ("b", b"5"), ("c", b"0"), ("./d", b"0")]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, "/etc/passwd", stat.S_ISUID | 0o777
            member.size = 3 if kind == b"0" else 0
            archive.addfile(member, io.BytesIO(b"abc"))
    assert _unpacked(stream.getvalue(), {"a", "b", "d"}) == {"d": b"abc"}
    assert _unpacked(stream.getvalue()[:700], {"a"}) == {}
    assert list(tmp_path.iterdir()) == []
