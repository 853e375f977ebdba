"""`doctor` on this host and on another one, which a stand-in for `ssh` reaches."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path

import pytest
from remote_host import Host

from compress.core.errors import PipelineError, StageError
from compress.surface.cli.main import main
from compress.surface.fleet import doctor
from compress.surface.fleet.address import DeviceAddress, parse_ssh

SSH = """#!/bin/sh
echo "$@" > "{folder}/asked"
while test "$1" != --; do shift; done
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


def test_a_host_without_python(there: Path) -> None:
    with pytest.raises(StageError, match=r"exit code 127.*--python"):
        doctor.examine("ssh://board", "python-of-none", as_json=False)


def test_over_a_real_sshd(server: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program `ssh` has the keys and the known hosts of a user."""
    client = tmp_path / "client"
    known = tmp_path / "known"
    known.write_text(server.known.read_text())
    client.write_text(f"UserKnownHostsFile {known}\nIdentityFile {server.folder}/user\nStrictHostKeyChecking yes\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {client} "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "app" / "deploy").mkdir(parents=True)
    (tmp_path / "app" / "deploy" / "__init__.py").write_text("")
    to = f"ssh://{getpass.getuser()}@127.0.0.1:{server.port}{tmp_path}/app"
    text, code = doctor.examine(to, sys.executable, as_json=True)
    assert code in (0, 14)
    assert {"runtime", "shadow"} <= kinds(text)
    known.write_text("")  # the client does not know the host
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
