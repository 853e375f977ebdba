"""A trial of a model in a child process: loading libedgetpu, its delegate, the model, and the first inference.

Each of these steps can crash or hang the process. The child reports each step before it begins it, so that the parent
can name the step that failed (`errors.EdgeTpuError`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from typing import Any, Dict, List, Optional

from deploy.contract.errors import ArgumentError, DeviceError, EdgeTpuError, LoadError, RuntimeLibraryError
from deploy.runner import child_process, host, runtime
from deploy.runner.child_process import ChildResult, Report
from deploy.runner.problems import LIBRARY_RELEASES
from deploy.runner.runtime import INSTALL, RuntimeOptions

TIMEOUT_S = 60.0
"""The first opening of an Edge TPU on USB takes three seconds, and loading a large model more."""
_STEPS = {
    "python": "Python was started",
    "runtime": "the TFLite runtime was imported",
    "library": "libedgetpu was loaded",
    "delegate": "the delegate was made",
    "interpreter": "the model was loaded",
    "inference": "the first inference ran",
}
"""The steps in their order, and what each has done when it succeeded."""
_INSTALL_OLDER = "python3 -m pip install 'tflite-runtime<2.12' 'numpy<2'"
_BUILD = "install a libedgetpu that was built for this TFLite (%s), or use Python 3.9 or older" % LIBRARY_RELEASES
_REINSTALL = "sudo apt-get install --reinstall libedgetpu1-std"
_REPLUG = "unplug the Edge TPU and plug it in again (on a board: sudo reboot)"


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """The result of a trial.

    Attributes:
        seconds: the time from the start of the child to the beginning of each step; `end`: to the end of the last one.
        error: `type` and `text` of an exception; for a `DeviceError` also `kind`, `hint` and `exit_code`.
        returncode: see `ChildResult`.
        stderr: the last lines that the libraries printed.
    """

    seconds: Dict[str, float]
    step: str
    error: Optional[Dict[str, Any]]
    returncode: Optional[int]
    libedgetpu: Optional[str]
    stderr: str

    @property
    def sound(self) -> bool:
        """Whether all steps succeeded."""
        return self.returncode == 0 and self.error is None and "end" in self.seconds


def run(content: bytes, options: RuntimeOptions, timeout_s: float = TIMEOUT_S) -> ProbeResult:
    """Load a .tflite file and run the model once, in a child process."""
    header = json.dumps(dataclasses.asdict(options)).encode() + b"\n"
    started = time.monotonic()
    return _result(child_process.run("deploy.runner.probe", header + content, timeout_s), started)


def _result(ended: ChildResult, started: float) -> ProbeResult:
    seconds: Dict[str, float] = {}
    step = "python"
    error = None
    version = None
    for row in ended.reports:
        if "step" in row:
            step = row["step"] if row["step"] != "end" else step
            seconds[row["step"]] = row["at"] - started
        error = row.get("error", error)
        version = row.get("libedgetpu", version)
    stderr = "\n".join(ended.stderr.strip().splitlines()[-5:])
    return ProbeResult(seconds, step, error, ended.returncode, version, stderr)


def child() -> None:
    """Try the model on standard input: the work of the child process. It reports exceptions to its parent."""
    report = child_process.reporter()
    options = RuntimeOptions(**json.loads(sys.stdin.buffer.readline().decode()))
    content = sys.stdin.buffer.read()
    try:
        _try_model(content, options, report)
    except (Exception, SystemError) as error:  # noqa: BLE001 - the parent names the failure
        row = error.to_json() if isinstance(error, DeviceError) else {}
        text = error.what if isinstance(error, DeviceError) else str(error)
        report(error=dict(row, type=type(error).__name__, text=text))


def _try_model(content: bytes, options: RuntimeOptions, report: Report) -> None:
    def begin(step: str) -> None:
        report(step=step, at=time.monotonic())

    begin("runtime")
    library = runtime.find()
    delegate = None
    if options.device != "cpu":
        begin("library")
        report(libedgetpu=library_version(options.library))
        begin("delegate")
        delegate = runtime.load_delegate(library, options)
    begin("interpreter")
    session = runtime.InferenceSession(library, content, options, delegate)
    begin("inference")
    session.run_tensors(session.zeros())
    begin("end")


def library_version(library: str) -> Optional[str]:
    """Return the version that libedgetpu reports, or None if it has no function for that. May crash the process.

    Raises:
        OSError: the library does not load.
    """
    loaded = ctypes.pydll.LoadLibrary(library)
    if not hasattr(loaded, "edgetpu_version"):
        return None
    loaded.edgetpu_version.restype = ctypes.c_char_p
    text = loaded.edgetpu_version()
    return None if text is None else str(text.decode("utf-8", "replace"))


_known: Dict[Any, ProbeResult] = {}


def check(content: bytes, options: RuntimeOptions, timeout_s: float = TIMEOUT_S) -> ProbeResult:
    """Check in a child process that a model can be loaded and run. A success is remembered.

    Raises:
        EdgeTpuError: the Edge TPU cannot be used; the message has the cause.
        LoadError: the runtime refuses the model.
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
    """Return the error for a trial that failed: its cause, and the command that fixes it."""
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
    return LoadError("%s, and then: %s" % (_last_success(outcome), (text or outcome.stderr or "no message")[:500]))


def _ours(error: Dict[str, Any]) -> DeviceError:
    for kind in (EdgeTpuError, RuntimeLibraryError, LoadError, ArgumentError):
        if kind.exit_code == error["exit_code"]:
            return kind(error["what"], error["hint"], error["kind"])
    return DeviceError(error["what"], error["hint"], error["kind"])


def _last_success(outcome: ProbeResult) -> str:
    done = ["python"] + [step for step in _STEPS if step in outcome.seconds and step != outcome.step]
    return _STEPS[done[-1]]


def _crash(outcome: ProbeResult, options: RuntimeOptions) -> DeviceError:
    number = -(outcome.returncode or 0)
    name = signal.Signals(number).name if number in list(signal.Signals) else "signal %d" % number
    what = "the trial in a child process was ended by %s after %s" % (name, _last_success(outcome))
    if outcome.step in ("python", "runtime"):
        return RuntimeLibraryError(what, INSTALL, "crash")
    library = runtime.find()
    version = "%s %s" % (library.name, library.version)
    if options.device == "cpu":  # for example SIGILL: an old processor lacks the instructions of a kernel
        what += "; on the CPU, with %s" % version
        return RuntimeLibraryError(what, "install another version of it, or: %s" % INSTALL, "crash")
    if library.too_new_for_libedgetpu_16:
        what += "; %s is too new for Google's libedgetpu 16.0" % version
        return EdgeTpuError(what, _INSTALL_OLDER if sys.version_info < (3, 10) else _BUILD, "crash")
    return EdgeTpuError(what, _REINSTALL, "crash")


def _hang(outcome: ProbeResult, options: RuntimeOptions) -> DeviceError:
    what = "the trial in a child process did not end in time; the last success: %s" % _last_success(outcome)
    if options.device == "cpu":
        return RuntimeLibraryError(what, INSTALL, "hang")
    holders = _holders(_matching(options.device))
    return _busy(holders) if holders else EdgeTpuError(what, _REPLUG, "hang")


def _unloadable(library: str, text: str) -> DeviceError:
    if "libusb" in text:
        what = "%s is installed, but libusb is not: %s" % (library, text)
        return EdgeTpuError(what, "sudo apt-get install libusb-1.0-0", "libusb_missing")
    if os.path.basename(library) in text and "cannot open shared object file" in text:
        hint = "sudo apt-get install libedgetpu1-std (its package source: coral.ai/software)"
        return EdgeTpuError("%s is not installed" % library, hint, "library_missing")
    return EdgeTpuError("%s does not load: %s" % (library, text), _REINSTALL, "library_broken")


def _matching(device: str) -> List[Dict[str, Any]]:
    """Return the Edge TPUs of the host that a device option can mean."""
    kind, _, index = device.partition(":")
    tpus = [tpu for tpu in host.edge_tpus() if not kind or tpu["device"].startswith(kind)]
    return tpus[int(index) : int(index) + 1] if index else tpus


def _holders(tpus: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [holder for tpu in tpus if tpu["node"] for holder in host.holders(tpu["node"])]


def _busy(holders: List[Dict[str, Any]]) -> DeviceError:
    names = ", ".join("%(name)s (process %(pid)d)" % holder for holder in holders)
    return EdgeTpuError("the Edge TPU is in use by %s" % names, "kill %d" % holders[0]["pid"], "busy")


def _without_delegate(text: str, options: RuntimeOptions) -> DeviceError:
    """Return the error for a delegate that libedgetpu does not create. It gives no reason: the host's files do."""
    reason = " ".join(text.replace("Failed to load delegate from %s" % options.library, "").split())
    tpus = _matching(options.device)
    holders = _holders(tpus)
    if holders:
        return _busy(holders)
    if "busy" in reason.lower():
        return EdgeTpuError("the Edge TPU is in use: %s" % reason, "sudo fuser -v /dev/apex_* /dev/bus/usb/*/*", "busy")
    return _not_opened(tpus[0], reason) if tpus else _absent(options)


def _absent(options: RuntimeOptions) -> DeviceError:
    others = [tpu["device"] for tpu in host.edge_tpus()]
    if others:
        what = "no Edge TPU %s is connected; connected: %s" % (options.device, ", ".join(others))
        return EdgeTpuError(what, "use --device %s" % others[0], "no_device")
    what = "%s is installed, but no Edge TPU is on USB or PCIe" % options.library
    hint = "plug it in, and look for 1a6e:089a, 18d1:9302 or 1ac1:089a with: lsusb; lspci -n"
    return EdgeTpuError(what, hint, "no_device")


def _not_opened(tpu: Dict[str, Any], reason: str) -> DeviceError:
    if tpu["node"] is None:
        what = "the Edge TPU %s is on the bus, but has no device file" % tpu["device"]
        return EdgeTpuError(what, "sudo apt-get install gasket-dkms && sudo modprobe apex", "no_driver")
    if not tpu["accessible"]:
        group = "plugdev" if tpu["device"].startswith("usb") else "apex"
        what = "this user may not open the Edge TPU's file %s" % tpu["node"]
        return EdgeTpuError(what, "sudo usermod -aG %s $USER, and log in again" % group, "permission")
    what = "the Edge TPU %s is connected and free, but libedgetpu cannot open it" % tpu["device"]
    return EdgeTpuError("%s (%s)" % (what, reason or "it gives no reason"), _REPLUG, "refused")
