"""Where to deploy: `ssh://user@host:port/path`, or a folder of this machine, such as a card."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from compress.errors import PipelineError

ALLOWED = "ssh://[user@]host[:port]/path, file:///path, or a folder"
_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:-]{0,252}\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")
_PATH = re.compile(r"[^\x00-\x1f\x7f]{1,1000}\Z")


@dataclass(frozen=True)
class DeviceAddress:
    """A folder on a device.

    Attributes:
        host: its name; None for this machine.
        user: who logs in, where it is said.
        port: of its SSH server, where it is said.
        path: the folder there; `~/…` is below the home folder.
    """

    host: str | None
    user: str | None
    port: int | None
    path: str

    @property
    def name(self) -> str:
        """For a file name: what tells this device from others."""
        if self.host is None:
            return re.sub(r"[^A-Za-z0-9._-]+", "-", self.path).strip("-.") or "folder"
        port = "" if self.port in (None, 22) else f"-{self.port}"
        return re.sub(r"[^A-Za-z0-9.-]+", "_", self.host).strip("_") + port

    def __str__(self) -> str:
        if self.host is None:
            return self.path
        host = f"[{self.host}]" if ":" in self.host else self.host
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        return f"ssh://{user}{host}{port}/{quote(self.path.removeprefix('/'), safe='/~')}"


def parse(text: str) -> DeviceAddress:
    """Parse an address.

    Raises:
        PipelineError: it is not an address.
    """
    if "://" not in text:
        if ":" in text.partition("/")[0]:  # a host, for scp and rsync
            todo = "a folder with a colon in its name: ./NAME"
            raise PipelineError(f"{text!r} is no address that can be used", allowed=ALLOWED, todo=todo)
        return _folder(text, text)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise PipelineError(f"{text!r} is no address: {error}", allowed=ALLOWED) from error
    path = unquote(parts.path)
    if parts.query or parts.fragment or parts.password is not None or parts.scheme not in ("ssh", "file"):
        raise PipelineError(f"{text!r} is no address that can be used", allowed=ALLOWED, todo="passwords are not used")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise PipelineError(f"{text!r} names another machine", allowed=ALLOWED, todo="three slashes: file:///path")
        return _folder(path, text)
    host, user = parts.hostname or "", parts.username
    if not _HOST.match(host) or (user is not None and not _USER.match(user)) or port == 0:
        raise PipelineError(f"{text!r} has no host that can be used", allowed=ALLOWED)
    path = path[1:] if path.startswith("/~/") else path
    return DeviceAddress(host, user, port, _checked(path, text))


def _folder(path: str, text: str) -> DeviceAddress:
    whole = os.path.abspath(os.path.expanduser(path)) if path else ""
    return DeviceAddress(None, None, None, _checked(whole, text))


def _checked(path: str, text: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".", "~")]
    if not parts or ".." in parts or not _PATH.match(path):
        raise PipelineError(
            f"{text!r} names no folder that can be used", allowed=ALLOWED, todo="such as /opt/coralline, without .."
        )
    return path.rstrip("/")


def listed(path: Path) -> list[DeviceAddress]:
    """The addresses in a file, one on a line; `#` begins a comment.

    Raises:
        PipelineError: it cannot be read, or has a line that is no address.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot be read: {error}", where=str(path), todo="give a file of addresses") from error
    found = []
    for number, line in enumerate(lines, 1):
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if text:
            try:
                found.append(parse(text))
            except PipelineError as error:
                raise PipelineError(error.what, where=f"{path}:{number}", allowed=ALLOWED) from error
    return found


def distinct(addresses: Iterable[DeviceAddress]) -> list[DeviceAddress]:
    """The addresses, each once.

    Raises:
        PipelineError: there are none.
    """
    found = list(dict.fromkeys(addresses))
    if not found:
        raise PipelineError("no address was given", allowed="--to ADDRESS, --hosts FILE", todo="say where to deploy")
    return found
