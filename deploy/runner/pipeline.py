"""A pipeline: the segments of a model on several devices at the same time, each with a thread of its own.

`python -m compress split` makes segments. Every sample goes through them in order; while the second segment works on
it, the first one works on the next sample. A sample carries its tensors by name: a segment takes its inputs, and adds
its outputs, so that a tensor may skip segments. A queue in front of each segment holds a few samples; the segment
before it waits while it is full. So does the source of the samples: nothing is read faster than it is used.

Copies of the same segments take turns, and answers come in the order of the samples::

    with pipeline.load(["shop_2_segments"], ["usb:0", "usb:1"]) as segments:
        for outputs in segments.stream(samples):
            print(outputs["scores"])
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import itertools
import json
import os
import queue
import re
import threading
import time
from typing import Any, Deque, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.durable_files import write_atomically
from deploy.contract.errors import ArgumentError, DeviceError, EdgeTpuError, ImageError
from deploy.contract.preprocessing import Array
from deploy.contract.tensors import TensorDescription
from deploy.runner import host, probe
from deploy.runner.measurement import describe, measured
from deploy.runner.runtime import LIBRARY, InferenceSession, RuntimeOptions, find, first_line

WAITING = 2
"""Samples in the queue of each segment."""
END_S = 10.0
"""How long the end waits for the inferences that are running."""
KEPT = 100_000
"""Times of the last samples that are kept for the statistics."""
DESCRIPTION = "split.json"
"""The file that `split` writes next to the segments."""
MAX_DESCRIPTION_BYTES = 1 << 24
"""The largest part of a description that is read; chosen: those of `split` have a few kB."""
MAX_RUNS = 1_000_000
"""The largest number of samples of a measurement; chosen."""
_SEGMENT = re.compile(
    r"(?P<model>.*)_segment_(?P<index>[0-9]{1,3})_of_(?P<count>[0-9]{1,3})(?P<compiled>_edgetpu)?\.tflite\Z"
)
Tensors = Mapping[str, Array]


class _ClosedError(Exception):
    """The channel was closed."""


class _Failure(NamedTuple):
    """An exception, in the place of a sample."""

    error: BaseException


_END = object()


class _Channel:
    """A queue with a limit that can be closed: threads that wait for the queue then get an exception.

    The channel has two `queue.SimpleQueue`, whose operations are single steps for Python's signals. Ctrl-C inside a
    `threading.Condition` (and so in `queue.Queue`) can leave its lock held, or release the lock twice.
    """

    def __init__(self, limit: int) -> None:
        self._items = queue.SimpleQueue()  # type: queue.SimpleQueue[Any]
        self._free = queue.SimpleQueue()  # type: queue.SimpleQueue[Any]
        for _ in range(limit):
            self._free.put(None)
        self._closed = False

    def put(self, item: Any) -> None:
        self._taken(self._free)
        self._items.put(item)

    def get(self) -> Any:
        item = self._taken(self._items)
        self._free.put(None)
        return item

    def close(self) -> None:
        self._closed = True
        self._items.put(None)
        self._free.put(None)

    def _taken(self, source: queue.SimpleQueue[Any]) -> Any:
        item = source.get()
        if self._closed:
            source.put(None)  # for the next thread that waits
            raise _ClosedError()
        return item


class _Sample:
    """The tensors of a sample by name, and the time of `time.perf_counter` when it entered the pipeline."""

    __slots__ = ("entered", "tensors")

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = dict(tensors)
        self.entered = time.perf_counter()


class LoadedSegment:
    """A segment on its device.

    Args:
        name: its name in messages, such as its file.

    Attributes:
        times: the seconds of its last inferences, with setting inputs and reading outputs.
    """

    def __init__(self, name: str, session: InferenceSession) -> None:
        self.name = name
        self.session = session
        self.inputs = [tensor.tensor for tensor in session.inputs]
        self.outputs = [tensor.tensor for tensor in session.outputs]
        self.times: Deque[float] = collections.deque(maxlen=KEPT)

    def run(self, sample: _Sample) -> None:
        """Add the outputs to the tensors of a sample."""
        begin = time.perf_counter()
        outputs = self.session.run_tensors([sample.tensors[name] for name in self.inputs])
        sample.tensors.update(zip(self.outputs, outputs))
        self.times.append(time.perf_counter() - begin)


class SegmentPipeline:
    """Segments that work at the same time. One thread may use it at a time.

    Args:
        copies: the segments of each copy, in order. All copies have the same segments, on different devices.
        waiting: the number of samples in the queue of each segment.
        outputs: the names of the outputs of the whole model; empty: the outputs that no other segment reads.

    Attributes:
        inputs: the descriptions of the inputs of the whole model.

    Raises:
        ArgumentError: there are no segments, or a segment needs a tensor that a later segment computes.
    """

    def __init__(
        self, copies: Sequence[Sequence[LoadedSegment]], waiting: int = WAITING, outputs: Sequence[str] = ()
    ) -> None:
        if waiting < 1:
            raise ArgumentError("--queue is %d, and must be at least 1" % waiting, "use --queue %d" % WAITING)
        if not copies or not copies[0]:
            raise ArgumentError("there are no segments", "name the folder, or the files in their order")
        self.copies = [list(copy) for copy in copies]
        self._waiting = waiting
        segments = self.copies[0]
        producers: Dict[str, int] = {}
        external: Dict[str, TensorDescription] = {}
        read = set()
        for index, segment in enumerate(segments):
            for tensor in segment.session.inputs:
                read.add(tensor.tensor)
                if tensor.tensor not in producers:
                    external.setdefault(tensor.tensor, tensor)
            producers.update(dict.fromkeys(segment.outputs, index))
        early = [name for name in external if name in producers]
        if early:
            what = "a segment needs %s, which a later segment computes" % early[0]
            raise ArgumentError(what, "name the files in their order")
        self.inputs = list(external.values())
        last = len(segments) - 1
        self.outputs = list(outputs) or [name for name, index in producers.items() if name not in read or index == last]
        self._latencies: Deque[float] = collections.deque(maxlen=KEPT)
        self._elapsed_s = 0.0
        self._count = 0

    def stream(self, samples: Iterable[Tensors]) -> Iterator[Dict[str, Array]]:
        """Yield the outputs of the whole model for each sample, by name and in the order of the samples.

        If a sample or a segment fails, the answers for the samples before it are yielded first. All threads end with
        the iterator: after an error, with Ctrl-C, and if it is closed early.

        Args:
            samples: for each sample, its input tensors by name, in the shapes and dtypes of the model. Another thread
                iterates over them.

        Raises:
            ArgumentError: a sample lacks an input.
            EdgeTpuError: an inference failed.
        """
        self._latencies.clear()
        for segment in self._segments():
            segment.times.clear()
        self._count = 0
        begin = time.perf_counter()
        run = _Run(self.copies, samples, self._waiting)
        try:
            for sample in run.results():
                now = time.perf_counter()
                self._latencies.append(now - sample.entered)
                self._elapsed_s = now - begin
                self._count += 1
                yield {name: sample.tensors[name] for name in self.outputs}
        finally:
            run.end()

    def _segments(self) -> List[LoadedSegment]:
        return [segment for copy in self.copies for segment in copy]

    def statistics(self) -> Dict[str, Any]:
        """Return throughput, latency and the bottleneck of the last stream, as a plain map."""
        if not self._count:
            return {"samples": 0, "segments": []}
        latencies = np.array(self._latencies) * 1000
        note = "%d samples, from the first queue to the last output" % self._count
        result: Dict[str, Any] = {
            "samples": self._count,
            "throughput": measured(self._count / self._elapsed_s, "1/s", "%d samples" % self._count),
            "latency": {
                name: measured(float(np.percentile(latencies, percent)), "ms", note)
                for name, percent in (("median", 50), ("p90", 90), ("p99", 99))
            },
        }
        rows = [dict(self._row(segment), copy=i) for i, copy in enumerate(self.copies) for segment in copy]
        result["segments"] = rows
        result["bottleneck"] = max(rows, key=lambda row: row["busy"]["value"])["name"]
        return result

    def _row(self, segment: LoadedSegment) -> Dict[str, Any]:
        times = np.array(segment.times) * 1000
        note = "%d inferences" % len(times)
        busy = min(float(times.mean()) * self._count / len(self.copies) / 1000 / self._elapsed_s, 1.0)
        return {
            "name": segment.name,
            "device": segment.session.options.device or "(any)",
            "median": measured(float(np.median(times)), "ms", note),
            "p99": measured(float(np.percentile(times, 99)), "ms", note),
            "busy": measured(busy, "fraction", "of the time of the stream"),
        }

    def close(self) -> None:
        """Release all devices."""
        for segment in self._segments():
            segment.session.close()

    def __enter__(self) -> SegmentPipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Run:
    def __init__(self, copies: Sequence[Sequence[LoadedSegment]], samples: Iterable[Tensors], waiting: int) -> None:
        self._channels = [[_Channel(waiting) for _ in range(len(copy) + 1)] for copy in copies]
        self._needed = {name for segment in copies[0] for name in segment.inputs}
        self._needed -= {name for segment in copies[0] for name in segment.outputs}
        self._threads = [threading.Thread(target=self._feed, args=(samples,), name="samples", daemon=True)]
        for copy, channels in zip(copies, self._channels):
            for segment, source, target in zip(copy, channels, channels[1:]):
                arguments = (segment, source, target)
                self._threads.append(threading.Thread(target=_work, args=arguments, name=segment.name, daemon=True))
        for thread in self._threads:
            thread.start()

    def _feed(self, samples: Iterable[Tensors]) -> None:
        """Put samples into the first channels of the copies, in turn."""
        turn = 0
        item: Any = _END
        try:
            for tensors in samples:
                missing = self._needed - set(tensors)
                if missing:
                    raise ArgumentError("a sample has no input %s" % sorted(missing)[0], "give every input by its name")
                self._channels[turn][0].put(_Sample(tensors))
                turn = (turn + 1) % len(self._channels)
        except _ClosedError:
            return
        except Exception as error:  # noqa: BLE001 - the thread that reads the results raises it
            item = _Failure(error)
        with contextlib.suppress(_ClosedError):
            self._channels[turn][0].put(item)

    def results(self) -> Iterator[_Sample]:
        """Yield the samples with their outputs, in order."""
        turn = 0
        while True:
            item = self._channels[turn][-1].get()
            if item is _END:
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item
            turn = (turn + 1) % len(self._channels)

    def end(self) -> None:
        """End all threads, after the inferences that are running."""
        for channels in self._channels:
            for channel in channels:
                channel.close()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


def _work(segment: LoadedSegment, source: _Channel, target: _Channel) -> None:
    """Run a segment on the samples of a channel, until its end: the work of one thread."""
    try:
        while True:
            item = source.get()
            if isinstance(item, _Sample):
                item = _ran(segment, item)
            target.put(item)
            if not isinstance(item, _Sample):
                return
    except _ClosedError:
        pass


def _ran(segment: LoadedSegment, sample: _Sample) -> Any:
    try:
        segment.run(sample)
    except DeviceError as error:
        return _Failure(error)
    except Exception as error:  # noqa: BLE001 - the thread that reads the results raises it
        what = "%s did not run: %s" % (segment.name, first_line(error))
        return _Failure(EdgeTpuError(what, "python3 runner.pyz doctor", "refused"))
    return sample


def text(result: Dict[str, Any]) -> str:
    """Return statistics as text."""
    if not result["samples"]:
        return "no samples"
    lines = ["throughput  %s" % describe(result["throughput"])]
    lines += ["latency     %s %s" % (name, describe(value)) for name, value in result["latency"].items()]
    for row in result["segments"]:
        facts = (row["name"], row["device"], describe(row["median"]), 100 * row["busy"]["value"])
        lines.append("  %s on %s: median %s, busy %.0f%%" % facts)
    lines.append("bottleneck  %s" % result["bottleneck"])
    return "\n".join(lines)


# --- the command, and the files of segments -------------------------------------------


def run(arguments: argparse.Namespace) -> Tuple[Dict[str, Any], str]:
    """Run the command: measure a pipeline."""
    if not 1 <= arguments.runs <= MAX_RUNS or arguments.warmup < 0:
        raise ArgumentError("--runs is %d, and --warmup %d" % (arguments.runs, arguments.warmup), "use --runs 200")
    if arguments.save and not arguments.inputs:
        raise ArgumentError("--save needs --inputs", "name the samples")
    with load(arguments.segments, arguments.device, arguments.threads, arguments.library, arguments.queue) as pipeline:
        samples = _samples(pipeline.inputs, arguments.inputs)
        if arguments.save:
            _save(arguments.save, list(pipeline.stream(samples)))
        for _ in pipeline.stream(itertools.islice(itertools.cycle(samples), arguments.warmup)):
            pass
        for _ in pipeline.stream(itertools.islice(itertools.cycle(samples), arguments.runs)):
            pass
        result = dict(pipeline.statistics(), runtime=find().describe())
    return result, text(result)


def load(
    paths: Sequence[str],
    devices: Sequence[str] = (),
    threads: int = 1,
    library: str = LIBRARY,
    waiting: int = WAITING,
    kernels: str = "default",
) -> SegmentPipeline:
    """Load the segments of a model on their devices. A child process tries each one first, because it may crash.

    Args:
        paths: the folder of the segments, or their files in order.
        devices: the device of each segment, as in `RuntimeOptions`, or one device for all. Two or more devices for each
            segment make two or more copies. Empty: the Edge TPUs :0, :1, … for compiled segments, the CPU for others.
        threads: the number of CPU threads of each segment.
        library: libedgetpu, by name or path.
        waiting: the number of samples in the queue of each segment.
        kernels: see `runtime.RESOLVERS`.

    Raises:
        ArgumentError: the files are not the segments of one model, or the number of devices is wrong.
        LoadError, EdgeTpuError, RuntimeLibraryError: a segment cannot be loaded, or does not run.
    """
    compiled = any(device != "cpu" for device in devices) or (not devices and bool(host.edge_tpus()))
    files, outputs = _files(paths, compiled)
    chosen = _devices(files, devices)
    copies = []
    runtime = find()
    for start in range(0, len(chosen), len(files)):
        segments = []
        for path, device in zip(files, chosen[start : start + len(files)]):
            with open(path, "rb") as stream:
                content = stream.read()
            options = RuntimeOptions(device, threads, kernels, library)
            probe.check(content, options)
            try:
                session = InferenceSession(runtime, content, options)
            except (OSError, ValueError) as error:  # the child process could open it a moment before
                what = "%s: the Edge TPU cannot be opened again: %s" % (path, first_line(error))
                raise EdgeTpuError(what, "name another --device for each segment", "busy")
            segments.append(LoadedSegment(os.path.basename(path), session))
        copies.append(segments)
    return SegmentPipeline(copies, waiting, outputs)


def _files(paths: Sequence[str], compiled: bool) -> Tuple[List[str], List[str]]:
    """Return the files of the segments in order, and the names of the outputs of the whole model if they are known."""
    if len(paths) > 1 or not os.path.isdir(paths[0]):
        return list(paths), []
    folder = paths[0]
    segments: Dict[Tuple[str, int, bool], Dict[int, str]] = {}
    for name in sorted(os.listdir(folder)):
        match = _SEGMENT.match(name)
        if match:
            key = (match.group("model"), int(match.group("count")), bool(match.group("compiled")))
            segments.setdefault(key, {})[int(match.group("index"))] = os.path.join(folder, name)
    complete = {key: files for key, files in segments.items() if sorted(files) == list(range(key[1]))}
    models = sorted({key[:2] for key in complete})
    if len(models) != 1:
        what = "%s has the segments of %d models" % (folder, len(models))
        raise ArgumentError(what, "name a folder of `python -m compress split`, or the files in their order")
    kinds = (True, False) if compiled else (False, True)
    files = next(complete[models[0] + (kind,)] for kind in kinds if models[0] + (kind,) in complete)
    return [files[index] for index in range(len(files))], _outputs(os.path.join(folder, DESCRIPTION))


def _outputs(path: str) -> List[str]:
    """Return the names of the outputs of the whole model in the description of a split; none without the file."""
    if not os.path.exists(path):
        return []
    with open(path, "rb") as stream:
        content = stream.read(MAX_DESCRIPTION_BYTES)
    try:
        description = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentError("%s is damaged: %s" % (path, first_line(error)), "split the model again")
    outputs = description.get("outputs") if isinstance(description, dict) else None
    if not isinstance(outputs, list):
        raise ArgumentError("%s is damaged: it has no list of outputs" % path, "split the model again")
    names = [output["name"] for output in outputs if isinstance(output, dict) and isinstance(output.get("name"), str)]
    if len(names) < len(outputs):
        raise ArgumentError("%s is damaged: an output has no name" % path, "split the model again")
    return names


def _devices(files: Sequence[str], devices: Sequence[str]) -> List[str]:
    if not devices:
        compiled = [path.endswith("_edgetpu.tflite") for path in files]
        return [":%d" % index if is_compiled else "cpu" for index, is_compiled in enumerate(compiled)]
    if len(devices) == 1:
        return list(devices) * len(files)
    if len(devices) % len(files):
        what = "there are %d segments and %d devices" % (len(files), len(devices))
        raise ArgumentError(what, "name one --device for each segment, or twice or more as many for copies")
    tpus = [device for device in devices if device != "cpu"]
    if len(set(tpus)) < len(tpus):
        raise ArgumentError("a device is named twice", "name another --device for each segment")
    return list(devices)


def _samples(inputs: Sequence[TensorDescription], path: Optional[str]) -> List[Tensors]:
    """Return the samples in a file, or random ones."""
    if path is None:
        random = np.random.RandomState(0)
        return [{tensor.tensor: _random(tensor, random) for tensor in inputs} for _ in range(4)]
    try:
        stored = np.load(path, allow_pickle=False)
        arrays = {inputs[0].tensor: stored} if isinstance(stored, np.ndarray) else dict(stored)
    except (ValueError, EOFError, MemoryError) as error:
        raise ImageError("%s is not an array: %s" % (path, first_line(error)), "write it with numpy.save")
    names = [tensor.tensor for tensor in inputs]
    if sorted(arrays) != sorted(names):
        raise ImageError("%s has the arrays %s" % (path, ", ".join(sorted(arrays))), "name them %s" % ", ".join(names))
    columns = [list(_column(tensor, arrays[tensor.tensor], path)) for tensor in inputs]
    samples: List[Tensors] = [dict(zip(names, row)) for row in zip(*columns)]
    if not samples:
        raise ImageError("%s has no samples" % path, "give at least one")
    return samples


def _column(tensor: TensorDescription, array: Array, path: str) -> Iterator[Array]:
    """Yield the values of one input for each sample, in the dtype of the model; real values are quantized."""
    if array.shape[1:] not in (tensor.shape, tensor.shape[1:]) or array.dtype.kind not in "uifb":
        what = "%s: the array for %s is %s %r" % (path, tensor.tensor, array.dtype, list(array.shape))
        raise ImageError(what, "give an array [n, %s]" % ", ".join(map(str, tensor.shape[1:])))
    for value in array:
        is_real = array.dtype.kind == "f" and tensor.is_quantized
        stored = tensor.stored(value) if is_real else value.astype(tensor.dtype)
        yield stored.reshape(tensor.shape)


def _random(tensor: TensorDescription, random: Any) -> Array:
    dtype = np.dtype(tensor.dtype)
    if dtype.itemsize == 1 and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return random.randint(limits.min, limits.max + 1, tensor.shape).astype(dtype)
    return random.random_sample(tensor.shape).astype(dtype)


def _save(path: str, results: Sequence[Dict[str, Array]]) -> None:
    """Write outputs as an .npz file, one array [n, …] for each output, atomically."""
    stacked: Dict[str, Any] = {name: np.stack([row[name] for row in results]) for name in results[0]}
    stream = io.BytesIO()
    np.savez(stream, **stacked)
    write_atomically(path, stream.getvalue())
