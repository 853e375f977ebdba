"""Interpreters for the Edge TPU and the CPU.

`make_interpreter` also takes bundles (.coralline). A model that is not compiled for the Edge TPU runs on the CPU and
needs no libedgetpu.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from deploy.contract import bundle, trust
from deploy.contract.errors import EdgeTpuError
from deploy.contract.preprocessing import Array
from deploy.runner import host, probe, runtime

_ZIP = b"PK\x03\x04"


class BundledInterpreter(NamedTuple):
    """The verified bundle that an interpreter was made from, and the role of the model in use."""

    bundle: bundle.Bundle
    role: str


_bundled: "weakref.WeakKeyDictionary[Any, BundledInterpreter]" = weakref.WeakKeyDictionary()


def make_interpreter(
    model_path_or_content: Union[str, bytes, "os.PathLike[str]"],
    device: Optional[str] = None,
    delegate: Any = None,
) -> Any:
    """Return an interpreter of the installed TFLite runtime.

    Of a bundle, it takes the compiled model if an Edge TPU is connected or `delegate` is passed, otherwise the int8
    model. A bundle without an int8 model gives its original model.

    Args:
        model_path_or_content: a path, or the content of a .tflite file or of a bundle.
        device: `usb`, `pci`, `:0`, `usb:0`, `pci:1`: this Edge TPU must exist, also for a model that is not compiled;
            None: any Edge TPU, for a compiled model; `cpu`: no Edge TPU.
        delegate: a delegate of `load_edgetpu_delegate`; `device` is then ignored.

    Raises:
        ValueError: the file cannot be read, or libedgetpu cannot open the Edge TPU.
        BundleError: the bundle was changed.
        TrustError: this device trusts a root, and the bundle is not in the signed metadata.
        EdgeTpuError: the model is compiled for the Edge TPU, and the device is `cpu`.
        LoadError: the runtime refuses the model.
        RuntimeLibraryError: no TFLite runtime is installed.
    """
    content = _content(model_path_or_content)
    opened = None
    if content.startswith(_ZIP):
        path = "" if isinstance(model_path_or_content, bytes) else os.fspath(model_path_or_content)
        opened = _bundled_interpreter(content, path, device, delegate)
        content = opened.bundle.content(opened.role)
    library = runtime.find()
    compiled = runtime.CUSTOM_OP.encode() in content
    if compiled and delegate is None and device == "cpu":
        hint = "pass the model that is not compiled, or another device"
        raise EdgeTpuError("the model is compiled for the Edge TPU, and the device is cpu", hint, "no_delegate")
    if delegate is None and device != "cpu" and (compiled or device):
        delegate = load_edgetpu_delegate({"device": device} if device else None)
    interpreter = runtime.allocated_interpreter(library, content, runtime.RuntimeOptions(), delegate)
    if opened is not None:
        _bundled[interpreter] = opened
    return interpreter


def bundle_of(interpreter: Any) -> Optional[BundledInterpreter]:
    """Return the bundle of an interpreter; None: it was made from a .tflite file. `pycoral` does not have it."""
    return _bundled.get(interpreter)


def load_edgetpu_delegate(options: Optional[Dict[str, Any]] = None) -> Any:
    """Return a delegate of libedgetpu with its options, such as `device`.

    Raises:
        ValueError: libedgetpu cannot open the Edge TPU.
        OSError: libedgetpu is not installed.
    """
    return runtime.find().module.load_delegate(runtime.LIBRARY, options or {})


def list_edge_tpus() -> List[Dict[str, str]]:
    """Return `type` (`usb` or `pci`) and `path` (the device file) of each Edge TPU, in the order of libedgetpu."""
    tpus = host.edge_tpus()
    # libedgetpu lists PCIe first; its names usb:0 and pci:0 count within each bus.
    tpus.sort(key=lambda tpu: str(tpu["device"]).startswith("usb"))
    return [{"type": str(tpu["device"]).partition(":")[0], "path": str(tpu["node"] or "")} for tpu in tpus]


def get_runtime_version() -> str:
    """Return the version that libedgetpu reports.

    Raises:
        OSError: libedgetpu is not installed.
    """
    return probe.library_version(runtime.LIBRARY) or ""


def set_verbosity(verbosity: int) -> bool:
    """Set how much libedgetpu logs: 0 (nothing) to 10. Return whether libedgetpu accepts it.

    Raises:
        OSError: libedgetpu is not installed.
    """
    library = ctypes.pydll.LoadLibrary(runtime.LIBRARY)
    if not hasattr(library, "edgetpu_verbosity"):
        return False
    library.edgetpu_verbosity(ctypes.c_int(verbosity))
    return True


def supports_dmabuf(interpreter_handle: Any) -> bool:
    """Return False: inputs are always copied."""
    return False


def run_inference(interpreter: Any, input_data: Any) -> None:
    """Run one inference on a raw input tensor, also while the program holds views of the tensors, as `pycoral` does.

    A view of an output then shows the new output.

    Args:
        interpreter: an allocated interpreter.
        input_data: the values of the first input, flat: an array, `bytes`, a pair of `ctypes.c_void_p` and the number
            of bytes, or a `Gst.Buffer`.

    Raises:
        ValueError: the data have fewer values than the input.
        TypeError: the data have another type.
    """
    detail = interpreter.get_input_details()[0]
    shape = tuple(int(length) for length in detail["shape"])
    count = int(np.prod(shape))
    size, memory = _raw(input_data)
    if size < count:
        raise ValueError("input size=%d, expected=%d." % (size, count))
    dtype = np.dtype(detail["dtype"])
    if memory.nbytes < count * dtype.itemsize:
        raise ValueError("the input has %d bytes, and the model takes %d" % (memory.nbytes, count * dtype.itemsize))
    values = np.frombuffer(memory, dtype, count)
    interpreter.set_tensor(detail["index"], values.reshape(shape))
    native = getattr(interpreter, "_interpreter", None)
    if native is None:
        interpreter.invoke()
    else:
        native.Invoke()  # `invoke` refuses to run while a view exists


def _content(model: Union[str, bytes, "os.PathLike[str]"]) -> bytes:
    if isinstance(model, bytes):
        return model
    try:
        with open(model, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise ValueError("Could not open %r: %s" % (os.fspath(model), error))


def _bundled_interpreter(content: bytes, path: str, device: Optional[str], delegate: Any) -> BundledInterpreter:
    """Return the verified bundle with the model that fits the device."""
    trusted = trust.find()
    if trusted is not None:
        trusted.require_bundle(content, path)
    opened = bundle.Bundle(content)
    on_tpu = delegate is not None or (device != "cpu" and bool(device or host.edge_tpus()))
    if "compiled" in opened.roles and on_tpu:
        return BundledInterpreter(opened, "compiled")
    for role in ("int8", "original"):
        if role in opened.roles:
            return BundledInterpreter(opened, role)
    return BundledInterpreter(opened, "compiled")


def _raw(data: Any) -> Tuple[int, Array]:
    """Return the number of elements that the caller passed, and their memory as bytes."""
    if isinstance(data, bytes):
        return len(data), np.frombuffer(data, np.uint8)
    if isinstance(data, np.ndarray):
        return len(data), np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], ctypes.c_void_p):
        pointer, size = data
        if isinstance(size, int):
            return size, np.frombuffer(ctypes.string_at(pointer, size), np.uint8)
    if hasattr(data, "extract_dup") and hasattr(data, "get_size"):  # a Gst.Buffer
        copy = bytes(data.extract_dup(0, data.get_size()))
        return len(copy), np.frombuffer(copy, np.uint8)
    raise TypeError("input data type is not supported.")
