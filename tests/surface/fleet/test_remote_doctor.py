"""`doctor` on this host and on another one, which a stand-in for `ssh` reaches."""

from __future__ import annotations

import getpass
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compress.core.errors import PipelineError, StageError
from compress.surface.cli.main import main
from compress.surface.fleet import doctor
from compress.surface.fleet.address import DeviceAddress, parse_ssh

SSH = """#!/bin/sh
echo "$@" > "{folder}/asked"
while test "$1" != --; do shift; done
test "$2" != nowhere || {{ echo "ssh: no such host" >&2; exit 255; }}
shift 2
cd "{folder}" && exec sh -c "$1"
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of the other host."""
    folder, bin_ = tmp_path / "home", tmp_path / "bin"
    for directory in (folder / "app" / "deploy", bin_, tmp_path / "tmp"):
        directory.mkdir(parents=True)
    (folder / "app" / "deploy" / "__init__.py").write_text("")
    (bin_ / "ssh").write_text(SSH.format(folder=folder))
    (bin_ / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return folder


def kinds(text: str) -> set[str]:
    return {row["kind"] for row in json.loads(text)["findings"]}


def test_another_host(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--to", f"ssh://me@board:2222{there}/app", "--python", sys.executable, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["sound"] else 14)
    assert "shadow" in {row["kind"] for row in report["findings"]}  # only a doctor in that folder finds it
    ssh_command = (there / "asked").read_text()
    assert "BatchMode=yes" in ssh_command
    assert "-p 2222 -- me@board sh -c" in ssh_command
    assert list((there.parent / "tmp").iterdir()) == []


def test_words(there: Path) -> None:
    text, _ = doctor.examine("ssh://board", sys.executable, as_json=False)
    assert "warnings: " in text.splitlines()[-1]
    assert "shadow" not in kinds(doctor.examine("ssh://board", sys.executable, as_json=True)[0])


def test_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compress").mkdir()
    (tmp_path / "compress" / "__init__.py").write_text("")
    assert "shadow" in kinds(doctor.examine(None, "", as_json=True)[0])


def test_a_host_that_is_not_there(there: Path) -> None:
    with pytest.raises(StageError, match="cannot be reached: ssh: no such host; try: ssh nowhere true"):
        doctor.examine("ssh://nowhere", "python3", as_json=False)


def test_a_host_without_python(there: Path) -> None:
    with pytest.raises(StageError, match=r"exit code 127.*--python"):
        doctor.examine("ssh://board", "python-of-none", as_json=False)


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a real sshd on this host, which a client reaches with its own keys and known hosts."""
    programs = {
        name: shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin") for name in ("sshd", "ssh", "ssh-keygen")
    }
    if not all(programs.values()):
        pytest.skip("OpenSSH is not installed")
    for name in ("host", "me"):
        command = [programs["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name]
        subprocess.run(command, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"HostKey": "host", "AuthorizedKeysFile": "me.pub", "PidFile": "pid"}
    lines = [f"{key} {tmp_path / name}" for key, name in settings.items()]
    lines += [f"Port {port}", "ListenAddress 127.0.0.1", "StrictModes no", "UsePAM no", "PasswordAuthentication no"]
    (tmp_path / "server").write_text("\n".join(lines) + "\n")
    key = (tmp_path / "host.pub").read_text()
    (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {key}")
    client = f"UserKnownHostsFile {tmp_path}/known\nIdentityFile {tmp_path}/me\nStrictHostKeyChecking yes\n"
    (tmp_path / "client").write_text(client)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {programs["ssh"]} -F {tmp_path}/client "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    log = tmp_path / "log"
    with (
        log.open("w") as stream,
        subprocess.Popen([str(programs["sshd"]), "-D", "-e", "-f", str(tmp_path / "server")], stderr=stream) as process,
    ):
        try:
            until = time.monotonic() + 10
            while "listening" not in log.read_text().lower():
                if process.poll() is not None or time.monotonic() > until:
                    pytest.skip(f"sshd does not start: {log.read_text()[-200:]}")
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()


def test_over_a_real_sshd(sshd: int, tmp_path: Path) -> None:
    (tmp_path / "app" / "deploy").mkdir(parents=True)
    (tmp_path / "app" / "deploy" / "__init__.py").write_text("")
    to = f"ssh://{getpass.getuser()}@127.0.0.1:{sshd}{tmp_path}/app"
    text, code = doctor.examine(to, sys.executable, as_json=True)
    assert code in (0, 14)
    assert {"runtime", "shadow"} <= kinds(text)
    (tmp_path / "known").write_text("")  # the client does not know the host
    with pytest.raises(StageError, match="cannot be reached: Host key verification failed"):
        doctor.examine(to, sys.executable, as_json=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ssh://board", DeviceAddress("board", None, None, "")),
        ("ssh://me@10.0.0.7:2222/opt/shelf", DeviceAddress("10.0.0.7", "me", 2222, "/opt/shelf")),
        ("ssh://me@[fe80::1]/", DeviceAddress("fe80::1", "me", None, "/")),
    ],
)
def test_addresses(text: str, expected: DeviceAddress) -> None:
    assert parse_ssh(text) == expected


@pytest.mark.parametrize(
    "text",
    ["board", "http://board", "ssh://", "ssh://-oProxyCommand=x", "ssh://-l@b", "ssh://a b", "ssh://b:x", "ssh://b\n"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(PipelineError, match="is not a valid address"):
        parse_ssh(text)
