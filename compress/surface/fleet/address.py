"""Addresses of devices: `ssh://user@host:port/path`, or a folder on this machine, such as a mounted card."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from compress.core.errors import PipelineError, reason_of

ALLOWED = "ssh://[user@]host[:port]/path, file:///path, or a folder (./NAME if its name has a colon); no passwords"
_SSH = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9._-]{0,63})@)?"
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<path>/[^\x00-\x1f\x7f?#]*)?\Z"
)
_FILE = re.compile(r"file://(?:localhost)?(?P<path>/[^\x00-\x1f\x7f?#]*)\Z")
_PATH = re.compile(r"[^\x00-\x1f\x7f]{1,1000}\Z")


@dataclass(frozen=True)
class DeviceAddress:
    """A folder on a device.

    Attributes:
        host: the name of the host; None for this machine.
        user: the user of the login; None for the default of OpenSSH.
        port: the port of the SSH server; None for the default of OpenSSH.
        path: the folder on the device; `~/…` is below the home folder.
    """

    host: str | None
    user: str | None
    port: int | None
    path: str

    @property
    def name(self) -> str:
        """A file name that differs between devices."""
        if self.host is None:
            return re.sub(r"[^A-Za-z0-9._-]+", "-", self.path).strip("-.") or "folder"
        port = "" if self.port in (None, 22) else f"-{self.port}"
        return re.sub(r"[^A-Za-z0-9.-]+", "_", self.host).strip("_") + port

    @property
    def login(self) -> str:
        """The host as an argument of ssh: `[user@]host`."""
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.host}"

    def __str__(self) -> str:
        if self.host is None:
            return self.path
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.user}@" if self.user else ""
        port = f":{self.port}" if self.port else ""
        return f"ssh://{user}{host}{port}/{quote(self.path.removeprefix('/'), safe='/~')}"


def parse(text: str) -> DeviceAddress:
    """Parse the address of a folder on a device, or on this machine.

    Raises:
        PipelineError: the text is not an address.
    """
    if ":" not in text.partition("/")[0]:  # a colon there is a URL, or a host in the notation of scp
        return _folder(text, text)
    card = _FILE.match(text)
    if card:
        return _folder(unquote(card["path"]), text)
    address = parse_ssh(text, allowed=ALLOWED)
    return replace(address, path=_checked(address.path, text))


def parse_ssh(text: str, *, where: str = "", allowed: str = "ssh://[user@]host[:port][/folder]") -> DeviceAddress:
    """Parse the address of a host, with or without a folder; the path is empty without one.

    `where`, the option with the address, and `allowed`, the accepted forms, are for the message.

    Raises:
        PipelineError: the text is not an address of this form.
    """
    match = _SSH.match(text)
    port = int(match["port"]) if match and match["port"] else None
    if match is None or port not in (None, *range(1, 1 << 16)):
        raise PipelineError(f"{text!r} is not a valid address", where=where, allowed=allowed)
    path = unquote(match["path"] or "")
    if path.startswith("/~/"):
        path = path[1:]
    return DeviceAddress(match["host"].strip("[]"), match["user"], port, path)


def _folder(path: str, text: str) -> DeviceAddress:
    absolute = os.path.abspath(os.path.expanduser(path)) if path else ""
    return DeviceAddress(None, None, None, _checked(absolute, text))


def _checked(path: str, text: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".", "~")]
    if not parts or ".." in parts or not _PATH.match(path):
        hint = "add a folder such as /opt/coralline, without .."
        raise PipelineError(f"{text!r} has no valid folder", allowed=ALLOWED, hint=hint)
    return path.rstrip("/")


def read_addresses(path: Path) -> list[DeviceAddress]:
    """Read addresses from a file, one on each line; `#` starts a comment.

    Raises:
        PipelineError: the file cannot be read, or a line is not an address.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(
            f"cannot be read: {reason_of(error)}", where=str(path), hint="give a file of addresses"
        ) from error
    addresses = []
    for number, line in enumerate(lines, 1):
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if not text:
            continue
        try:
            addresses.append(parse(text))
        except PipelineError as error:
            raise PipelineError(error.what, where=f"{path}:{number}", allowed=ALLOWED) from error
    return addresses


def distinct(addresses: Iterable[DeviceAddress]) -> list[DeviceAddress]:
    """Return the addresses without repetitions, in order.

    Raises:
        PipelineError: the list is empty.
    """
    unique = list(dict.fromkeys(addresses))
    if not unique:
        raise PipelineError("no address was given", allowed="--to ADDRESS, --hosts FILE", hint="add one of them")
    return unique
