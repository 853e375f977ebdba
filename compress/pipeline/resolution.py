"""What a run needs and has: the key of every result, the artifacts so far, and the store.

A result is known by the digest of everything that it depends on. A stage or probe runs only if the store has no
artifact for its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.core.artifact import MODEL_TFLITE, Artifact, Kind
from compress.core.files import digest_of
from compress.core.progress import Progress
from compress.data.types import Data
from compress.pipeline.probes.original_outputs import TaughtByOriginal
from compress.pipeline.schema import Pipeline, StageEntry
from compress.pipeline.stage import NOTHING, Work
from compress.pipeline.store import STORE, Store
from compress.tasks import task_of

MEASURED = (Kind.KERAS, Kind.FLOAT_TFLITE, Kind.TFLITE, Kind.COMPILED)
"""The kinds that have a MODEL_TFLITE."""

FACTS = 2
"""To be increased when the facts of all stages change their form. 2: `profile.phases` is a map."""


@dataclass
class Resolution:
    """The artifacts of a run, and the keys of further ones.

    Attributes:
        pipeline: what is run.
        store: where artifacts are found and published.
        forced: ids of steps to re-run even if the store has their artifacts.
        artifacts: the artifact of each stage, by id.
        original: the id of the step whose model everything is compared with.
        taught: the data set with the outputs of the original as targets, once they are needed.
    """

    pipeline: Pipeline
    store: Store
    forced: frozenset[str] = frozenset()
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    original: str | None = None
    taught: TaughtByOriginal | None = None

    def find_original(self, entry: StageEntry | None = None) -> None:
        """Set the original before the first stage that changes the model: the last model that can be measured.

        A stage that trains an untrained model makes the first such model.
        """
        if self.original is None and (entry is None or not entry.stage.makes_original):
            models = [name for name, artifact in self.artifacts.items() if artifact.kind in MEASURED]
            if entry is not None and not models and Kind.UNTRAINED in entry.stage.consumes:
                return
            self.original = models[-1] if models else next(iter(self.artifacts))

    @property
    def original_artifact(self) -> Artifact:
        """The original; NOTHING before it is known."""
        return self.artifacts.get(self.original or "", NOTHING)

    def key(self, work: Work, inputs: Mapping[str, Artifact]) -> str:
        """Return the digest of everything that a result depends on."""
        pipeline = self.pipeline
        needs: dict[str, Any] = {
            "data": self._data_digest,
            "target": lambda: pipeline.target.digest,
            "seed": lambda: pipeline.head.seed,
            "name": lambda: pipeline.head.name,
            "original": lambda: self.original_artifact.digest,
        }
        dependencies = work.needs
        if task_of(pipeline.data).learns_from_original:  # the data describe the outputs of the model
            dependencies |= {"data"}
        return digest_of(
            {
                "work": [FACTS, work.role, work.name, work.version],
                "settings": work.identity(),
                "environment": {**work.environment(), **work.target_environment(pipeline.target)},
                "given": {name: artifact.digest for name, artifact in inputs.items()},
                "needs": {need: needs[need]() for need in sorted(dependencies)},
            }
        )

    def _data_digest(self) -> str:
        """Return the digest of samples and targets."""
        digest = self.pipeline.data.digest
        if self._original_teaches:
            return digest_of({"data": digest, "targets": self.original_artifact.digest})
        return digest

    @property
    def _original_teaches(self) -> bool:
        """Whether the targets are the outputs of the original, and it is known."""
        return task_of(self.pipeline.data).learns_from_original and MODEL_TFLITE in self.original_artifact.files

    def data(self, progress: Progress) -> Data:
        """Return the data set, with the outputs of the original as targets if the task needs them."""
        if not self._original_teaches:
            return self.pipeline.data
        if self.taught is None:
            self.taught = TaughtByOriginal(self.pipeline.data, self.original_artifact, progress)
        self.taught.report_to(progress)
        return self.taught

    def stored(self, title: str, key: str) -> Artifact | None:
        """Return the artifact of a step from the store, unless the step is forced."""
        return None if title in self.forced else self.store.find(key)


def inputs_of(artifact: Artifact | None) -> dict[str, Artifact]:
    """Return the input of a stage, by its name in the key."""
    return {} if artifact is None else {"given": artifact}


def preview(
    pipeline: Pipeline, out: Path, forced: frozenset[str] = frozenset(), store: Store | None = None
) -> list[tuple[StageEntry, str]]:
    """Return what a run would do with each step: "cached", "skipped" or "to do"."""
    state = Resolution(pipeline, store or Store(out / STORE), forced)
    current: Artifact | None = None
    is_known = True
    result = []
    for entry in pipeline.steps:
        if entry.skip:
            result.append((entry, "skipped"))
            continue
        if is_known:
            state.find_original(entry)
            key = state.key(entry.stage, inputs_of(current))
            current = None if entry.id in forced else state.store.look(key)
            is_known = current is not None
            if current is not None:
                state.artifacts[entry.id] = current
        result.append((entry, "cached" if is_known else "to do"))
    return result
