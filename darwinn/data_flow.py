"""Which steps of a program read what other steps wrote, by their addresses in the activation memory."""

from __future__ import annotations

from collections.abc import Sequence

from darwinn.operator_geometry import geometry_of, pass_shape
from darwinn.tensor_steps import ProgramStep, StepKind

_MAX_DISTANCE = 512
"""The steps before a step that are searched for what it reads."""
_MAX_PARTS = 8
"""The steps before a step that can write other parts of the same result."""


def step_reads(steps: Sequence[ProgramStep]) -> list[list[list[int]]]:
    """Return for each step, and each of its `sources`, the steps that wrote it; none if no step did."""
    targets = [step.target for step in steps]
    signatures = [_signature(step) for step in steps]
    reads: list[list[list[int]]] = []
    last_reader = [-1] * len(steps)
    for index, step in enumerate(steps):
        sources = []
        for extent in step.sources:
            earlier = range(index - 1, max(index - 1 - _MAX_DISTANCE, -1), -1)
            last = next((step_index for step_index in earlier if _overlap(targets[step_index], extent)), None)
            parts = [] if last is None else [*_other_parts(signatures, targets, last, last_reader), last]
            sources.append([part for part in parts if _overlap(targets[part], extent)])
        reads.append(sources)
        for writer in (step_index for source in sources for step_index in source):
            last_reader[writer] = index
    return reads


def _signature(step: ProgramStep) -> tuple[object, ...]:
    """Return what is equal in all steps of one operator."""
    shape = pass_shape(geometry_of(step)) if step.kind is StepKind.WEIGHTS else ()
    return step.kind, step.constants, shape


def _other_parts(
    signatures: Sequence[tuple[object, ...]], targets: Sequence[range], last: int, last_reader: Sequence[int]
) -> list[int]:
    """Return the steps before `last` that wrote other parts of the same result: not read or written over before it."""
    parts = []
    for step in range(max(last - _MAX_PARTS, 0), last):
        if signatures[step] != signatures[last] or step < last_reader[step] < last:
            continue
        target, later = targets[step], range(step + 1, last + 1)
        is_covered = any(_covers(targets[other], target) for other in later)
        is_reused = any(_overlap(targets[other], target) for other in later if signatures[other] != signatures[last])
        if not is_covered and not is_reused:
            parts.append(step)
    return parts


def _covers(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _overlap(first: range, second: range) -> bool:
    return first.start < second.stop and second.start < first.stop
