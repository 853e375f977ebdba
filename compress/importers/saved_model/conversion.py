"""A SavedModel that holds no Keras model, as a float .tflite file: converted in a process of its own, with limits.

Conversion runs the graph that the folder brings (its operators were looked at before: `saved_model`), and evaluates
constants of any size that it asks for, in native code; whatever becomes of it there is one message here.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.importers.common.unsupported import carrying
from compress.importers.saved_model.saved_model_folder import Content, Signature, refusal
from compress.suggestions import listing, nearest

DEFAULT = "serving_default"
SECONDS = 600
MEMORY_BYTES = 12 * 2**30
SAMPLES = 4
_CODE = "from compress.importers.saved_model import conversion; conversion.child()"


@dataclass(frozen=True)
class Converted:
    """A converted signature.

    Attributes:
        tflite: the float file, with batch 1.
        runtime: TensorFlow and its version.
        inputs: of each run one random array for each input.
        outputs: what the SavedModel answered to them.
    """

    tflite: bytes
    runtime: str
    inputs: list[list[NDArray[Any]]]
    outputs: list[list[NDArray[Any]]]


def chosen(content: Content, name: str | None) -> Signature:
    """The signature to convert: the one named, TensorFlow's default, or the only one.

    Raises:
        ModelError: there are none, several of which none is the default or named, or its inputs are not for a network.
    """
    names = [each.name for each in content.signatures]
    where = str(content.path)
    if not names:
        raise ModelError("has no signature", where=where, todo="save it with model.export(), or signatures=…")
    if name is None and DEFAULT in names:
        name = DEFAULT
    if name is None and len(names) > 1:
        what = f"has several signatures: {', '.join(sorted(names))}"
        raise ModelError(what, where=where, todo="set `signature:` under `model:`, or give --signature to `import`")
    wanted = name or names[0]
    if wanted not in names:
        todo = nearest(wanted, names)
        raise ModelError(f"has no signature {wanted!r}", where=where, allowed=listing(sorted(names)), todo=todo)
    found = content.signatures[names.index(wanted)]
    for port in found.inputs:
        shape = port.shape
        if port.dtype not in ("float32", "uint8", "int8", "int32", "int64", "bool") or shape is None:
            raise ModelError(f"its input {port.name!r} is {port.dtype} of {shape}", where=where, allowed="numbers")
        if None in shape[1:] or any(side > 2**15 for side in shape[1:] if side is not None):
            raise ModelError(
                f"its input {port.name!r} has the shape {list(shape)}",
                where=where,
                allowed="sides that are fixed behind the first, of at most 32,768",
                todo="export it with a fixed size",
            )
    return found


def refused(content: Content) -> ModelError:
    """The error that lists the operators for which a graph is not run."""
    what = f"has operators that are not run: {'; '.join(map(str, content.refused))}"
    return carrying(refusal(content.path, what), content.refused)


def convert(content: Content, name: str | None = None) -> Converted:
    """Converts one signature to a float .tflite file with batch 1.

    Raises:
        ModelError: the graph has operators that are not run, or TensorFlow cannot convert it in bounds.
    """
    if content.refused:
        raise refused(content)
    signature = chosen(content, name)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(content.path.absolute()), signature.name, folder]
        root = str(Path(__file__).resolve().parents[3])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.getenv("PYTHONPATH")])])}
        command = [sys.executable, "-W", "ignore", "-c", _CODE, *arguments]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise refusal(content.path, f"was not converted in {SECONDS} s") from error
        told = Path(folder) / "told.json"
        if done.returncode or not told.exists():
            ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
            raise refusal(content.path, f"TensorFlow ended while it converted it ({ended})")
        facts = json.loads(told.read_text())
        if "error" in facts:
            raise refusal(content.path, f"cannot be converted: {facts['error']}")
        with np.load(Path(folder) / "answers.npz") as stored:
            inputs, outputs = (
                [[stored[f"{kind}_{run}_{at}"] for at in range(facts[kind])] for run in range(SAMPLES)]
                for kind in ("inputs", "outputs")
            )
        return Converted((Path(folder) / "model.tflite").read_bytes(), facts["runtime"], inputs, outputs)


def child() -> None:
    """The process of its own: converts, and leaves model.tflite, answers.npz and told.json in a folder."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path, name, folder = sys.argv[1:4]
    try:
        facts = _converted(path, name, Path(folder))
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells it
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        facts = {"error": f"{type(error).__name__}: {lines[0][:300]}"}
    (Path(folder) / "told.json").write_text(json.dumps(facts))


def _converted(path: str, name: str, folder: Path) -> dict[str, Any]:
    from compress.ir import tensorflow

    tensorflow.keras()
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    signature = loaded.signatures[name]
    specs = signature.structured_input_signature[1]
    names = sorted(specs)
    fixed = [tf.TensorSpec([1, *specs[each].shape[1:]][: specs[each].shape.rank], specs[each].dtype) for each in names]

    @tf.function(input_signature=fixed)  # type: ignore[untyped-decorator]
    def run(*tensors: Any) -> Any:
        made = signature(**dict(zip(names, tensors, strict=True)))
        return [made[each] for each in sorted(made)]

    concrete = run.get_concrete_function()
    random = np.random.default_rng(0)
    answers: dict[str, Any] = {}
    for number in range(SAMPLES):
        given = [_random(random, spec) for spec in fixed]
        answers |= {f"inputs_{number}_{at}": each for at, each in enumerate(given)}
        answers |= {
            f"outputs_{number}_{at}": each.numpy() for at, each in enumerate(concrete(*map(tf.constant, given)))
        }
    np.savez(folder / "answers.npz", **answers)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], loaded)
    (folder / "model.tflite").write_bytes(converter.convert())
    counts = {"inputs": len(fixed), "outputs": len(concrete.outputs)}
    return {"runtime": f"tensorflow {tf.__version__}", **counts}


def _random(random: np.random.Generator, spec: Any) -> NDArray[Any]:
    """Normal numbers, or small whole ones."""
    shape = tuple(spec.shape)
    made = random.standard_normal(shape) if spec.dtype.is_floating else random.integers(0, 2, shape)
    return made.astype(spec.dtype.as_numpy_dtype)
