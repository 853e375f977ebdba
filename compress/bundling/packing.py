"""The content of a bundle: models, golden inputs and outputs, and the evaluation sample."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.bundling import recognition
from compress.bundling.recognition import RecognitionSettings
from compress.core.errors import StageError
from compress.core.progress import SILENT, Phase, Progress
from compress.core.resources import __version__
from compress.data.splits import spread
from compress.data.types import Data
from compress.model.tflite import float_graph, graph
from compress.model.tflite.embedding import OUTPUT as EMBEDDING
from compress.model.tflite.embedding import is_embedding
from compress.model.tflite.interpreter import LoadedModel, version
from compress.tasks.base import Specification, Task
from deploy.contract import bundle
from deploy.contract.preprocessing import VERSION, Preprocessing
from deploy.contract.tensors import TensorDescription, unique_names

MAX_EVALUATION_BYTES = 1 << 24
"""Maximum size of the evaluation samples in a bundle and of the models' outputs for them, decoded; the same for golden
inputs and outputs. If samples or outputs are large, there are fewer of them."""
_Members = dict[str, bytes]


@dataclass(frozen=True)
class Packing:
    """The source of a bundle.

    Attributes:
        files: the .tflite files by role: `int8`; and `original` and `compiled`, if there are any.
        data: the data for golden inputs and the evaluation sample; None: the bundle has neither.
        specification: how the outputs are read.
        golden: number of validation samples with the expected outputs.
        evaluation: number of test samples.
        labels: names of the classes that do not come from the data.
        recognition: the settings of the confidence and of the reference embeddings.
    """

    name: str
    files: Mapping[str, Path]
    task: Task
    tools: Mapping[str, str]
    progress: Progress
    data: Data | None = None
    specification: Specification = None
    golden: int = 4
    evaluation: int = 100
    labels: Sequence[str] = field(default=())
    recognition: RecognitionSettings = field(default_factory=RecognitionSettings)

    @cached_property
    def models(self) -> dict[str, LoadedModel]:
        """The models that this host can run, by role.

        Raises:
            ModelError: the runtime rejects a model.
        """
        return {
            role: LoadedModel(path, reproducible=True, order=self._ordered)
            for role, path in self.files.items()
            if role != "compiled"
        }

    @property
    def class_names(self) -> Sequence[str]:
        """The names of the classes in the data; none for a model that learns from its original, which has its own."""
        return () if self.data is None or self.task.learns_from_original else self.data.class_names

    def _ordered(self, outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the outputs in the order of the task, with an embedding after them."""
        task_outputs = self.task.output_order(outputs, self.specification)
        return task_outputs + [detail for detail in outputs if is_embedding(detail) and detail not in task_outputs]

    @property
    def output_bytes(self) -> int:
        """The size of the stored outputs of all models for one sample."""
        total = 0
        for model in self.models.values():
            dtype = np.result_type(*(tensor.dtype for tensor in model.output_tensors))
            total += model.output_layout.size * dtype.itemsize
        return total


def pack(packing: Packing) -> bytes:
    """Return the bytes of a bundle.

    Raises:
        DataError: see `recognition.described`.
        ModelError: a model does not fit the data, or the runtime rejects it.
        StageError: the model is not quantized.
    """
    models = packing.models
    _refuse_float(models["int8"], packing.files["int8"])
    if packing.labels and packing.class_names:
        raise StageError("package.labels is set, but the data has class names already", hint="remove package.labels")
    members = {f"{role}.tflite": path.read_bytes() for role, path in packing.files.items()}
    members |= {_lookup_file(role): bundle.array_bytes(m.lookup.table) for role, m in models.items() if m.lookup}
    entries = {role: _described(packing, role) for role in models}
    if "compiled" in packing.files:
        entries["compiled"] = {**entries["int8"], "file": "compiled.tflite"}
    data = packing.data
    steps = data.preprocessing if data else []
    golden, golden_members = _golden(packing)
    evaluation, evaluation_members = _evaluation(packing)
    names = [tensor["name"] for tensor in entries["int8"]["outputs"]]
    recognized = recognition.described(packing, names)
    manifest = {
        "name": packing.name,
        "coralline": __version__,
        "task": packing.task.name,
        "labels": list(packing.labels or packing.class_names),
        "preprocessing": {"version": VERSION, "digest": Preprocessing(steps).digest, "steps": steps},
        "models": entries,
        "golden": golden,
        "evaluation": evaluation,
        "tools": dict(packing.tools),
        **({"decoding": data.decoding} if data and data.decoding else {}),
        **packing.task.manifest(packing.specification, packing.labels),
        **recognized.manifest,
    }
    return bundle.pack(manifest, members | golden_members | evaluation_members | dict(recognized.members))


def _refuse_float(model: LoadedModel, path: Path) -> None:
    if any(tensor.is_quantized for tensor in [*model.input_tensors, *model.output_tensors]):
        return
    if float_graph.is_float(graph.read(path)):
        raise StageError("the model is not quantized", hint="put quantize before package")
    raise StageError(
        "the model is quantized inside, but its inputs and outputs are float",
        allowed="a model with an input or output of int8 or uint8",
        hint="convert them with `python -m compress legalize MODEL.tflite NEW.tflite --io int8`, and use the new file",
    )


def _described(packing: Packing, role: str) -> dict[str, Any]:
    """Return the entry of a model in the manifest; all models have the same names of inputs and outputs."""
    first = next(iter(packing.models.values()))
    model = packing.models[role]
    trained = [output["name"] for output in (packing.specification or {}).get("outputs", ())]
    return {
        "file": f"{role}.tflite",
        "inputs": _named(model.input_tensors, first.input_tensors, ()),
        "outputs": _named(model.output_tensors, first.output_tensors, trained),
        **({"lookup": _lookup_file(role)} if model.lookup else {}),
    }


def _lookup_file(role: str) -> str:
    return f"{role}-lookup.npy"


def _named(
    tensors: Sequence[TensorDescription], first: Sequence[TensorDescription], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return tensors with these names, or with those of the first model of the bundle."""
    chosen = list(names) if len(names) == len(tensors) else list(map(_application_name, first))
    if len(chosen) + 1 == len(tensors) and tensors[-1].tensor.startswith(EMBEDDING):
        chosen.append("embedding")  # of the quantized model alone
    if len(chosen) != len(tensors):
        chosen = list(map(_application_name, tensors))
    pairs = zip(tensors, unique_names(chosen), strict=True)
    return [tensor._replace(name=name).to_json() for tensor, name in pairs]


def _application_name(tensor: TensorDescription) -> str:
    """Return the name of a tensor for applications: the name in the file's signature, if the file has one."""
    return tensor.name if tensor.name != tensor.tensor else plain_name(tensor.tensor)


def plain_name(tensor: str) -> str:
    """Return the name of a tensor for applications, without what TensorFlow's converter added to it.

    `Identity_3` and `StatefulPartitionedCall:3` are the converter's names of the output 3.
    """
    name = tensor.split(";")[0].removeprefix("serving_default_")
    match = re.fullmatch(r"(?:Identity|StatefulPartitionedCall|PartitionedCall)(?:_(\d+))?(?::(\d+))?", name)
    if match is None:
        return name.removesuffix(":0")
    number = max(int(digits or 0) for digits in match.groups())
    return f"output_{number}" if number else "output"


def _golden(packing: Packing) -> tuple[dict[str, Any], _Members]:
    """Return the first validation samples and the outputs of each model: manifest entry and members."""
    entry: dict[str, Any] = {"inputs": [], "outputs": {}, "machine": platform.machine()}  # kernels differ between them
    data = packing.data
    if data is None:
        return entry, {}
    fitting = max(MAX_EVALUATION_BYTES // packing.output_bytes, 1)
    count = min(packing.golden, len(data.labels("validation")), fitting)
    raw, inputs = data.raw("validation", np.arange(count)), data.inputs("validation")[:count]
    members = {f"golden-input-{index}.npy": bundle.array_bytes(sample) for index, sample in enumerate(raw)}
    entry["inputs"] = list(members)
    for role, model in packing.models.items():
        name = f"golden-output-{role}.npy"
        entry["outputs"][role] = name
        members[name] = bundle.array_bytes(_outputs(model, inputs))
    return entry, members


def outputs_phase(role: str) -> Phase:
    """Return the phase in which one of the models runs on the evaluation sample."""
    return Phase(f"outputs of {role}", unit="sample")


def _outputs(model: LoadedModel, inputs: NDArray[np.float32], progress: Progress = SILENT) -> NDArray[Any]:
    """Return the outputs of a model for preprocessed samples, in the model's type: [n, ...]."""
    parts = []
    for number, sample in enumerate(inputs):
        parts.append(model.raw(model.feed(sample)))
        progress.update(number + 1, len(inputs))
    return np.concatenate(parts)


def _evaluation(packing: Packing) -> tuple[dict[str, Any] | None, _Members]:
    """Return test samples, the outputs of each model, and their metrics: manifest entry and members."""
    data = packing.data
    if data is None:
        return None, {}
    indices, stacks = _stacked(data, packing.evaluation, packing.output_bytes)
    expected = min(packing.evaluation, len(data.labels("test")))
    if len(indices) < expected:
        what = f"{len(indices)} of {expected} evaluation samples and their outputs fit"
        packing.progress.note(f"{what} into {MAX_EVALUATION_BYTES:,} bytes")
    if not indices:
        return None, {}
    members = {f"evaluation-inputs-{index}.npy": bundle.array_bytes(stack) for index, stack in enumerate(stacks)}
    entry: dict[str, Any] = {"split": "test", "inputs": list(members), "outputs": {}}
    rows = {}
    for role, model in packing.models.items():
        with packing.progress.phase(outputs_phase(role)):
            stored = _outputs(model, data.inputs("test")[indices], packing.progress)
        name = f"evaluation-output-{role}.npy"
        entry["outputs"][role] = name
        members[name] = bundle.array_bytes(stored)
        rows[role] = _of_task(model, model.dequantized(stored))
    entry["metrics"] = {}
    if "original" in rows:
        note = f"evaluation sample, {version()}, default kernels without a delegate"
        packaged = packing.task.packaged(rows, data, indices, packing.specification, note)
        entry["metrics"] = packaged.metrics
        if packaged.targets is not None and (packing.labels or packing.class_names):  # the device checks their classes
            entry |= {"labels_from": "original"} if packing.task.learns_from_original else {}
            entry["labels"] = "evaluation-labels.npy"
            members["evaluation-labels.npy"] = bundle.array_bytes(packaged.targets)
    return entry, members


def _of_task(model: LoadedModel, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the outputs that the task measures, without an embedding in addition to them."""
    extra = [is_embedding(detail) for detail in model.outputs[1:]]
    if not any(extra):
        return rows
    parts = model.output_layout.parts(rows)
    return np.concatenate([part for part, is_extra in zip(parts, [False, *extra], strict=True) if not is_extra], axis=1)


def _stacked(data: Data, count: int, output_bytes: int) -> tuple[list[int], list[NDArray[Any]]]:
    """Return test samples grouped by shape and dtype: their indices in the split, and one stack for each group."""
    groups: dict[tuple[Any, ...], list[tuple[int, NDArray[Any]]]] = {}
    free = MAX_EVALUATION_BYTES
    for index in spread(data.labels("test"))[:count]:
        (sample,) = data.raw("test", np.array([index]))
        free -= sample.nbytes + output_bytes
        if free < 0:
            break
        groups.setdefault((sample.shape, sample.dtype.str), []).append((int(index), sample))
    indices = [index for group in groups.values() for index, _ in group]
    return indices, [np.stack([sample for _, sample in group]) for group in groups.values()]
