"""The agent: a program that the host sends to a device, and that changes the releases there.

Host and agent exchange lines of JSON over standard input and output. A request with `"do": "put"` is followed by the
bytes of a piece. Each request gets one line, `{"answer": ...}` or `{"error": {"kind", "what", "hint", "current"}}`, in
the same order. An error has no "current" if the disk does not say what runs. The first line of the
agent is GREETING; the login shell may have printed others before. The agent ends
with the connection; the current release then stays. It uses only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import time
from typing import Any, Callable, Dict, Iterator, Optional

from deploy.contract import trust
from deploy.contract.errors import DeviceError
from deploy.contract.releases import DeviceFolder, Message, ReleaseError

GREETING = "coralline-releases-1"
SILENCE_S = 120.0
"""The agent ends if the host is silent for longer: the system may not detect a dead connection for hours."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_OWNED = 'deploy to a folder that you own, or own this one, on the device: sudo install -d -o "$USER" FOLDER'


class HostGoneError(Exception):
    """The host ended the connection, or has been silent for too long."""


class Link:
    """The connection to the host: `source` and `sink` are file descriptors."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink, self._held = source, sink, b""

    def _fill(self, timeout_s: float) -> None:
        """Read the available bytes; wait for them up to a time limit."""
        if not select.select([self._source], [], [], timeout_s)[0]:
            raise HostGoneError("silent for %g s" % timeout_s)
        block = os.read(self._source, 1 << 16)
        if not block:
            raise HostGoneError("the connection ended")
        self._held += block

    def line(self) -> Message:
        """Return the next request."""
        while b"\n" not in self._held:
            self._fill(SILENCE_S)
        line, _, self._held = self._held.partition(b"\n")
        message = json.loads(line.decode("utf-8"))
        if not isinstance(message, dict):
            raise ReleaseError("request", "a request is a map")
        return message

    def content(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes, in the blocks in which they arrive."""
        while size > 0:
            if not self._held:
                self._fill(SILENCE_S)
            block, self._held = self._held[:size], self._held[size:]
            size -= len(block)
            yield block

    def wait(self, seconds: float) -> None:
        """Wait; raise HostGoneError if the connection ends meanwhile."""
        end = time.monotonic() + seconds
        while select.select([self._source], [], [], max(end - time.monotonic(), 0.0))[0]:
            if len(self._held) > 1 << 20:  # the host sends more requests, so the connection is open
                time.sleep(seconds)
                return
            self._fill(0.0)

    def say(self, message: Message) -> None:
        """Send one line to the host."""
        rest = (json.dumps(message) + "\n").encode()
        while rest:
            try:
                rest = rest[os.write(self._sink, rest) :]
            except BrokenPipeError:
                raise HostGoneError("the connection ended")


class Agent:
    """The requests of the host: one function for each."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._folder: Optional[DeviceFolder] = None
        self.requests: Dict[str, Callable[[Message], Any]] = {
            "look": self.look,
            "open": self.open,
            "want": self.want,
            "put": self.put,
            "install": lambda request: self.folder.install(request["release"], request["files"]),
            "run": self.run,
            "switch": lambda request: self.folder.switch(request["release"]),
            "discard": lambda request: self.folder.discard(request["release"]),
            "prune": lambda request: self.folder.prune(request["keep"]),
            "trust": self.update_trust,
            "write": lambda request: self.folder.write(request["name"], request["text"]),
        }

    @property
    def folder(self) -> DeviceFolder:
        """The open folder."""
        if self._folder is None:
            raise ReleaseError("request", "no folder is open")
        return self._folder

    def look(self, request: Message) -> Message:
        """Describe the current release. Nothing is locked or changed, so this works during a deployment too."""
        return DeviceFolder(request["path"], by="", create=False, lock=False).status()

    def open(self, request: Message) -> Message:
        """Lock the folder, and describe its releases."""
        self._folder = DeviceFolder(request["path"], request["by"], request["create"])
        return self._folder.describe()

    def update_trust(self, request: Message) -> Message:
        """Accept the metadata of the host, after the rules of this device; see `trust.TrustFolder.update`."""
        metadata: Dict[str, str] = request["metadata"]

        def fetch(name: str, limit: int) -> Optional[bytes]:
            return metadata[name].encode("utf-8")[: limit + 1] if name in metadata else None

        trusted = trust.find()
        is_first = trusted is None
        if trusted is None:
            if not request["first_root"]:
                raise ReleaseError("trust", "this device trusts no root yet", trust.FIRST)
            trusted = trust.first_contact(fetch, request["first_root"], running=self.folder.running())
        trusted.update(fetch)
        return dict(trusted.describe(), first_contact=is_first)

    def want(self, request: Message) -> Message:
        """Return the pieces of a release that must be sent."""
        if self.folder.whole(request["release"]):
            self.folder.drop_incoming()  # left by a deployment that was interrupted after `install`
            return {"whole": True, "missing": {}}
        return {"whole": False, "missing": self.folder.missing(request["pieces"], request["total"])}

    def put(self, request: Message) -> bool:
        """Receive a piece from `offset` on. All its bytes are read, even if they cannot be stored."""
        content = self.link.content(request["size"] - request["offset"])
        try:
            return self.folder.put(request["sha256"], request["offset"], request["size"], content)
        finally:
            for _ in content:
                pass

    def run(self, request: Message) -> Message:
        """Run a command of the runner."""
        return self.folder.run(request["release"], request["command"], request["timeout_s"], self.link.wait)

    def answer(self, request: Message) -> Message:
        """Execute one request; return its answer or its error."""
        try:
            return {"answer": self.requests[request["do"]](request)}
        except ReleaseError as error:
            return self._error(error)
        except DeviceError as error:  # a TrustError
            return self._error(ReleaseError("trust", error.what, error.hint))
        except OSError as error:
            full = error.errno in _FULL
            if full and self._folder:
                with contextlib.suppress(OSError):
                    self.folder.clear()
                    self.folder.drop_incoming()
            reason = error.strerror or str(error)
            what = "%s: %s" % (error.filename, reason) if error.filename else reason
            hint = "free some space" if full else _OWNED if error.errno in _FORBIDDEN else ""
            return self._error(ReleaseError("disk" if full else "files", what, hint))

    def _error(self, error: ReleaseError) -> Message:
        content: Dict[str, Any] = {"kind": error.kind, "what": error.what, "hint": error.hint}
        if self._folder:
            with contextlib.suppress(OSError):  # a disk that fails: what runs is not known
                content["current"] = self._folder.current()
        return {"error": content}


def serve() -> None:
    """Answer requests on standard input until the connection ends."""
    link = Link(0, 1)
    agent = Agent(link)
    try:
        link.say({"hello": GREETING})
        while True:
            link.say(agent.answer(link.line()))
    except HostGoneError:
        return
