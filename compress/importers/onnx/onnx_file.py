""".onnx files as models to work on: rebuilt with Keras layers, and compared with onnxruntime.

What a file is, and what is in the way of rebuilding it, can be told without TensorFlow.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.importers.common import difference, verification
from compress.importers.common.difference import Parity
from compress.importers.common.unsupported import Refused, carrying
from compress.importers.common.verification import TOLERANCE
from compress.importers.onnx import child_processes, onnx_graph
from compress.importers.onnx.builder import FLOAT
from compress.importers.onnx.layout import Value
from compress.importers.onnx.network import Imported, imported
from compress.importers.onnx.onnx_graph import Graph
from compress.importers.onnx.onnx_inputs import Shapes
from compress.importers.onnx.ops.rules import RULES
from compress.ir import keras_graph as networks
from compress.ir.keras_graph import tensors_in

if TYPE_CHECKING:
    import keras

Arrays = Sequence[NDArray[Any]]
WHOLE_TYPES = {
    "UINT8": np.uint8,
    "INT8": np.int8,
    "UINT16": np.uint16,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}
DRAWN = {"UINT8": 256, "BOOL": 2}
"""How many whole numbers, from 0 on, are drawn for an input of such."""
DRAWN_ELSE = 8
LAST_BITS = 8
"""How many times what the last bits of an input change an answer may differ, where that is more than the tolerance."""
MOST_ALLOWED = 1e-2


@dataclass(frozen=True)
class File:
    """What an .onnx file is to a pipeline.

    Attributes:
        path: the file.
        graph: as it was read.
        imported: the network it became; None where operators are refused for what they are.
    """

    path: Path
    graph: Graph
    imported: Imported | None

    @property
    def problems(self) -> tuple[Refused, ...]:
        """The operators that cannot become layers of Keras, all of them."""
        return self.imported.problems if self.imported else self.graph.refused

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as it was in the file, in words."""
        return self.imported.notes if self.imported else self.graph.notes


def read(path: Path, shapes: Shapes = MappingProxyType({})) -> File:
    """Reads a file, and finds out what can be done with it; without TensorFlow.

    Args:
        path: the file.
        shapes: by input its sides, where the file leaves some open.

    Raises:
        ModelError: it is no ONNX model, is damaged, or makes no sense.
    """
    child_processes.check_readable(path, shapes)
    graph = onnx_graph.read(path, RULES, shapes)
    if graph.refused and not graph.nodes:
        return File(path, graph, None)
    try:
        return File(path, graph, imported(graph, RULES))
    except ModelError as error:
        error.where = str(path)
        raise


def load(file: File, samples: NDArray[np.float32] | None = None) -> tuple[keras.Model, float]:
    """As `compared`, with the largest difference, relative to the largest number of an output."""
    model, found = compared(file, samples)
    return model, found.max_rel


def compared(file: File, samples: NDArray[np.float32] | None = None) -> tuple[keras.Model, Parity]:
    """The file as a Keras model, and how far their outputs are apart.

    Args:
        file: one without problems.
        samples: real samples [n, ...] as the Keras model takes them, that both are run on beside random ones.

    Raises:
        ModelError: an operator has no counterpart, or the model answers differently.
    """
    if file.problems or file.imported is None:
        listed = "; ".join(map(str, file.problems))
        count = f"{len(file.problems)} operator{'s' if len(file.problems) != 1 else ''}"
        what = f"{count} cannot become layers of Keras: {listed}"
        raise carrying(ModelError(what, where=str(file.path)), file.problems)
    found = file.imported
    needed = networks.observed(found.network, list(tensors_in(found.network.outputs)))
    network = replace(needed, name="model", outputs=found.network.outputs)
    try:
        feeds = [*_random(found), *_real(found, samples)]
        wanted = _wanted(found.graph, found, feeds, found.graph.outputs)
        model = verification.built(network)
        made = [verification.answers(model, [array[None] for array in feed]) for feed in feeds]
        apart = _differences(wanted, made, found)
        own = _own(found, feeds, wanted) if max(apart) > TOLERANCE else None
        limits = [max(TOLERANCE, min(LAST_BITS * change, MOST_ALLOWED)) for change in own or [0.0] * len(feeds)]
        far = [feed for feed, one, most in zip(feeds, apart, limits, strict=True) if one > most]
        if far:
            raise verification.too_far(max(apart), str(file.path), _first_difference(found, far))
    except ModelError as error:
        error.where = str(file.path)
        raise
    against = f"onnxruntime {importlib.metadata.version('onnxruntime')}"
    return model, Parity(_largest(wanted, made, found), max(apart), against, len(feeds), max(own) if own else None)


def _largest(wanted: Sequence[Arrays], made: Sequence[Arrays], found: Imported) -> float:
    """The largest difference of an output, as it is."""
    return max(
        difference.difference(one.reshape(-1)[value.positions], other.reshape(-1))
        for outputs, answers in zip(wanted, made, strict=True)
        for value, one, other in zip(found.outputs, outputs, answers, strict=True)
    )


def _own(found: Imported, feeds: Sequence[Arrays], wanted: Sequence[Arrays]) -> list[float]:
    """How far the file's own answers move in each run when the last bits of its inputs change.

    They move much in a logarithm of what two large numbers leave over. There the answers of two sound
    runtimes differ as much as those of one for two inputs that are as good as the same.
    """
    nudged = [
        [array if kind in WHOLE_TYPES else other for kind, array, other in zip(_kinds(found), *pair, strict=True)]
        for pair in zip(feeds, verification.nudged(feeds), strict=True)
    ]
    again = _wanted(found.graph, found, nudged, found.graph.outputs)
    return verification.change(wanted, again)


def _kinds(found: Imported) -> list[str]:
    """The type that the file takes each input in."""
    return [found.graph.types[name] for name in found.inputs]


def _random(found: Imported) -> list[Arrays]:
    """Random samples; whole numbers where the file takes such, which are the same to the network."""
    counts = [_count(found.graph, name) if found.graph.types[name] in WHOLE_TYPES else 0 for name in found.inputs]
    return [
        [np.floor(np.abs(array) * count) % count if count else array for array, count in zip(feed, counts, strict=True)]
        for feed in verification.random([value.sides for value in found.inputs.values()])
    ]


def _count(graph: Graph, name: str) -> int:
    """How many whole numbers are drawn for an input: no more than there are rows in tables that it may pick from."""
    seen, counts = {name}, [DRAWN.get(graph.types[name], DRAWN_ELSE)]
    for node in graph.nodes:
        if node.operator == "Gather" and node.inputs[0] in graph.constants:
            counts += [len(graph.constants[node.inputs[0]])] if node.inputs[1] in seen else []
        elif seen.intersection(node.inputs):
            seen.update(node.outputs)
    return min(counts)


def _real(found: Imported, samples: NDArray[np.float32] | None) -> list[Arrays]:
    """Samples one by one, if the model takes such; rounded where the file takes whole numbers."""
    sides = [value.sides for value in found.inputs.values()]
    if samples is None or len(sides) != 1 or samples.shape[1:] != sides[0]:
        return []
    (kind,) = _kinds(found)
    if kind in WHOLE_TYPES:
        low, high = (0, 1) if kind == "BOOL" else (np.iinfo(WHOLE_TYPES[kind]).min, np.iinfo(WHOLE_TYPES[kind]).max)
        samples = np.rint(samples).clip(low, high)
    return [[np.asarray(sample, np.float32)] for sample in samples]


def _wanted(graph: Graph, found: Imported, feeds: Sequence[Arrays], outputs: Sequence[str]) -> list[list[NDArray[Any]]]:
    """What onnxruntime makes of the same inputs."""
    given = [
        {name: _fed(graph, name, value, array) for (name, value), array in zip(found.inputs.items(), feed, strict=True)}
        | {name: np.zeros(graph.shapes[name], _dtype(graph, name)) for name in graph.inputs if name not in found.inputs}
        for feed in feeds
    ]
    try:
        return child_processes.run_model(graph.model, given, outputs)
    except child_processes.OnnxRuntimeFailedError as error:
        raise ModelError(str(error), todo="run the file in onnxruntime, and export it again") from error


def _dtype(graph: Graph, name: str) -> Any:
    return WHOLE_TYPES.get(graph.types[name], np.float32)


def _fed(graph: Graph, name: str, value: Value, array: NDArray[Any]) -> NDArray[Any]:
    """An input of the network as the graph takes it; whole numbers where it takes only such."""
    turned = np.empty(array.size, np.float32)
    turned[value.positions] = array.reshape(-1)
    return turned.reshape(value.shape).astype(_dtype(graph, name))


def _differences(wanted: Sequence[Arrays], made: Sequence[Arrays], found: Imported) -> list[float]:
    """For each run the largest difference of an output."""
    return [
        max(_apart(found, value, *pair) for value, *pair in zip(found.outputs, outputs, answers, strict=True))
        for outputs, answers in zip(wanted, made, strict=True)
    ]


def _apart(found: Imported, value: Value, wanted: NDArray[Any], made: NDArray[Any]) -> float:
    """The difference of one tensor, as the graph and as the network have it."""
    if wanted.size != made.size:
        return float("inf")
    least = 1.0 if _is_share(found, value) else 1e-6
    return verification.relative(wanted.reshape(-1)[value.positions], made, least)


def _is_share(found: Imported, value: Value) -> bool:
    """Whether it is made by a sigmoid or a softmax: runtimes compute these to so much of 1, however small they are."""
    layer = found.network.layers[value.tensor.layer]
    while layer.kind in ("Reshape", "Flatten", "Permute", "Identity"):
        layer = found.network.layers[layer.given()[0].layer]
    return layer.kind == "Softmax" or layer.config.get("activation") in ("sigmoid", "softmax")


def _first_difference(found: Imported, feeds: Sequence[Arrays]) -> str:
    """The first operator whose result differs, by its name in the file."""
    places = _places(found)
    network = networks.observed(found.network, [value.tensor for value in places.values()])
    model = networks.build(network)
    wanted = _wanted(replace(found.graph, model=_showing(found.graph, list(places))), found, feeds, list(places))
    apart = dict.fromkeys(places, 0.0)
    for feed, outputs in zip(feeds, wanted, strict=True):
        made = verification.answers(model, [array[None] for array in feed])
        for name, one, other in zip(places, outputs, made, strict=True):
            apart[name] = max(apart[name], _apart(found, places[name], one, other))
    for node in found.graph.nodes:
        worst = max((apart.get(name, 0.0) for name in node.outputs), default=0.0)
        if worst > TOLERANCE:
            return f"{node.operator} {node.name!r}, by {worst:.2g}"
    return "no operator alone"


def _places(found: Imported) -> Mapping[str, Value]:
    """How the network has what each operator makes, where it still has that; each of its tensors once."""
    places: dict[str, Value] = {}
    seen = set()
    for node in found.graph.nodes:
        for name in node.outputs:
            value = found.values.get(name)
            if value is not None and value.tensor not in seen and found.graph.types.get(name) == FLOAT:
                seen.add(value.tensor)
                places[name] = value
    return places


def _showing(graph: Graph, names: Sequence[str]) -> bytes:
    """The model with these tensors as its outputs."""
    import onnx

    model = onnx.ModelProto()
    model.ParseFromString(graph.model)
    del model.graph.output[:]
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, graph.shapes[name]) for name in names
    )
    return bytes(model.SerializeToString())
