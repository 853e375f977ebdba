"""The host's repository as devices read it, repositories of another program, and keys."""

from __future__ import annotations

import fcntl
import json
import shutil
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bundles
import pytest
import tiny

from compress.bundling import runner_pyz
from compress.core.errors import PipelineError, SigningError, StoreError
from compress.surface.cli.main import main
from compress.surface.fleet import key_files, repository
from deploy.contract import trust
from deploy.contract.trust import TrustError

pytest.importorskip("tuf", reason="python-tuf is not installed: pip install -e '.[sign]'")

ONE, TWO, THREE = (bundles.packed(number) for number in (1, 2, 3))


class Shop:
    """A repository with its keys."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder / "repository", folder / "keys"
        repository.init(self.folder, self.keys)

    def editor(self, *keys: Path, **settings: Any) -> repository.Editor:
        return repository.Editor(self.folder, keys or [self.keys], **settings)

    def only(self, place: Path, *names: str) -> Path:
        """Copy some of the keys into a folder; return the folder."""
        place.mkdir()
        for name in ("root.json", *names):
            shutil.copy(self.keys / name, place / name)
        return place


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    new_shop = Shop(tmp_path)
    new_shop.editor().add({"shop.coralline": ONE})
    return new_shop


def device(shop: Shop, folder: Path) -> trust.TrustFolder:
    fetch = trust.folder_source(str(shop.folder))
    trusted = trust.first_contact(fetch, repository.read(shop.folder).fingerprint, str(folder))
    trusted.update(fetch)
    return trusted


def accepts(trusted: trust.TrustFolder, content: bytes) -> bool:
    try:
        trusted.require(content, ".coralline", "it")
    except TrustError:
        return False
    return True


def test_a_device_follows_every_rotation(shop: Shop, tmp_path: Path) -> None:
    ours, source = device(shop, tmp_path / "device"), trust.folder_source(str(shop.folder))
    assert trust.download(str(shop.folder), "runner.pyz", ours.listed(), True) == runner_pyz.content()
    editor = shop.editor()
    for role in ("online", "targets", "root"):
        editor.rotate(role)
    editor.add({"shop.coralline": TWO})
    for trusted in (ours, device(shop, tmp_path / "another")):
        trusted.update(source)
        assert accepts(trusted, TWO)
        assert not accepts(trusted, ONE)


def test_an_older_repository_is_refused(shop: Shop, tmp_path: Path) -> None:
    shutil.copytree(shop.folder, tmp_path / "old")
    shop.editor().add({"shop.coralline": TWO})
    ours = device(shop, tmp_path / "device")
    with pytest.raises(TrustError, match="New timestamp version 2 must be >= 3"):
        ours.update(trust.folder_source(str(tmp_path / "old")))
    assert not accepts(ours, ONE)


@pytest.mark.parametrize("consistent", [True, False])
def test_our_device_reads_what_python_tuf_writes(tmp_path: Path, consistent: bool) -> None:
    """The repository has keys of other types, delegations, other hashes, and text that is not ASCII."""
    from securesystemslib.signer import CryptoSigner
    from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=9)
    signers = {role: CryptoSigner.generate_ed25519() for role in trust.ROLES}
    root = Root(expires=expires, consistent_snapshot=consistent)
    for role, signer in signers.items():
        root.add_key(signer.public_key, role)
    root.add_key(CryptoSigner.generate_ecdsa().public_key, "targets")
    targets = Targets(expires=expires, unrecognized_fields={'x "é\\\u2028': [None, True, {"b": 1, "a": -2}]})
    targets.targets["a.coralline"] = TargetFile.from_data("a.coralline", b"new", ["sha512", "sha256"])
    folder = tmp_path / "metadata"
    folder.mkdir()

    def write(name: str, signed: Any) -> None:
        document = Metadata(signed)
        document.sign(signers[signed.type])
        (folder / name).write_bytes(document.to_bytes())

    prefix = "1." if consistent else ""
    write("1.root.json", root)
    write(f"{prefix}targets.json", targets)
    write(f"{prefix}snapshot.json", Snapshot(expires=expires))
    write("timestamp.json", Timestamp(expires=expires, snapshot_meta=MetaFile(1)))
    fetch = trust.folder_source(str(tmp_path))
    digest = trust.fingerprint((folder / "1.root.json").read_bytes())
    trusted = trust.first_contact(fetch, digest, str(tmp_path / "trust"))
    trusted.update(fetch)
    assert accepts(trusted, b"new")


# --- keys -----------------------------------------------------------------------------------


def test_only_the_owner_can_read_keys(shop: Shop) -> None:
    keys = sorted(shop.keys.glob("*.key"))
    assert [path.name for path in keys] == ["online-1.key", "root-1.key", "root-2.key", "root-3.key", "targets-1.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    secrets = [path.read_text().splitlines()[1] for path in keys]
    assert len(set(secrets)) == len(keys)
    published = b"".join(path.read_bytes() for path in shop.folder.rglob("*") if path.is_file())
    assert not [secret for secret in secrets if secret.encode() in published]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_can_read(shop: Shop, mode: int) -> None:
    (shop.keys / "online-1.key").chmod(mode)
    with pytest.raises(SigningError, match="other users can read this private key; chmod 600"):
        shop.editor()


def test_files_that_are_no_keys(shop: Shop, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    def pem(key: Any, lock: Any) -> bytes:
        content: bytes = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, lock)
        return content

    path = tmp_path / "other.key"
    for content, message in (
        (b"hello", "not a private key"),
        (pem(ec.generate_private_key(ec.SECP256R1()), form.NoEncryption()), "not for Ed25519"),
        (pem(ed25519.Ed25519PrivateKey.generate(), form.BestAvailableEncryption(b"x")), "has a password"),
    ):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(SigningError, match=message):
            key_files.read(path)
    with pytest.raises(StoreError):
        key_files.read(tmp_path / "absent.key")


def test_nothing_is_overwritten(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(SigningError, match="is not overwritten"):
        repository.init(shop.folder, tmp_path / "other")
    with pytest.raises(SigningError, match="is not overwritten"):
        repository.init(tmp_path / "other", shop.keys)
    assert key_files.generate(shop.keys, "root").name == "root-4.key"


def test_keys_in_their_own_places(shop: Shop, tmp_path: Path) -> None:
    """The targets key is on one computer, the online key on another, and the root keys are on two sticks."""
    release = shop.only(tmp_path / "release", "targets-1.key")
    online = shop.only(tmp_path / "online", "online-1.key")
    editor = shop.editor(release)
    editor.add({"shop.coralline": TWO})
    assert not editor.is_published
    ours = device(shop, tmp_path / "device")
    assert accepts(ours, ONE)
    editor = shop.editor(online)
    editor.refresh()
    assert editor.is_published
    ours.update(trust.folder_source(str(shop.folder)))
    assert accepts(ours, TWO)
    with pytest.raises(SigningError, match="0 keys of the role targets are in --keys, and 1 are required"):
        editor.add({"shop.coralline": THREE})
    with pytest.raises(SigningError, match="keys of the role root"):
        editor.rotate("online")
    sticks = [shop.only(tmp_path / "first", "root-1.key"), shop.only(tmp_path / "second", "root-3.key")]
    with pytest.raises(SigningError, match="1 keys of the role root are in --keys, and 2 are required"):
        shop.editor(sticks[0]).rotate("online")
    (new,) = shop.editor(online, *sticks).rotate("online")
    assert new == online / "online-2.key"
    ours.update(trust.folder_source(str(shop.folder)))
    with pytest.raises(SigningError):
        shop.editor(shop.only(tmp_path / "stolen", "online-1.key")).refresh()


def test_a_root_key_is_lost(shop: Shop, tmp_path: Path) -> None:
    ours = device(shop, tmp_path / "device")
    lost = shop.keys / "root-2.key"
    (name,) = repository._signers([lost])
    lost.unlink()
    (new,) = shop.editor().rotate("root", [name[:8]])
    assert new.name == "root-2.key"
    ours.update(trust.folder_source(str(shop.folder)))
    keys = repository.read(shop.folder).root.roles["root"]
    assert (name in keys.keyids, len(keys.keyids), keys.threshold) == (False, 3, 2)
    assert ours.root.roles["root"].keyids == keys.keyids


def test_an_interrupted_rotation(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new root exists, but nothing is signed with the new key: the same command continues with the same list."""

    def cut(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(repository.Editor, "_release", cut)
        with pytest.raises(KeyboardInterrupt):
            shop.editor().rotate("targets")
    assert repository.read(shop.folder).targets == {}
    shop.editor().rotate("targets")
    contents = repository.read(shop.folder)
    assert set(contents.targets) == {"shop.coralline", "runner.pyz"}
    assert contents.metadata["targets"].version == 3


def test_too_many_root_keys_are_lost(shop: Shop) -> None:
    for name in ("root-1.key", "root-2.key"):
        (shop.keys / name).unlink()
    before = {path: path.read_bytes() for path in shop.folder.rglob("*") if path.is_file()}
    keys = set(shop.keys.iterdir())
    with pytest.raises(SigningError, match="1 keys of the role root are in --keys, and 2 are required"):
        shop.editor().rotate("root")
    assert {path: path.read_bytes() for path in shop.folder.rglob("*") if path.is_file()} == before
    assert set(shop.keys.iterdir()) == keys


def test_a_new_root_must_reach_its_own_threshold(shop: Shop) -> None:
    (shop.keys / "root-1.key").unlink()
    (name,) = repository._signers([shop.keys / "root-2.key"])
    keys = set(shop.keys.iterdir())
    with pytest.raises(SigningError, match="signed by 2/3 keys"):  # root-3 and the new key, but now 3 are required
        shop.editor().rotate("root", [name], threshold=3)
    assert set(shop.keys.iterdir()) == keys
    with pytest.raises(PipelineError, match="--threshold is 4"):
        shop.editor().rotate("root", threshold=4)
    with pytest.raises(PipelineError, match="is the beginning of 0 keys of online"):
        shop.editor().rotate("online", [name])


# --- what is signed -------------------------------------------------------------------------


def test_a_manipulated_repository_is_not_signed(shop: Shop, tmp_path: Path) -> None:
    """An attacker with the online key, or with the folder, adds a bundle and waits for the targets key to sign it."""
    path = shop.folder / "metadata" / "2.targets.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"shop.coralline", b"evil.coralline"))
    with pytest.raises(SigningError, match="was signed by 0/1 keys"):
        shop.editor().add({"shop.coralline": TWO})
    path.write_bytes(content)
    evil = Shop(tmp_path / "evil")
    evil.editor().add({"evil.coralline": THREE})
    shutil.rmtree(shop.folder)
    shutil.copytree(evil.folder, shop.folder)
    with pytest.raises(SigningError, match="is none of its roots"):
        shop.editor().add({"shop.coralline": TWO})
    (shop.keys / "root.json").unlink()
    with pytest.raises(SigningError, match=r"has root\.json, the trusted root"):
        shop.editor()


def test_only_a_bundle_is_added(shop: Shop) -> None:
    before = sorted(shop.folder.rglob("*"))
    for name, content in (
        ("shop.coralline", ONE[:-1]),
        ("shop.tflite", ONE),
        ("../shop.coralline", ONE),
        ("é.coralline", ONE),
    ):
        with pytest.raises(SigningError):
            shop.editor().add({name: content})
    assert sorted(shop.folder.rglob("*")) == before


def test_an_earlier_bundle_keeps_its_runner(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    old = runner_pyz.content()
    monkeypatch.setattr(runner_pyz, "content", lambda: old + b"# newer\n")
    monkeypatch.setattr(runner_pyz, "digest", lambda: trust.fingerprint(old + b"# newer\n"))
    shop.editor().add({"shop.coralline": TWO})
    assert set(repository.read(shop.folder).targets) == {"shop.coralline", "runner.pyz"}
    monkeypatch.setattr(runner_pyz, "content", lambda: old + b"# newest\n")
    monkeypatch.setattr(runner_pyz, "digest", lambda: trust.fingerprint(old + b"# newest\n"))
    shop.editor().add({"door.coralline": THREE})
    contents = repository.read(shop.folder)
    (earlier,) = set(contents.targets) - {"shop.coralline", "door.coralline", "runner.pyz"}
    assert trust.download(str(shop.folder), earlier, contents.targets, True) == old + b"# newer\n"
    assert repository.published(shop.folder)[1] == old + b"# newest\n"


def test_removed(shop: Shop, tmp_path: Path) -> None:
    ours = device(shop, tmp_path / "device")
    shop.editor().remove(["shop.coralline"])
    ours.update(trust.folder_source(str(shop.folder)))
    assert not accepts(ours, ONE)
    with pytest.raises(PipelineError, match=r"shop\.coralline is not listed"):
        shop.editor().remove(["shop.coralline"])


def test_two_at_once(shop: Shop) -> None:
    first, second = shop.editor(), shop.editor()
    first.add({"two.coralline": TWO})
    second.add({"three.coralline": THREE})  # it was created before the first one wrote
    assert set(repository.read(shop.folder).targets) >= {"shop.coralline", "two.coralline", "three.coralline"}
    second.remove(["two.coralline"])
    with pytest.raises(PipelineError, match=r"two\.coralline is not listed"):
        first.remove(["two.coralline"])


def test_a_change_waits_for_another_one(shop: Shop) -> None:
    before = repository.read(shop.folder).metadata["timestamp"].version
    with (shop.folder / repository.LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=shop.editor().refresh, daemon=True)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(30)
    assert repository.read(shop.folder).metadata["timestamp"].version == before + 1


def test_validity(shop: Shop, tmp_path: Path) -> None:
    shop.editor(days={"timestamp": 7}).refresh()
    rows = repository.read(shop.folder).metadata
    left = {role: round((row.expires - datetime.now(UTC)) / timedelta(days=1)) for role, row in rows.items()}
    assert left == {"targets": 365, "snapshot": 30, "timestamp": 7}


# --- the command line -----------------------------------------------------------------------


@pytest.mark.essential
def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.coralline").write_bytes(ONE)

    def status(*arguments: str) -> dict[str, Any]:
        assert main(["trust", *arguments, "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    first = status("init", "shop", "--keys", "keys", "--root-keys", "2", "--threshold", "1")
    assert (len(first["roles"]["root"]["keys"]), first["roles"]["root"]["threshold"]) == (2, 1)
    added = status("add", "shop", "shop.coralline", "--keys", "keys", "--days", "timestamp=3")
    assert set(added["targets"]) == {"runner.pyz", "shop.coralline"}
    assert added["fingerprint"] == first["fingerprint"] == trust.fingerprint(Path("keys/root.json").read_bytes())
    assert status("refresh", "shop", "--keys", "keys")["roles"]["timestamp"]["version"] == 3
    assert status("rotate", "shop", "online", "--keys", "keys")["roles"]["root"]["version"] == 2
    removed = status("remove", "shop", "shop.coralline", "--keys", "keys")
    assert set(removed["targets"]) == {"runner.pyz"}
    assert status("status", "shop") == removed
    assert main(["trust", "status", "shop"]) == 0
    assert capsys.readouterr().out.startswith(
        f"root fingerprint  {removed['fingerprint']}\nroot       version 2, valid"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["add", "shop", "--keys", "keys"], 2, "trust add takes BUNDLE"),
        (["status", "shop", "more"], 2, "trust status takes a repository alone"),
        (["refresh", "shop"], 2, "--keys FOLDER"),
        (["init", "shop", "--keys", "keys", "--threshold", "4"], 2, "4 of 3 root keys cannot sign"),
        (["init", "shop", "--keys", "keys", "--days", "root=0"], 2, "--days root=0"),
        (["init", "shop", "--keys", "keys", "--days", "online=3"], 2, "--days online=3"),
        (["status", "shop"], 8, "is not a repository"),
        (["refresh", "shop", "--keys", "keys"], 8, "root.json"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trust", *arguments]) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_python_tuf(tmp_path: Path) -> None:
    block = "import sys; sys.modules['tuf'] = None; from compress.surface.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-W", "error", "-c", block, "trust", "init", "shop", "--keys", "keys"]
    done = subprocess.run(command, cwd=tmp_path, env=tiny.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 8
    assert "the package `tuf` is not installed; pip install 'cryptography>=48' 'tuf~=7.0'" in done.stderr
    assert list(tmp_path.iterdir()) == []
