"""The device's end of a deployment: its answers, and when it ends."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.contract import agent, releases

Ends = tuple[agent.Agent, int, int]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """An agent, and the host's ends of its pipes: to write to, and to read from."""
    source, host_out = os.pipe()
    host_in, sink = os.pipe()
    yield agent.Agent(agent.Link(source, sink)), host_out, host_in
    for handle in (source, host_out, host_in, sink):
        try:
            os.close(handle)
        except OSError:
            continue


def test_a_host_that_is_silent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "SILENCE_S", 0.05)
    with pytest.raises(agent.HostGoneError, match="silent"):
        ends[0].link.line()


def test_a_host_that_goes_in_a_line_or_a_piece(ends: Ends) -> None:
    os.write(ends[1], b'{"do": "x"}\nabc')
    assert ends[0].link.line() == {"do": "x"}
    os.close(ends[1])
    with pytest.raises(agent.HostGoneError):
        list(ends[0].link.content(10))


def test_a_host_that_does_not_read(ends: Ends) -> None:
    os.close(ends[2])
    with pytest.raises(agent.HostGoneError):
        ends[0].link.say({"answer": 1})


def test_a_host_that_goes_ends_the_runner(ends: Ends, tmp_path: Path) -> None:
    device_agent, host_out, _ = ends
    place = tmp_path / "there" / "releases" / ("0" * 64)
    device_agent.answer({"do": "open", "path": str(tmp_path / "there"), "by": "test", "create": True})
    place.mkdir()
    (place / releases.RUNNER).write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    threading.Timer(1.0, os.close, [host_out]).start()
    with pytest.raises(agent.HostGoneError):
        device_agent.answer({"do": "run", "release": "0" * 64, "command": ["verify"], "timeout_s": 30})
    pid = (tmp_path / "pid").read_text()
    time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def error(device_agent: agent.Agent, request: dict[str, Any]) -> str:
    return str(device_agent.answer(request)["error"]["kind"])


def test_what_cannot_be_done(ends: Ends, tmp_path: Path) -> None:
    device_agent, path = ends[0], str(tmp_path / "there")
    assert error(device_agent, {"do": "switch", "release": "0" * 64}) == "request"
    assert error(device_agent, {"do": "open", "path": path, "by": "test", "create": False}) == "absent"
    assert "answer" in device_agent.answer({"do": "open", "path": path, "by": "test", "create": True})
    assert error(device_agent, {"do": "switch", "release": "0" * 64}) == "damaged"
    assert error(device_agent, {"do": "switch", "release": "../../etc"}) == "request"
    assert error(device_agent, {"do": "write", "name": "../x", "text": ""}) == "request"
    assert error(device_agent, {"do": "want", "release": "0" * 64, "pieces": {}, "total": 1 << 60}) == "disk"
    other = agent.Agent(device_agent.link)
    assert error(other, {"do": "open", "path": path, "by": "test", "create": True}) == "locked"
    assert error(other, {"do": "open", "path": "/proc/1/x", "by": "test", "create": True}) == "files"
    slow = tmp_path / "there" / "releases" / ("0" * 64)
    slow.mkdir()
    (slow / releases.RUNNER).write_text("import time\ntime.sleep(60)\n")
    assert error(device_agent, {"do": "run", "release": "0" * 64, "command": ["verify"], "timeout_s": 0.1}) == "timeout"


def test_a_piece_that_cannot_be_kept_is_read_all_the_same(ends: Ends, tmp_path: Path) -> None:
    device_agent, host_out, _ = ends
    device_agent.answer({"do": "open", "path": str(tmp_path / "there"), "by": "test", "create": True})
    os.write(host_out, json.dumps({"do": "put", "sha256": "0" * 64, "offset": 5, "size": 8}).encode() + b"\nabc{}\n")
    assert "error" in device_agent.answer(device_agent.link.line())
    assert device_agent.link.line() == {}


def test_a_cut_line_of_the_history(tmp_path: Path) -> None:
    path = tmp_path / "there"
    one, two = "1" * 64, "2" * 64
    (path / "releases" / one).mkdir(parents=True)
    (path / "releases" / two).mkdir()
    os.symlink(f"releases/{two}", path / "current")
    (path / "history.jsonl").write_text(json.dumps({"release": one}) + '\n{"by": "me", "rel')
    folder = releases.DeviceFolder(str(path), "test", create=False)
    assert (folder.current(), folder.previous()) == (two, one)
    assert (path / "history.jsonl").read_text().count(two) == 1  # a cut after the switch had left this out
    assert releases.DeviceFolder.previous(folder) == one


def test_a_folder_of_somebody_else(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o555)
    request = {"do": "open", "path": str(tmp_path / "theirs" / "shop"), "by": "", "create": True}
    if root := os.geteuid() == 0:
        os.seteuid(65534)  # root may write everywhere
    try:
        error = ends[0].answer(request)["error"]
    finally:
        if root:
            os.seteuid(0)
    assert "Permission denied" in error["what"]
    assert "sudo install -d" in error["hint"]
    assert not list((tmp_path / "theirs").iterdir())


def installed(folder: releases.DeviceFolder, text: bytes) -> tuple[str, dict[str, int]]:
    """Install a release of two small files; return its name and pieces."""
    files, pieces = {}, {}
    for name in (releases.BUNDLE, releases.RUNNER):
        content = text + name.encode()
        digest = hashlib.sha256(content).hexdigest()
        folder.put(digest, 0, len(content), iter([content]))
        files[name], pieces[digest] = {"sha256": digest, "pieces": [[digest, len(content)]]}, len(content)
    name = releases.release_name(*(files[file_name]["sha256"] for file_name in (releases.BUNDLE, releases.RUNNER)))
    folder.install(name, files)
    return name, pieces


def test_releases_that_never_ran_make_room_before_anything_is_sent(tmp_path: Path) -> None:
    """Deployments that were cut before the switch must not fill a disk: the next one could never begin."""
    folder = releases.DeviceFolder(str(tmp_path / "there"), "test", create=True)
    ran, _ = installed(folder, b"ran")
    folder.switch(ran)
    cut, again = installed(folder, b"cut")
    assert folder.missing(again, 100) == {}  # pieces that arrived are not sent twice
    assert sorted(folder.releases()) == sorted([ran, cut])
    assert folder.missing({"0" * 64: 10}, 100) == {"0" * 64: 0}
    assert folder.releases() == [ran]


def test_what_a_deployment_left_that_was_cut_when_its_release_was_whole(ends: Ends, tmp_path: Path) -> None:
    device_agent, there = ends[0], tmp_path / "there"
    device_agent.answer({"do": "open", "path": str(there), "by": "test", "create": True})
    release, pieces = installed(device_agent.folder, b"whole")
    for digest in pieces:
        (there / "incoming" / digest).write_bytes(b"arrived")
    response = device_agent.answer({"do": "want", "release": release, "pieces": pieces, "total": 100})
    assert response == {"answer": {"whole": True, "missing": {}}}
    assert not list((there / "incoming").iterdir())


def test_a_damaged_piece_is_sent_again(tmp_path: Path) -> None:
    """Otherwise every further deployment of this bundle would find the same damaged piece."""
    folder = releases.DeviceFolder(str(tmp_path / "there"), "test", create=True)
    digest = hashlib.sha256(b"sent").hexdigest()
    (tmp_path / "there" / "incoming" / digest).write_bytes(b"spoilt on the disk")
    files = {name: {"sha256": digest, "pieces": [[digest, 4]]} for name in (releases.BUNDLE, releases.RUNNER)}
    assert folder.missing({digest: 4}, 8) == {}
    with pytest.raises(releases.ReleaseError, match="not what was sent"):
        folder.install(releases.release_name(digest, digest), files)
    assert folder.missing({digest: 4}, 8) == {digest: 0}


def test_a_disk_that_fails_is_an_answer(ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host must not lose the connection, even if nothing can be removed."""
    device_agent, there = ends[0], tmp_path / "there"
    device_agent.answer({"do": "open", "path": str(there), "by": "test", "create": True})
    release, _ = installed(device_agent.folder, b"whole")

    def fail(*names: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("symlink", "listdir"):
        monkeypatch.setattr(os, name, fail)
    error = device_agent.answer({"do": "switch", "release": release})["error"]
    assert error == {"kind": "disk", "what": "No space left on device", "hint": "free some space", "current": None}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_cannot_flush_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    flush = os.fsync

    def of_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        flush(handle)

    monkeypatch.setattr(os, "fsync", of_files)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            releases.DeviceFolder(str(tmp_path / "there"), "test", create=True)
        return
    folder = releases.DeviceFolder(str(tmp_path / "there"), "test", create=True)
    release, _ = installed(folder, b"whole")
    folder.switch(release)
    assert folder.current() == release


def test_a_look_changes_nothing(ends: Ends, tmp_path: Path) -> None:
    """Nothing changes, even while a deployment works there."""
    there = tmp_path / "there"
    assert ends[0].answer({"do": "look", "path": str(there)})["error"]["kind"] == "absent"
    folder = releases.DeviceFolder(str(there), "somebody", create=True)
    release, _ = installed(folder, b"whole")
    folder.switch(release)
    (there / "releases" / ".new").mkdir()
    state = ends[0].answer({"do": "look", "path": str(there)})["answer"]
    assert {name: state[name] for name in ("current", "name", "by", "whole")} == {
        "current": release,
        "name": None,  # it is not a bundle
        "by": "somebody",
        "whole": True,
    }
    assert (there / "releases" / ".new").exists()
    (there / "releases" / release / releases.RUNNER).write_bytes(b"damaged")
    assert not ends[0].answer({"do": "look", "path": str(there)})["answer"]["whole"]
