"""The TFLite runtime of this Python, and models loaded into it.

The first one that is installed is used: `ai_edge_litert`, `tflite_runtime` (also version 2.5 of Mendel Linux),
`tensorflow`. The environment variable CORALLINE_RUNTIME selects one of them.

The signature of the interpreter shows which options a runtime has; its version does not: `num_threads` (TFLite 2.3),
`experimental_op_resolver_type` and `experimental_preserve_all_tensors` (2.5).
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.errors import (
    RUNTIMES,
    ArgumentError,
    DeviceError,
    EdgeTpuError,
    LoadError,
    RuntimeLibraryError,
)
from deploy.contract.preprocessing import Array
from deploy.contract.tensors import TensorDescription, as_row
from deploy.runner.host import needs_numpy_1, version_numbers

LIBRARY = "libedgetpu.so.1"
CUSTOM_OP = "edgetpu-custom-op"
NEWEST_FOR_LIBEDGETPU_16 = (2, 11, 1)
"""With newer TFLite, Google's libedgetpu 16.0 can crash the process. Source: issues of google-coral/edgetpu."""
INSTALL = "python3 -m pip install " + RUNTIMES
RESOLVERS = {"default": "AUTO", "reproducible": "BUILTIN_WITHOUT_DEFAULT_DELEGATES", "reference": "BUILTIN_REF"}
"""Kernels by our name: the fastest ones; those without XNNPACK, whose int8 results differ by a few steps between
versions; the plain C++ ones."""
_DEVICE = re.compile(r"(cpu|(usb|pci)?(:[0-9]{1,3})?)\Z")


@dataclasses.dataclass(frozen=True)
class RuntimeOptions:
    """The options for loading a model.

    Attributes:
        device: `cpu`, or a device name of libedgetpu: `` (any Edge TPU), `usb`, `pci`, `usb:0`, `pci:1`, `:0`.
        kernels: a key of RESOLVERS; runtimes before 2.5 only have `default`.
        library: the name or path of libedgetpu.
        keep: whether intermediate tensors can be read after an inference.
    """

    device: str = "cpu"
    threads: int = 1
    kernels: str = "default"
    library: str = LIBRARY
    keep: bool = False

    def __post_init__(self) -> None:
        if not _DEVICE.match(self.device):
            raise ArgumentError("%r is not a device" % self.device, "use cpu, usb, pci, usb:0 or pci:1")
        if self.threads < 1:
            raise ArgumentError("the number of threads is %d, and must be at least 1" % self.threads, "use 1 or more")


@dataclasses.dataclass(frozen=True)
class Runtime:
    """An imported TFLite runtime.

    Attributes:
        module: the `interpreter` module of the package.
        arguments: the argument names of the `Interpreter`.
    """

    name: str
    version: str
    module: Any
    arguments: FrozenSet[str]

    def kernels(self) -> Tuple[str, ...]:
        """Return the kernels that can be selected, by our names."""
        if "experimental_op_resolver_type" not in self.arguments or not hasattr(self.module, "OpResolverType"):
            return ("default",)
        return tuple(name for name, member in RESOLVERS.items() if hasattr(self.module.OpResolverType, member))

    @property
    def keeps_tensors(self) -> bool:
        """Whether intermediate tensors can be read after an inference."""
        return "experimental_preserve_all_tensors" in self.arguments

    @property
    def too_new_for_libedgetpu_16(self) -> bool:
        """Whether it is newer than the last version that works with Google's libedgetpu 16.0."""
        return self.name == "ai_edge_litert" or version_numbers(self.version) > NEWEST_FOR_LIBEDGETPU_16

    def describe(self) -> Dict[str, Any]:
        """Return name, version and kernels as a plain map."""
        return {"name": self.name, "version": self.version, "numpy": np.__version__, "kernels": list(self.kernels())}


_PACKAGES = ("ai_edge_litert", "tflite_runtime", "tensorflow")
"""The packages with an interpreter, in the order of preference."""


def _import(name: str) -> Tuple[Any, Any]:
    """Return one of _PACKAGES, and its module `interpreter`."""
    if name == "ai_edge_litert":
        import ai_edge_litert
        from ai_edge_litert import interpreter

        return ai_edge_litert, interpreter
    if name == "tflite_runtime":
        import tflite_runtime
        from tflite_runtime import interpreter

        return tflite_runtime, interpreter
    import tensorflow
    from tensorflow.lite.python import interpreter

    return tensorflow, interpreter


def find() -> Runtime:
    """Return the first runtime that is installed, or the runtime that CORALLINE_RUNTIME names.

    Raises:
        RuntimeLibraryError: no runtime is installed, or it cannot be imported.
    """
    selected = os.environ.get("CORALLINE_RUNTIME", "")
    if selected and selected not in _PACKAGES:
        allowed = ", ".join(_PACKAGES)
        raise ArgumentError("CORALLINE_RUNTIME is %r" % selected, "set it to one of: %s" % allowed)
    broken = []
    for name in [selected] if selected else _PACKAGES:
        try:
            package, module = _import(name)
        except ImportError as error:
            if not isinstance(error, ModuleNotFoundError) or error.name != name:
                broken.append("%s is installed but cannot be imported: %s" % (name, first_line(error)))
            continue
        arguments = frozenset(inspect.signature(module.Interpreter.__init__).parameters)
        return Runtime(name, str(getattr(package, "__version__", "unknown")), module, arguments)
    if broken:
        raise RuntimeLibraryError("; ".join(broken), INSTALL, "runtime_broken")
    raise RuntimeLibraryError("no TFLite runtime is installed for this Python", INSTALL)


def pycoral() -> str:
    """Return which `pycoral` is installed: `coral` (Google's), `other` (PyPI's, on coral reefs) or `missing`."""
    try:
        import pycoral
    except ImportError:
        return "missing"
    try:
        from pycoral.utils import edgetpu
    except ImportError as error:
        # Google's package fails in this way if its extension module was built for another Python.
        paths = [os.path.join(folder, "utils", "edgetpu.py") for folder in getattr(pycoral, "__path__", [])]
        return "coral" if error.name and any(os.path.exists(path) for path in paths) else "other"
    return "coral" if hasattr(edgetpu, "make_interpreter") else "other"


class InferenceSession:
    """One model in one runtime. Not thread-safe. A delegate may crash the process: call `probe.check` first.

    Args:
        runtime: the runtime, from `find`.
        delegate: the delegate, from `load_delegate`; None: the session loads it.

    Attributes:
        outputs: the descriptions of the output tensors, in the order of the model or of `arrange`.
        views: functions that return the memory of each input tensor. The runtime refuses to run while a reference to
            this memory exists.

    Raises:
        LoadError: the runtime refuses the model.
        EdgeTpuError: the model is compiled for the Edge TPU and loaded for the CPU, or libedgetpu refuses it.
        RuntimeLibraryError: the runtime itself does not work.
        OSError, ValueError: the delegate cannot be loaded; `probe.check` finds the cause.
    """

    def __init__(self, runtime: Runtime, content: bytes, options: RuntimeOptions, delegate: Any = None) -> None:
        self.runtime = runtime
        self.options = options
        if delegate is None and options.device != "cpu":
            delegate = load_delegate(runtime, options)
        self._delegate = delegate
        self.interpreter = allocated_interpreter(runtime, content, options, self._delegate)
        inputs = self.interpreter.get_input_details()
        self.inputs = TensorDescription.of(inputs)
        self.input_indices = [int(detail["index"]) for detail in inputs]
        self.views = [self.interpreter.tensor(index) for index in self.input_indices]
        outputs = self.interpreter.get_output_details()
        self.output_indices = [int(detail["index"]) for detail in outputs]
        if any((np.asarray(detail.get("shape_signature", ())) < 0).any() for detail in outputs):
            outputs = self._with_shapes(outputs)
        self.outputs = TensorDescription.of(outputs)

    def _with_shapes(self, outputs: List[Any]) -> List[Any]:
        """Return details of outputs whose shapes are only known after an inference."""
        try:
            self.run_tensors(self.zeros())
        except (ValueError, RuntimeError) as error:
            raise load_error(self.runtime, error)
        shapes = [self.interpreter.get_tensor(index).shape for index in self.output_indices]
        return [dict(detail, shape=shape) for detail, shape in zip(outputs, shapes)]

    def zeros(self) -> List[Array]:
        """Return input tensors of zeros."""
        return [np.zeros(tensor.shape, tensor.dtype) for tensor in self.inputs]

    def arrange(self, inputs: Sequence[TensorDescription], outputs: Sequence[TensorDescription]) -> None:
        """Put inputs and outputs into the order of the manifest: compilers may change it."""
        order = matching_order(self.inputs, inputs)
        self.inputs = [self.inputs[index] for index in order]
        self.input_indices = [self.input_indices[index] for index in order]
        self.views = [self.views[index] for index in order]
        order = matching_order(self.outputs, outputs)
        self.outputs = [self.outputs[index] for index in order]
        self.output_indices = [self.output_indices[index] for index in order]

    def run_tensors(self, tensors: Sequence[Array]) -> List[Array]:
        """Run one inference; return copies of the output tensors, in the dtypes of the model."""
        interpreter = self.interpreter
        for index, tensor in zip(self.input_indices, tensors):
            interpreter.set_tensor(index, tensor)
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in self.output_indices]

    def run(self, tensors: Sequence[Array]) -> Array:
        """Run one inference; return its outputs as the host stores them: one output as it is, several as one row."""
        return as_row(self.run_tensors(tensors))

    def close(self) -> None:
        """Release the memory and the Edge TPU."""
        self.views = []
        self.interpreter = self._delegate = None  # the delegate must be released last


def matching_order(actual: Sequence[TensorDescription], expected: Sequence[TensorDescription]) -> Sequence[int]:
    """Return the indices of expected tensors: by their names in the file, or by everything else that describes them.

    Where neither is clear, the order of the model is kept.
    """
    keys: Tuple[Callable[[TensorDescription], Any], ...] = (lambda tensor: tensor.tensor, lambda tensor: tensor.values)
    for key in keys:
        actual_keys = [key(tensor) for tensor in actual]
        expected_keys = [key(tensor) for tensor in expected]
        unique = len(set(expected_keys)) == len(expected_keys) == len(actual_keys)
        if unique and set(actual_keys) == set(expected_keys):
            return [actual_keys.index(expected_key) for expected_key in expected_keys]
    return range(len(actual))


def load_delegate(runtime: Runtime, options: RuntimeOptions) -> Any:
    """Load the delegate for the device of the options."""
    return runtime.module.load_delegate(options.library, {"device": options.device} if options.device else {})


def allocated_interpreter(runtime: Runtime, content: bytes, options: RuntimeOptions, delegate: Any) -> Any:
    """Return an interpreter with allocated tensors. Without a delegate (None) it runs on the CPU.

    Raises:
        LoadError: the runtime refuses the model.
        EdgeTpuError: the model is compiled for the Edge TPU, and it has no delegate.
        RuntimeLibraryError: the runtime does not work, or does not have these kernels.
    """
    if needs_numpy_1(runtime.name, runtime.version) and version_numbers(np.__version__)[:1] >= (2,):
        raise _numpy_2(runtime)
    arguments: Dict[str, Any] = {"model_content": content}
    if "num_threads" in runtime.arguments:
        arguments["num_threads"] = options.threads
    if delegate is not None:
        arguments["experimental_delegates"] = [delegate]
    if options.kernels != "default":
        if options.kernels not in runtime.kernels():
            what = "%s %s has no %s kernels" % (runtime.name, runtime.version, options.kernels)
            raise RuntimeLibraryError(what, INSTALL, "runtime_broken")
        arguments["experimental_op_resolver_type"] = getattr(runtime.module.OpResolverType, RESOLVERS[options.kernels])
    if options.keep and runtime.keeps_tensors:
        arguments["experimental_preserve_all_tensors"] = True
    try:
        interpreter = runtime.module.Interpreter(**arguments)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError, SystemError) as error:
        raise load_error(runtime, error)
    return interpreter


def _numpy_2(runtime: Runtime) -> RuntimeLibraryError:
    what = "%s %s was built for numpy 1, and numpy %s is installed" % (runtime.name, runtime.version, np.__version__)
    return RuntimeLibraryError(what, "python3 -m pip install 'numpy<2'", "numpy_2")


def load_error(runtime: Runtime, error: BaseException) -> DeviceError:
    """Return the named error for an exception with which a runtime refuses a model."""
    text = str(error)
    version = "%s %s" % (runtime.name, runtime.version)
    if isinstance(error, SystemError):  # the extension module failed in numpy's C API
        return _numpy_2(runtime)
    versions = re.search(r"requires runtime version \((\d+)\).{0,40}runtime version \((\d+)\)", text, re.DOTALL)
    if versions:
        what = "the model needs Edge TPU runtime %s, and the installed libedgetpu has runtime %s" % versions.groups()
        hint = "sudo apt-get install --only-upgrade libedgetpu1-std, or compile with compile.min_runtime_version: %s"
        return EdgeTpuError(what, hint % versions.group(2), "old_library")
    if CUSTOM_OP in text:
        what = "the model is compiled for the Edge TPU, and no Edge TPU delegate is loaded"
        hint = "use --role compiled --device usb (or pci), or --role int8 for the CPU"
        return EdgeTpuError(what, hint, "no_delegate")
    operator = re.search(r"Didn't find op for builtin opcode '(\w+)' version '(\d+)'", text)
    if operator:
        what = "%s is older than the model: it has no %s of version %s" % ((version,) + operator.groups())
        return LoadError(what, INSTALL, "model_too_new")
    return LoadError("%s refuses the model: %s" % (version, first_line(error)))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if the text is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def reproducible(runtime: Optional[Runtime]) -> str:
    """Return the kernels to compare outputs with: those without XNNPACK, if the runtime can select them."""
    return "reproducible" if runtime is not None and "reproducible" in runtime.kernels() else "default"
