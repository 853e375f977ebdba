"""Which operator each vector instruction of a program belongs to, and its constants for another model.

An instruction is known by its constants: those that follow from an operator's scales and zero points. Several operators
can have the same constants. Where their new constants differ, the order of the program decides if it can: an operator
starts after the operators that it needs have started, and ends after them. Where it cannot, the instruction is
ambiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.graph import NONE, Graph, Operator
from compress.model.tflite.structure import describe
from darwinn import operator_constants
from darwinn.blocks import FEW_ROWS, ROW_BLOCK
from darwinn.instructions import (
    ADD,
    BUNDLE_BYTES,
    FIELDS_BIT,
    Constants,
    Factor,
    VectorInstruction,
    bundles,
    factors,
    replace_constants,
    replace_factor,
    vector_instructions,
)
from darwinn.operator_constants import DATA_MOVEMENT, ONE_BITS, WEIGHTED, Form, activation_quantizations

_MOST_CANDIDATES = 1_000_000
"""The limit of instructions times operators with the same constants; 30,000 in a large network."""
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 64, 191
"""The exponents of multipliers that a program can have: 2^-63 to 2^64. Others are 0, infinite or damaged."""
_FACTOR_DISTANCES = (77, 71, 59, 53, 47, 41, 29, 23)
"""The bundles between the factors of an addition and its first instruction; four for each input. Source: the compiled
models with residual connections; where a program has another order, no load is found there, and it is refused."""
_OPTIONAL = DATA_MOVEMENT | {"SOFTMAX"}
"""Operators that can have no instruction with scales or zero points."""


@dataclass(frozen=True)
class Candidate:
    """An operator that an instruction can belong to.

    Attributes:
        operator: the operator's index.
        form: the kind of the instruction.
        constants: the instruction's constants for the new model.
        factors: the factors of an addition for the new model; None for another operator.
    """

    operator: int
    form: Form
    constants: Constants
    factors: tuple[int, int] | None


@dataclass
class ProgramPlan:
    """The changes of one program for another model.

    Attributes:
        constants: new constants, by instruction.
        factors: new factors of additions, by bundle that loads one.
        problems: the reasons why the program cannot be changed; empty if it can.
        located: the operators of which at least one instruction was found.
    """

    constants: list[tuple[VectorInstruction, Constants]] = field(default_factory=list)
    factors: list[tuple[Factor, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    located: set[int] = field(default_factory=set)

    def apply(self, program: bytes) -> bytes:
        """Return the program with the new constants and factors."""
        changed = bytearray(program)
        for instruction, constants in self.constants:
            replace_constants(changed, instruction, constants)
        for factor, value in self.factors:
            replace_factor(changed, factor, value)
        return bytes(changed)


class ModelChange:
    """Two models of one structure, and the operators whose instructions differ.

    Attributes:
        old: the model that the program was compiled from.
        new: the model that it shall run.
        operators: the operators of the old model that run on the Edge TPU.
    """

    def __init__(self, old: Graph, new: Graph, operators: Collection[int]) -> None:
        self.old, self.new = old, new
        self.operators = [operator for operator in old.operators if operator.index in operators]
        self.old_forms = {operator.index: operator_constants.forms(old, operator) for operator in self.operators}
        self.new_forms = {
            operator.index: {form.name: form for form in operator_constants.forms(new, new.operators[operator.index])}
            for operator in self.operators
        }

    @cached_property
    def changed(self) -> set[int]:
        """The operators of which a scale or zero point that instructions can hold is different."""
        return {
            operator.index
            for operator in self.operators
            if _quantizations(self.old, operator) != _quantizations(self.new, self.new.operators[operator.index])
        }

    def describe(self, index: int) -> str:
        """Return an operator's name for messages."""
        return describe(self.old.operators[index])

    def candidates(self, instruction: VectorInstruction) -> list[Candidate]:
        """Return the operators that an instruction can belong to, because its constants are theirs in the old model."""
        candidates = []
        for operator, form in self._by_constants.get(instruction.constants, ()):
            after = self.new_forms[operator.index].get(form.name)
            same_kind = instruction.kind in form.kinds and instruction.per_channel == form.weights_per_channel
            if after is not None and same_kind and self._has_rows(operator, instruction):
                candidates.append(Candidate(operator.index, form, after.constants, after.factors))
        return candidates

    @cached_property
    def _by_constants(self) -> dict[Constants, list[tuple[Operator, Form]]]:
        """The operators of the old model, and their forms, by the constants of the instruction."""
        by_constants: dict[Constants, list[tuple[Operator, Form]]] = {}
        for operator in self.operators:
            for form in self.old_forms[operator.index]:
                by_constants.setdefault(form.constants, []).append((operator, form))
        return by_constants

    def _has_rows(self, operator: Operator, instruction: VectorInstruction) -> bool:
        """Return whether an operator's number of outputs allows the rows of an instruction."""
        if operator.name not in WEIGHTED:
            return True
        shape = self.old.tensors[operator.inputs[1]].shape
        if operator.name == "DEPTHWISE_CONV_2D":
            inputs = self.old.tensors[operator.inputs[0]].shape[-1]
            return instruction.rows == FEW_ROWS or inputs == 1
        consumers = self.old.consumers.get(operator.outputs[0], ())
        if any(consumer.name == "RESHAPE" for consumer in consumers):  # the channels can be split into several parts
            return True
        rows = -(-shape[0] // FEW_ROWS) * FEW_ROWS
        return instruction.rows in (rows % ROW_BLOCK, ROW_BLOCK if rows >= ROW_BLOCK else rows)

    @cached_property
    def needs(self) -> dict[int, set[int]]:
        """For each operator, the nearest operators before it that have forms."""
        known = {index for index, forms in self.old_forms.items() if forms}
        reaching: dict[int, set[int]] = {}
        needs: dict[int, set[int]] = {}
        for operator in self.old.operators:
            before: set[int] = set()
            for tensor in operator.inputs:
                before |= reaching.get(tensor, set())
            if operator.index in known:
                needs[operator.index] = before
                before = {operator.index}
            for tensor in operator.outputs:
                reaching[tensor] = before
        return needs


def _quantizations(graph: Graph, operator: Operator) -> list[tuple[float, int] | None]:
    """Return scale and zero point of each tensor of an operator; None for those that no instruction holds."""
    quantizations: list[tuple[float, int] | None] = []
    for position, tensor in enumerate((*operator.inputs, *operator.outputs)):
        operand = graph.tensors[tensor] if tensor != NONE else None
        quantization = operand.quantization if operand is not None else None
        is_weight = operator.name in WEIGHTED and 0 < position < len(operator.inputs)
        # The scales of channels are in the parameters. That of a bias follows from those of input and weights.
        if (
            operand is None
            or quantization is None
            or operand.dtype == "INT32"
            or (is_weight and not quantization.one_scale)
        ):
            quantizations.append(None)
        else:
            quantizations.append((quantization.scale[0], operator_constants.unsigned_zero_point(operand)))
    return quantizations


def plan_program(program: bytes, change: ModelChange, *, is_only: bool = True) -> ProgramPlan:
    """Return the changes of a program for another model, or the reasons why it cannot be changed.

    With `is_only`, all operators are in this program, so that the order of its instructions can decide between them.
    """
    plan = ProgramPlan()
    if not change.changed:
        return plan
    parsed = bundles(program)
    instructions = vector_instructions(parsed)
    possible = []
    for instruction in instructions:
        possible.append(change.candidates(instruction))
        if len(possible[-1]) * len(instructions) > _MOST_CANDIDATES:
            plan.problems.append("too many operators have the same scales and zero points")
            return plan
    if is_only:
        possible = _by_order(possible, change)
    for instruction, candidates in zip(instructions, possible, strict=True):
        _plan_instruction(plan, change, instruction, candidates)
    _plan_factors(plan, change, instructions, possible, factors(parsed))
    plan.problems += _unknown_multipliers(program, change, instructions)
    return plan


def _plan_instruction(
    plan: ProgramPlan, change: ModelChange, instruction: VectorInstruction, candidates: Sequence[Candidate]
) -> None:
    where = f"the instruction at bundle {instruction.bundle}"
    outcomes = {candidate.constants for candidate in candidates}
    if operator_constants.is_independent(instruction):
        outcomes.add(instruction.constants)
    if not outcomes:
        plan.problems.append(f"{where} has constants that no operator of the old model explains")
        return
    plan.located.update(candidate.operator for candidate in candidates)
    if len(outcomes) > 1:
        names = ", ".join(sorted({change.describe(candidate.operator) for candidate in candidates}))
        plan.problems.append(f"{where} is ambiguous: it can belong to {names}")
        return
    (constants,) = outcomes
    if not _SMALLEST_EXPONENT <= constants.multiplier >> 23 <= _LARGEST_EXPONENT:
        plan.problems.append(f"{where} would have a multiplier that is too small or too large")
        return
    if constants != instruction.constants:
        plan.constants.append((instruction, constants))


def _by_order(possible: list[list[Candidate]], change: ModelChange) -> list[list[Candidate]]:
    """Drop the candidates that the order of the program excludes."""
    original = possible
    needed = {operator for operator in _positions(possible) if not _is_optional(operator, change)}
    while True:
        first, last = _earliest(possible, change), _latest(possible, change)
        narrowed = [
            [candidate for candidate in candidates if first[candidate.operator] <= position <= last[candidate.operator]]
            for position, candidates in enumerate(possible)
        ]
        if [len(candidates) for candidates in narrowed] == [len(candidates) for candidates in possible]:
            return possible
        lost = any(before and not after for before, after in zip(possible, narrowed, strict=True))
        if lost or not needed <= _positions(narrowed).keys():
            return original  # The program is not in this order, which then decides nothing.
        possible = narrowed


def _positions(possible: Sequence[Sequence[Candidate]]) -> dict[int, list[int]]:
    positions: dict[int, list[int]] = {}
    for position, candidates in enumerate(possible):
        for operator in dict.fromkeys(candidate.operator for candidate in candidates):
            positions.setdefault(operator, []).append(position)
    return positions


def _earliest(possible: Sequence[Sequence[Candidate]], change: ModelChange) -> dict[int, int]:
    """Return the earliest possible first instruction of each operator."""
    positions = _positions(possible)
    earliest: dict[int, int] = {}
    reached: dict[int, int] = {}
    for operator, needs in change.needs.items():
        after = max((reached[producer] for producer in needs), default=-1)
        earliest[operator] = next(
            (position for position in positions.get(operator, ()) if position > after), len(possible)
        )
        can_be_missing = operator not in positions or _is_optional(operator, change)
        reached[operator] = after if can_be_missing else max(after, earliest[operator])
    return earliest


def _latest(possible: Sequence[Sequence[Candidate]], change: ModelChange) -> dict[int, int]:
    """Return the latest possible last instruction of each operator."""
    positions = _positions(possible)
    consumers: dict[int, set[int]] = {operator: set() for operator in change.needs}
    for operator, needs in change.needs.items():
        for producer in needs:
            consumers[producer].add(operator)
    latest: dict[int, int] = {}
    reached: dict[int, int] = {}
    for operator in reversed(list(change.needs)):
        before = max((reached[consumer] for consumer in consumers[operator]), default=len(possible))
        latest[operator] = next(
            (position for position in reversed(positions.get(operator, ())) if position < before), -1
        )
        can_be_missing = operator not in positions or _is_optional(operator, change)
        reached[operator] = before if can_be_missing else min(before, latest[operator])
    return latest


def _is_optional(operator: int, change: ModelChange) -> bool:
    return change.old.operators[operator].name in _OPTIONAL


def _plan_factors(
    plan: ProgramPlan,
    change: ModelChange,
    instructions: Sequence[VectorInstruction],
    possible: Sequence[Sequence[Candidate]],
    loads: Sequence[Factor],
) -> None:
    """Add the factors of changed additions to a plan."""
    by_bundle = {load.bundle: load for load in loads}
    used: set[int] = set()
    previous: set[int] = set()
    for instruction, candidates in zip(instructions, possible, strict=True):
        sums = {
            candidate.operator: candidate
            for candidate in candidates
            if candidate.form.factors is not None and candidate.operator in change.changed
        }
        starts = set(sums) != previous
        previous = set(sums)
        if not sums or not starts or instruction.kind != ADD:
            continue
        own_loads = [by_bundle.get(instruction.bundle - distance) for distance in _FACTOR_DISTANCES]
        outcome = {_new_factors(candidate, own_loads) for candidate in sums.values()}
        (values,) = outcome if len(outcome) == 1 else (None,)
        if values is None:
            plan.problems.append(
                f"the factors of {', '.join(map(change.describe, sorted(sums)))} were not found before its instruction"
            )
            continue
        for load, value in zip(own_loads, values, strict=True):
            assert load is not None
            used.add(load.bundle)
            plan.factors.append((load, value))
    left = {load.value for load in loads if load.bundle not in used}
    for index in sorted(change.changed):
        for form in change.old_forms[index]:
            if form.factors is not None and left & {factor for factor in form.factors if factor > _LIKELY_FACTOR}:
                plan.problems.append(f"a factor of {change.describe(index)} is at another position in the program, too")


_LIKELY_FACTOR = 1 << 10
"""Smaller values are loaded for other purposes, too, such as sizes. A factor is a part of a fraction whose denominator
is at most 32,767 and as close to the ratio of two scales as possible, and is therefore rarely small."""


def _new_factors(candidate: Candidate, loads: Sequence[Factor | None]) -> tuple[int, ...] | None:
    """Return the new values of the loads of an addition; None if they do not hold its factors, or in unknown order."""
    old, new = candidate.form.factors, candidate.factors
    if old is None or new is None:
        return None
    half = len(loads) // 2
    values = [load.value if load is not None else -1 for load in loads]
    orders = {
        (*[new[a]] * half, *[new[b]] * half)
        for a, b in ((0, 1), (1, 0))
        if values == [*[old[a]] * half, *[old[b]] * half]
    }
    return orders.pop() if len(orders) == 1 else None


_COMMON = 0xFFF
"""The last bits of a float32; where they are 0, as in 0.0625, the number is in a program by chance."""


def _unknown_multipliers(program: bytes, change: ModelChange, instructions: Sequence[VectorInstruction]) -> list[str]:
    """Return the changed operators whose multiplier is in the program at a position that is not understood."""
    multipliers = {
        form.constants.multiplier: index
        for index in change.changed
        for form in change.old_forms[index]
        if form.constants.multiplier & _COMMON and form.constants.multiplier != ONE_BITS - 1
    }
    known = {instruction.bundle * BUNDLE_BYTES * 8 + FIELDS_BIT for instruction in instructions}
    windows = _windows(program)
    problems = []
    for bit in np.flatnonzero(np.isin(windows, np.array(sorted(multipliers), np.uint32))).tolist():
        if bit not in known:
            operator = change.describe(multipliers[int(windows[bit])])
            problems.append(f"the multiplier of {operator} is at bit {bit} of the program, in no known instruction")
    return problems


def _windows(program: bytes) -> NDArray[np.uint32]:
    """Return the 32 bits at each bit position of a program."""
    bits = np.unpackbits(np.frombuffer(program, np.uint8), bitorder="little")
    count = max(len(bits) - 31, 0)
    windows = np.zeros(count, np.uint32)
    for shift in range(32):
        windows |= bits[shift : shift + count].astype(np.uint32) << np.uint32(shift)
    return windows


def missing_instructions(change: ModelChange, explained: Collection[int]) -> list[str]:
    """Return the changed operators whose instructions are not understood or were not found.

    `explained` has the operators with instructions in the programs.
    """
    problems = []
    for index in sorted(change.changed):
        operator = change.old.operators[index]
        if not change.old_forms[index]:
            problems.append(f"{change.describe(index)}: how its instructions depend on scales is not known")
            continue
        # An operator that moves values needs no instruction if the values keep their meaning, in both models.
        graphs = (change.old, change.new)
        scales = [set(activation_quantizations(graph, graph.operators[index])) for graph in graphs]
        is_free = operator.name in DATA_MOVEMENT and all(len(scale) == 1 for scale in scales)
        if index not in explained and not is_free:
            problems.append(f"{change.describe(index)}: its instructions were not found")
    return problems
