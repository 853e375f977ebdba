"""`relink`: a retrained model of the same architecture in the program that the compiler once made.

The program of the old model is kept. Its parameters, the scales and zero points in its instructions, and everything in
the file around it that depends on the model's values are replaced. A relink is refused, with all reasons, if anything
is ambiguous, was not found, or could need another program.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.core.errors import ModelError
from compress.model.tflite import graph as graphs
from compress.model.tflite import structure
from compress.model.tflite.graph import NONE, Graph, Operator, Tensor
from compress.model.tflite.structure import describe
from darwinn import compiled_file, package, parameter_location, surroundings
from darwinn.compiled_file import CompiledFile
from darwinn.cpu_part import compare_cpu_part
from darwinn.instruction_map import ModelChange, missing_instructions, plan_program
from darwinn.instructions import bundles, vector_instructions
from darwinn.operator_constants import WEIGHTED, activation_quantizations, unsigned_zero_point
from darwinn.parameter_layout import Values
from darwinn.parameter_location import ParameterRegion
from darwinn.stored_parameters import stored_parameters
from darwinn.surroundings import Replacement, TensorPair
from darwinn.verification import verify

SCHEMA_VERSION = 1
NOTES = (
    "no device has run this file: compare it with the new model on one device before you send it to others",
    "if the old file was compiled together with others, the new one no longer shares the chip's memory with them",
)


@dataclass(frozen=True)
class Relinked:
    """The result of a relink.

    Attributes:
        content: the new compiled file; None if it is refused.
        problems: the reasons for the refusal; empty if it succeeded.
        changes: what was replaced, by name: numbers of bytes and instructions.
    """

    content: bytes | None
    problems: tuple[str, ...]
    changes: dict[str, int]

    @property
    def is_refused(self) -> bool:
        """Whether the relink was refused."""
        return self.content is None

    def to_json(self) -> dict[str, Any]:
        """Return the result as a plain map, schema 1, without the file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "refused": self.is_refused,
            "problems": list(self.problems),
            "changes": dict(self.changes),
            "notes": [] if self.is_refused else list(NOTES),
        }

    def describe(self) -> str:
        """Return the result as text for a person."""
        if self.is_refused:
            reasons = "".join(f"  {problem}\n" for problem in self.problems)
            return f"refused, for {len(self.problems)} reason{'s' if len(self.problems) > 1 else ''}:\n{reasons}"
        changes = "".join(f"{name:<32} {number:,}\n" for name, number in self.changes.items())
        return changes + "".join(f"note: {note}\n" for note in NOTES)


def relink_files(new: Path, old: Path, template: Path, *, keep_names: bool = False) -> Relinked:
    """Put a model into the program of another one; the arguments are those of `relink`, as files.

    Raises:
        ModelError: a file cannot be read, is damaged, or the template was not made by the vendor's compiler.
    """
    contents = []
    for path in (new, old):
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from error
        if graphs.parse(contents[-1], str(path)).custom_operators(package.OPERATOR):
            raise ModelError("is compiled already", where=str(path), hint="give the model that it was compiled from")
    return relink(contents[0], contents[1], compiled_file.read(template), keep_names=keep_names)


def relink(new: bytes, old: bytes, template: CompiledFile, *, keep_names: bool = False) -> Relinked:
    """Put a model into the program of another one with the same structure.

    `new` and `old` are .tflite files; the template was compiled from `old`. With `keep_names`, the old names of tensors
    stay.

    Raises:
        ModelError: a file is damaged.
    """
    models = graphs.parse(old, "the old model"), graphs.parse(new, "the new model")
    attempt = _Attempt(*models, template, keep_names=keep_names)
    attempt.problems += attempt.structure()
    if not attempt.problems:
        attempt.problems += surroundings.replace_metadata(attempt.replacement, template, *models, (old, new))
        attempt.write()
    if not attempt.problems:
        written = compiled_file.parse(bytes(attempt.replacement.content), "the new file")
        attempt.problems += [f"the new file is wrong: {reason}" for reason in not_verified(written, models[1])]
    content = None if attempt.problems else bytes(attempt.replacement.content)
    return Relinked(content, tuple(dict.fromkeys(attempt.problems)), attempt.changes)


class _Attempt:
    """The state of one relink: what was replaced so far, and the reasons against it."""

    def __init__(self, old: Graph, new: Graph, template: CompiledFile, *, keep_names: bool) -> None:
        self.old, self.new, self.template, self.keep_names = old, new, template, keep_names
        self.problems: list[str] = []
        self.changes: dict[str, int] = {}
        self.replacement = Replacement(template.content)
        self.mapped: set[int] = set()

    def structure(self) -> list[str]:
        """Return the reasons why the template does not hold the old model, or the new one has another structure."""
        problems = [f"the template: {reason}" for reason in not_verified(self.template, self.old)]
        return problems + structure.differences(self.old, self.new)

    def write(self) -> None:
        """Replace everything, and add the reasons against it to the problems."""
        cpu = compare_cpu_part(self.template.graph, self.old, self.template.custom_operators)
        self.mapped = {operator.index for operator in self.old.operators} - cpu.operators
        self.problems += compiler_choices(self.old, self.new, self.mapped)
        self._parameters()
        self._instructions()
        self._surroundings(cpu.tensors)
        tokens = _fresh_tokens(self.template)
        self.problems += surroundings.replace_tokens(self.replacement, self.template, tokens)
        self.problems += self.replacement.problems

    def _surroundings(self, old_tensors: Mapping[int, int]) -> None:
        new_tensors = structure.matching_tensors(self.old, self.new)
        pairs = []
        for stored in self.template.graph.tensors:
            old = old_tensors.get(stored.index)
            if old is None or old not in new_tensors:
                self.problems.append(f"tensor {stored.name!r} of the compiled file is not in the models")
            else:
                pairs.append(TensorPair(stored, self.old.tensors[old], self.new.tensors[new_tensors[old]]))
        self.problems += surroundings.replace_numbers(self.replacement, self.template, pairs)
        if not self.keep_names:
            self.problems += surroundings.replace_names(self.replacement, self.template, pairs)

    def _parameters(self) -> None:
        operators = [operator for operator in self.old.operators if operator.index in self.mapped]
        location = parameter_location.locate(self.template, self.old, operators)
        located = {region.operator.index for region in location.regions}
        self.problems += [
            f"{structure.describe(operator)}: how the compiler stores its weights is not known"
            for operator in operators
            if operator.name in WEIGHTED | {"TRANSPOSE_CONV"} and operator.index not in located
        ]
        copies = Counter(region.parameters for region in location.regions)
        changed = sum(self._region(region, copies[region.parameters]) for region in location.regions)
        self.changes["bytes of parameters replaced"] = changed

    def _region(self, region: ParameterRegion, copies: int) -> int:
        """Replace the parameters of one region, and return how many bytes differ."""
        where = f"{structure.describe(region.operator)}, {region.parameters.purpose}"
        before = region.layout.encode(region.values)
        encodings = set()
        try:
            for index, layout in parameter_location.possible_layouts(region, self.template):
                encodings.add(layout.encode(self._new_values(region, index)).tobytes())
        except ModelError as error:
            self.problems.append(f"{where}: {error}")
            return 0
        if len(encodings) != 1:
            self.problems.append(
                f"{where}: {len(encodings)} layouts fit the old values, and the new ones differ in them"
            )
            return 0
        after = encodings.pop()
        if after == before.tobytes():
            return 0
        if region.is_interchangeable:
            self.problems.append(f"{where}: another operator has the same values, so that its position is ambiguous")
        if copies > 1:
            self.problems.append(f"{where}: the file has {copies} copies, and which of them belong to it is ambiguous")
        start = self.template.executables[region.executable].parameters.start + region.offset
        self.replacement.write(start, after, where)
        return int((np.frombuffer(after, np.uint8) != before).sum())

    def _new_values(self, region: ParameterRegion, choice: int) -> Values:
        """Return the new model's values for a region, as one of the choices of the compiler."""
        before = stored_parameters(region.operator, self.old)
        after = stored_parameters(self.new.operators[region.operator.index], self.new)
        indices = [index for index, part in enumerate(before) if part.purpose == region.parameters.purpose]
        if len(after) != len(before):
            raise ModelError("the new model has other parameters there")
        # Any of several parts of one purpose can be in the region: their values must be equal.
        if len({after[index].choices[0].values.pool.tobytes() for index in indices}) != 1:
            raise ModelError("the new model has other parameters there")
        choices = after[indices[0]].choices
        if len(choices) != len(before[indices[0]].choices):
            raise ModelError("the compiler has other choices for the new model")
        return choices[choice].values

    def _instructions(self) -> None:
        change = ModelChange(self.old, self.new, self.mapped)
        extents = [extent for executable in self.template.executables for extent in executable.instructions]
        streams = [(extent.start, self.template.bytes_at(extent)) for extent in extents]
        programs = [(start, content) for start, content in streams if vector_instructions(bundles(content))]
        explained: set[int] = set()
        replaced = 0
        for position, content in programs:
            plan = plan_program(content, change, is_only=len(programs) == 1)
            self.problems += plan.problems
            explained |= plan.located
            replaced += len(plan.constants) + len(plan.factors)
            self.replacement.write(position, plan.apply(content), "the instructions")
        self.problems += missing_instructions(change, explained)
        self.changes["instructions changed"] = replaced


def _fresh_tokens(file: CompiledFile) -> dict[int, int]:
    """Return a new token for each one of a file, different from all of them."""
    old = {executable.token for executable in file.executables}
    tokens: dict[int, int] = {}
    for token in old:
        fresh = secrets.randbits(64)
        while not fresh or fresh in old or fresh in tokens.values():
            fresh = secrets.randbits(64)
        tokens[token] = fresh
    return tokens


def not_verified(file: CompiledFile, model: Graph) -> list[str]:
    """Return the reasons why a compiled file does not hold a model, or why that cannot be decided."""
    verification = verify(file, model)
    reasons = [difference.message for difference in verification.differences]
    reasons += [undecided.reason for undecided in verification.undecided if undecided.blocks]
    return reasons


_WEIGHT, _BIAS = 1, 2
_SHARED_SCALES = WEIGHTED | {"LOGISTIC", "SOFTMAX", "TANH", "TRANSPOSE_CONV"}
"""Operators that rescale anyway: equal scales of their tensors mean nothing."""


def compiler_choices(old: Graph, new: Graph, operators: set[int]) -> list[str]:
    """Return the differences in values that the compiler's choices can depend on, for operators on the Edge TPU."""
    differences = []
    for before in old.operators:
        after = new.operators[before.index]
        if before.index in operators:
            differences += [f"{describe(before)}: {choice}" for choice in _choices(old, before, new, after)]
    return differences


def _choices(old: Graph, before: Operator, new: Graph, after: Operator) -> Iterator[str]:
    for number, (first, second) in enumerate(zip(before.inputs, after.inputs, strict=True)):
        if first == NONE or not old.tensors[first].is_constant:
            continue
        pair = old.tensors[first], new.tensors[second]
        if before.name not in WEIGHTED:  # a relink writes the constants of these operators alone
            if _content(pair[0]) != _content(pair[1]):
                yield f"its constant operand {pair[0].name!r} differs; a relink replaces only weights and biases"
        elif number == _BIAS and pair[0].is_zero != pair[1].is_zero:
            yield "its biases are all zero in one model only, and the compiler drops such biases"
        elif number == _WEIGHT and _one_scale(pair[0]) != _one_scale(pair[1]):
            yield "the scales of its weights are all equal in one model only, which is another layout"
    if before.name not in _SHARED_SCALES and _equal_scales(old, before) != _equal_scales(new, after):
        yield "other tensors of it have equal scales or zero points, so that the compiler can choose other steps"
    if before.name == "PAD":
        padded = old.tensors[before.inputs[0]], new.tensors[after.inputs[0]]
        if unsigned_zero_point(padded[0]) != unsigned_zero_point(padded[1]):
            yield "its zero point differs, and where the program holds the padding's value is not known"


def _content(tensor: Tensor) -> tuple[bytes, object]:
    data = b"" if tensor.data is None else tensor.data.tobytes()
    quantization = tensor.quantization
    return data, None if quantization is None else (quantization.scale, quantization.zero_point)


def _one_scale(tensor: Tensor) -> bool:
    return tensor.quantization is None or tensor.quantization.one_scale


def _equal_scales(graph: Graph, operator: Operator) -> list[tuple[bool, bool]]:
    """Return which pairs of activations of an operator have equal scales, and which equal scales and zero points."""
    quantizations = activation_quantizations(graph, operator)
    return [
        (first[0] == second[0], first == second)
        for index, first in enumerate(quantizations)
        for second in quantizations[:index]
    ]
