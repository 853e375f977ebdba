"""Conversion of a SavedModel without a Keras model to a float .tflite file, in a child process with limits.

Conversion runs the graph of the folder and evaluates its constants in native code. Its operators are checked first
(`saved_model_folder`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress import sandbox
from compress.errors import ModelError
from compress.importers.common.unsupported import carrying, listed
from compress.importers.saved_model.saved_model_folder import Content, Port, Signature, refusal
from compress.suggestions import listing, nearest

DEFAULT = "serving_default"
TIMEOUT_S = 600
MEMORY_BYTES = 12 * 2**30
SAMPLES = 4
MODEL = "model.tflite"
RESULT = "result.json"
TENSORS = "tensors.npz"
LARGEST_SIZE = 2**15


@dataclass(frozen=True)
class Converted:
    """A converted signature.

    Attributes:
        tflite: the float file, with batch 1.
        runtime: TensorFlow and its version.
        inputs: random inputs of each run, one array for each input.
        outputs: outputs of the SavedModel for them.
    """

    tflite: bytes
    runtime: str
    inputs: list[list[NDArray[Any]]]
    outputs: list[list[NDArray[Any]]]


def choose_signature(content: Content, name: str | None) -> Signature:
    """Return the signature to convert: the one named, TensorFlow's default, or the only one.

    Raises:
        ModelError: there is no signature, the choice is ambiguous, or an input has an unsupported type or shape.
    """
    names = [signature.name for signature in content.signatures]
    where = str(content.path)
    if not names:
        raise ModelError("has no signature", where=where, hint="save it with model.export(), or signatures=…")
    if name is None and DEFAULT in names:
        name = DEFAULT
    if name is None and len(names) > 1:
        what = f"has several signatures: {', '.join(sorted(names))}"
        raise ModelError(what, where=where, hint="set `signature:` under `model:`, or give --signature to `import`")
    chosen = name or names[0]
    if chosen not in names:
        hint = nearest(chosen, names)
        raise ModelError(f"has no signature {chosen!r}", where=where, allowed=listing(sorted(names)), hint=hint)
    signature = content.signatures[names.index(chosen)]
    for port in signature.inputs:
        _check_input(port, where)
    return signature


def _check_input(port: Port, where: str) -> None:
    """Refuse an input whose type or shape cannot be converted."""
    if port.dtype not in ("float32", "uint8", "int8", "int32", "int64", "bool") or port.shape is None:
        raise ModelError(f"its input {port.name!r} is {port.dtype} of {port.shape}", where=where, allowed="numbers")
    if any(size is None or size > LARGEST_SIZE for size in port.shape[1:]):
        raise ModelError(
            f"its input {port.name!r} has the shape {list(port.shape)}",
            where=where,
            allowed=f"fixed dimensions after the first, of at most {LARGEST_SIZE:,}",
            hint="export it with a fixed size",
        )


def refused_operators(content: Content) -> ModelError:
    """Return the error that lists the operators that are not allowed to run."""
    what = f"has operators that are not run: {listed(content.refused)}"
    return carrying(refusal(content.path, what), content.refused)


def convert(content: Content, name: str | None = None) -> Converted:
    """Convert one signature to a float .tflite file with batch 1.

    Raises:
        ModelError: the graph has operators that are not run, or TensorFlow cannot convert it within the limits.
    """
    if content.refused:
        raise refused_operators(content)
    signature = choose_signature(content, name)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(content.path.absolute()), signature.name, folder]
        try:
            ended = sandbox.run(convert_in_child, arguments, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES)
        except sandbox.SandboxTimeoutError as error:
            raise refusal(content.path, f"was not converted in {TIMEOUT_S} s") from error
        result = Path(folder) / RESULT
        if ended.status or not result.exists():
            raise refusal(content.path, f"TensorFlow crashed while it converted it ({ended.reason})")
        facts = json.loads(result.read_text())
        if "error" in facts:
            raise refusal(content.path, f"cannot be converted: {facts['error']}")
        with np.load(Path(folder) / TENSORS) as stored:
            inputs = [_stored(stored, f"inputs_{run}", facts["inputs"]) for run in range(SAMPLES)]
            outputs = [_stored(stored, f"outputs_{run}", facts["outputs"]) for run in range(SAMPLES)]
        return Converted((Path(folder) / MODEL).read_bytes(), facts["runtime"], inputs, outputs)


def _stored(archive: Any, prefix: str, count: int) -> list[NDArray[Any]]:
    return [archive[f"{prefix}_{index}"] for index in range(count)]


def convert_in_child(path: str, name: str, folder: str) -> None:
    """Convert one signature; write the model, the tensors of its runs and the result or the error to a folder."""
    from compress.importers.saved_model.loops import LoopError

    try:
        facts = _convert(path, name, Path(folder))
    except LoopError as error:
        facts = {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - TensorFlow raises many types, and the parent reports all of them
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        facts = {"error": f"{type(error).__name__}: {lines[0][:300]}"}
    (Path(folder) / RESULT).write_text(json.dumps(facts))


def _convert(path: str, name: str, folder: Path) -> dict[str, Any]:
    from compress.importers.saved_model import loops
    from compress.ir import tensorflow

    tensorflow.keras()
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    signature = loaded.signatures[name]
    specs = signature.structured_input_signature[1]
    names = sorted(specs)
    fixed = [_with_batch_1(specs[input_name]) for input_name in names]

    @tf.function(input_signature=fixed)  # type: ignore[untyped-decorator]
    def run(*tensors: Any) -> Any:
        outputs = signature(**dict(zip(names, tensors, strict=True)))
        return [outputs[output_name] for output_name in sorted(outputs)]

    concrete = run.get_concrete_function()
    np.savez(folder / TENSORS, **_run_samples(concrete, fixed))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([loops.unrolled(concrete)], loaded)
    (folder / MODEL).write_bytes(_named(converter.convert(), names, sorted(signature.structured_outputs)))
    counts = {"inputs": len(fixed), "outputs": len(concrete.outputs)}
    return {"runtime": f"tensorflow {tf.__version__}", **counts}


def _named(tflite: bytes, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """Return a .tflite file with the signature's names; the converter's are those of function calls."""
    from compress.tflite import graph as graphs
    from compress.tflite.edit import Edit

    graph = graphs.parse(tflite)
    edit = Edit(graph)
    for index, name in zip((*graph.inputs, *graph.outputs), (*inputs, *outputs), strict=True):
        edit.rename(index, name)
    return graphs.serialize(edit.graph())


def _with_batch_1(spec: Any) -> Any:
    import tensorflow as tf

    shape = [1, *spec.shape[1:]][: spec.shape.rank]
    return tf.TensorSpec(shape, spec.dtype)


def _run_samples(function: Any, specs: list[Any]) -> dict[str, Any]:
    """Return random inputs and their outputs, as named arrays."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for run in range(SAMPLES):
        inputs = [_random(random, spec) for spec in specs]
        arrays |= {f"inputs_{run}_{index}": array for index, array in enumerate(inputs)}
        outputs = function(*map(tf.constant, inputs))
        arrays |= {f"outputs_{run}_{index}": tensor.numpy() for index, tensor in enumerate(outputs)}
    return arrays


def _random(random: np.random.Generator, spec: Any) -> NDArray[Any]:
    """Return standard normal values, or 0 and 1 for an integer input."""
    shape = tuple(spec.shape)
    values = random.standard_normal(shape) if spec.dtype.is_floating else random.integers(0, 2, shape)
    return values.astype(spec.dtype.as_numpy_dtype)
