"""What can crash, tried in a child process first: loading libedgetpu, its delegate, the first inference.

The child is the same interpreter with the same `deploy`, also where that comes out of `runner.pyz`. It is
given the model on its standard input and says on its standard output which step it begins, so that a
crash or a hang has a place. What the parent makes of it is a named failure (`errors.EdgeTpuError`).
Runs on Python 3.7 with numpy and a TFLite runtime.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

import numpy as np

from deploy import host, runtime
from deploy.contract.errors import ArgumentError, DeviceError, EdgeTpuError, LoadError, RuntimeLibraryError
from deploy.runtime import INSTALL, RuntimeOptions

TIMEOUT_S = 60.0
"""An Edge TPU on USB takes three seconds to be opened first, and a large model some more."""
STEPS = ("python", "runtime", "library", "delegate", "interpreter", "inference")
_WORDS = {
    "python": "Python was started",
    "runtime": "the TFLite runtime was imported",
    "library": "libedgetpu was loaded",
    "delegate": "the delegate was made",
    "interpreter": "the model was loaded",
    "inference": "the first inference ran",
}
_CHILD = "import sys; sys.path.insert(0, sys.argv.pop(1)); from deploy import probe; probe.child()"
_OLDER = "python3 -m pip install 'tflite-runtime<2.12' 'numpy<2'"
_REBUILT = "build libedgetpu for this TFLite, see github.com/google-coral/libedgetpu, or use Python 3.9 and older"


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """What became of the child.

    Attributes:
        seconds: since the child was started, by step: when it began; `end` when everything was done.
        step: the last step that began.
        error: `type` and `text` of an exception, with `kind`, `todo` and `exit_code` where it is one of ours.
        returncode: of the process; negative: the signal that ended it; None: it was stopped after the timeout.
        libedgetpu: the version that the library tells.
        noise: what the libraries wrote, the last lines.
    """

    seconds: Dict[str, float]
    step: str
    error: Optional[Dict[str, Any]]
    returncode: Optional[int]
    libedgetpu: Optional[str]
    noise: str

    @property
    def sound(self) -> bool:
        """Whether everything was done."""
        return self.returncode == 0 and self.error is None and "end" in self.seconds


def run(content: bytes, options: RuntimeOptions, timeout_s: float = TIMEOUT_S) -> ProbeResult:
    """Loads a model and runs it once, in a child process.

    Args:
        content: the .tflite file.
        options: where and how it runs.
        timeout_s: how long to wait for it.
    """
    place = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # a folder, or runner.pyz
    header = json.dumps(dataclasses.asdict(options)).encode() + b"\n"
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    returncode: Optional[int] = None
    try:
        told, noise = process.communicate(header + content, timeout=timeout_s)
        returncode = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        told, noise = process.communicate()
    finally:
        if process.poll() is None:  # Ctrl-C
            process.kill()
            process.wait()
    return _outcome(told, noise, returncode, started)


def _outcome(told: bytes, noise: bytes, returncode: Optional[int], started: float) -> ProbeResult:
    seconds: Dict[str, float] = {}
    step, error, version = "python", None, None
    for line in told.splitlines():
        try:
            row = json.loads(line.decode("utf-8", "replace"))
        except ValueError:  # cut off in the middle by a crash
            continue
        if "step" in row:
            step = row["step"] if row["step"] != "end" else step
            seconds[row["step"]] = row["at"] - started
        error = row.get("error", error)
        version = row.get("libedgetpu", version)
    lines = noise.decode("utf-8", "replace").strip().splitlines()
    return ProbeResult(seconds, step, error, returncode, version, "\n".join(lines[-5:]))


def child() -> None:
    """The child's work; never returns an error in another way than on its standard output."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with what is told

    def tell(**row: Any) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    options = RuntimeOptions(**json.loads(sys.stdin.buffer.readline().decode()))
    content = sys.stdin.buffer.read()
    try:
        _steps(content, options, tell)
    except (Exception, SystemError) as error:  # noqa: BLE001 - whatever it is, the parent names it
        row = error.to_json() if isinstance(error, DeviceError) else {}
        text = error.what if isinstance(error, DeviceError) else str(error)
        tell(error=dict(row, type=type(error).__name__, text=text))


def _steps(content: bytes, options: RuntimeOptions, tell: Any) -> None:
    def begin(step: str) -> None:
        tell(step=step, at=time.monotonic())

    begin("runtime")
    found = runtime.find()
    delegate = None
    if options.device != "cpu":
        begin("library")
        tell(libedgetpu=library_version(options.library))
        begin("delegate")
        delegate = runtime.load_delegate(found, options)
    begin("interpreter")
    session = runtime.InferenceSession(found, content, options, delegate)
    begin("inference")
    session.run(np.zeros(session.input["shape"], session.input["dtype"]))
    begin("end")


def library_version(library: str) -> Optional[str]:
    """What libedgetpu says of itself. May crash the process.

    Raises:
        OSError: it does not load.
    """
    loaded = ctypes.pydll.LoadLibrary(library)
    if not hasattr(loaded, "edgetpu_version"):
        return None
    loaded.edgetpu_version.restype = ctypes.c_char_p
    text = loaded.edgetpu_version()
    return None if text is None else str(text.decode("utf-8", "replace"))


_known: Dict[Any, ProbeResult] = {}


def check(content: bytes, options: RuntimeOptions, timeout_s: float = TIMEOUT_S) -> ProbeResult:
    """Makes sure that a model can be loaded and run without danger for this process.

    Asked again for the same model and options, it does not try again what went well.

    Raises:
        EdgeTpuError: the Edge TPU cannot be used, and why.
        ModelError: the runtime refuses the model.
        RuntimeLibraryError: the runtime does not work, or crashes on the CPU.
    """
    key = (hash(content), options)
    if key not in _known:
        outcome = run(content, options, timeout_s)
        if not outcome.sound:
            raise failure(outcome, options)
        _known[key] = outcome
    return _known[key]


def failure(outcome: ProbeResult, options: RuntimeOptions) -> DeviceError:
    """The name and the remedy of what went wrong."""
    text = outcome.error["text"] if outcome.error else ""
    if outcome.returncode is None:
        return _hang(outcome, options)
    if outcome.returncode < 0:
        return _crash(outcome, options)
    if outcome.error and "kind" in outcome.error:
        return _ours(outcome.error)
    if outcome.step == "library":
        return _unloadable(options.library, text)
    if outcome.step == "delegate":
        return _without_delegate(text, options)
    return LoadError("%s, and then: %s" % (_before(outcome), (text or outcome.noise or "nothing was told")[:500]))


def _ours(error: Dict[str, Any]) -> DeviceError:
    for kind in (EdgeTpuError, RuntimeLibraryError, LoadError, ArgumentError):
        if kind.exit_code == error["exit_code"]:
            return kind(error["what"], error["todo"], error["kind"])
    return DeviceError(error["what"], error["todo"], error["kind"])


def _before(outcome: ProbeResult) -> str:
    """What went well before the last step."""
    done = ["python"] + [step for step in STEPS if step in outcome.seconds and step != outcome.step]
    return _WORDS[done[-1]]


def _crash(outcome: ProbeResult, options: RuntimeOptions) -> DeviceError:
    number = -(outcome.returncode or 0)
    name = signal.Signals(number).name if number in list(signal.Signals) else "signal %d" % number
    what = "the trial in a child process was ended by %s after %s" % (name, _before(outcome))
    if outcome.step in ("python", "runtime"):
        return RuntimeLibraryError(what, INSTALL, "crash")
    found = runtime.find()
    if options.device == "cpu":  # SIGILL, for one: kernels of instructions that an old processor does not have
        what += "; on the CPU, with %s %s" % (found.name, found.version)
        return RuntimeLibraryError(what, "install another version of it, or: %s" % INSTALL, "crash")
    if found.too_new_for_libedgetpu_16:
        what += "; %s %s is newer than what Google's libedgetpu 16.0 works with" % (found.name, found.version)
        return EdgeTpuError(what, _OLDER if sys.version_info < (3, 10) else _REBUILT, "crash")
    return EdgeTpuError(what, "sudo apt-get install --reinstall libedgetpu1-std", "crash")


def _hang(outcome: ProbeResult, options: RuntimeOptions) -> DeviceError:
    what = "the trial in a child process did not come back; before, %s" % _before(outcome)
    if options.device == "cpu":
        return RuntimeLibraryError(what, INSTALL, "hang")
    held = _held(_matching(options.device))
    if held:
        return _busy(held)
    return EdgeTpuError(what, "unplug the Edge TPU and plug it in again (on a board: sudo reboot)", "hang")


def _unloadable(library: str, text: str) -> DeviceError:
    if "libusb" in text:
        return EdgeTpuError(
            "%s is here, but libusb is not: %s" % (library, text), "sudo apt-get install libusb-1.0-0", "libusb_missing"
        )
    if os.path.basename(library) in text and "cannot open shared object file" in text:
        return EdgeTpuError(
            "%s is not installed" % library,
            "sudo apt-get install libedgetpu1-std (its package source: coral.ai/software)",
            "library_missing",
        )
    return EdgeTpuError(
        "%s does not load: %s" % (library, text), "sudo apt-get install --reinstall libedgetpu1-std", "library_broken"
    )


def _matching(device: str) -> List[Dict[str, Any]]:
    """The Edge TPUs of the host that a device option may mean."""
    found = host.edge_tpus()
    kind, _, index = device.partition(":")
    chosen = [each for each in found if not kind or each["device"].startswith(kind)]
    return chosen[int(index) : int(index) + 1] if index else chosen


def _held(found: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [holder for each in found if each["node"] for holder in host.holders(each["node"])]


def _busy(held: List[Dict[str, Any]]) -> DeviceError:
    names = ", ".join("%s (process %d)" % (each["name"], each["pid"]) for each in held)
    return EdgeTpuError("the Edge TPU is in use by %s" % names, "kill %d" % held[0]["pid"], "busy")


def _without_delegate(text: str, options: RuntimeOptions) -> DeviceError:
    """The name of a null delegate. The library gives no reason; the host's own facts do."""
    reason = " ".join(text.replace("Failed to load delegate from %s" % options.library, "").split())
    found = _matching(options.device)
    held = _held(found)
    if held:
        return _busy(held)
    if "busy" in reason.lower():
        return EdgeTpuError("the Edge TPU is in use: %s" % reason, "sudo fuser -v /dev/apex_* /dev/bus/usb/*/*", "busy")
    return _absent(options) if not found else _unopened(found, reason)


def _absent(options: RuntimeOptions) -> DeviceError:
    others = [each["device"] for each in host.edge_tpus()]
    if others:
        what = "there is no Edge TPU %s; here is %s" % (options.device, ", ".join(others))
        return EdgeTpuError(what, "use --device %s" % others[0], "no_device")
    what = "%s is here, but no Edge TPU is on USB or PCIe" % options.library
    return EdgeTpuError(
        what, "plug it in, and look for 1a6e:089a, 18d1:9302 or 1ac1:089a with: lsusb; lspci -n", "no_device"
    )


def _unopened(found: List[Dict[str, Any]], reason: str) -> DeviceError:
    first = found[0]
    if first["node"] is None:
        what = "the Edge TPU %s is on the bus, but the kernel made no device file for it" % first["device"]
        return EdgeTpuError(what, "sudo apt-get install gasket-dkms && sudo modprobe apex", "no_driver")
    if not first["accessible"]:
        group = "plugdev" if first["device"].startswith("usb") else "apex"
        what = "this user may not open the Edge TPU's file %s" % first["node"]
        return EdgeTpuError(what, "sudo usermod -aG %s $USER, and log in again" % group, "permission")
    what = "the Edge TPU %s is there and free, and libedgetpu does not open it (%s)" % (
        first["device"],
        reason or "it gives no reason",
    )
    return EdgeTpuError(what, "unplug it and plug it in again (on a board: sudo reboot)", "refused")
