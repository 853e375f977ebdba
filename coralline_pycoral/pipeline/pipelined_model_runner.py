"""A model in segments, each in a thread: while one segment works on an input, the one before it takes the next."""

from __future__ import annotations

import queue
import threading
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from deploy.contract.preprocessing import Array

Tensors = Dict[str, Array]
BETWEEN = 1
"""The number of results that wait between two segments: enough to keep both busy, as in the vendor's library."""


class PipelinedModelRunner:
    """The segments of one model.

    A segment takes its inputs by name from the outputs of all segments before it. The results come in the order of the
    inputs. Between two segments, one result waits: a fast segment does not fill the memory in front of a slow one. The
    first error of a segment ends the pipeline.

    Args:
        interpreters: an allocated interpreter for each segment, in their order. Only the runner may use them.

    Raises:
        ValueError: there is no interpreter, or a segment has an input that no segment before it has as an output.
    """

    def __init__(self, interpreters: Sequence[Any]) -> None:
        self._queues: Sequence[_ResizableQueue] = []
        self._closed = False
        self._ended = False
        if not interpreters:
            raise ValueError("At least one interpreter expected")
        available = {detail["name"] for detail in interpreters[0].get_input_details()}
        for index, interpreter in enumerate(interpreters):
            if not {detail["name"] for detail in interpreter.get_input_details()} <= available:
                raise ValueError("Interpreter %d can not get its input tensors" % index)
            available.update(detail["name"] for detail in interpreter.get_output_details())
        self._interpreters = interpreters
        self._input_types = {detail["name"]: detail["dtype"] for detail in interpreters[0].get_input_details()}
        self._output_names = [detail["name"] for detail in interpreters[-1].get_output_details()]
        self._lock = threading.Lock()
        self._errors: List[str] = []
        self._queues = [_ResizableQueue(), *(_ResizableQueue(BETWEEN) for _ in interpreters[1:]), _ResizableQueue()]
        for position, interpreter in enumerate(interpreters):
            ends = self._queues[position : position + 2]
            # The threads hold no reference to the runner, so that it can be deleted.
            arguments = (position, interpreter, *ends, self._errors)
            threading.Thread(target=_run_segment, args=arguments, daemon=True).start()

    def __del__(self) -> None:
        """End the threads."""
        if self._queues and not self._closed:
            self._queues[0].resize(0)
            self._queues[-1].resize(0)
            self._queues[0].put(None)

    def set_input_queue_size(self, size: int) -> None:
        """Set the largest number of waiting inputs, above which `push` blocks; 0: no limit, the default."""
        self._queues[0].resize(size)

    def set_output_queue_size(self, size: int) -> None:
        """Set the largest number of waiting results, above which the last segment waits; 0: no limit, the default."""
        self._queues[-1].resize(size)

    def push(self, input_tensors: Tensors) -> None:
        """Add an input. It waits if a queue has a limit, and the pipeline is full.

        Args:
            input_tensors: the input tensors by name; an empty dictionary: there are no more inputs.

        Raises:
            ValueError: an input is missing, or has the wrong type.
            RuntimeError: an empty dictionary was passed before, or a segment failed.
        """
        if input_tensors and len(input_tensors) != len(self._input_types):
            facts = (len(self._input_types), len(input_tensors))
            raise ValueError("Expected input of length %d, but got %d" % facts)
        for name, tensor in input_tensors.items():
            dtype = self._input_types[name]
            if not isinstance(tensor, np.ndarray) or tensor.dtype != dtype:
                raise ValueError("Input should be a list of numpy array of type %s" % dtype)
        with self._lock:
            if self._errors:
                raise RuntimeError(self._errors[0])
            if self._closed:
                raise RuntimeError("Pipeline was turned off before.")
            self._closed = not input_tensors
            self._queues[0].put({name: tensor.copy() for name, tensor in input_tensors.items()} or None)

    def pop(self) -> Optional[Tensors]:
        """Return the next result: the output tensors of the last segment by name. None: there are no more results.

        Raises:
            RuntimeError: a segment failed. There are no more results.
        """
        if self._ended:
            return None
        result = self._queues[-1].get()
        self._ended = not isinstance(result, dict)
        if isinstance(result, str):
            raise RuntimeError(result)
        if result is None:
            return None
        return {name: result[name] for name in self._output_names}

    def interpreters(self) -> Sequence[Any]:
        """Return the interpreters of the segments."""
        return self._interpreters


class _ResizableQueue(queue.Queue):  # type: ignore[type-arg]
    """A queue whose limit can change while threads use it."""

    def resize(self, size: int) -> None:
        """Set the limit; 0: no limit."""
        with self.mutex:
            self.maxsize = size
            self.not_full.notify_all()


def _run_segment(
    position: int, interpreter: Any, inputs: _ResizableQueue, outputs: _ResizableQueue, errors: List[str]
) -> None:
    """Run a segment until the end of the inputs.

    An error takes the place of its result. The inputs after an error are taken and dropped: nothing waits for them.
    """
    while True:
        tensors = inputs.get()
        if isinstance(tensors, dict):
            if errors:
                continue
            try:
                tensors = _with_outputs(interpreter, tensors)
            except (ValueError, RuntimeError) as error:
                tensors = "Segment %d runner error: %s" % (position, error)
                errors.append(tensors)
        outputs.put(tensors)
        if tensors is None:
            return


def _with_outputs(interpreter: Any, tensors: Tensors) -> Tensors:
    """Return all tensors so far with the outputs of a segment."""
    for detail in interpreter.get_input_details():
        values = tensors[detail["name"]].reshape(detail["shape"])
        interpreter.set_tensor(detail["index"], values)
    interpreter.invoke()
    results = {detail["name"]: interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()}
    return dict(tensors, **results)
