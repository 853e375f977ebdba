"""Updates that a device accepts: TUF's attacks, on every interpreter; and hostile metadata from a generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import update_attacks as attacks
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreters import executable, interpreters
from paths import ROOT
from securesystemslib.exceptions import FormatError
from tuf.api.metadata import TargetFile

from deploy.contract import trust
from deploy.contract.trust import TrustError


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_attack(name: str, tmp_path: Path) -> None:
    actual, expected = attacks.one(attacks.ATTACKS[name], tmp_path / "trust")
    assert actual == expected


def test_the_modules_that_deploy_sends_need_the_standard_library_alone() -> None:
    code = "import sys, deploy.contract.agent; print(sorted({'numpy', 'cryptography', 'tuf'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("interpreter", [name for name in interpreters() if name in ("3.7", "3.8", "3.9")])
def test_a_python_without_python_tuf_refuses_every_bundle(interpreter: str, tmp_path: Path) -> None:
    code = "from deploy.contract import trust; assert trust.find() is None; trust.find('trust')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CORALLINE_ROOT": str(tmp_path)}
    command = [executable(interpreter), "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert f"which cannot be verified: this Python is {interpreter}; to do: use Python 3.10" in done.stderr


@pytest.mark.parametrize("version", [None, "6.0.0"])
def test_another_python_tuf(version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tuf", version and types.SimpleNamespace(__version__=version))
    refused("unsupported", trust.find, str(tmp_path))


# --- first contact, and the folder ----------------------------------------------------------


@pytest.fixture
def source() -> attacks.Source:
    return attacks.started()


@pytest.fixture
def device(tmp_path: Path, source: attacks.Source) -> Iterator[attacks.Device]:
    yield attacks.Device(tmp_path / "trust", source)
    attacks.set_clock(None)


def refused(kind: str, call: Any, *arguments: Any) -> str:
    with pytest.raises(TrustError) as caught:
        call(*arguments)
    assert caught.value.kind == kind
    return str(caught.value)


def test_no_trust_on_first_use(tmp_path: Path, source: attacks.Source) -> None:
    for digest in ("", "0" * 64, trust.fingerprint(source.files["timestamp.json"])):
        refused("first_contact", trust.first_contact, source.fetch, digest, str(tmp_path / "trust"))
    assert list(tmp_path.iterdir()) == []
    evil = attacks.Source()
    evil.root(roots=("evil-1", "evil-2"), signers=("evil-1", "evil-2"))
    digest = trust.fingerprint(source.files["1.root.json"])
    refused("first_contact", trust.first_contact, evil.fetch, digest, str(tmp_path / "trust"))
    assert trust.first_contact(source.fetch, f" {digest.upper()}\n", str(tmp_path / "trust")).root.version == 1


def test_first_contact_with_a_later_root(tmp_path: Path, source: attacks.Source) -> None:
    source.root(2)
    digest = trust.fingerprint(source.files["2.root.json"])
    trusted = trust.first_contact(source.fetch, digest, str(tmp_path / "trust"))
    assert trusted.root.version == 2


def test_first_contact_happens_once(device: attacks.Device, source: attacks.Source) -> None:
    digest = trust.fingerprint(source.files["1.root.json"])
    with pytest.raises(OSError, match="not empty"):
        trust.first_contact(source.fetch, digest, device.trusted.path)


def test_a_damaged_folder_is_not_a_device_without_trust(device: attacks.Device) -> None:
    root = Path(device.trusted.path, "root.json")
    content = root.read_bytes()
    for spoilt in (b"", content[:-1], content.replace(b'"threshold": 2', b'"threshold": 1')):
        root.write_bytes(spoilt)
        with pytest.raises(TrustError):
            trust.find(device.trusted.path)
    root.unlink()
    refused("damaged", trust.find, device.trusted.path)


def test_where_a_device_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: attacks.Source) -> None:
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/mendel")
    assert trust.find() is None
    digest = trust.fingerprint(source.files["1.root.json"])
    personal = tmp_path / "home/mendel/.config/coralline/trust"
    trust.first_contact(source.fetch, digest, str(personal))
    trust_folder = trust.find()
    assert trust_folder is not None
    assert trust_folder.path == str(personal)
    everybody = tmp_path / "etc/coralline/trust"
    trust.first_contact(source.fetch, digest, str(everybody))
    trust_folder = trust.find()
    assert trust_folder is not None
    assert trust_folder.path == str(everybody)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert trust.default_folder() == str(personal)


def test_files(device: attacks.Device) -> None:
    trusted = device.trusted
    trusted.require(attacks.NEW, ".coralline", "it")
    for content, ending in (
        (attacks.OLD, ".coralline"),
        (attacks.NEW, ".pyz"),  # a bundle is not a program
        (attacks.NEW + b"x", ".coralline"),
        (b"", ".coralline"),
        (b"x" * len(attacks.NEW), ".coralline"),
    ):
        assert "version 3" in refused("unlisted", trusted.require, content, ending, "it")


def test_what_was_installed_runs_on(device: attacks.Device, source: attacks.Source, tmp_path: Path) -> None:
    path = tmp_path / "board" / "releases" / "ab" / "bundle.coralline"
    path.parent.mkdir(parents=True)
    (tmp_path / "board" / "current").symlink_to("releases/ab")
    current = str(tmp_path / "board" / "current" / "bundle.coralline")
    device.trusted.record(str(tmp_path / "board"), [trust.fingerprint(attacks.NEW)])
    source.release(4, {"shop.coralline": b"the next bundle"})
    device.trusted.update(source.fetch)
    device.trusted.require_bundle(attacks.NEW, current)
    refused("unlisted", device.trusted.require_bundle, attacks.OLD, current)
    refused("unlisted", device.trusted.require_bundle, attacks.NEW, str(tmp_path / "card" / "bundle.coralline"))
    refused("unlisted", device.trusted.require, attacks.NEW, ".coralline", "it")  # but it cannot be installed again
    device.trusted.record(str(tmp_path / "board"), [])
    refused("unlisted", device.trusted.require_bundle, attacks.NEW, current)


def test_a_folder_as_a_source(tmp_path: Path, source: attacks.Source) -> None:
    (tmp_path / "card" / "metadata").mkdir(parents=True)
    for name, content in source.files.items():
        (tmp_path / "card" / "metadata" / name).write_bytes(content)
    fetch = trust.folder_source(str(tmp_path / "card"))
    assert fetch("2.root.json", 100) is None
    assert fetch("1.root.json", 100) == source.files["1.root.json"][:101]
    os.mkfifo(tmp_path / "card" / "metadata" / "2.root.json")  # reading it would block forever
    refused("metadata", fetch, "2.root.json", 100)
    (tmp_path / "card" / "metadata" / "3.root.json").symlink_to("/dev/zero")
    refused("metadata", fetch, "3.root.json", 100)
    (tmp_path / "card" / "metadata" / "4.root.json").mkdir()
    refused("metadata", fetch, "4.root.json", 100)


def test_targets_of_a_folder(tmp_path: Path) -> None:
    listed = {"a.coralline": TargetFile.from_data("a.coralline", b"new", ["sha256"])}
    folder = tmp_path / "targets"
    folder.mkdir()
    path = folder / f"{trust.fingerprint(b'new')}.a.coralline"
    refused("missing", trust.download, str(tmp_path), "a.coralline", listed, True)
    for content, kind in ((b"old", "mixed"), (b"new more", "mixed"), (b"n", "mixed")):
        path.write_bytes(content)
        refused(kind, trust.download, str(tmp_path), "a.coralline", listed, True)
    path.write_bytes(b"new")
    assert trust.download(str(tmp_path), "a.coralline", listed, True) == b"new"
    for name in ("b.coralline", "../a.coralline", "/etc/passwd"):
        refused("unlisted", trust.download, str(tmp_path), name, listed, True)
    (folder / "a.coralline").write_bytes(b"new")
    assert trust.download(str(tmp_path), "a.coralline", listed, False) == b"new"


# --- generated metadata ---------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**14), 10**14) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
VALUES = JSON | st.sampled_from(
    [1.5, -1, 0, 2**70, "", "root", "1.0", "2030-01-31T00:00:00Z", "0" * 64, [], {}, [[]], [{}]]
)


def _paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here] + [path for key, inner in children for path in _paths(inner, (*here, key))]


def _changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _changed(value[path[0]], path[1:], new)
    return copy


NAMES = ("1.root.json", "timestamp.json", "4.snapshot.json", "4.targets.json")
SIGNERS = {"1.root.json": attacks.ROOTS, "4.targets.json": ("targets",)}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_signed_metadata_with_any_value(data: st.DataObject) -> None:
    """Whoever has the keys may sign anything: the result is acceptance or a `TrustError`, and nothing else happens."""
    source = attacks.started()
    source.release(4, {"shop.coralline": attacks.NEW}, hashes=False)
    name = data.draw(st.sampled_from(NAMES))
    signed = json.loads(source.files[name])["signed"]
    path = data.draw(st.sampled_from(_paths(signed)))
    signed = _changed(signed, path, data.draw(VALUES))
    try:
        content = attacks.document(signed, SIGNERS.get(name, ("online",)))
    except (FormatError, UnicodeEncodeError):  # not canonical JSON
        content = json.dumps({"signed": signed, "signatures": []}).encode()
    source.files[name.replace("1.root", "2.root")] = content
    with tempfile.TemporaryDirectory() as folder:
        try:
            device = attacks.Device(Path(folder) / "trust", attacks.started())
            assert not device.accepts(attacks.EVIL)
            attacks.outcome(device, source.fetch)
            trust.find(device.trusted.path)
        finally:
            attacks.set_clock(None)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_metadata_with_any_edit_is_not_accepted(data: st.DataObject) -> None:
    """An edit without the keys does not change what the device trusts."""
    source = attacks.started()
    source.release(4, {"shop.coralline": attacks.OLD}, hashes=False)
    name = data.draw(st.sampled_from(NAMES[1:]))
    content = source.files[name]
    start = data.draw(st.integers(0, len(content) - 1))
    end = min(start + data.draw(st.integers(0, 20)), len(content))
    piece = data.draw(st.binary(max_size=20) | st.sampled_from([b'"', b"{}", b",", b"[[", b"9" * 9, content[:40]]))
    edited = content[:start] + piece + content[end:]
    source.files[name] = edited
    with tempfile.TemporaryDirectory() as folder:
        try:
            device = attacks.Device(Path(folder) / "trust", attacks.started())
            result = attacks.outcome(device, source.fetch)
        finally:
            attacks.set_clock(None)
    if result == "accepted":  # spaces, or a second signature: the signed part is the same
        assert json.loads(edited)["signed"] == json.loads(content)["signed"]
