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

On the host side (`compress.core.errors`), the same codes have the same meaning.
"""

from __future__ import annotations

from typing import Any, Dict

INSTALL = (
    "python3 -m pip install numpy, and ai-edge-litert (Python 3.10 and newer, 64 bits)"
    " or tflite-runtime 'numpy<2' (others)"
)
"""How to install what the device side needs."""
EXIT_FILES = 6
EXIT_UNSOUND = 14
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


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
