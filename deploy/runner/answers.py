"""The answers of models: a class, named arrays, or detections, and their form in JSON.

`decoder` returns for a bundle the function from the output tensors of a sample to its answer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from deploy.contract.bundle import Bundle, archive_of, array_bytes
from deploy.contract.detection import BOX_FORMAT, Detections
from deploy.contract.image_geometry import AffineMap
from deploy.contract.preprocessing import Array
from deploy.contract.tensors import TensorDescription, sample_shape
from deploy.runner.measurement import finite

MAX_SHOWN = 4096
"""The largest number of values of an output that JSON shows."""
Decode = Callable[[Sequence[Array]], Any]
Row = Dict[str, Any]


@dataclasses.dataclass(eq=False)
class Answer:
    """The answer of a classifier for one sample.

    Attributes:
        scores: float32 [outputs], in the order of `labels`.
    """

    scores: Array
    labels: List[str]

    @property
    def index(self) -> int:
        """The index of the class with the highest score."""
        return int(self.scores.argmax())

    @property
    def label(self) -> str:
        """The name of the class with the highest score; its index if the bundle has no name for it."""
        return _name(self.labels, self.index)

    @property
    def score(self) -> float:
        """The highest score."""
        return float(self.scores.max())

    def top(self, count: int = 5) -> List[Tuple[str, float]]:
        """Return the names and scores of the best classes, the best first; equal ones in the order of `labels`."""
        order = np.argsort(-self.scores, kind="mergesort")[:count]
        return [(_name(self.labels, int(index)), float(self.scores[index])) for index in order]

    def rows(self, count: int = 5) -> List[Row]:
        """Return the best classes as plain maps of `label` and `score`; a score that is NaN or infinite is None."""
        return [{"label": label, "score": finite(score)} for label, score in self.top(count)]

    def __repr__(self) -> str:
        return "Answer(label=%r, score=%.6g)" % (self.label, self.score)


@dataclasses.dataclass(eq=False)
class Recognition(Answer):
    """The answer of a classifier with a calibrated confidence, and with learnt classes: see `deploy.learn.recognizer`.

    Attributes:
        scores: the probabilities of all classes, float32: those of the bundle, then the learnt ones.
        threshold: answers with a lower confidence are unknown; 0: no answer is unknown.
        is_calibrated: whether the confidence is calibrated.
    """

    threshold: float
    is_calibrated: bool

    @property
    def confidence(self) -> float:
        """The probability of the best class, the same as `score`."""
        return self.score

    @property
    def is_unknown(self) -> bool:
        """Whether the confidence is too low for an answer. `label` is the best class all the same."""
        return self.score < self.threshold

    def __repr__(self) -> str:
        return "Recognition(label=%r, confidence=%.6g, is_unknown=%r)" % (self.label, self.score, self.is_unknown)


@dataclasses.dataclass(eq=False)
class NamedOutputs:
    """The outputs of a model for one sample, by name and in the order of the model::

        mask = outputs["mask"]
        names = list(outputs)

    An output is float32, in the shape of the model's output without the batch.
    """

    arrays: Dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def first(self) -> Array:
        """The first output."""
        return next(iter(self.arrays.values()))

    def rows(self, count: int = MAX_SHOWN) -> List[Row]:
        """Return plain maps of `name`, `shape` and `values`; values that are NaN or infinite are None.

        Args:
            count: the largest number of values of each output. Of a larger output, the first values are returned as a
                flat list, with a `note`.
        """
        return [_array_row(name, array, count) for name, array in self.arrays.items()]

    def __repr__(self) -> str:
        shapes = ("%s %r" % (name, list(array.shape)) for name, array in self.arrays.items())
        return "NamedOutputs(%s)" % ", ".join(shapes)


@dataclasses.dataclass(eq=False)
class ChosenLabels(NamedOutputs):
    """The answer of a multi-label classifier for one sample.

    Attributes:
        arrays: the outputs as they are, by name.
        scores: the probabilities, float32 [labels], in the order of `labels`.
    """

    scores: Array
    labels: List[str]

    def chosen(self) -> List[Tuple[str, float]]:
        """Return the names and probabilities of the labels above one half, the best first."""
        order = np.argsort(-self.scores, kind="mergesort")
        best = [int(index) for index in order if self.scores[index] > 0.5]
        return [(_name(self.labels, index), float(self.scores[index])) for index in best]

    def rows(self, count: int = MAX_SHOWN) -> List[Row]:
        """Return at most `count` of the chosen labels as plain maps of `label` and `score`."""
        return [{"label": label, "score": score} for label, score in self.chosen()[:count]]

    def __repr__(self) -> str:
        return "ChosenLabels(%s)" % ", ".join("%s=%.6g" % pair for pair in self.chosen())


def decoder(opened: Bundle, tensors: Sequence[TensorDescription]) -> Decode:
    """Return the function from the output tensors of a sample, in their dtypes and in this order, to its answer."""
    labels = list(opened.labels)
    if opened.answers == "class":
        scores = class_scores(opened, tensors[0])
        return lambda outputs: Answer(scores(outputs[0]), labels)
    values = [_to_values(tensor) for tensor in tensors]
    shapes = [sample_shape(tensor.shape) for tensor in tensors]
    names = [tensor.name for tensor in tensors]

    def arrays(outputs: Sequence[Array]) -> List[Array]:
        return [decode(output).reshape(shape) for decode, output, shape in zip(values, outputs, shapes)]

    def chosen(outputs: Sequence[Array]) -> ChosenLabels:
        real = arrays(outputs)
        return ChosenLabels(dict(zip(names, real)), _probabilities(real[0].ravel(), opened), labels)

    detector = opened.detector
    if detector is not None:
        return lambda outputs: detector(arrays(outputs), labels)
    return chosen if opened.answers == "labels" else lambda outputs: NamedOutputs(dict(zip(names, arrays(outputs))))


def class_scores(opened: Bundle, tensor: TensorDescription) -> Callable[[Array], Array]:
    """Return the function from the first output of a classifier, in its dtype, to the scores of the classes."""
    values = _to_values(tensor)
    if np.prod(tensor.shape) != 1 or len(opened.labels) < 2:
        return values

    def of_both_classes(output: Array) -> Array:
        likely = _probabilities(values(output), opened)
        return np.concatenate([1 - likely, likely])

    return of_both_classes


def in_image(answer: Any, placed: AffineMap) -> Any:
    """Return detections or keypoints as fractions of the image; `answer` has fractions of the model's input.

    Boxes in the border that preprocessing added to the image are removed.

    Args:
        answer: `Detections`, or the outputs of a model of keypoints, of which the first has x and y of each point.
        placed: the position of the image in the input.
    """
    if isinstance(answer, NamedOutputs):
        name, points = next(iter(answer.arrays.items()))
        image_points = placed.to_image(points.reshape(-1, 2)[:, ::-1])[:, ::-1]
        return NamedOutputs(dict(answer.arrays, **{name: image_points.astype(np.float32).reshape(points.shape)}))
    boxes = placed.boxes_to_image(answer.boxes)
    points = answer.keypoints
    if points is not None:
        points = np.concatenate([placed.to_image(points[..., :2]), points[..., 2:]], axis=-1).astype(np.float32)
    moved = dataclasses.replace(answer, boxes=boxes, keypoints=points)
    return moved.taken((boxes[:, 2:] > boxes[:, :2]).all(axis=1))


def to_json(answer: Any, count: int) -> Dict[str, Any]:
    """Return an answer as an entry of a JSON map: `top`, `labels` or `outputs`; for objects also `box_format`. It
    has at most `count` classes, labels or objects."""
    if isinstance(answer, ChosenLabels):
        return {"labels": answer.rows(count)}
    if isinstance(answer, NamedOutputs):
        return {"outputs": answer.rows()}
    if isinstance(answer, Recognition):
        return {"top": answer.rows(count), "unknown": answer.is_unknown}
    if isinstance(answer, Detections):
        return {"top": answer.rows(count), "box_format": BOX_FORMAT}
    return {"top": answer.rows(count)}


def to_npz(outputs: NamedOutputs) -> bytes:
    """Return outputs as the content of an .npz file: all values, by name."""
    return archive_of({name + ".npy": array_bytes(array) for name, array in outputs.arrays.items()})


def _to_values(tensor: TensorDescription) -> Callable[[Array], Array]:
    """Return the function from an output tensor to flat float32 values. For 8 bits it looks them up: faster."""
    dtype = np.dtype(tensor.dtype)
    if not tensor.is_quantized or dtype.itemsize > 1:
        return lambda output: tensor.real(output.ravel())
    table = tensor.real(np.arange(256, dtype=np.uint8).view(dtype))
    take = table.take  # a negative int8 indexes from the end of the table, where its value is
    if len(tensor.shape) == 2 and tensor.shape[0] == 1:
        return lambda output: take(output[0])
    return lambda output: take(output.ravel())


def _probabilities(values: Array, opened: Bundle) -> Array:
    """Return the values of separate decisions as probabilities, float32."""
    if opened.manifest.get("binary") != "logit":
        return values
    return (1 / (1 + np.exp(-np.clip(values, -80, 80)))).astype(np.float32)


def _array_row(name: str, array: Array, count: int) -> Row:
    row: Row = {"name": name, "shape": list(array.shape)}
    if array.size > count:
        row["note"] = "the first %d of %d values; .npz has all of them" % (count, array.size)
        array = array.ravel()[:count]
    return dict(row, values=_plain(array))


def _plain(array: Array) -> Any:
    """Return an array as nested lists, with None for NaN and infinity, which JSON does not have."""
    if np.isfinite(array).all():
        return array.tolist()
    plain: Any = np.where(np.isfinite(array), array.astype(object), None)
    return plain.tolist()


def _name(labels: List[str], index: int) -> str:
    return labels[index] if index < len(labels) else str(index)
