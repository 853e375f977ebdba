"""Deployments to many devices at a time, and to folders that are carried to devices."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cuts
import pytest
from deployments import answers, failed
from remote_host import Host

from compress.surface.cli.main import main

Write = Callable[..., Path]


def test_a_fleet(host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "hosts"
    listed.write_text(
        "".join(f"{host.address(tmp_path / name)}\n" for name in ("b", "c")) + "ssh://127.0.0.1:1/x # off\n"
    )
    options = [*host.options(tmp_path / "a"), "--hosts", str(listed), "--jobs", "2"]
    assert main(["deploy", str(bundle_file(1)), *options]) == 15
    table = capsys.readouterr().out
    assert [line.split()[-2] for line in table.splitlines()[1:5]] == ["deployed"] * 3 + ["failed"]
    assert "refuses the connection" in table
    assert [answers(tmp_path / name) for name in "abc"] == [1, 1, 1]
    assert (
        main(["deploy", str(bundle_file(1)), *host.options(tmp_path / "a"), "--to", host.address(tmp_path / "b")]) == 0
    )
    assert "unchanged" in capsys.readouterr().out
    events = [json.loads(line) for line in (host.folder / "log.jsonl").read_text().splitlines()]
    assert {event["event"] for event in events if event["address"] == "ssh://127.0.0.1:1/x"} >= {"begun", "failed"}


def test_a_card(bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card is written here and run on the board as README.txt says, and the results are brought back."""
    card, path, log = tmp_path / "card", bundle_file(1), ["--log", str(tmp_path / "log.jsonl")]
    assert main(["deploy", str(path), "--to", card.as_uri(), *log]) == 0
    assert answers(card) == 1
    assert not (card / "coralline.service").exists()
    (line,) = [line for line in (card / "README.txt").read_text().splitlines() if " bench " in line]
    words = line.split()
    assert words[0] == "python3"
    subprocess.run([sys.executable, *words[1:]], cwd=card, check=True, capture_output=True)
    capsys.readouterr()
    assert main(["results", str(card / "results.json"), "--run", str(path.parent), "--name", "shop-7"]) == 0
    assert json.loads((path.parent / "devices" / "shop-7.json").read_text())["benchmark"]["model"]["role"] == "int8"
    assert main(["deploy", str(path), "--to", str(card), "--bench", *log]) == 2
    assert "no device to measure on" in capsys.readouterr().err


def test_a_card_without_links(bundle_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a FAT file system, `current` is a file that names the release."""
    from deploy.contract import releases

    def refuse(*names: object, **more: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    names = []
    folder = releases.DeviceFolder(str(tmp_path / "card"), "test", create=True)
    for version in (1, 2):
        names.append(install(folder, bundle_file(version).read_bytes()))
        if version == 1:
            monkeypatch.setattr(os, "symlink", refuse)
        folder.switch(names[-1])
        assert folder.current() == names[-1]
    assert (tmp_path / "card" / "current").read_text() == f"releases/{names[1]}\n"
    assert folder.previous() == names[0]


def install(folder: object, content: bytes) -> str:
    import hashlib

    from deploy.contract import releases

    assert isinstance(folder, releases.DeviceFolder)
    files = {}
    for name, file_bytes in ((releases.BUNDLE, content), (releases.RUNNER, b"runner")):
        digest = hashlib.sha256(file_bytes).hexdigest()
        files[name] = {"sha256": digest, "pieces": [[digest, len(file_bytes)]]}
        assert folder.put(digest, 0, len(file_bytes), iter([file_bytes]))
    release = releases.release_name(files[releases.BUNDLE]["sha256"], files[releases.RUNNER]["sha256"])
    folder.install(release, files)
    return release


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jobs", "0"], "--jobs"),
        (["--keep", "0"], "--keep"),
        (["--python", "-c"], "--python"),
    ],
)
def test_arguments(
    bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["deploy", str(bundle_file()), "--to", str(tmp_path / "card"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "card").exists()


def test_a_folder_that_cannot_be_written(
    bundle_file: Write, tmp_path: Path, unwritable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ["--log", str(tmp_path / "log.jsonl")]
    said = failed(capsys, ["deploy", str(bundle_file()), "--to", str(unwritable / "card"), *log])
    assert "Read-only" in said or "Permission" in said


def test_no_deployment_without_a_log(
    bundle_file: Write, tmp_path: Path, unwritable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card, log = tmp_path / "card", str(unwritable / "log.jsonl")
    assert main(["deploy", str(bundle_file()), "--to", str(card), "--log", log]) == 6
    assert "log of deployments" in capsys.readouterr().err
    assert not card.exists()


def test_status_of_a_fleet(host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = host.options(tmp_path / "a")
    assert main(["deploy", str(bundle_file(1)), *options]) == 0
    arguments = ["status", *options[: options.index("--log")], "--to", host.address(tmp_path / "b"), "--jobs", "2"]
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    sound, nothing = json.loads(capsys.readouterr().out)["devices"]
    assert (sound["result"], sound["name"], nothing["result"], nothing["current"]) == (
        "sound",
        "tiny",
        "nothing deployed",
        None,
    )
    current = os.readlink(tmp_path / "a" / "current")
    assert current == f"releases/{sound['current']}"
    assert not (tmp_path / "b").exists()

    (tmp_path / "a" / current / "runner.pyz").write_bytes(b"damaged")
    assert main([*arguments, "--to", "ssh://127.0.0.1:1/x"]) == 15
    table = capsys.readouterr().out
    assert "damaged" in table.splitlines()[1]
    assert "unknown" in table.splitlines()[3]
    assert "1 of 3: damaged" in table
    assert "refuses the connection" in table


@pytest.mark.parametrize("moment", ["before the switch", "after the switch"])
def test_a_connection_that_ends(
    host: Host, bundle_file: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    """The version that a device runs is reported only if it is known."""
    there = tmp_path / "there"
    options = [*host.options(there), "--to", host.address(tmp_path / "other"), "--jobs", "1", "--json"]
    assert main(["deploy", str(bundle_file(1)), *options]) == 0
    old = os.readlink(there / "current").removeprefix("releases/")
    capsys.readouterr()
    host.python(before=cuts.at_the_switch(there, after=moment == "after the switch"))
    assert main(["deploy", str(bundle_file(2)), *options]) == 15
    failed_row, other = json.loads(capsys.readouterr().out)["devices"]
    assert (failed_row["result"], failed_row["before"]) == ("failed", old)
    assert other["result"] == "deployed"
    runs = answers(there)
    assert (failed_row["after"], runs) == {"before the switch": (old, 1), "after the switch": ("unknown", 2)}[moment]
    (line,) = [
        json.loads(text)
        for text in (host.folder / "log.jsonl").read_text().splitlines()
        if '"failed"' in text and str(there) in text
    ]
    assert line["after"] == failed_row["after"]
