"""Conversion of a SavedModel without a Keras model to a float .tflite file, in a child process with limits.

Conversion runs the graph of the folder and evaluates its constants in native code. Its operators are checked first
(`saved_model_folder`).

The file takes one sample. This is right only if the first axis of the inputs is a batch: the SavedModel computes
several different samples at once, and each of them alone must have the same outputs. The outputs of the file are
compared with these, so every user of the file gets one that computes the same as the folder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core import sandbox
from compress.core.errors import ModelError, cause_of, listing, nearest
from compress.model.importers.common import verification
from compress.model.importers.common.batches import HINT, BatchError
from compress.model.importers.common.unsupported import carrying, listed
from compress.model.importers.common.verification import Arrays, Parity, Runs
from compress.model.importers.saved_model.saved_model_folder import Content, Port, Signature, refusal

DEFAULT = "serving_default"
TIMEOUT_S = 600
"""A damaged graph could keep the converter busy without end."""
MEMORY_BYTES = 12 * 2**30
"""The converter holds several copies of the weights; a damaged graph cannot take the whole machine."""
MODEL = "model.tflite"
RESULT = "result.json"
TENSORS = "tensors.npz"
LARGEST_SIZE = 2**15
"""A damaged file could ask for more memory than the machine has."""
LOOPS = {"While", "StatelessWhile"}


@dataclass(frozen=True)
class Converted:
    """A converted signature.

    Attributes:
        tflite: the float file, with batch 1; its inputs and outputs have the names and the order of the signature.
        inputs: random inputs of each run, one array for each input.
        outputs: outputs of the SavedModel for them.
        repeated: outputs of the SavedModel for the same inputs with their last bits changed.
    """

    tflite: bytes
    runtime: str
    inputs: Runs
    outputs: Runs
    repeated: Runs

    def compared(self, actual: Runs) -> tuple[Parity, bool]:
        """Return the comparison of the outputs of another form of the model, and whether they agree.

        The comparison leaves out dimensions of 1: a network may have its batch before the first dimension of the file's
        tensor.
        """
        by_run = [
            verification.compare_outputs(_flat(expected), _flat(outputs))
            for expected, outputs in zip(self.outputs, actual, strict=True)
        ]
        parity, exceeding = verification.verified(
            self.inputs, by_run, self.outputs, lambda: self.repeated, "tensorflow", len(self.inputs)
        )
        return parity, not exceeding


def _flat(outputs: Arrays) -> list[NDArray[Any]]:
    return [output.reshape(-1) for output in outputs]


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
    if texts := [port.name for port in signature.outputs if port.dtype == "string"]:
        raise ModelError(f"its output {texts[0]!r} is text", where=where, allowed="numbers")
    return signature


def _check_input(port: Port, where: str) -> None:
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
    """Convert one signature to a float .tflite file with batch 1, and compare the file with the SavedModel.

    Raises:
        ModelError: the graph has operators that are not run, TensorFlow cannot convert it within the limits, the first
            axis is not a batch, or the outputs of the file differ.
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
        if "not a batch" in facts:
            raise ModelError(facts["not a batch"], where=str(content.path), hint=HINT)
        if "error" in facts:
            raise refusal(content.path, f"cannot be converted: {facts['error']}")
        converted = _read_results(Path(folder), facts)
    _check_conversion(converted, str(content.path))
    return converted


def _read_results(folder: Path, counts: Mapping[str, int]) -> Converted:
    with np.load(folder / TENSORS) as stored:
        inputs, outputs, repeated = (
            [[stored[f"{kind}_{run}_{index}"] for index in range(counts[kind])] for run in range(counts["runs"])]
            for kind in ("inputs", "outputs", "repeated")
        )
    runtime = verification.runtime_version("tensorflow")
    return Converted((folder / MODEL).read_bytes(), runtime, inputs, outputs, repeated)


def _check_conversion(converted: Converted, where: str) -> None:
    """Compare the file in the TFLite runtime with the SavedModel."""
    from compress.model.tflite import graph
    from compress.model.tflite.comparison import Runner

    try:
        runner = Runner(graph.parse(converted.tflite))
        parity, agrees = converted.compared([runner.run(inputs) for inputs in converted.inputs])
    except ModelError as error:
        error.where = error.where or where
        raise
    if not agrees:
        raise ModelError(
            f"the outputs of the converted .tflite file differ by {parity.max_rel:.2g} of the largest output",
            where=where,
            allowed=f"{verification.TOLERANCE:g}",
            hint="remove random operators from the signature; otherwise please report it, with the folder",
        )


def convert_in_child(path: str, name: str, folder: str) -> None:
    """Convert one signature; write the model, the tensors of its runs and the result or the error to a folder."""
    facts: dict[str, Any]
    try:
        facts = _convert(path, name, Path(folder))
    except BatchError as error:
        facts = {"not a batch": error.what}
    except ModelError as error:
        facts = {"error": error.what}
    except Exception as error:  # noqa: BLE001 - TensorFlow raises many types, and the parent reports all of them
        facts = {"error": f"{type(error).__name__}: {cause_of(error)}"}
    (Path(folder) / RESULT).write_text(json.dumps(facts))


def _convert(path: str, name: str, folder: Path) -> dict[str, Any]:
    from compress.model.importers.saved_model import one_sample
    from compress.model.ir import tensorflow

    tensorflow.keras()
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    signature = one_sample.LoadedSignature.of(loaded.signatures[name])
    function = signature.for_one_sample()
    _refuse_loops(function)
    tensors = one_sample.run_samples(signature, function)
    stored: dict[str, Any] = {
        f"{kind}_{run}_{index}": array
        for kind, runs in tensors.items()
        for run, arrays in enumerate(runs)
        for index, array in enumerate(arrays)
    }
    np.savez(folder / TENSORS, **stored)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], loaded)
    (folder / MODEL).write_bytes(_named(converter.convert(), signature.inputs, signature.outputs))
    counts = {kind: len(runs[0]) for kind, runs in tensors.items()}
    return {**counts, "runs": len(tensors["inputs"])}


def _refuse_loops(function: Any) -> None:
    """Refuse a graph with a while loop: a full-integer model has none, and the layers that it comes from are lost.

    Raises:
        ModelError: the graph has one.
    """
    from tensorflow.python.framework import convert_to_constants

    frozen = convert_to_constants.convert_variables_to_constants_v2(function, lower_control_flow=False)
    for node in frozen.graph.as_graph_def().node:  # freezing has put the functions of the graph into it
        if node.op in LOOPS:
            raise ModelError(
                f"its graph has the while loop {node.name}, such as that of a recurrent layer; save a recurrent model "
                "as a .keras or .h5 file, whose layers are read"
            )


def _named(tflite: bytes, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """Return a .tflite file with the names and the order of a signature.

    The converter changes the order. Only the signature in its file says which tensor is which: there, the tensors are
    called input_0, input_1, … and output_0, output_1, … (`one_sample.LoadedSignature.for_one_sample`).
    """
    from compress.model.tflite import edit as edits
    from compress.model.tflite import graph as graphs

    graph = graphs.parse(tflite)
    (signature,) = graph.source.signatureDefs
    edit = edits.Edit(graph)
    ends = []
    for entries in (signature.inputs, signature.outputs):  # in the order of the numbers in their names
        tensors = {int(entry.name.decode().rsplit("_", 1)[1]): int(entry.tensorIndex) for entry in entries}
        ends.append([tensors[number] for number in sorted(tensors)])
    edit.inputs, edit.outputs = ends
    for position, index in enumerate(edit.outputs):
        if index in (*edit.inputs, *edit.outputs[:position]):  # the same values under a second name
            edit.outputs[position] = edit.like(graph.tensors[index], "again")
            edits.reshape(edit, index, edit.outputs[position], graph.tensors[index].shape)
    for index, name in zip((*edit.inputs, *edit.outputs), (*inputs, *outputs), strict=True):
        edit.rename(index, name)
    named = edit.graph()
    for entries, names, indices in (
        (signature.inputs, inputs, named.inputs),
        (signature.outputs, outputs, named.outputs),
    ):
        for entry, name, index in zip(entries, names, indices, strict=True):
            entry.name, entry.tensorIndex = name, index
    named.source.signatureDefs = [signature]
    return graphs.serialize(named)
