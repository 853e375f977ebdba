"""Attacks on the updates of a device, and their outcomes: "accepted", or the kind of the `TrustError`.

The metadata of the repository is written and signed here, without python-tuf, so that it can be wrong in every way.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import types
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.formats import encode_canonical
from tuf.ngclient import UpdaterConfig
from tuf.ngclient._internal import trusted_metadata_set

from deploy.contract import trust
from deploy.contract.trust import TrustError

NOW = 1_800_000_000.0
"""The time on the device: January 2027."""
DAY = 86_400
ROOTS = ("root-1", "root-2", "root-3")
NEW, OLD, EVIL = b"a new bundle", b"an old bundle", b"an evil bundle"
LIMITS = UpdaterConfig()


@functools.cache
def private(name):
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def public(name):
    key = private(name).public_key().public_bytes_raw().hex()
    return {"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": key}}


def key_id(name):
    return hashlib.sha256(encode_canonical(public(name)).encode()).hexdigest()


def document(signed, names):
    """Return a metadata file, signed by the keys with these names; or by pairs of key id and name."""
    message = encode_canonical(signed).encode()
    pairs = [(key_id(name), name) if isinstance(name, str) else name for name in names]
    rows = [{"keyid": identifier, "sig": private(name).sign(message).hex()} for identifier, name in pairs]
    return json.dumps({"signed": signed, "signatures": rows}).encode()


def moment(days):
    return datetime.datetime.fromtimestamp(NOW + days * DAY, datetime.UTC)


def set_clock(days):
    """Set the clock of the device, and of python-tuf, to a number of days after NOW; None: the true time."""
    trust.time, trusted_metadata_set.datetime = __import__("time"), datetime
    if days is not None:
        now = moment(days)
        trust.time = types.SimpleNamespace(time=now.timestamp)
        clock = types.SimpleNamespace(now=lambda zone: now)
        trusted_metadata_set.datetime = types.SimpleNamespace(datetime=clock, timezone=datetime.timezone)


def when(days):
    return moment(days).strftime(trust.TIME_FORMAT)


def info(content, version=None):
    entry = {"length": len(content), "hashes": {"sha256": hashlib.sha256(content).hexdigest()}}
    return entry if version is None else dict(entry, version=version)


class Source:
    """A repository in memory: `files` has the metadata by name."""

    def __init__(self):
        self.files = {}
        self.online, self.targets = ("online",), ("targets",)

    def root(self, version=1, roots=ROOTS, signers=ROOTS, days=365):
        """Write root metadata, and return the part that is signed."""
        names = sorted({*roots, *self.online, *self.targets})
        roles = {"root": (roots, 2), "targets": (self.targets, 1)}
        roles["snapshot"] = roles["timestamp"] = (self.online, 1)
        signed = {
            "_type": "root",
            "spec_version": "1.0.31",
            "version": version,
            "expires": when(days),
            "consistent_snapshot": True,
            "keys": {key_id(name): public(name) for name in names},
            "roles": {
                role: {"keyids": [key_id(name) for name in keys], "threshold": count}
                for role, (keys, count) in roles.items()
            },
        }
        self.files[f"{version}.root.json"] = document(signed, signers)
        return signed

    def release(self, number, bundles, days=(30, 30, 365), hashes=True):
        """Write targets, snapshot and timestamp metadata with this version, which list the bundles by name.

        `days` is the validity of timestamp, snapshot and targets metadata. Without `hashes`, the listed files have
        neither length nor hashes.
        """
        listed = {name: info(content) for name, content in bundles.items()}
        base = {"spec_version": "1.0.31", "version": number}
        signed = dict(base, _type="targets", expires=when(days[2]), targets=listed)
        self.files[f"{number}.targets.json"] = document(signed, self.targets)
        self.timestamp(number, days, targets=number, hashes=hashes)

    def timestamp(self, number, days=(30, 30), snapshot=None, targets=1, hashes=True, issued=0, more=None):
        """Write the metadata that the online key signs, for targets metadata that exists."""
        base = {"spec_version": "1.0.31", "version": number}
        content = self.files.get(f"{targets}.targets.json", b"")
        meta = {"targets.json": info(content, targets) if hashes else {"version": targets}}
        meta.update({name: {"version": version} for name, version in (more or {}).items()})
        signed = dict(base, _type="snapshot", expires=when(days[1]), meta=meta)
        if snapshot is None:
            self.files[f"{number}.snapshot.json"] = document(signed, self.online)
        snapshot = snapshot or number
        content = self.files[f"{snapshot}.snapshot.json"]
        meta = {"snapshot.json": info(content, snapshot) if hashes else {"version": snapshot}}
        signed = dict(base, _type="timestamp", expires=when(days[0]), meta=meta, issued=when(issued))
        self.files["timestamp.json"] = document(signed, self.online)

    def fetch(self, name, limit):
        content = self.files.get(name)
        return None if content is None else content[: limit + 1]


def started():
    """Return a source with three releases."""
    source = Source()
    source.root()
    source.release(1, {"shop.coralline": OLD})
    source.release(2, {"shop.coralline": OLD})
    source.release(3, {"shop.coralline": NEW})
    return source


class Device:
    """A device that has accepted the third release of a source."""

    def __init__(self, folder, source):
        set_clock(0)
        digest = trust.fingerprint(source.files["1.root.json"])
        self.trusted = trust.first_contact(source.fetch, digest, str(folder))
        self.trusted.update(source.fetch)

    def accepts(self, content):
        try:
            trust.TrustFolder(self.trusted.path).require(content, ".coralline", "it")
        except TrustError:
            return False
        return True


def outcome(device, fetch):
    """Update the device; return "accepted" or the kind of the error.

    In both cases, the device must not trust a bundle that the targets keys did not sign.
    """
    kind, code = "accepted", 8
    try:
        trust.TrustFolder(device.trusted.path).update(fetch)
    except TrustError as error:
        kind, code = error.kind, error.exit_code
    assert code == 8
    assert not device.accepts(EVIL)
    return kind


def freshness(device):
    """Return "fresh" if something new may be installed now, else the kind of the error."""
    try:
        trust.TrustFolder(device.trusted.path).require_fresh()
    except TrustError as error:
        return error.kind
    return "fresh"


# --- attacks: each changes the source (or the device), and has the expected outcome ---------


def nothing(device, source):
    return "accepted"


def rollback_of_the_timestamp(device, source):
    source.release(2, {"shop.coralline": OLD})
    return "version"


def rollback_of_the_snapshot(device, source):
    source.timestamp(4, snapshot=2, targets=3)
    return "version"


def rollback_of_the_targets(device, source):
    """A stolen online key publishes an older list that the targets key signed. The device knows a newer one."""
    source.timestamp(4, targets=2)
    return "version"


def snapshot_without_targets(device, source):
    signed = {"_type": "snapshot", "spec_version": "1.0.31", "version": 4, "expires": when(30), "meta": {}}
    source.timestamp(4, targets=3, hashes=False)
    source.files["4.snapshot.json"] = document(signed, source.online)
    return "metadata"


def snapshot_that_lacks_a_file(device, source):
    source.timestamp(4, targets=3, more={"shops.json": 1})
    assert outcome(device, source.fetch) == "accepted"
    source.timestamp(5, targets=3)
    return "metadata"


def freeze(device, source):
    set_clock(31)
    return "expired"


def freeze_of_the_snapshot(device, source):
    source.timestamp(4, days=(60, 20), targets=3)
    set_clock(25)
    return "expired"


def freeze_of_the_targets(device, source):
    source.release(4, {"shop.coralline": NEW}, days=(60, 60, 20))
    set_clock(25)
    return "expired"


def expired_root(device, source):
    set_clock(366)
    return "expired"


def expired_new_root(device, source):
    source.root(2, days=-1)
    return "expired"


def expired_root_in_the_chain(device, source):
    source.root(2, days=-1)
    source.root(3)
    return "accepted"


def mixed(role, old, kind, hashes=True):
    """Return an attack with older metadata of a role in the place of the newest."""

    def attack(device, source):
        source.release(4, {"shop.coralline": NEW}, hashes=hashes)
        source.files[f"4.{role}.json"] = source.files[f"{old}.{role}.json"]
        return kind

    return attack


def endless_root(device, source):
    source.files["2.root.json"] = b" " * (LIMITS.root_max_length + 1)
    return "length"


def endless_timestamp(device, source):
    source.files["timestamp.json"] += b" " * LIMITS.timestamp_max_length
    return "length"


def endless(role, blanks, hashes=False):
    """Return an attack with blanks at the end of the metadata of a role."""

    def attack(device, source):
        source.release(4, {"shop.coralline": NEW}, hashes=hashes)
        source.files[f"4.{role}.json"] += b" " * blanks
        return "length"

    return attack


def wrong_key(role):
    def attack(device, source):
        source.release(4, {"shop.coralline": EVIL}, hashes=False)
        file = "timestamp.json" if role == "timestamp" else f"4.{role}.json"
        signed = json.loads(source.files[file].decode())["signed"]
        evil = "evil" if role == "targets" else "targets"  # a key of another role is as invalid as an unknown key
        source.files[file] = document(signed, [evil])
        return "signature"

    return attack


def signature_of_another_text(device, source):
    content = json.loads(source.files["timestamp.json"].decode())
    content["signed"]["version"] = 9
    source.files["timestamp.json"] = json.dumps(content).encode()
    return "signature"


def no_signature(device, source):
    content = json.loads(source.files["timestamp.json"].decode())
    source.files["timestamp.json"] = json.dumps(dict(content, signatures=[])).encode()
    return "signature"


def root_of_one_old_key(device, source):
    source.root(2, roots=("evil-1", "evil-2"), signers=("root-1", "evil-1", "evil-2"))
    return "signature"


def root_that_does_not_sign_itself(device, source):
    source.root(2, roots=("new-1", "new-2"), signers=("root-1", "root-2", "new-1"))
    return "signature"


def one_key_that_signs_twice(device, source):
    source.root(2, signers=("root-1", "root-1"))
    return "metadata"


def one_key_under_two_ids(device, source):
    signed = source.root(2)
    signed["keys"]["0" * 64] = public("root-1")
    signed["roles"]["root"]["keyids"].append("0" * 64)
    source.files["2.root.json"] = document(signed, ["root-1", ("0" * 64, "root-1")])
    return "signature"


def one_id_twice_in_a_role(device, source):
    signed = source.root(2)
    signed["roles"]["root"]["keyids"].append(key_id("root-1"))
    source.files["2.root.json"] = document(signed, ROOTS)
    return "metadata"


def threshold_of_zero(device, source):
    signed = source.root(2)
    signed["roles"]["targets"]["threshold"] = 0
    source.files["2.root.json"] = document(signed, ROOTS)
    return "metadata"


def root_that_skips_a_version(device, source):
    source.online = ("evil",)
    source.root(3, roots=("evil-1", "evil-2"), signers=("evil-1", "evil-2"))
    source.release(4, {"shop.coralline": EVIL})
    return "signature"


def root_with_another_version_than_its_name(device, source):
    signed = source.root(3)
    source.files["2.root.json"] = document(signed, ROOTS)
    return "version"


def root_again(device, source):
    source.root(2)
    assert outcome(device, source.fetch) == "accepted"
    source.files["3.root.json"] = source.files["1.root.json"]
    return "version"


def a_lost_root_key_is_replaced(device, source):
    source.root(2, roots=("root-1", "root-2", "root-4"), signers=("root-1", "root-2"))
    source.root(3, roots=("root-4", "root-5", "root-6"), signers=("root-2", "root-4", "root-5"))
    return "accepted"


def an_online_key_is_replaced(device, source):
    source.online = ("online-2",)
    source.root(2)
    source.release(1, {"shop.coralline": NEW})  # its versions begin again, and the device has forgotten the old ones
    return "accepted"


def the_old_online_key_after_a_rotation(device, source):
    source.online = ("online-2",)
    source.root(2)
    source.release(4, {"shop.coralline": NEW})
    assert outcome(device, source.fetch) == "accepted"
    source.online = ("online",)
    source.timestamp(5, targets=4)
    return "signature"


def the_old_targets_key_after_a_rotation(device, source):
    source.targets = ("targets-2",)
    source.root(2)
    source.targets = ("targets",)
    source.release(4, {"shop.coralline": EVIL})
    return "signature"


def fast_forward(device, source):
    """A stolen online key signs the largest versions. A new online key repairs this."""
    source.release(10**14, {"shop.coralline": NEW})
    assert outcome(device, source.fetch) == "accepted"
    source.release(4, {"shop.coralline": NEW})
    assert outcome(device, source.fetch) == "version"
    source.online = ("online-2",)
    source.root(2)
    source.release(5, {"shop.coralline": NEW})
    return "accepted"


def clock_sent_ahead(device, source):
    """A stolen online key signs a future time, so that everything seems expired. A new online key repairs this."""
    source.timestamp(4, days=(9_000, 9_000), targets=3, issued=8_000)
    assert outcome(device, source.fetch) == "expired"
    source.timestamp(5, targets=3)
    assert outcome(device, source.fetch) == "expired"
    source.online = ("online-2",)
    source.root(2)
    source.release(6, {"shop.coralline": NEW})
    return "accepted"


def time_of_signing_after_the_end(device, source):
    source.timestamp(4, targets=3, issued=31)
    return "expired"


def a_clock_that_is_behind(device, source):
    """The device has no battery for its clock: after a restart it is 1970.

    A timestamp that ends before the last accepted one was signed is expired nevertheless.
    """
    set_clock(-20_000)
    source.timestamp(4, targets=3, issued=40, days=(70, 70))
    assert outcome(device, source.fetch) == "accepted"
    source.timestamp(5, targets=3, issued=0, days=(30, 70))
    return "expired"


def a_clock_that_is_behind_all_metadata(device, source):
    set_clock(-20_000)
    source.release(4, {"shop.coralline": NEW})
    return "accepted"


def a_clock_that_is_ahead(device, source):
    set_clock(9_000)
    return "expired"


def missing_timestamp(device, source):
    del source.files["timestamp.json"]
    return "missing"


def interrupted(device, source):
    """An update stops after the timestamp: nothing new is installed before the next complete update."""
    source.release(4, {"shop.coralline": NEW})
    kept = source.files.pop("4.snapshot.json")
    assert outcome(device, source.fetch) == "missing"
    assert freshness(device) == "missing"
    source.files["4.snapshot.json"] = kept
    assert outcome(device, source.fetch) == "accepted"
    assert freshness(device) == "fresh"
    return "accepted"


def another_type(device, source):
    source.files["timestamp.json"] = source.files["3.snapshot.json"]
    return "metadata"


def another_specification(device, source):
    signed = json.loads(source.files["timestamp.json"].decode())["signed"]
    source.files["timestamp.json"] = document(dict(signed, spec_version="2.0.0", version=4), source.online)
    return "metadata"


def text(content):
    """Return an attack with this text as the timestamp."""

    def attack(device, source):
        source.files["timestamp.json"] = content
        return "refused"

    return attack


def changed(old, new):
    """Return an attack with a change in the text of the timestamp, which is signed again."""

    def attack(device, source):
        source.release(4, {"shop.coralline": NEW})
        assert old in source.files["timestamp.json"]
        content = source.files["timestamp.json"].replace(old, new, 1)
        source.files["timestamp.json"] = document(json.loads(content.decode())["signed"], source.online)
        return "refused"

    return attack


def another_list_by_a_stolen_online_key(device, source):
    """A stolen online key lists another bundle. The device refuses it: the targets key must sign the list."""
    source.targets = ("online",)
    source.release(4, {"shop.coralline": EVIL})
    return "signature"


def an_older_list_for_a_new_device(device, source):
    """A device that has accepted nothing before cannot know that the list is old: it is accepted until it expires."""
    source.timestamp(4, targets=2)
    new = Device(Path(device.trusted.path + "-new"), source)
    assert new.accepts(OLD)
    assert not new.accepts(EVIL)
    return "version"


def frozen_by_a_stolen_online_key(device, source):
    """A stolen online key signs the list of the device again and again: this works until the list expires."""
    for day in (29, 200, 360):
        set_clock(day)
        source.timestamp(10 + day, days=(day + 30, day + 30), targets=3, issued=day)
        assert outcome(device, source.fetch) == "accepted"
        assert device.accepts(NEW)
    set_clock(366)
    source.timestamp(900, days=(400, 400), targets=3, issued=365)
    return "expired"


ATTACKS = {
    name: attack
    for name, attack in dict(globals()).items()
    if isinstance(attack, types.FunctionType) and attack.__code__.co_varnames[:2] == ("device", "source")
}
ATTACKS.update(
    {
        "mixed_snapshot": mixed("snapshot", 3, "mixed"),
        "mixed_snapshot_without_hashes": mixed("snapshot", 3, "version", hashes=False),
        "mixed_targets": mixed("targets", 2, "mixed"),
        "mixed_targets_without_hashes": mixed("targets", 2, "version", hashes=False),
        "endless_snapshot": endless("snapshot", 1, hashes=True),
        "endless_snapshot_without_length": endless("snapshot", LIMITS.snapshot_max_length),
        "endless_targets": endless("targets", LIMITS.targets_max_length),
    }
)
ATTACKS.update({f"wrong_key_of_{role}": wrong_key(role) for role in ("timestamp", "snapshot", "targets")})
ATTACKS.update(
    {
        f"text_{name}": text(content)
        for name, content in {
            "empty": b"",
            "nested": b"[" * 10_000,
            "open_string": b'"' + b'\\"' * 8_000 + b"\\",
            "float": b'{"signed": {"_type": "timestamp", "version": 1.0}, "signatures": []}',
            "long_integer": b'{"signed": ' + b"9" * 10_000 + b"}",
            "surrogate": b'{"signed": {"_type": "timestamp", "spec_version": "1.0", "version": 4, '
            b'"expires": "2030-01-01T00:00:00Z", "meta": {}, "x": "\\ud800"}, "signatures": []}',
        }.items()
    }
)
ATTACKS.update(
    {
        f"signed_{name}": changed(old, new)
        for name, (old, new) in {
            "version_true": (b'"version": 4,', b'"version": true,'),
            "version_negative": (b'"version": 4,', b'"version": -4,'),
            "expires_number": (b'"expires": "', b'"expires": 1, "then": "'),
            "expires_zone": (b'Z", "meta"', b'+01:00", "meta"'),
            "no_meta": (b'"meta"', b'"mate"'),
            "hash_upper_case": (b'"sha256": "', b'"sha256": "A'),
            "other_hash": (b'"sha256"', b'"md5"'),
            "length_negative": (b'"length": ', b'"length": -'),
        }.items()
    }
)


def one(attack, folder):
    """Return the actual and the expected outcome of one attack."""
    source = started()
    device = Device(folder, source)
    try:
        expected = attack(device, source)
        actual = outcome(device, source.fetch)
        assert actual != "accepted" or device.accepts(NEW)
        if expected == "refused" and actual != "accepted":
            actual = expected
    finally:
        set_clock(None)
    return [actual, expected]
