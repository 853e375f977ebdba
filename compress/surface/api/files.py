"""`check`, `estimate` and `legalize`: .tflite files on a target. `load_model`: a model file as a Keras model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress import targets
from compress.model.tflite import graph
from compress.targets.base import hardware_costs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from compress.targets.base import CheckResult, EstimateResult, LegalizeResult, Target

FilePath = str | PathLike[str]


def check(
    model: FilePath, *, target: str | None = None, compiler: str | None = None, all_subgraphs: bool = False
) -> CheckResult:
    """Predict where each operator of a model runs, without the target's compiler.

    Args:
        model: a full-integer .tflite file.
        target: the name of a target, such as "cpu"; None for the Edge TPU.
        compiler: the version of the Edge TPU compiler, "16.0", "15.0", "2.1" or "1.0"; None for the newest.
        all_subgraphs: like the compiler's option -a.

    Returns:
        The placement of every operator with its reason, and the memory in bytes.

    Raises:
        ModelError: the file cannot be read.
        PipelineError: unknown target or version.
    """
    return _target(target, compiler).check(graph.read(Path(model)), all_subgraphs=all_subgraphs)


def estimate(
    model: FilePath,
    host: str | None = None,
    *,
    target: str | None = None,
    clock: str | None = None,
    compiled: FilePath | None = None,
) -> EstimateResult:
    """Predict the latency of a model, in milliseconds.

    Args:
        model: a full-integer .tflite file, not compiled.
        host: "usb3", "usb2", "pcie", "devboard", "pi4-usb3", "pi5-usb3" or "pi5-pcie"; None for the target's default.
        target: the name of a target; None for the Edge TPU. No latency is predicted for "cpu".
        clock: "max", or "std" for half of it; None for the maximum.
        compiled: the same model, compiled by edgetpu_compiler: its real sizes replace the predicted ones.

    Returns:
        The latency as an interval, its parts, and the slowest layers.

    Raises:
        ModelError: a file cannot be read, or `compiled` was made from another model.
        PipelineError: unknown target, host or clock.
    """
    path = None if compiled is None else Path(compiled)
    costs = hardware_costs(_target(target, None))
    return costs.estimate(graph.read(Path(model)), host, clock, path)


def legalize(
    model: FilePath,
    out: FilePath,
    *,
    target: str | None = None,
    inputs: FilePath | None = None,
    io: str | None = None,
    compiler: str | None = None,
) -> LegalizeResult:
    """Rewrite a model so that more operators run on the target, and write the result.

    Args:
        model: a full-integer .tflite file.
        out: the file for the result.
        target: the name of a target, such as "cpu"; None for the Edge TPU.
        inputs: .npy [n, ...], or .npz by input name: samples that each rewrite is verified on; None for random ones.
        io: "int8" or "uint8", the type of inputs and outputs; None for the internal type.
        compiler: the version of the Edge TPU compiler, "16.0", "15.0", "2.1" or "1.0"; None for the newest.

    Returns:
        The changes with their reasons, and the placement before and after.

    Raises:
        ModelError: the model cannot be read, or the TFLite runtime cannot run it.
        DataError: the inputs do not fit the model.
        PipelineError: unknown target or version.
        OSError: `out` cannot be written.
    """
    from compress.model.tflite import comparison
    from deploy.contract.durable_files import write_atomically

    original = graph.read(Path(model))
    feeds = [] if inputs is None else comparison.read_feeds(Path(inputs), original)
    dtype = None if io is None else io.upper()
    result = _target(target, compiler).legalize(original, feeds, io=dtype)
    write_atomically(Path(out), graph.serialize(result.graph))
    return result


def _target(name: str | None, compiler: str | None) -> Target:
    """Return a target with the requested version of its compiler."""
    target = targets.load(name or targets.DEFAULT)
    return target if compiler is None else target.compiled_by(compiler)


def load_model(
    path: FilePath,
    *,
    trust: bool = False,
    signature: str | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    samples: NDArray[np.float32] | None = None,
) -> Any:
    """Read a model file as a Keras 3 model whose outputs were compared with those of the original runtime.

    Args:
        path: a .keras, .h5, .hdf5, .onnx or float .tflite file, or the folder of a SavedModel.
        trust: allow the model to run code that it contains.
        signature: the signature of a SavedModel that has several.
        shapes: the shapes of the inputs that are dynamic in an .onnx file, by name.
        samples: float32 [n, ...], as the model's input expects them: compared in addition to random samples.

    Returns:
        A `keras.Model`. The annotation is `Any` because Keras is imported when it is first used.

    Raises:
        UntrustedError: the model contains code, and `trust` is False.
        ModelError: the file cannot be read, has operators that are not supported, or the outputs differ.
    """
    from compress.model.importers import model_file

    file = model_file.read(Path(path), signature, shapes)
    return model_file.load(file, trust=trust, samples=samples).model
