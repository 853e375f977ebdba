"""Deployments to a real sshd."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import bundles
import cuts
import pytest
import tiny
from deployments import answers, failed, left, rows
from interpreters import executable, interpreters
from remote_host import Host

from compress.core import ssh
from compress.surface.cli.main import main
from compress.surface.fleet import remote

Write = Callable[..., Path]


@pytest.mark.essential
def test_first_second_and_back(
    host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "on the board" / "coralline"
    options = [*host.options(str(there).replace(" ", "%20")), "--json"]
    assert main(["deploy", str(bundle_file(1)), *options]) == 0
    (first,) = rows(capsys)
    assert first["result"] == "deployed"
    assert first["before"] is None
    assert first["results"]["verify"]["golden"]["int8"]["verdict"] == "equal"
    assert answers(there) == 1

    assert main(["deploy", str(bundle_file(2)), *options, "--verify"]) == 0
    (second,) = rows(capsys)
    assert (second["before"], answers(there)) == (first["after"], 2)
    assert second["sent_bytes"] < first["sent_bytes"] / 10  # the runner and the models are there already
    assert os.readlink(there / "current") == f"releases/{second['after']}"

    assert main(["deploy", str(bundle_file(2)), *options]) == 0
    (again,) = rows(capsys)
    assert (again["result"], again["sent_bytes"]) == ("unchanged", 0)

    assert main(["rollback", *options]) == 0
    (back,) = rows(capsys)
    assert (back["result"], back["after"], answers(there)) == ("rolled back", first["after"], 1)
    assert main(["rollback", *options]) == 0
    assert answers(there) == 2
    assert not left(there)


def test_the_last_versions_stay(host: Host, bundle_file: Write, tmp_path: Path) -> None:
    there = tmp_path / "there"
    for number in (1, 2, 3, 4):
        assert main(["deploy", str(bundle_file(number)), *host.options(there), "--keep", "1"]) == 0
        assert len(list((there / "releases").iterdir())) == min(number, 2)  # the previous one stays
    for number in (5, 6, 7):
        assert main(["deploy", str(bundle_file(number)), *host.options(there)]) == 0
    assert len(list((there / "releases").iterdir())) == 3
    assert main(["rollback", *host.options(there)]) == 0
    assert answers(there) == 6


def test_a_bundle_that_does_not_verify_there_is_not_switched_to(
    host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    assert "`verify`" in failed(capsys, ["deploy", str(bundle_file(2, wrong=True)), *host.options(there)])
    assert answers(there) == 1
    assert len(list((there / "releases").iterdir())) == 1


def test_switched_back_where_what_runs_does_not_verify(
    host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    host.python(before=cuts.runner_fails_after(1))  # `verify`; then `serve --print-unit`
    assert "`serve --print-unit` failed" in failed(capsys, ["deploy", str(bundle_file(2)), *host.options(there)])
    assert len(list((there / "releases").iterdir())) == 1
    host.python(before=cuts.runner_fails_after(2))
    assert "switched back" in failed(capsys, ["deploy", str(bundle_file(2)), *host.options(there), "--verify"])
    assert answers(there) == 1
    assert "the new release runs" in failed(capsys, ["deploy", str(bundle_file(2)), *host.options(there), "--bench"])
    assert answers(there) == 2


def test_a_file_that_is_no_bundle_is_not_sent(host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.coralline"
    path.write_bytes(bundles.packed()[:-1])
    assert main(["deploy", str(path), *host.options(tmp_path / "there")]) == 4
    assert "not deployed" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--known-hosts", "{folder}/changed"), "host key.*ssh-key"),
        (("--known-hosts", "{folder}/unknown"), "host key.*ssh-key"),
        (("--identity", "{host}/host"), "it refuses the SSH key"),
        (("--to", "ssh://127.0.0.1:1/there"), "refuses the connection"),
        (("--to", "ssh://nobody.invalid/there"), "its name cannot be resolved"),
    ],
    ids=["another host key", "an unknown host", "a key that may not log in", "no host", "no name"],
)
def test_hosts_that_cannot_be_used(
    host: Host,
    bundle_file: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, str],
    said: str,
) -> None:
    other = (host.folder / "user.pub").read_text()
    (tmp_path / "changed").write_text(f"[127.0.0.1]:{host.port} {other}")
    (tmp_path / "unknown").touch()
    to = host.options(tmp_path / "there")
    more = [option.format(folder=tmp_path, host=host.folder) for option in options]
    message = failed(capsys, ["deploy", str(bundle_file()), *(to[2:] if options[0] == "--to" else to), *more])
    assert re.search(said, message, re.DOTALL)
    assert not (tmp_path / "there").exists()


OLD = Path.home() / ".pyenv" / "versions"


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nonexistent/python3", "no such Python"),
        ("no; touch injected", "no such Python"),
        ("~/no; touch injected", "no such Python"),
        (__file__, "no such Python"),  # is not a program
        (str(next(OLD.glob("3.6.*/bin/python"), "Python 3.6")), "too old"),
        (str(next(OLD.glob("2.7.*/bin/python"), "Python 2.7")), "too old"),
    ],
)
def test_a_python_that_cannot_be_used(
    host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], python: str, said: str
) -> None:
    if python.startswith("Python"):
        pytest.skip(f"{python} is not installed")
    arguments = ["deploy", str(bundle_file()), *host.options(tmp_path / "there"), "--python", python]
    assert said in failed(capsys, arguments)
    assert not list(Path.home().glob("injected"))


def test_a_python_below_the_home_folder(host: Host, bundle_file: Write, tmp_path: Path) -> None:
    python = "~/" + os.path.relpath(host.folder / "bin" / "python3", Path.home())
    assert main(["deploy", str(bundle_file(1)), *host.options(tmp_path / "there"), "--python", python]) == 0
    assert answers(tmp_path / "there") == 1


def test_a_login_shell_that_talks(host: Host, bundle_file: Write, tmp_path: Path) -> None:
    host.python(before=r"import os; os.write(2, b'foo: not found\n'); os.write(1, b'{}\n\xff welcome')")
    assert main(["deploy", str(bundle_file(1)), *host.options(tmp_path / "there")]) == 0
    assert answers(tmp_path / "there") == 1


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("import os\nwhile os.read(0, 65536): pass", "its Python does not respond"),
        ("import sys; print('no log-in'); sys.stderr.write('---\\n'); sys.exit(3)", "no log-in, exit code 3"),
        ("import sys; sys.exit('Permission denied\\nfoo: not found\\nlast')", "last, exit code 1"),
        ("while True: print('more')", "prints too much"),
    ],
)
def test_a_login_shell_that_gets_in_the_way(
    host: Host,
    bundle_file: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    does: str,
    said: str,
) -> None:
    monkeypatch.setattr(remote, "GREETING_TIMEOUT_S", 5.0 - ssh.CONNECT_TIMEOUT_S)
    host.python(before=does)
    message = failed(capsys, ["deploy", str(bundle_file(1)), *host.options(tmp_path / "there")])
    assert said in message
    assert "profile" in message
    assert not (tmp_path / "there").exists()


def test_a_python_without_numpy(
    host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = next(OLD.glob("3.9.*/bin/python"), None)
    if bare is None or subprocess.run([bare, "-c", "import numpy"], capture_output=True, check=False).returncode == 0:
        pytest.skip("there is no Python 3.9 without numpy")
    arguments = ["deploy", str(bundle_file()), *host.options(tmp_path / "there"), "--python", str(bare)]
    said = failed(capsys, arguments)
    assert "no numpy" in said
    assert "pip install" in said


@pytest.mark.parametrize("python", interpreters())
def test_on_the_pythons_that_boards_have(host: Host, bundle_file: Write, tmp_path: Path, python: str) -> None:
    runtimes = "try:\n import tflite_runtime.interpreter\nexcept ImportError:\n import ai_edge_litert.interpreter"
    python = executable(python)
    if subprocess.run([python, "-c", f"import numpy\n{runtimes}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no TFLite runtime")
    host.python(python)
    there = tmp_path / "there"
    for version in (1, 2):
        assert main(["deploy", str(bundle_file(version)), *host.options(there), "--verify"]) == 0
    assert main(["rollback", *host.options(there)]) == 0
    assert answers(there) == 1


def test_a_full_disk(
    host: Host, bundle_file: Write, mounted: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    there = mounted("size=2m,nr_inodes=500") / "there"
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    said = failed(capsys, ["deploy", str(bundle_file(2, extra_bytes=1_500_000)), *host.options(there)])
    assert "the disk needs" in said
    assert answers(there) == 1
    tiny.fill(there)
    said = failed(capsys, ["deploy", str(bundle_file(3)), *host.options(there)])
    assert "the disk needs" in said or "No space left" in said
    assert answers(there) == 1
    (there / "filler").unlink()
    assert main(["deploy", str(bundle_file(3)), *host.options(there)]) == 0
    assert answers(there) == 3


def test_two_at_once(host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    there = tmp_path / "there"
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    with (there / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is using" in failed(capsys, ["deploy", str(bundle_file(2)), *host.options(there)])
        assert "is using" in failed(capsys, ["rollback", *host.options(there)])
    assert main(["deploy", str(bundle_file(2)), *host.options(there)]) == 0  # the lock file stays, but locks nothing
    assert answers(there) == 2


def test_nothing_to_go_back_to(
    host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    assert "nothing was deployed" in failed(capsys, ["rollback", *host.options(there)])
    assert not there.exists()
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    assert "has no previous release" in failed(capsys, ["rollback", *host.options(there)])


def test_a_version_that_was_damaged_is_not_gone_back_to(
    host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    for number in (1, 2):
        assert main(["deploy", str(bundle_file(number)), *host.options(there)]) == 0
    (other,) = [path for path in (there / "releases").iterdir() if path != (there / "current").resolve()]
    spoil(other / "bundle.coralline")
    assert "failed on the device" in failed(capsys, ["rollback", *host.options(there)])
    assert answers(there) == 2


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_was_damaged_is_mended_by_the_same_deployment(host: Host, bundle_file: Write, tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    spoil(there / "current" / "bundle.coralline")
    assert main(["deploy", str(bundle_file(1)), *host.options(there)]) == 0
    assert answers(there) == 1


def test_measured_there(host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bundle_file(1)
    assert main(["deploy", str(path), *host.options(tmp_path / "there"), "--bench"]) == 0
    report = json.loads((path.parent / "devices" / f"127.0.0.1-{host.port}.json").read_text())
    assert report["benchmark"]["steady"]["median"]["how"] == "measured"


def test_the_unit_for_systemd(host: Host, bundle_file: Write, tmp_path: Path) -> None:
    there = tmp_path / "50% $HOME"
    path = str(there).replace("%", "%25").replace(" ", "%20")
    assert main(["deploy", str(bundle_file(1)), *host.options(path)]) == 0
    unit = (there / "coralline.service").read_text()
    escaped = str(there).replace("%", "%%").replace("$", "$$")
    assert f'"{escaped}/current/runner.pyz" serve "{escaped}/current/bundle.coralline"' in unit
    assert f"User={Path.home().owner()}" in unit  # the owner of the folder can write the files that the service runs
    assert "systemctl restart" in (there / "README.txt").read_text()


def test_the_log(host: Host, bundle_file: Write, tmp_path: Path) -> None:
    log = tmp_path / "state" / "log.jsonl"
    options = [*host.options(tmp_path / "there"), "--log", str(log)]
    assert main(["deploy", str(bundle_file(1)), *options]) == 0
    with log.open("a") as stream:
        stream.write('{"cut')
    assert main(["rollback", *options]) == 15
    lines = log.read_text().splitlines()
    entries = [json.loads(line) for line in lines if line != '{"cut']
    assert [(entry["action"], entry["event"]) for entry in entries] == [
        ("deploy", "begun"),
        ("deploy", "done"),
        ("rollback", "begun"),
        ("rollback", "failed"),
    ]
    assert entries[1]["after"] == entries[1]["release"]
    assert len(entries[1]["bundle"]) == 64
