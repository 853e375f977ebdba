"""The API for shops and other places whose classes change: calibrated answers, "unknown", and new classes from photos::

    from deploy import Recognizer

    recognizer = Recognizer("shop.coralline")
    answer = recognizer(image)
    print("unknown" if answer.is_unknown else answer.label, answer.confidence)
    recognizer.learn("Oat milk", photos)  # about five
    recognizer.undo()

What was learnt is in a file next to the bundle (`learnt_file`), and is used again by the next `Recognizer`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deploy.contract import confidence
from deploy.contract.class_heads import Head, imprinted
from deploy.contract.durable_files import write_atomically
from deploy.contract.embedding import References
from deploy.contract.errors import ArgumentError
from deploy.contract.preprocessing import Array
from deploy.learn import learning, learnt_file
from deploy.learn.learning import LearnSettings, LearntHead
from deploy.learn.learnt_file import Change, LearntClass, LearntState
from deploy.runner.answers import Recognition, class_scores
from deploy.runner.model import Model

COSINE_TEMPERATURE = 0.1
"""The temperature of cosines in a bundle without samples of known classes."""
FEW_PHOTOS = 5
"""The number of photos with which examples/retail/README.md measures new products."""


class LearnReport(NamedTuple):
    """The result of learning a class.

    Attributes:
        photos: the number of photos that were added.
        total: the number of all its photos.
        recognized: the number of added photos that are recognized as the class now. They were used for learning.
        before: what the photos were recognized as before, and how often; the most frequent first.
        lost: how many validation samples of the bundle went from the right old class to a new one, by all learnt
            classes together; None: the bundle has no validation samples.
    """

    name: str
    photos: int
    total: int
    recognized: int
    before: List[Tuple[str, int]]
    lost: Optional[int]
    validation: int

    def to_json(self) -> Dict[str, Any]:
        """Return plain values."""
        return dict(self._asdict(), before=[{"label": label, "photos": count} for label, count in self.before])

    def text(self) -> str:
        """Return the report as text."""
        lines = ["learnt %r from %d photos, %d in total" % (self.name, self.photos, self.total)]
        if self.total < FEW_PHOTOS:
            lines.append("  %d are few: add more, from other sides; five or more are better" % self.total)
        if self.before:
            shown = ", ".join("%s (%d)" % pair for pair in self.before[:3])
            lines.append("  before, the photos were recognized as: %s" % shown)
        lines.append("  now %d of these %d photos are recognized as it" % (self.recognized, self.photos))
        if self.lost is not None:
            what = "  %d of %d validation samples go from the right class of the bundle to a learnt one"
            lines.append(what % (self.lost, self.validation))
        return "\n".join(lines)


class Recognizer:
    """A model that answers with calibrated confidences, also of classes that were learnt here.

    Any number of threads may share one object. The answers of `model` change too: they become those of the recognizer.

    Args:
        model: the model, or the path of its bundle.
        path: the file with learnt classes. None: the file next to the bundle; "": nothing is read or written.

    Raises:
        ArgumentError: the model is not a classifier, or this role of it has no embedding.
        LearntFileError: the file with learnt classes is damaged, or belongs to another bundle.
        BundleError, DeviceError, OSError: see `Model`.
    """

    def __init__(self, model: Any, path: Optional[str] = None, settings: LearnSettings = LearnSettings()) -> None:  # noqa: B008
        if path is None:
            if not isinstance(model, (str, os.PathLike)):
                raise ArgumentError("the file with learnt classes is not known", 'pass path, or path=""')
            path = learnt_file.beside(os.fspath(model))
        learning.check(settings)
        self.model: Model = model if isinstance(model, Model) else Model(model)
        self.path = path
        self._settings = settings
        opened = self.model.bundle
        self._digest = opened.digest
        self._parts = _parts(self.model)
        self._lock = threading.Lock()
        self._state = LearntState()
        if self.learns and self.path:
            self._state = learnt_file.read(self.path, self._digest, self._parts.values)
        elif self.path and os.path.exists(self.path):
            learnt_file.read(self.path, self._digest, 0)
        self._decode = self._decoder(self._state)
        self.model.decode = lambda outputs: self._decode(outputs)

    @property
    def learns(self) -> bool:
        """Whether the bundle has an embedding, so that classes can be learnt."""
        return self._parts.values > 0

    @property
    def labels(self) -> List[str]:
        """The names of all classes: those of the bundle, then the learnt ones."""
        return self._parts.labels + [learnt_class.name for learnt_class in self._state.classes()]

    @property
    def learnt(self) -> List[Tuple[str, int]]:
        """The names of the learnt classes, and the number of their photos."""
        return [(learnt_class.name, len(learnt_class.embeddings)) for learnt_class in self._state.classes()]

    @property
    def history(self) -> List[Dict[str, Any]]:
        """The events of the file, the oldest first: maps of `time`, `action`, `names` and `photos`."""
        return [dict(event) for event in self._state.history]

    def __call__(self, sample: Any) -> Recognition:
        """Return the answer for a decoded sample, see `Model`."""
        answer: Recognition = self.model(sample)
        return answer

    def stream(self, samples: Iterable[Any]) -> Iterator[Recognition]:
        """Yield the answer for each sample of an iterator, such as a camera."""
        return (self(sample) for sample in samples)

    def embedding(self, sample: Any) -> Array:
        """Return the embedding of a decoded sample: float32 [values].

        Raises:
            ArgumentError: the bundle has no embedding.
            ImageError: the sample has the wrong shape or type.
        """
        self._check_embedding()
        outputs = self.model.run(self.model.prepare(sample))
        return self._parts.embedding(outputs)[0]

    def learn(self, name: str, samples: Sequence[Any]) -> LearnReport:
        """Learn a new class, or add photos to a learnt one, and write the file.

        Args:
            name: the name of the class, which the bundle must not have.
            samples: decoded photos, see `Model`; about five from different sides.

        Raises:
            ArgumentError: the name is invalid, there are no photos, or the bundle has no embedding or no references.
            ImageError: a photo has the wrong shape or type.
            OSError: the file cannot be written.
        """
        name = learnt_file.checked_name(name, self._parts.labels)
        if not len(samples):
            raise ArgumentError("there are no photos of %r" % name, "name about five files")
        self._check_references()
        embeddings = np.stack([self.embedding(sample) for sample in samples]).astype(np.float32)
        before = self._counts(embeddings)

        def added(state: LearntState) -> LearntState:
            names = {learnt_class.name.casefold(): learnt_class.name for learnt_class in state.classes()}
            learnt = LearntClass(names.get(name.casefold(), name), embeddings)
            return state.with_change(Change(learnt_file.now(), "learn", (learnt,)))

        self._update(added)
        return self._report(name, embeddings, before)

    def undo(self) -> Change:
        """Undo the last change, and write the file; return the change.

        Raises:
            ArgumentError: there is no change.
            OSError: the file cannot be written.
        """
        undone: List[Change] = []

        def shorter(state: LearntState) -> LearntState:
            result = state.without_last()
            undone.append(state.changes[-1])
            return result

        self._update(shorter)
        return undone[-1]

    def exported(self) -> bytes:
        """Return the learnt classes as the content of a file, for `imported` on another device."""
        self._check_embedding()
        return learnt_file.content_of(self._state, self._digest, self._parts.values)

    def imported(self, content: bytes, name: str = "the file") -> Change:
        """Add the classes of an exported file (its `name` is for messages) as one change; return the change.

        Raises:
            ArgumentError: the file has no classes.
            LearntFileError: the file is damaged, or belongs to another bundle.
            OSError: the file cannot be written.
        """
        self._check_embedding()
        classes = learnt_file.parsed(content, name, self._digest, self._parts.values).classes()
        if not classes:
            raise ArgumentError("%s has no learnt classes" % name, "export them after learning")
        for learnt_class in classes:
            learnt_file.checked_name(learnt_class.name, self._parts.labels)
        self._check_references()
        change = Change(learnt_file.now(), "import", tuple(classes))
        self._update(lambda state: state.with_change(change))
        return change

    def close(self) -> None:
        """Release the model, see `Model.close`."""
        self.model.close()

    def __enter__(self) -> Recognizer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_embedding(self) -> None:
        if not self.learns:
            what = "the bundle %r has no embedding" % self.model.bundle.manifest["name"]
            raise ArgumentError(what, "add the stage expose_embedding after quantize, and package it again")

    def _check_references(self) -> None:
        """Refuse to compare new classes with old ones without samples of the old ones."""
        self._check_embedding()
        if self._parts.old is not None and not self._parts.references:
            what = "the bundle has no reference embeddings of its classes"
            raise ArgumentError(what, "package it with data, and with package.recognition.references of 1 or more")

    def _update(self, change: Callable[[LearntState], LearntState]) -> None:
        """Change the state: in the file first, then in memory."""
        with self._lock:
            with learnt_file.locked(self.path) if self.path else contextlib.nullcontext():
                old = learnt_file.read(self.path, self._digest, self._parts.values) if self.path else self._state
                state = change(old)
                content = learnt_file.content_of(state, self._digest, self._parts.values)
                decode = self._decoder(state)
                if self.path:
                    write_atomically(self.path, content)
            self._state = state
            self._decode = decode

    def _decoder(self, state: LearntState) -> Callable[[Sequence[Array]], Recognition]:
        parts = self._parts
        head = _new_head(parts, state, self._settings)
        labels = parts.labels + [learnt_class.name for learnt_class in state.classes()]
        return lambda outputs: parts.recognition(outputs, head, labels)

    def _counts(self, embeddings: Array) -> List[Tuple[str, int]]:
        head = _new_head(self._parts, self._state, self._settings)
        labels = self.labels
        if not labels:
            return []
        answers = [self._parts.of_embedding(row[np.newaxis], head, labels) for row in embeddings]
        names = ["unknown" if answer.is_unknown else answer.label for answer in answers]
        return sorted(((name, names.count(name)) for name in set(names)), key=lambda pair: (-pair[1], pair[0]))

    def _report(self, name: str, embeddings: Array, before: List[Tuple[str, int]]) -> LearnReport:
        totals = {label.casefold(): (label, count) for label, count in self.learnt}
        label, total = totals[name.casefold()]
        recognized = dict(self._counts(embeddings)).get(label, 0)
        held_out = self._parts.references.get("validation")
        head = _new_head(self._parts, self._state, self._settings)
        lost = None
        if held_out is not None and self._parts.old is not None and head is not None:
            lost = learning.losses(head, self._parts.old, held_out)
        validation = 0 if held_out is None else len(held_out.labels)
        return LearnReport(label, len(embeddings), total, recognized, before, lost, validation)


class _Parts(NamedTuple):
    """The parts of a model that a recognizer uses.

    Attributes:
        labels: the names of the classes of the bundle.
        calibration: the calibration of the bundle, or one that changes nothing.
        is_calibrated: whether the calibration is that of the bundle.
        values: the size of the embedding; 0: the model has no embedding.
        embedding: the function from outputs to the embedding: float32 [1, values].
        scores: the function from outputs to the scores of the classes.
        old: the head of the old classes; None: the old classes have no head.
    """

    labels: List[str]
    calibration: confidence.Confidence
    is_calibrated: bool
    values: int
    embedding: Callable[[Sequence[Array]], Array]
    scores: Callable[[Sequence[Array]], Array]
    old: Optional[Head]
    references: Dict[str, References]

    def recognition(self, outputs: Sequence[Array], head: Optional[LearntHead], labels: List[str]) -> Recognition:
        """Return the answer for the outputs of a sample."""
        if self.values:
            return self.of_embedding(self.embedding(outputs), head, labels)
        scores = self.scores(outputs)
        if not self.is_calibrated:
            return Recognition(scores, labels, 0.0, False)
        logits = confidence.logits_of(scores[np.newaxis], self.calibration.form, self.calibration.step)
        return self._calibrated(logits, labels)

    def of_embedding(self, embedding: Array, head: Optional[LearntHead], labels: List[str]) -> Recognition:
        """Return the answer for an embedding [1, values]."""
        logits = np.zeros((1, 0), np.float32) if self.old is None else self.old.logits(embedding)
        if head is not None:
            logits = np.concatenate([logits, head.logits(embedding)], axis=1)
        return self._calibrated(logits, labels)

    def _calibrated(self, logits: Array, labels: List[str]) -> Recognition:
        if not labels:
            raise ArgumentError("the bundle has no classes, and none was learnt", "learn a class first")
        likely = np.exp(confidence.log_softmax(logits, self.calibration.temperature))[0].astype(np.float32)
        return Recognition(likely, labels, self.calibration.threshold or 0.0, self.is_calibrated)


def _parts(model: Model) -> _Parts:
    opened = model.bundle
    tensors = model.session.outputs
    calibration = opened.confidence
    only_embedding = opened.gives_embedding
    if opened.answers != "class" and not only_embedding:
        raise ArgumentError("the task of the bundle is %s" % opened.task, "use a classifier, or a model of embeddings")
    entry = opened.embedding
    embedding_index: Optional[int] = 0 if only_embedding else None
    if entry is not None:
        embedding_index = next((number for number, tensor in enumerate(tensors) if tensor.name == entry.output), None)
    if embedding_index is None and (entry is not None or (calibration is not None and calibration.form == "head")):
        raise ArgumentError("the %s model has no embedding" % model.role, "use the int8 or the compiled model")
    references = {} if entry is None else entry.references
    old: Optional[Head] = None if entry is None else entry.head
    labels = list(opened.labels)
    known = references.get("training")
    if old is None and embedding_index is not None:
        if known is None or not only_embedding:
            labels = []
        else:
            old = imprinted(known.embeddings, known.labels, len(labels), known.embeddings.mean(axis=0))
    default = confidence.Confidence("head" if embedding_index is not None else "scores", COSINE_TEMPERATURE, None)
    embedding_tensor = tensors[embedding_index or 0]
    scores = class_scores(opened, tensors[0])
    return _Parts(
        labels,
        default if calibration is None else calibration,
        calibration is not None,
        0 if embedding_index is None else int(np.prod(embedding_tensor.shape)),
        lambda outputs: embedding_tensor.real(outputs[embedding_index or 0]).reshape(1, -1),
        lambda outputs: scores(outputs[0]),
        old,
        references,
    )


def _new_head(parts: _Parts, state: LearntState, settings: LearnSettings) -> Optional[LearntHead]:
    """Return the head of the learnt classes; None without learnt classes."""
    classes = state.classes()
    if not classes:
        return None
    photos = [learnt_class.embeddings for learnt_class in classes]
    return learning.new_head(photos, parts.old, parts.references, settings)
