"""Deployments to devices that trust a root, over a real sshd; and updates from a card."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import bundles
import cuts
import pytest
from deployments import answers, failed, left
from interpreters import executable
from remote_host import Host

from compress.bundling import runner_pyz
from compress.surface.cli.main import main
from compress.surface.fleet import repository
from deploy.contract import trust

pytest.importorskip("tuf", reason="python-tuf is not installed: pip install -e '.[sign]'")

Write = Callable[..., Path]


class Board:
    """A device over ssh, and the repository of its owner."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.root, self.there = host, folder / "root", folder / "board"
        self.repository, self.keys = folder / "repository", folder / "keys"
        self.trust = self.root / trust.default_folder().lstrip("/")
        self.root.mkdir()
        repository.init(self.repository, self.keys)
        self.python()

    def python(self, before: str = "", program: str | None = None) -> None:
        """Write its Python, which keeps what it trusts below `root`."""
        program_of = {"program": program} if program else {}
        self.host.python(before=f"import os\nos.environ['CORALLINE_ROOT'] = {str(self.root)!r}\n{before}", **program_of)

    def add(self, *files: Path) -> None:
        editor = repository.Editor(self.repository, [self.keys])
        editor.add({path.name: path.read_bytes() for path in files})

    @property
    def fingerprint(self) -> str:
        return repository.read(self.repository).fingerprint

    def deploy(self, path: Path, *arguments: str) -> list[str]:
        """Return the arguments that deploy with the repository."""
        return ["deploy", str(path), *self.host.options(self.there), "--repository", str(self.repository), *arguments]

    def trusted(self) -> trust.TrustFolder:
        trust_folder = trust.find(str(self.trust))
        assert trust_folder is not None
        return trust_folder


@pytest.fixture
def board(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    new_board = Board(host, tmp_path)
    monkeypatch.setenv("CORALLINE_ROOT", str(new_board.root))  # for `answers`, which runs the runner here
    return new_board


def test_first_contact_is_explicit(board: Board, bundle_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    one = bundle_file(1)
    board.add(one)
    said = failed(capsys, board.deploy(one))
    assert "this device trusts no root yet" in said
    assert "--first-root" in said
    said = failed(capsys, board.deploy(one, "--first-root", "0" * 64))
    assert "no root with the fingerprint" in said
    assert not board.trust.exists()
    assert not (board.there / "current").exists()
    assert main([*board.deploy(one, "--first-root", board.fingerprint), "--json"]) == 0
    assert answers(board.there) == 1
    assert board.trusted().root.version == 1
    assert main(board.deploy(one)) == 0  # the root is trusted from now on
    assert main(board.deploy(one, "--first-root", board.fingerprint)) == 0  # the same command for a whole fleet


def test_unsigned_does_not_replace_signed(board: Board, bundle_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = bundle_file(1), bundle_file(2)
    board.add(one)
    assert main(board.deploy(one, "--first-root", board.fingerprint)) == 0
    plain = ["deploy", str(two), *board.host.options(board.there)]
    assert "bundle.coralline is not in the signed targets metadata" in failed(capsys, plain)
    assert answers(board.there) == 1
    assert main(board.deploy(two)) == 8  # the host finds the error before it contacts a device
    assert "is not in the signed targets metadata of the repository" in capsys.readouterr().err
    board.add(two)
    assert main(board.deploy(two)) == 0
    assert answers(board.there) == 2


def test_another_runner_is_not_run(
    board: Board, bundle_file: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner is code: it is checked like the bundle before it runs."""
    one = bundle_file(1)
    board.add(one)
    assert main(board.deploy(one, "--first-root", board.fingerprint)) == 0
    evil = runner_pyz.content().replace(b"sys.exit(main())", b"sys.exit(9)     ")
    monkeypatch.setattr(runner_pyz, "content", lambda: evil)
    said = failed(capsys, ["deploy", str(one), *board.host.options(board.there)])
    assert "runner.pyz is not in the signed targets metadata" in said
    assert answers(board.there) == 1
    assert main(board.deploy(one)) == 0  # with the runner of the repository


def test_an_older_signed_bundle(board: Board, bundle_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = bundle_file(1), bundle_file(2)
    shop = one.parent / "shop.coralline"
    shutil.copy(one, shop)
    board.add(shop)
    assert main(board.deploy(shop, "--first-root", board.fingerprint)) == 0
    shutil.copytree(board.repository, board.root.parent / "old")
    shutil.copy(two, shop)
    board.add(shop)
    assert main(board.deploy(shop)) == 0
    old = ["deploy", str(one), *board.host.options(board.there)]
    assert "is not in the signed targets metadata of this device (version 3)" in failed(capsys, old)
    replayed = [*old, "--repository", str(board.root.parent / "old")]
    assert "New timestamp version 2 must be >= 3" in failed(capsys, replayed)
    assert "is not in the signed targets metadata" in failed(capsys, ["rollback", *board.host.options(board.there)])
    assert answers(board.there) == 2
    board.add(one)  # under its own name: whoever releases bundles allows it again
    options = [*board.host.options(board.there), "--repository", str(board.repository)]
    assert main(["rollback", *options]) == 0
    assert answers(board.there) == 1


def test_what_runs_goes_on_running(board: Board, bundle_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """The new metadata lists a bundle that does not verify on the device: the old one must still start."""
    one, two = bundle_file(1), bundle_file(2, wrong=True)
    board.add(one)
    assert main(board.deploy(one, "--first-root", board.fingerprint)) == 0
    repository.Editor(board.repository, [board.keys]).remove([one.name])
    board.add(two)
    assert "`verify`" in failed(capsys, board.deploy(two))
    assert one.name not in board.trusted().listed()
    assert answers(board.there) == 1


def test_switched_back_to_what_is_not_listed_any_more(
    board: Board, bundle_file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = bundle_file(1), bundle_file(2)
    board.add(one)
    assert main(board.deploy(one, "--first-root", board.fingerprint)) == 0
    repository.Editor(board.repository, [board.keys]).remove([one.name])
    board.add(two)
    board.python(cuts.runner_fails_after(2))
    assert "switched back" in failed(capsys, board.deploy(two, "--verify"))
    assert answers(board.there) == 1


def test_what_ran_before_the_first_contact_goes_on_running(
    board: Board, bundle_file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = bundle_file(1), bundle_file(2, wrong=True)
    assert main(["deploy", str(one), *board.host.options(board.there)]) == 0
    board.add(two)
    assert "`verify`" in failed(capsys, board.deploy(two, "--first-root", board.fingerprint))
    assert answers(board.there) == 1


def test_keys_rotate(board: Board, bundle_file: Write) -> None:
    one, two = bundle_file(1), bundle_file(2)
    board.add(one)
    assert main(board.deploy(one, "--first-root", board.fingerprint)) == 0
    editor = repository.Editor(board.repository, [board.keys])
    for role in ("root", "targets", "online"):
        editor.rotate(role)
    board.add(two)
    assert main(board.deploy(two)) == 0
    assert answers(board.there) == 2
    assert board.trusted().root.version == 4


@pytest.mark.parametrize("operation", [3, 20, 45, 70, 95])
def test_killed_at_any_operation(board: Board, bundle_file: Write, operation: int) -> None:
    """The device runs the old or the new bundle, even if only one of them is listed."""
    one, two = bundle_file(1), bundle_file(2)
    board.add(one)
    assert main(board.deploy(one, "--first-root", board.fingerprint)) == 0
    repository.Editor(board.repository, [board.keys]).remove([one.name])
    board.add(two)
    board.python(cuts.at_operation(operation, board.root.parent))
    main(board.deploy(two))
    assert answers(board.there) in (1, 2)
    board.python()
    assert main(board.deploy(two)) == 0
    assert answers(board.there) == 2
    assert not left(board.there)


def test_on_python_3_7(board: Board, bundle_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """python-tuf needs 3.10: such a device accepts any bundle before it trusts a root, and none afterwards."""
    board.python(program=executable("3.7"))
    one, two = bundle_file(1), bundle_file(2)
    assert main(["deploy", str(one), *board.host.options(board.there)]) == 0
    board.add(one, two)
    said = failed(capsys, board.deploy(two, "--first-root", board.fingerprint))
    assert "cannot be verified: this Python is 3.7; use Python 3.10 or newer" in said
    assert not board.trust.exists()
    trust.first_contact(trust.folder_source(str(board.repository)), board.fingerprint, str(board.trust))
    for command in (board.deploy(two), ["deploy", str(two), *board.host.options(board.there)]):
        assert "cannot be verified: this Python is 3.7" in failed(capsys, command)


def test_arguments(board: Board, bundle_file: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = bundle_file(1)
    options = ["deploy", str(one), *board.host.options(board.there)]
    assert main([*options, "--first-root", "0" * 64]) == 2
    assert "--first-root needs the repository" in capsys.readouterr().err
    assert main([*options, "--repository", str(tmp_path)]) == 8
    assert "is not a repository" in capsys.readouterr().err
    assert main(board.deploy(one)) == 8  # nothing was added yet
    assert "trust add" in capsys.readouterr().err


# --- updates from a card --------------------------------------------------------------------


def update(board: Board, *arguments: str, python: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `runner.pyz update` on the device; the card is the repository."""
    runner = board.root.parent / "runner.pyz"
    runner.write_bytes(runner_pyz.content())
    command = [python or str(board.host.folder / "bin" / "python3"), str(runner), "update", str(board.repository)]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CORALLINE_ROOT": str(board.root)},
    )


def test_update_from_a_card(board: Board, bundle_file: Write) -> None:
    one, two = bundle_file(1), bundle_file(2)
    shop = one.parent / "shop.coralline"
    shutil.copy(one, shop)
    board.add(shop)
    install = ("--install", "shop.coralline", "--to", str(board.there))
    done = update(board, *install)
    assert done.returncode == 8
    assert "this device trusts no root yet" in done.stderr
    done = update(board, *install, "--first-root", board.fingerprint, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"] == "installed"
    assert answers(board.there) == 1
    assert json.loads(update(board, *install, "--json").stdout)["result"] == "unchanged"
    shutil.copy(two, shop)
    board.add(shop)
    assert "targets   version 3" in update(board).stdout  # updates the metadata alone
    assert answers(board.there) == 1
    target = next((board.repository / "targets").glob(f"{trust.fingerprint(two.read_bytes())}.*"))
    content = target.read_bytes()
    target.write_bytes(one.read_bytes())  # the old bundle under the name of the new one
    done = update(board, *install)
    assert (done.returncode, answers(board.there)) == (8, 1)
    target.write_bytes(content)
    assert update(board, *install).returncode == 0
    assert answers(board.there) == 2
    done = update(board, "--install", "other.coralline", "--to", str(board.there))
    assert done.returncode == 8
    assert "use one of: runner.pyz, shop.coralline" in done.stderr
    assert update(board, "--install", "shop.coralline").returncode == 2


def test_a_card_with_a_bundle_that_does_not_verify(board: Board, bundle_file: Write) -> None:
    one, bad = bundle_file(1), bundle_file(2, wrong=True)
    board.add(one, bad)
    first = ("--first-root", board.fingerprint)
    assert update(board, *first, "--install", one.name, "--to", str(board.there)).returncode == 0
    done = update(board, "--install", bad.name, "--to", str(board.there))
    assert done.returncode == 6
    assert "`verify` failed" in done.stderr
    assert answers(board.there) == 1
    assert not left(board.there)


def test_the_runner_checks_before_it_uses(board: Board, bundle_file: Write, tmp_path: Path) -> None:
    one = bundle_file(1)
    board.add(one)
    folder = str(tmp_path / "elsewhere")
    assert update(board, "--first-root", board.fingerprint, "--trust-folder", folder).returncode == 0
    assert not board.trust.exists()
    other = tmp_path / "other.coralline"
    other.write_bytes(bundles.packed(3))
    for verb in ("verify", "run", "bench", "serve"):
        command = [str(board.host.folder / "bin" / "python3"), str(tmp_path / "runner.pyz"), verb, str(other)]
        done = subprocess.run(
            [*command, "--trust-folder", folder, "--json"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 8, done.stderr
        assert json.loads(done.stdout)["error"]["kind"] == "unlisted"
