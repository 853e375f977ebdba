"""Errors of the operating system as sentences with what to do, for all commands."""

from __future__ import annotations

import errno
import os
from typing import Any, Dict, Tuple

from deploy.contract.errors import DeviceError, FileError

_CAUSES: Dict[int, Tuple[str, str]] = {
    errno.EACCES: ("this user may not use it", "check its owner and mode with ls -l, or choose another path"),
    errno.EPERM: ("this user may not do that", "check its owner and mode with ls -l, or choose another path"),
    errno.ENOENT: ("it does not exist", "check the path"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "check the path"),
    errno.EISDIR: ("it is a folder", "name a file"),
    errno.EEXIST: ("it exists already", "choose another path, or remove it"),
    errno.ENOTEMPTY: ("the folder is not empty", "choose another path, or empty it"),
    errno.ENAMETOOLONG: ("the path is too long", "choose a shorter one"),
    errno.ELOOP: ("its symbolic links go in a circle", "check the path with ls -l"),
    errno.ENOSPC: ("the disk is full", "free some space: df -h shows how much there is"),
    errno.EDQUOT: ("the disk quota of this user is used up", "free some space, or ask for a larger quota"),
    errno.EFBIG: ("the file is too large for this file system", "write to another file system"),
    errno.EROFS: ("the file system is read-only", "write to another folder, or mount it with mount -o remount,rw"),
    errno.EIO: ("the disk does not work", "look at the end of dmesg; an SD card may be worn out"),
    errno.ENXIO: ("nothing reads from it or writes to it", "check the path"),
    errno.ENODEV: ("there is no such device", "check that it is connected"),
    errno.EBUSY: ("another process uses it", "end the other process"),
    errno.ETXTBSY: ("it is a program that runs", "end the program, or choose another path"),
    errno.EMFILE: ("this process has too many open files", "raise the limit with ulimit -n"),
    errno.ENFILE: ("the system has too many open files", "end other programs"),
    errno.ENOMEM: ("there is not enough memory", "end other programs; free -h shows the memory"),
}
_ADDRESS_CAUSES: Dict[int, Tuple[str, str]] = {
    errno.EADDRINUSE: (
        "another process listens on this address",
        "end it (ss -ltnp shows it), or use another one: --port 0 takes any free port",
    ),
    errno.EADDRNOTAVAIL: ("this host does not have this address", "use one that `ip addr` shows, or 127.0.0.1"),
    errno.EACCES: ("ports below 1024 are for root", "use --port 8080, or a proxy or systemd socket for the lower port"),
    errno.EAFNOSUPPORT: ("this host does not have this kind of address", "use --host 127.0.0.1"),
}


def file_error(error: OSError) -> DeviceError:
    """Return the error for a file that cannot be used; its cause is one sentence, without an errno."""
    name = error.filename2 if error.filename2 is not None else error.filename
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    return _explained(error, name, _CAUSES)


def address_error(error: OSError, address: Any, is_path: bool) -> DeviceError:
    """Return the error for an address that the service cannot listen on: a Unix socket's path, or host and port."""
    if is_path:
        causes = dict(_CAUSES)
        causes[errno.EADDRINUSE] = _ADDRESS_CAUSES[errno.EADDRINUSE]
        return _explained(error, address, causes)
    host = "[%s]" % address[0] if ":" in address[0] else address[0]
    return _explained(error, "%s:%d" % (host, address[1]), {**_CAUSES, **_ADDRESS_CAUSES})


def _explained(error: OSError, name: Any, causes: Dict[int, Tuple[str, str]]) -> FileError:
    cause, hint = causes.get(error.errno or 0, (error.strerror or str(error) or type(error).__name__, ""))
    own_text = error.strerror or ""
    if error.errno is not None and own_text and own_text != os.strerror(error.errno):
        cause = own_text  # raised by this program, with its own words
    return FileError("%s: %s" % (name, cause) if name is not None else cause, hint)
