"""What can go wrong on a device, and the exit code of each; every message ends with the one thing to do.

The exit codes of `runner.pyz`, all of them::

    0    done
    1    our own fault, or not classified: please report it
    2    the arguments are wrong
    3    an image cannot be used
    4    the runtime refuses the model
    6    a file cannot be read or written
    8    the bundle does not verify (`bundle.BundleError`)
    11   no TFLite runtime, or one that does not work here
    12   the Edge TPU cannot be used; `kind` says why
    13   the golden vectors give other outputs than they must
    14   `doctor` found an error on this host
    130  interrupted with Ctrl-C

The codes that the host side (`compress.errors`) has too mean the same there.
Runs on Python 3.7 with the standard library alone.
"""

from __future__ import annotations

from typing import Any, Dict

EXIT_FILES = 6
EXIT_UNSOUND = 14
EXIT_INTERRUPTED = 130


class DeviceError(Exception):
    """Something that is told to the user in one message, without a traceback.

    Args:
        what: what was found, in words.
        todo: the one thing to do about it, a command where there is one.
        kind: a word for programs; stays the same from version to version.
    """

    exit_code = 1
    kind = "error"

    def __init__(self, what: str, todo: str = "", kind: str = "") -> None:
        super().__init__(what)
        self.what, self.todo, self.kind = what, todo, kind or self.kind

    def __str__(self) -> str:
        return "%s; to do: %s" % (self.what, self.todo) if self.todo else self.what

    def to_json(self) -> Dict[str, Any]:
        """As a plain map."""
        return {"kind": self.kind, "what": self.what, "todo": self.todo, "exit_code": self.exit_code}


class ArgumentError(DeviceError):
    """The command line, or an argument of the API, is wrong."""

    exit_code = 2
    kind = "arguments"


class ImageError(DeviceError):
    """An image cannot be used."""

    exit_code = 3
    kind = "image"


class LoadError(DeviceError):
    """The runtime refuses the model."""

    exit_code = 4
    kind = "model"


class RuntimeLibraryError(DeviceError):
    """There is no TFLite runtime, or one that does not work here.

    `kind` is `no_runtime`, `runtime_broken`, `numpy_2`, or `crash` or `hang` (on the CPU).
    """

    exit_code = 11
    kind = "no_runtime"


class UnexpectedError(DeviceError):
    """A request of the service failed because of a bug. The log of the service has the traceback.

    Args:
        error: the exception.
    """

    kind = "unexpected"

    def __init__(self, error: BaseException) -> None:
        super().__init__("unexpected %s" % type(error).__name__, "read the log of the service, and report the bug")


class EdgeTpuError(DeviceError):
    """The Edge TPU cannot be used.

    `kind` is one of

    - `no_delegate`: a compiled model, and nothing to run it with
    - `library_missing`, `library_broken`, `libusb_missing`: libedgetpu is not there, or does not load
    - `no_device`, `no_driver`: libedgetpu is there, an Edge TPU is not, or the kernel does not know it
    - `permission`, `busy`: it is there, but not for this user, or another process holds it
    - `old_library`: the model needs a newer libedgetpu
    - `crash`, `hang`: the probe in a child process died or did not come back
    - `refused`: it is there and free, and libedgetpu gives no reason
    """

    exit_code = 12
    kind = "refused"


class DifferentError(DeviceError):
    """The golden vectors give other outputs than they must."""

    exit_code = 13
    kind = "different"
