"""The TFLite runtime, in a child process.

A .tflite file of unknown origin can crash the runtime (a negative scale aborts it), keep it busy without end, or make
it allocate any amount of memory. No other module creates an `Interpreter`: every model runs in one child process with
limits, which starts with the first model. If a model ends the child, the caller gets an error, and the next model gets
a new child.

Messages in both directions are JSON and the bytes of arrays. Nothing that the child sends is executed.
"""

from __future__ import annotations

import atexit
import json
import os
import struct
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import IO, Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from compress.core import sandbox
from compress.core.errors import ModelError

MEMORY_BYTES = 4 * 2**30
"""Limit of the child process: twice the largest .tflite file."""
LOAD_TIMEOUT_S = 60.0
"""A damaged file may keep the runtime busy without end."""
RUN_TIMEOUT_S = 120.0
"""Limit of one inference."""
MAX_MESSAGE_BYTES = 4 * 2**30
"""A damaged length of a message cannot ask for more."""
EXIT_TIMEOUT_S = 5.0
"""The child process has nothing left to do; it is killed after this time."""
_LENGTH = struct.Struct("<I")
Arrays = Sequence[NDArray[Any] | None]


class IsolatedInterpreter:
    """A model in the child process.

    Args:
        reproducible: use the kernels without a delegate.
        keep: whether intermediate tensors can be read.
        shapes: for some inputs by index, the shape that they get.

    Attributes:
        duration_ns: the time of the last inference: inputs set, invoked, outputs read.

    Raises:
        ModelError: the runtime refuses the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        *,
        reproducible: bool = True,
        threads: int = 1,
        keep: bool = False,
        shapes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.duration_ns = 0
        self._child = _present_child()
        self._number = self._child.next_number()
        header: dict[str, Any] = {"do": "load", "reproducible": reproducible, "threads": threads, "keep": keep}
        header["shapes"] = [[index, list(shape)] for index, shape in (shapes or {}).items()]
        content: list[NDArray[Any]] = []
        if isinstance(model, bytes):
            content.append(np.frombuffer(model, np.uint8))
        else:
            header["path"] = str(model.absolute())
        answer, _ = self._child.request({**header, "model": self._number}, content, LOAD_TIMEOUT_S)
        finalize(self, self._child.released.append, self._number)
        self.inputs = [_details(entry) for entry in answer["inputs"]]
        self.outputs = [_details(entry) for entry in answer["outputs"]]

    def run(self, inputs: Mapping[int, NDArray[Any]], tensors: Sequence[int]) -> list[NDArray[Any]]:
        """Set inputs by index, run the model, and return the requested tensors.

        Raises:
            ModelError: an input does not fit, the run fails, or a tensor has no value.
        """
        return self.run_all([inputs], tensors)[0]

    def run_all(self, feeds: Sequence[Mapping[int, NDArray[Any]]], tensors: Sequence[int]) -> list[list[NDArray[Any]]]:
        """Run the model on several inputs as in `run`, with one request.

        Raises:
            ModelError: an input does not fit, a run fails, or a tensor has no value.
        """
        names = [list(feed) for feed in feeds]
        header = {"do": "run", "model": self._number, "feeds": names, "tensors": list(tensors)}
        arrays = [value for feed in feeds for value in feed.values()]
        answer, values = self._child.request(header, arrays, RUN_TIMEOUT_S * max(len(feeds), 1))
        self.duration_ns = int(answer["ns"])
        outputs = [value for value in values if value is not None]
        if len(outputs) != len(feeds) * len(tensors):
            raise ModelError("the TFLite runtime cannot run it: a tensor has no value after the run")
        return [outputs[start * len(tensors) : (start + 1) * len(tensors)] for start in range(len(feeds))]

    def tensor(self, index: int) -> NDArray[Any] | None:
        """Return a tensor after a run; None if it has no readable value: a resource, text, or not computed.

        Raises:
            ModelError: the runtime has ended.
        """
        _, (value,) = self._child.request({"do": "read", "model": self._number, "tensors": [index]}, [], RUN_TIMEOUT_S)
        return value


class _Child:
    def __init__(self) -> None:
        ours, theirs = socketpair()
        self.process_id = os.getpid()
        self.released: deque[int] = deque()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `_end` closes it
        self._lock = threading.Lock()
        self._last_number = 0
        self.ended = False
        with theirs:
            self._process = sandbox.start(
                serve, [str(theirs.fileno())], pipe=theirs.fileno(), stderr=self._stderr, memory_bytes=MEMORY_BYTES
            )
        self._pipe = Connection(ours.detach())

    def next_number(self) -> int:
        """Return a number for a new model."""
        with self._lock:
            self._last_number += 1
            return self._last_number

    def request(
        self, header: Mapping[str, Any], arrays: Arrays, timeout_s: float
    ) -> tuple[Mapping[str, Any], list[NDArray[Any] | None]]:
        """Send a request, and return the answer.

        Raises:
            ModelError: the runtime reports an error, or the child process has ended.
        """
        action = f"the TFLite runtime {'refuses' if header['do'] == 'load' else 'cannot run'} it"
        with self._lock:
            if self.ended:
                raise ModelError(f"{action}: an earlier model ended the process of the runtime")
            gone = [self.released.popleft() for _ in range(len(self.released))]
            try:
                self._pipe.send_bytes(_packed({**header, "released": gone}, arrays))
                in_time = self._pipe.poll(timeout_s)
                if in_time:
                    answer, values = _unpacked(self._pipe.recv_bytes(MAX_MESSAGE_BYTES))
            except (OSError, EOFError, ValueError, KeyError, TypeError, struct.error) as error:
                raise ModelError(f"{action}: it crashed the runtime ({self._end()})") from error
            except BaseException:  # interrupted: the answer would be taken for that of the next request
                self._end()
                raise
            if not in_time:
                self._end()
                raise ModelError(f"{action}: it did not finish in {timeout_s:g} s")
        if "error" in answer:
            raise ModelError(f"{action}: {answer['error']}")
        return answer, values

    def _end(self) -> str:
        """End the process, and return the reason of its end."""
        self.ended = True
        self._pipe.close()
        try:
            status = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        with self._stderr:
            self._stderr.seek(0)
            text = self._stderr.read(1 << 20).decode(errors="replace")
        return sandbox.ended(status, text).reason

    def close(self) -> None:
        """End the process in order; in a fork only forget it."""
        if self.process_id == os.getpid() and not self.ended:
            self._end()


_children: list[_Child] = []
"""The present child, as the last item."""
_starting = threading.Lock()


def _present_child() -> _Child:
    """Return the child process; start one if no child runs, or if a fork has copied this process."""
    with _starting:
        if not _children or _children[-1].ended or _children[-1].process_id != os.getpid():
            _children[:] = [_Child()]
            atexit.register(_children[-1].close)
        return _children[-1]


def _packed(header: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Return a message: the length of the JSON header, the header, and the bytes of the arrays."""
    described: list[list[Any] | None] = []
    parts = []
    for array in arrays:
        described.append(None if array is None else [array.dtype.name, list(array.shape)])
        if array is not None:
            parts.append(array.tobytes())
    text = json.dumps({**header, "arrays": described}, default=_plain).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def _plain(value: Any) -> Any:
    """Return a numpy value or type in the runtime's details of a tensor as JSON has it."""
    return np.dtype(value).name if isinstance(value, type) else value.tolist()


def _unpacked(message: bytes) -> tuple[Mapping[str, Any], list[NDArray[Any] | None]]:
    start = _LENGTH.size + _LENGTH.unpack_from(message)[0]
    header = json.loads(message[_LENGTH.size : start])
    arrays: list[NDArray[Any] | None] = []
    for entry in header["arrays"]:
        if entry is None:
            arrays.append(None)
            continue
        dtype, shape = np.dtype(entry[0]), tuple(entry[1])
        if dtype.hasobject or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("an invalid array")
        count = int(np.prod(shape, dtype=np.uint64)) if shape else 1
        arrays.append(np.frombuffer(message, dtype, count, start).reshape(shape).copy())
        start += count * dtype.itemsize
    return header, arrays


def _details(entry: Mapping[str, Any]) -> dict[str, Any]:
    parameters = entry["quantization_parameters"]
    return {
        "name": str(entry["name"]),
        "index": int(entry["index"]),
        "shape": np.array(entry["shape"], np.int32),
        "shape_signature": np.array(entry["shape_signature"], np.int32),
        "dtype": np.dtype(entry["dtype"]).type,
        "quantization": (float(entry["quantization"][0]), int(entry["quantization"][1])),
        "quantization_parameters": {
            "scales": np.array(parameters["scales"], np.float32),
            "zero_points": np.array(parameters["zero_points"], np.int32),
            "quantized_dimension": int(parameters["quantized_dimension"]),
        },
    }


def serve(pipe: str) -> None:
    """Answer requests until the pipe is closed. This runs in the child process."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    connection = Connection(int(pipe))
    models: dict[int, Any] = {}
    with suppress(EOFError, OSError):
        while True:
            header, arrays = _unpacked(connection.recv_bytes())
            for number in header["released"]:
                models.pop(number, None)
            try:
                answer, values = _answer(header, arrays, models)
            except (ValueError, RuntimeError, TypeError, MemoryError, OverflowError, KeyError) as error:
                answer, values = {"error": first_line(error)}, []
            connection.send_bytes(_packed(answer, values))


def _answer(
    header: Mapping[str, Any], arrays: Arrays, models: dict[int, Any]
) -> tuple[dict[str, Any], list[NDArray[Any] | None]]:
    if header["do"] == "load":
        interpreter = models[header["model"]] = _loaded(header, arrays)
        return {"inputs": interpreter.get_input_details(), "outputs": interpreter.get_output_details()}, []
    interpreter = models[header["model"]]
    if header["do"] == "read":
        return {}, [_value(interpreter, index) for index in header["tensors"]]
    remaining = iter(arrays)
    values: list[NDArray[Any] | None] = []
    duration_ns = 0
    for feed in header["feeds"]:
        inputs = [(index, next(remaining)) for index in feed]
        began = time.perf_counter_ns()
        for index, value in inputs:
            interpreter.set_tensor(index, value)
        interpreter.invoke()
        values += [_value(interpreter, index) for index in header["tensors"]]
        duration_ns = time.perf_counter_ns() - began
    return {"ns": duration_ns}, values


def _loaded(header: Mapping[str, Any], arrays: Arrays) -> Any:
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES if header["reproducible"] else OpResolverType.AUTO
    (content,) = arrays or (None,)
    interpreter = Interpreter(
        header.get("path"),
        None if content is None else content.tobytes(),
        num_threads=header["threads"],
        experimental_op_resolver_type=resolver,
        experimental_preserve_all_tensors=header["keep"],
    )
    for index, shape in header["shapes"]:
        interpreter.resize_tensor_input(index, shape)
    interpreter.allocate_tensors()
    return interpreter


def _value(interpreter: Any, index: int) -> NDArray[Any] | None:
    try:
        value = np.asarray(interpreter.get_tensor(index))
    except (ValueError, RuntimeError):  # a resource, or a tensor that no operator has filled
        return None
    return None if value.dtype.hasobject else value


def first_line(error: BaseException) -> str:
    """Return the first line of a message, or the class of an error without a message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
