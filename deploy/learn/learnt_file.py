"""The file with what a device has learnt: the embeddings of photos of new classes, next to the bundle.

The content is a line with the SHA-256 of all that follows, then an archive like that of a bundle: `manifest.json` and
`embeddings.npy`, float32 [photos, values], in the order of the changes::

    {"schema_version": 1, "bundle": DIGEST, "changes": [CHANGE, ...], "history": [EVENT, ...]}

CHANGE is {"time", "action": "learn" or "import", "classes": [{"name", "photos"}, ...]}. EVENT is {"time", "action",
"names", "photos"}; the action may also be "undo". DIGEST is that of the bundle whose model gave the embeddings
(`Bundle.digest`): for another model they have no meaning.

A file is replaced atomically, and a lock keeps two processes from replacing it at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import unicodedata
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from deploy.contract import bundle
from deploy.contract.errors import ArgumentError, DeviceError
from deploy.contract.preprocessing import Array

SUFFIX = ".learnt"
MAGIC = b"Coralline-learnt1 "
MAX_BYTES = 1 << 26
"""MAX_PHOTOS embeddings of 1,280 values, as MobileNetV2 has them, take 51 MB."""
MAX_NAME = 80
"""Chosen: letters that fit a line."""
MAX_CLASSES, MAX_PHOTOS, MAX_HISTORY = 1000, 10000, 1000
"""Chosen: more classes or photos are a reason to train a network; the history is for people."""
_EMBEDDINGS = "embeddings.npy"


class LearntFileError(DeviceError):
    """The file with learnt classes is damaged, or belongs to another bundle."""

    exit_code = 6
    kind = "learnt_file"


class LearntClass(NamedTuple):
    """A learnt class with the embeddings of its photos: float32 [photos, values]."""

    name: str
    embeddings: Array


class Change(NamedTuple):
    """A change that can be undone.

    Attributes:
        time: the time of the change, UTC.
        action: "learn" or "import".
        classes: the classes to which the change added photos.
    """

    time: str
    action: str
    classes: Tuple[LearntClass, ...]

    @property
    def photos(self) -> int:
        """The number of photos."""
        return sum(len(learnt_class.embeddings) for learnt_class in self.classes)

    def event(self, action: str, when: str) -> Dict[str, Any]:
        """Return an event of the history."""
        names = [learnt_class.name for learnt_class in self.classes]
        return {"time": when, "action": action, "names": names, "photos": self.photos}


class LearntState(NamedTuple):
    """The content of a file.

    Attributes:
        changes: the changes that are in force, the oldest first.
        history: the last MAX_HISTORY events, the oldest first.
    """

    changes: Tuple[Change, ...] = ()
    history: Tuple[Dict[str, Any], ...] = ()

    def classes(self) -> List[LearntClass]:
        """Return the learnt classes in the order of their first photo, each with all its photos."""
        parts: Dict[str, List[Array]] = {}
        for change in self.changes:
            for learnt_class in change.classes:
                parts.setdefault(learnt_class.name, []).append(learnt_class.embeddings)
        return [LearntClass(name, np.concatenate(arrays)) for name, arrays in parts.items()]

    def with_change(self, change: Change) -> LearntState:
        """Return the state with another change."""
        history = self.history + (change.event(change.action, change.time),)
        return LearntState(self.changes + (change,), history[-MAX_HISTORY:])

    def without_last(self) -> LearntState:
        """Return the state without the last change.

        Raises:
            ArgumentError: there is no change.
        """
        if not self.changes:
            raise ArgumentError("there is no change to undo", "learn a class first")
        history = self.history + (self.changes[-1].event("undo", now()),)
        return LearntState(self.changes[:-1], history[-MAX_HISTORY:])


def beside(bundle_path: str) -> str:
    """Return the path of the file next to a bundle: shop.coralline has shop.learnt."""
    return os.path.splitext(bundle_path)[0] + SUFFIX


def now() -> str:
    """Return the time, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def checked_name(name: str, known: Sequence[str]) -> str:
    """Return the name of a new class in a normal form.

    Raises:
        ArgumentError: the name is empty, too long, not printable, or that of a class of the bundle.
    """
    text = " ".join(unicodedata.normalize("NFC", name).split())
    if not text or len(text) > MAX_NAME or not text.isprintable():
        what = "%.100r is not the name of a class" % name
        raise ArgumentError(what, "use 1 to %d printable characters" % MAX_NAME)
    if text.casefold() in {known_name.casefold() for known_name in known}:
        raise ArgumentError("%r is a class of the bundle already" % text, "use another name, such as '%s (new)'" % text)
    return text


def read(path: str, digest: str, values: int) -> LearntState:
    """Read a file of the bundle with this digest and embeddings of this size; a missing file has an empty state.

    Raises:
        LearntFileError: the file is damaged, or belongs to another bundle.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return LearntState()
    return parsed(content, path, digest, values)


def parsed(content: bytes, path: str, digest: str, values: int) -> LearntState:
    """Return the state in the content of a file; arguments and exceptions as for `read`."""
    line, _, archive = content[: MAX_BYTES + 1].partition(b"\n")
    damaged = "%s is damaged, or not a file with learnt classes" % path
    hint = "remove it, or import an exported copy"
    if line != MAGIC + hashlib.sha256(archive).hexdigest().encode() or len(content) > MAX_BYTES:
        raise LearntFileError(damaged, hint)
    try:
        members = bundle.read_archive(archive)
        manifest = json.loads(members[bundle.MANIFEST].decode())
        embeddings = bundle.read_array(members[_EMBEDDINGS])
        of = manifest["bundle"]
        if manifest["schema_version"] != 1:
            raise LearntFileError("%s has another version" % path, "use the runner that wrote it")
        if of == digest:
            changes = _changes(manifest["changes"], embeddings, values)
            history = []
            for entry in manifest["history"][-MAX_HISTORY:]:
                names = [str(name) for name in entry["names"]]
                event = {"time": str(entry["time"]), "action": str(entry["action"]), "names": names}
                history.append(dict(event, photos=int(entry["photos"])))
            return LearntState(changes, tuple(history))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LearntFileError("%s: %s" % (damaged, error), hint)
    what = "%s was learnt with another bundle" % path
    raise LearntFileError(what, "learn the classes again: embeddings of another model have no meaning")


def _changes(entries: List[Any], embeddings: Array, values: int) -> Tuple[Change, ...]:
    """Return the changes of a manifest with their embeddings."""
    if embeddings.dtype != np.float32 or embeddings.ndim != 2 or not np.isfinite(embeddings).all():
        raise ValueError("the embeddings are not finite float32 rows")
    if embeddings.shape[1] != values or len(embeddings) > MAX_PHOTOS:
        raise ValueError("the embeddings have %d values, not %d" % (embeddings.shape[1], values))
    changes = []
    start = 0
    for entry in entries:
        classes = []
        for row in entry["classes"]:
            count = row["photos"]
            name = checked_name(row["name"], ())
            if type(count) is not int or not 0 < count <= len(embeddings) - start:
                raise ValueError("a class has %r photos" % (count,))
            classes.append(LearntClass(name, embeddings[start : start + count]))
            start += count
        if entry["action"] not in ("learn", "import") or not isinstance(entry["time"], str):
            raise ValueError("an action is invalid")
        changes.append(Change(entry["time"], entry["action"], tuple(classes)))
    if start != len(embeddings):
        raise ValueError("some embeddings belong to no class")
    return tuple(changes)


def content_of(state: LearntState, digest: str, values: int) -> bytes:
    """Return the content of a file.

    Raises:
        ArgumentError: there are too many classes or photos.
    """
    arrays = [learnt_class.embeddings for change in state.changes for learnt_class in change.classes]
    embeddings = np.concatenate([np.zeros((0, values), np.float32)] + arrays)
    classes = state.classes()
    if len(classes) > MAX_CLASSES or len(embeddings) > MAX_PHOTOS:
        what = "%d classes with %d photos were learnt" % (len(classes), len(embeddings))
        raise ArgumentError(what, "at most %d classes and %d photos: train a network" % (MAX_CLASSES, MAX_PHOTOS))
    changes = []
    for change in state.changes:
        rows = [{"name": learnt_class.name, "photos": len(learnt_class.embeddings)} for learnt_class in change.classes]
        changes.append({"time": change.time, "action": change.action, "classes": rows})
    manifest = {"schema_version": 1, "bundle": digest, "changes": changes, "history": list(state.history)}
    text = json.dumps(manifest, indent=1, sort_keys=True).encode()
    archive = bundle.archive_of({bundle.MANIFEST: text, _EMBEDDINGS: bundle.array_bytes(embeddings)})
    content = MAGIC + hashlib.sha256(archive).hexdigest().encode() + b"\n" + archive
    if len(content) > MAX_BYTES:
        raise ArgumentError("the learnt classes take %d bytes" % len(content), "at most %d" % MAX_BYTES)
    return content


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of a file; wait for another process that holds it."""
    try:
        import fcntl
    except ImportError:  # not on Windows: two processes must not learn at the same time there
        yield
        return
    handle = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
