"""Which TFLite runtime is here, and a model loaded into it.

Looked for in this order: `ai_edge_litert`, `tflite_runtime` (also the one that Mendel Linux brings,
2.5), `tensorflow`. The environment variable CORALLINE_RUNTIME names one of them to use it alone.

What runtimes differ in is asked of them, not concluded from their version: `num_threads` (TFLite 2.3),
`experimental_op_resolver_type` and `experimental_preserve_all_tensors` (2.5).
Runs on Python 3.7 with numpy alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from typing import Any, Callable, Dict, FrozenSet, Optional, Tuple

import numpy as np

from deploy.contract.detection import ordered
from deploy.contract.errors import ArgumentError, DeviceError, EdgeTpuError, LoadError, RuntimeLibraryError
from deploy.contract.preprocessing import Array

LIBRARY = "libedgetpu.so.1"
CUSTOM_OP = "edgetpu-custom-op"
NEWEST_FOR_LIBEDGETPU_16 = (2, 11, 1)
"""With newer TFLite, Google's own libedgetpu 16.0 can crash the process. Source: reports from the field."""
INSTALL = "python3 -m pip install ai-edge-litert (Python 3.10 and newer, 64 bits) or tflite-runtime 'numpy<2' (others)"
RESOLVERS = {"default": "AUTO", "reproducible": "BUILTIN_WITHOUT_DEFAULT_DELEGATES", "reference": "BUILTIN_REF"}
"""Kernels by our name: the fastest; without XNNPACK, whose int8 results differ by some steps between
versions; plain C++."""
_DEVICE = re.compile(r"(cpu|(usb|pci)?(:[0-9]{1,3})?)\Z")


@dataclasses.dataclass(frozen=True)
class RuntimeOptions:
    """How a model is loaded.

    Attributes:
        device: `cpu`, or what libedgetpu takes: `` (any Edge TPU), `usb`, `pci`, `usb:0`, `pci:1`, `:0`.
        threads: threads of the runtime on the CPU.
        kernels: a key of RESOLVERS; runtimes before 2.5 have `default` alone.
        library: libedgetpu, by name or path.
        keep: every intermediate tensor stays readable after an inference.
    """

    device: str = "cpu"
    threads: int = 1
    kernels: str = "default"
    library: str = LIBRARY
    keep: bool = False

    def __post_init__(self) -> None:
        if not _DEVICE.match(self.device):
            raise ArgumentError("there is no device %r" % self.device, "use cpu, usb, pci, usb:0, pci:1 or the like")
        if self.threads < 1:
            raise ArgumentError("%d threads are not possible" % self.threads, "use 1 or more")


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A TFLite runtime that was imported.

    Attributes:
        name: its package.
        version: the package's version.
        module: its `interpreter` module.
        arguments: what its `Interpreter` takes.
    """

    name: str
    version: str
    module: Any
    arguments: FrozenSet[str]

    def kernels(self) -> Tuple[str, ...]:
        """The kernels that it can be told to use."""
        if "experimental_op_resolver_type" not in self.arguments or not hasattr(self.module, "OpResolverType"):
            return ("default",)
        return tuple(name for name, theirs in RESOLVERS.items() if hasattr(self.module.OpResolverType, theirs))

    @property
    def keeps_tensors(self) -> bool:
        """Whether intermediate tensors can be read after an inference."""
        return "experimental_preserve_all_tensors" in self.arguments

    @property
    def too_new_for_libedgetpu_16(self) -> bool:
        """Whether it is newer than the last one that Google's own libedgetpu is known to work with."""
        return self.name == "ai_edge_litert" or version_numbers(self.version) > NEWEST_FOR_LIBEDGETPU_16

    def describe(self) -> Dict[str, Any]:
        """As a plain map, for results."""
        return {"name": self.name, "version": self.version, "numpy": np.__version__, "kernels": list(self.kernels())}


def version_numbers(text: str) -> Tuple[int, ...]:
    """The numbers that a version begins with: `2.5.0.post1` gives (2, 5, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _litert() -> Tuple[Any, Any]:
    import ai_edge_litert
    from ai_edge_litert import interpreter

    return ai_edge_litert, interpreter


def _tflite_runtime() -> Tuple[Any, Any]:
    import tflite_runtime
    from tflite_runtime import interpreter

    return tflite_runtime, interpreter


def _tensorflow() -> Tuple[Any, Any]:
    import tensorflow
    from tensorflow.lite.python import interpreter

    return tensorflow, interpreter


_IMPORTS: Dict[str, Callable[[], Tuple[Any, Any]]] = {
    "ai_edge_litert": _litert,
    "tflite_runtime": _tflite_runtime,
    "tensorflow": _tensorflow,
}


def find() -> Runtime:
    """The runtime to use: the first one that is installed.

    Raises:
        RuntimeLibraryError: none is installed, or the one that is cannot be imported.
    """
    wanted = os.environ.get("CORALLINE_RUNTIME", "")
    if wanted and wanted not in _IMPORTS:
        allowed = ", ".join(_IMPORTS)
        raise ArgumentError("there is no runtime %r" % wanted, "set CORALLINE_RUNTIME to one of %s" % allowed)
    broken = []
    for name in [wanted] if wanted else list(_IMPORTS):
        try:
            package, module = _IMPORTS[name]()
        except ImportError as error:
            if not isinstance(error, ModuleNotFoundError) or error.name != name:
                broken.append("%s is installed and cannot be imported: %s" % (name, first_line(error)))
            continue
        arguments = frozenset(inspect.signature(module.Interpreter.__init__).parameters)
        return Runtime(name, str(getattr(package, "__version__", "unknown")), module, arguments)
    if broken:
        raise RuntimeLibraryError("; ".join(broken), INSTALL, "runtime_broken")
    raise RuntimeLibraryError("there is no TFLite runtime for this Python", INSTALL)


def pycoral() -> str:
    """What the package `pycoral` is here: `coral` (Google's), `other` (PyPI's, for coral reefs) or `missing`."""
    try:
        import pycoral as found
    except ImportError:
        return "missing"
    try:
        from pycoral.utils import edgetpu
    except ImportError as error:
        # Google's own fails like this where its extension module was built for another Python.
        folders = [os.path.join(folder, "utils", "edgetpu.py") for folder in getattr(found, "__path__", [])]
        return "coral" if error.name and any(os.path.exists(path) for path in folders) else "other"
    return "coral" if hasattr(edgetpu, "make_interpreter") else "other"


class InferenceSession:
    """One model in one runtime: a tensor in, a tensor out, of a detector two. Not thread-safe, and it may crash the
    process where a delegate is involved: `probe.check` goes first.

    Args:
        runtime: from `find`.
        content: the .tflite file.
        options: where and how it runs.
        delegate: from `load_delegate`, if it is loaded already.

    Attributes:
        interpreter: the runtime's own.
        input, output: the details of its one input and its one output; of a detector's two, the scores.
        outputs: of all outputs; of a detector the boxes first, wherever the file has them.
        input_index, output_index: the numbers of `input` and `output`.

    Raises:
        ModelError: the runtime refuses the model, or it has several inputs or outputs and is no detector.
        EdgeTpuError: it is compiled for the Edge TPU and loaded for the CPU, or libedgetpu refuses it.
        RuntimeLibraryError: the runtime itself does not work.
        OSError, ValueError: the delegate cannot be loaded; `probe.check` says why.
    """

    def __init__(self, runtime: Runtime, content: bytes, options: RuntimeOptions, delegate: Any = None) -> None:
        self.runtime, self.options = runtime, options
        if delegate is None and options.device != "cpu":
            delegate = load_delegate(runtime, options)
        self._delegate = delegate
        self.interpreter = _interpreter(runtime, content, options, self._delegate)
        inputs, outputs = self.interpreter.get_input_details(), self.interpreter.get_output_details()
        found = outputs if len(outputs) == 1 else ordered(outputs)
        if len(inputs) != 1 or found is None:
            raise LoadError("the model has %d inputs and %d outputs, not one of each" % (len(inputs), len(outputs)))
        self.input, self.outputs, self.output = inputs[0], found, found[-1]
        self.input_index, self.output_index = int(self.input["index"]), int(self.output["index"])
        self.view = self.interpreter.tensor(self.input_index)
        """Gives the input tensor's own memory. Whoever still has it while the model runs is refused by the runtime."""

    def run(self, tensor: Array) -> Array:
        """One inference: input tensor in, a copy of the output tensor out, in the model's own types.

        A detector's two outputs side by side: [1, anchors * (4 + classes)].
        """
        interpreter = self.interpreter
        interpreter.set_tensor(self.input_index, tensor)
        interpreter.invoke()
        if len(self.outputs) == 1:
            return interpreter.get_tensor(self.output_index)
        parts = [interpreter.get_tensor(int(each["index"])).reshape(1, -1) for each in self.outputs]
        return np.concatenate(parts, axis=1)

    def close(self) -> None:
        """Gives the memory and the Edge TPU back."""
        self.view = self.interpreter = self._delegate = None  # in this order: the delegate goes last


def load_delegate(runtime: Runtime, options: RuntimeOptions) -> Any:
    """The delegate for the device that the options name."""
    return runtime.module.load_delegate(options.library, {"device": options.device} if options.device else {})


def _interpreter(runtime: Runtime, content: bytes, options: RuntimeOptions, delegate: Any) -> Any:
    _check_numpy(runtime)
    given: Dict[str, Any] = {"model_content": content}
    if "num_threads" in runtime.arguments:
        given["num_threads"] = options.threads
    if delegate is not None:
        given["experimental_delegates"] = [delegate]
    if options.kernels != "default":
        if options.kernels not in runtime.kernels():
            raise RuntimeLibraryError(
                "%s %s has no %s kernels" % (runtime.name, runtime.version, options.kernels), INSTALL, "runtime_broken"
            )
        given["experimental_op_resolver_type"] = getattr(runtime.module.OpResolverType, RESOLVERS[options.kernels])
    if options.keep and runtime.keeps_tensors:
        given["experimental_preserve_all_tensors"] = True
    try:
        made = runtime.module.Interpreter(**given)
        made.allocate_tensors()
    except (ValueError, RuntimeError, SystemError) as error:
        raise refusal(runtime, error)
    return made


def _check_numpy(runtime: Runtime) -> None:
    """No tflite-runtime up to 2.14, the last on the package index, was built for numpy 2: it fails in strange words."""
    old = runtime.name == "tflite_runtime" and version_numbers(runtime.version)[:2] <= (2, 14)
    if old and version_numbers(np.__version__)[:1] >= (2,):
        raise _numpy_2(runtime)


def _numpy_2(runtime: Runtime) -> RuntimeLibraryError:
    what = "%s %s was built for numpy 1, and numpy %s is here" % (runtime.name, runtime.version, np.__version__)
    return RuntimeLibraryError(what, "python3 -m pip install 'numpy<2'", "numpy_2")


def refusal(runtime: Runtime, error: BaseException) -> DeviceError:
    """What a runtime's refusal of a model means."""
    text = str(error)
    if isinstance(error, SystemError):  # an error was set inside of the extension module: numpy's ABI
        return _numpy_2(runtime)
    needs = re.search(r"requires runtime version \((\d+)\).{0,40}runtime version \((\d+)\)", text, re.DOTALL)
    if needs:
        return EdgeTpuError(
            "the model needs Edge TPU runtime %s, and libedgetpu here is of runtime %s" % needs.groups(),
            "sudo apt-get install --only-upgrade libedgetpu1-std, or set compile.min_runtime_version: %s and compile"
            " again" % needs.group(2),
            "old_library",
        )
    if CUSTOM_OP in text:
        return EdgeTpuError(
            "the model is compiled for the Edge TPU, and no Edge TPU delegate is loaded",
            "use --role compiled --device usb (or pci), or --role int8 for the CPU",
            "no_delegate",
        )
    operator = re.search(r"Didn't find op for builtin opcode '(\w+)' version '(\d+)'", text)
    if operator:
        return LoadError(
            "%s %s has no %s of version %s: the model is newer than it"
            % ((runtime.name, runtime.version) + operator.groups()),
            INSTALL,
            "model_too_new",
        )
    return LoadError("%s %s refuses the model: %s" % (runtime.name, runtime.version, first_line(error)))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def reproducible(runtime: Optional[Runtime]) -> str:
    """The kernels to compare outputs with: without XNNPACK where the runtime can be told so."""
    return "reproducible" if runtime is not None and "reproducible" in runtime.kernels() else "default"
