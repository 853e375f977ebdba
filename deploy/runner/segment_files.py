"""The command `pipeline`: the files of segments, their devices, and the samples."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.durable_files import write_atomically
from deploy.contract.errors import ArgumentError, EdgeTpuError, ImageError
from deploy.contract.preprocessing import Array
from deploy.contract.tensors import TensorDescription
from deploy.runner import host, probe
from deploy.runner.pipeline import WAITING, LoadedSegment, SegmentPipeline, Tensors, text
from deploy.runner.runtime import LIBRARY, InferenceSession, RuntimeOptions, find, first_line

DESCRIPTION = "split.json"
MAX_DESCRIPTION_BYTES = 1 << 24
MAX_RUNS = 1_000_000
_SEGMENT = re.compile(
    r"(?P<model>.*)_segment_(?P<index>[0-9]{1,3})_of_(?P<count>[0-9]{1,3})(?P<compiled>_edgetpu)?\.tflite\Z"
)


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
    """Return the names of the outputs of the whole model in the description of a split; none if there is no file."""
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
