"""`split`: a model as a pipeline of segments on several Edge TPUs, compared with copies of the whole model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.core.artifact import MODEL_SEGMENT
from compress.core.errors import ModelError, PipelineError
from compress.model.tflite.comparison import Runner, random_feed, without_unknown_customs
from compress.model.tflite.graph import Graph, serialize
from compress.targets.base import Target
from compress.targets.edgetpu import estimate
from compress.targets.edgetpu.rules import refusing_damaged
from compress.targets.edgetpu.several import cuts as search
from compress.targets.edgetpu.several.cuts import UNCERTAIN, Cuts
from compress.targets.edgetpu.several.segments import Segment, SplitGraph, prepare

SCHEMA_VERSION = 1
DESCRIPTION = "split.json"
"""The file that describes the segments, next to them."""
MAX_TPUS = 16
"""The most Edge TPUs of one pipeline: chosen, not a limit of the hardware."""
FEEDS = 4
"""Random inputs on which the segments and the whole model must give equal outputs."""


@dataclass(frozen=True)
class Choice:
    """A use of the Edge TPUs.

    Attributes:
        segments: the number of segments; 1 for the whole model.
        copies: the number of copies of the model, or of the pipeline.
        cuts: the positions of the cuts, with the ends.
        latency_ms: predicted latency of one inference, from the first segment to the last.
        streamed_bytes: parameters that all segments together receive at every inference.
    """

    segments: int
    copies: int
    cuts: Cuts
    per_second: float
    latency_ms: float
    slowest_ms: float
    streamed_bytes: int

    @property
    def name(self) -> str:
        """A description in a few words."""
        description = "the whole model" if self.segments == 1 else f"{self.segments} segments"
        if self.copies > 1:
            return f"{self.copies} copies of {description}"
        return f"{description} on one Edge TPU" if self.segments == 1 else description

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a plain map."""
        return {
            "name": self.name,
            "segments": self.segments,
            "copies": self.copies,
            "cuts": list(self.cuts[1:-1]),
            "inferences_per_second": self.per_second,
            "latency_ms": self.latency_ms,
            "slowest_segment_ms": self.slowest_ms,
            "streamed_bytes": self.streamed_bytes,
        }


@dataclass(frozen=True)
class Split:
    """A model in segments, verified.

    Attributes:
        segments: the segments, one for each Edge TPU.
        choices: one Edge TPU, copies of the whole model, and pipelines of 2 segments and more.
        equal_bytes: the segments with equal parameter bytes; None if they were not requested, or do not exist.
        files: the .tflite file of each segment by its name.
        unverified: the custom operators that the runtime of this host does not have, and that were not compared.
    """

    model: SplitGraph
    segments: tuple[Segment, ...]
    choices: tuple[Choice, ...]
    equal_bytes: Choice | None
    files: Mapping[str, bytes]
    unverified: tuple[str, ...]

    @property
    def chosen(self) -> Choice:
        """The pipeline whose segments these are."""
        return self.choices[-1]

    @property
    def recommended(self) -> Choice:
        """The choice with the most inferences per second; of equal ones, that with the fewest segments."""
        return max(self.choices, key=lambda choice: (choice.per_second, -choice.segments))

    @property
    def advice(self) -> str:
        """Whether to split, with the figures."""
        best = self.recommended
        figures = f"{best.per_second:.4g} inferences/s and {best.latency_ms:.3g} ms"
        if best == self.chosen:
            return f"split: {best.name} give {figures}; {self._others()}"
        if best.segments == 1:
            return f"do not split: {best.name} give {figures}; {self.chosen.name} give {self._of(self.chosen)}"
        return (
            f"do not split into {self.chosen.segments}: {best.name} give {figures}; {self._others()}; "
            f"run again with --tpus {best.segments}"
        )

    def _others(self) -> str:
        copies = next(choice for choice in self.choices if choice.segments == 1 and choice.copies > 1)
        return f"{copies.name} give {self._of(copies)}"

    @staticmethod
    def _of(choice: Choice) -> str:
        return f"{choice.per_second:.4g} inferences/s and {choice.latency_ms:.3g} ms"

    def all_files(self) -> dict[str, bytes]:
        """Return the segments and their description, by file name."""
        return {**self.files, DESCRIPTION: json.dumps(self.to_json(), indent=1).encode() + b"\n"}

    def describe(self) -> str:
        """Return the segments and the choices as text for a person."""
        model = self.model
        lines = [
            f"{len(self.segments)} segments on {model.host}, clock {model.clock}; predicted, not measured",
            *(line for segment, file in zip(self.segments, self.files, strict=True) for line in _lines(segment, file)),
            "choices:",
            *(
                f"  {choice.name:<36} {choice.per_second:10.4g} inferences/s {choice.latency_ms:10.3f} ms"
                f"  {choice.streamed_bytes:,} bytes streamed"
                for choice in self.choices
            ),
            self.advice,
        ]
        if self.equal_bytes is not None:
            gain = self.equal_bytes.slowest_ms / self.chosen.slowest_ms
            lines.append(
                f"segments of equal parameter bytes, as the compiler's --num_segments: slowest segment "
                f"{self.equal_bytes.slowest_ms:.3g} ms instead of {self.chosen.slowest_ms:.3g} ms, {gain:.2f} times; "
                f"{self.equal_bytes.streamed_bytes:,} bytes streamed"
            )
        lines.append(
            f"verified: the segments in sequence give the outputs of the model, bit for bit, on {FEEDS} inputs"
        )
        if self.unverified:
            lines.append(f"not compared, because this runtime does not have them: {', '.join(self.unverified)}")
        lines.append("compile each segment alone (models that are compiled together share one cache):")
        lines += [f"  {command}" for command in self._commands()]
        return "\n".join(lines)

    def _commands(self) -> list[str]:
        name = self.model.target.compiler.name
        return [f"{name} -s {file}" for file in self.files]

    def to_json(self) -> dict[str, Any]:
        """Return the split as a plain map, schema 1."""
        return {
            "schema_version": SCHEMA_VERSION,
            "host": self.model.host,
            "clock": self.model.clock,
            "inputs": self._tensors(self.model.graph.inputs),
            "outputs": self._tensors(self.model.graph.outputs),
            "segments": [
                self._segment(segment, file, content)
                for segment, (file, content) in zip(self.segments, self.files.items(), strict=True)
            ],
            "choices": [choice.to_json() for choice in self.choices],
            "recommended": self.recommended.name,
            "split": self.recommended == self.chosen,
            "advice": self.advice,
            "equal_bytes": None if self.equal_bytes is None else self.equal_bytes.to_json(),
            "verified": {"bit_equal": True, "inputs": FEEDS, "not_compared": list(self.unverified)},
            "compile": self._commands(),
        }

    def _segment(self, segment: Segment, file: str, content: bytes) -> dict[str, Any]:
        allocation = segment.estimate.check.parameters
        return {
            "file": file,
            "sha256": hashlib.sha256(content).hexdigest(),
            "operators": [segment.start, segment.stop],
            "on_cpu": segment.on_cpu,
            "inputs": self._tensors(segment.inputs),
            "outputs": self._tensors(segment.outputs),
            "latency_ms": segment.latency_ms,
            "low_ms": segment.estimate.low_ms,
            "high_ms": segment.estimate.high_ms,
            "cached_bytes": allocation.cached_bytes if allocation else 0,
            "streamed_bytes": segment.estimate.streamed_bytes,
        }

    def _tensors(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        tensors = [self.model.graph.tensors[index] for index in indices]
        return [{"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in tensors]


def _lines(segment: Segment, file: str) -> list[str]:
    """Return the lines of one segment."""
    predicted = segment.estimate
    allocation = predicted.check.parameters
    cached_bytes = allocation.cached_bytes if allocation else 0
    lines = [
        f"{file}: operators {segment.start} to {segment.stop - 1}, {predicted.latency_ms:.3f} ms "
        f"({predicted.low_ms:.3g} to {predicted.high_ms:.3g})",
        f"  {cached_bytes:,} bytes of parameters cached, {predicted.streamed_bytes:,} streamed; "
        f"tensors: {len(segment.inputs)} in, {len(segment.outputs)} out",
    ]
    if segment.on_cpu:
        shown = ", ".join(f"{segment.estimate.check.ops[i - segment.start].op} {i}" for i in segment.on_cpu[:8])
        more = f" and {len(segment.on_cpu) - 8} more" if len(segment.on_cpu) > 8 else ""
        lines.append(f"  on the CPU, at {_cpu_location(segment)} of it: {shown}{more}")
    if segment.risk == UNCERTAIN:
        lines.append(f"  {predicted.check.cache_warning}")
    return lines


def _cpu_location(segment: Segment) -> str:
    """Return where the CPU operators of a segment are."""
    on_cpu = set(segment.on_cpu)
    first_tpu = next(index for index in range(segment.start, segment.stop) if index not in on_cpu)
    last_tpu = next(index for index in range(segment.stop - 1, segment.start - 1, -1) if index not in on_cpu)
    locations = [("the start", min(on_cpu) < first_tpu), ("the end", max(on_cpu) > last_tpu)]
    locations.append(("the side", any(first_tpu < index < last_tpu for index in on_cpu)))
    return " and ".join(name for name, is_there in locations if is_there)


@refusing_damaged(ArithmeticError)
def split(graph: Graph, target: Target, tpus: int, host: str, clock: str, *, compare: bool = False) -> Split:
    """Split a model into one segment for each Edge TPU, and verify the segments.

    With `compare`, the segments are compared with segments of equal parameter bytes.

    Raises:
        PipelineError: the number of Edge TPUs is invalid.
        ModelError: the compiler will refuse the model, it cannot be cut into so many segments, or a segment differs.
    """
    if not 2 <= tpus <= MAX_TPUS:
        raise PipelineError(f"--tpus is {tpus}", allowed=f"2 to {MAX_TPUS}")
    estimate.estimate(graph, target, host, clock)  # refuses what the compiler will refuse
    model = prepare(graph, target, host, clock)
    choices = found_choices(model, tpus)
    if choices[-1].segments != tpus:
        most = max(choice.segments for choice in choices)
        raise ModelError(
            f"cannot be cut into {tpus} segments",
            allowed="segments that each have an operator for the Edge TPU",
            hint=f"use --tpus {most}" if most > 1 else "use one Edge TPU, or copies of the whole model",
        )
    equal = search.equal_bytes(model.network, tpus, model.parameter_bytes) if compare else None
    segments = tuple(model.segments(choices[-1].cuts))
    parts = [model.file(segment) for segment in segments]
    unverified = verify(model.graph, parts)
    files = {MODEL_SEGMENT.format(index, tpus): serialize(part) for index, part in enumerate(parts)}
    return Split(model, segments, choices, None if equal is None else _choice(model, equal, 1), files, unverified)


def found_choices(model: SplitGraph, tpus: int) -> tuple[Choice, ...]:
    """Return the uses of a number of Edge TPUs: one of them, copies of the model, and the best pipelines."""
    uncut: Cuts = (0, model.network.operators)
    choices = [_choice(model, uncut, copies) for copies in (1, tpus)]
    for count in range(2, tpus + 1):
        cuts = search.best(model.network, count)
        if cuts is not None:
            choices.append(_choice(model, cuts, tpus // count))
    return tuple(choices)


def _choice(model: SplitGraph, cuts: Cuts, copies: int) -> Choice:
    segments = model.segments(cuts)
    slowest_ms = max(segment.latency_ms for segment in segments)
    return Choice(
        len(segments),
        copies,
        cuts,
        1000 * copies / slowest_ms,
        sum(segment.latency_ms for segment in segments),
        slowest_ms,
        sum(segment.estimate.streamed_bytes for segment in segments),
    )


def verify(graph: Graph, parts: Sequence[Graph]) -> tuple[str, ...]:
    """Run a model and its segments in sequence on random inputs, and compare their outputs.

    Returns:
        The custom operators that this runtime does not have. The inputs of these are compared instead of their outputs.

    Raises:
        ModelError: an output differs, or the runtime refuses a segment.
    """
    reference = without_unknown_customs(graph)
    kept = {operator.index for operator in reference.operators}
    lost = {operator.name for operator in graph.operators if operator.custom and reference is not graph}
    unknown = (
        sorted(lost - {operator.name for operator in reference.operators}) if len(kept) < len(graph.operators) else []
    )
    runner = Runner(reference)
    steps = [Runner(without_unknown_customs(part)) for part in parts]
    for seed in range(FEEDS):
        feed = random_feed(reference, np.random.default_rng(seed))
        values = dict(zip(_names(reference, reference.inputs), feed, strict=True))
        for step in steps:
            inputs = [values[name] for name in _names(step.graph, step.graph.inputs) if name in values]
            if len(inputs) < len(step.graph.inputs):
                raise ModelError(
                    "a segment needs the output of an operator that the runtime of this host does not have"
                )
            if step.graph.operators:
                values.update(zip(_names(step.graph, step.graph.outputs), step.run(inputs), strict=True))
        for name, expected in zip(_names(reference, reference.outputs), runner.run(feed), strict=True):
            if values[name].tobytes() != expected.tobytes():
                raise ModelError(f"the segments give another output {name!r} than the model", hint="report this bug")
    return tuple(unknown)


def _names(graph: Graph, indices: Sequence[int]) -> list[str]:
    return [graph.tensors[index].name for index in indices]
