"""The exceptions of the device side, and their exit codes. Every message ends with what to do.

The exit codes of `runner.pyz`::

    0    success
    1    a bug, or an unclassified error: please report it
    2    the arguments are wrong
    3    a sample cannot be used
    4    the runtime refuses the model
    6    a file cannot be read or written
    8    the bundle is damaged (`bundle.BundleError`), or not trusted (`trust.TrustError`)
    11   the TFLite runtime is missing, or does not work
    12   the Edge TPU cannot be used; `kind` has the cause
    13   the outputs differ from the golden outputs
    14   `doctor` found an error on this host
    130  interrupted with Ctrl-C
    141  the program that reads stdout closed it, as `head` does

On the host side (`compress.core.errors`), the same codes have the same meaning. `file_error` and `address_error` write
errors of the operating system as sentences with what to do.
"""

from __future__ import annotations

import errno
import os
from typing import Any, Dict, Tuple

RUNTIMES = "ai-edge-litert (Python 3.10 and newer, 64 bits) or tflite-runtime 'numpy<2' (others)"
INSTALL = "python3 -m pip install numpy, and " + RUNTIMES
"""How to install what the device side needs."""
EXIT_FILES = 6  # in the table above
EXIT_UNSOUND = 14  # in the table above
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
EXIT_PIPE = 141  # 128 + SIGPIPE, as in shells


class DeviceError(Exception):
    """An error that the user sees as one message, without a traceback.

    Args:
        what: the problem.
        hint: what to do about it, if possible a command.
        kind: an identifier for programs, stable across versions.
    """

    exit_code = 1
    kind = "error"

    def __init__(self, what: str, hint: str = "", kind: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.kind = kind or self.kind

    def __str__(self) -> str:
        return "%s; to do: %s" % (self.what, self.hint) if self.hint else self.what

    def to_json(self) -> Dict[str, Any]:
        """Return the error as a plain map."""
        return {"kind": self.kind, "what": self.what, "hint": self.hint, "exit_code": self.exit_code}


class ArgumentError(DeviceError):
    """The command line, or an argument of the API, is wrong."""

    exit_code = 2
    kind = "arguments"


class FileError(DeviceError):
    """A file, a folder or an address cannot be used."""

    exit_code = EXIT_FILES
    kind = "file"


class ImageError(DeviceError):
    """A sample, which may be an image or a sound, cannot be used."""

    exit_code = 3
    kind = "image"


class LoadError(DeviceError):
    """The runtime refuses the model."""

    exit_code = 4
    kind = "model"


class RuntimeLibraryError(DeviceError):
    """The TFLite runtime, or another library that a command needs, is missing, or does not work.

    `kind` is `no_numpy`, `no_waitress`, `no_runtime`, `runtime_broken`, `numpy_2`, or `crash` or `hang` (on the CPU).
    """

    exit_code = 11
    kind = "no_runtime"


class UnexpectedError(DeviceError):
    """A request of the service failed because of a bug. The log of the service has the traceback."""

    kind = "unexpected"

    def __init__(self, error: BaseException) -> None:
        super().__init__("unexpected %s" % type(error).__name__, "read the log of the service, and report the bug")


class EdgeTpuError(DeviceError):
    """The Edge TPU cannot be used.

    `kind` is one of

    - `no_delegate`: the model is compiled, and no delegate is loaded
    - `library_missing`, `library_broken`, `libusb_missing`: libedgetpu is not installed, or does not load
    - `no_device`, `no_driver`: no Edge TPU is connected, or the kernel has no driver for it
    - `permission`, `busy`: this user may not open it, or another process has opened it
    - `old_library`: the model needs a newer libedgetpu
    - `crash`, `hang`: the trial in a child process crashed or did not end
    - `refused`: it is connected and free, and libedgetpu gives no reason
    """

    exit_code = 12
    kind = "refused"


class DifferentError(DeviceError):
    """The outputs differ from the golden outputs."""

    exit_code = 13
    kind = "different"


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
        return _explained(error, address, {**_CAUSES, errno.EADDRINUSE: _ADDRESS_CAUSES[errno.EADDRINUSE]})
    host = "[%s]" % address[0] if ":" in address[0] else address[0]
    return _explained(error, "%s:%d" % (host, address[1]), {**_CAUSES, **_ADDRESS_CAUSES})


def _explained(error: OSError, name: Any, causes: Dict[int, Tuple[str, str]]) -> FileError:
    cause, hint = causes.get(error.errno or 0, (error.strerror or str(error) or type(error).__name__, ""))
    own_text = error.strerror or ""
    if error.errno is not None and own_text and own_text != os.strerror(error.errno):
        cause = own_text  # raised by this program, with its own words
    return FileError("%s: %s" % (name, cause) if name is not None else cause, hint)
