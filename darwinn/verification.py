"""`verify-compiled`: whether a compiled file holds a model.

The inputs, outputs and CPU operators of the file must be those of the model. On the Edge TPU, every weight, bias,
multiplier and constant is compared where the file stores it, and the scales and zero points of activations are compared
with the instructions. An answer of "yes" means that everything that can be seen agrees; what cannot be seen is listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.graph import Graph, Operator, Tensor
from compress.model.tflite.structure import describe
from darwinn.compiled_file import CompiledFile
from darwinn.cpu_part import compare_cpu_part, interface_differences, with_stated_outputs
from darwinn.instructions import Constants, VectorInstruction, bundles, vector_instructions
from darwinn.operator_constants import (
    DATA_MOVEMENT,
    WEIGHTED,
    Form,
    activation_quantizations,
    forms,
    is_independent,
    quantization_of,
)
from darwinn.parameter_layout import NumberDifference, NumberKind
from darwinn.parameter_location import (
    LeftoverKind,
    ParameterLocation,
    ParameterRegion,
    locate,
    region_bytes,
)
from darwinn.unlocated_parameters import output_of_each_number, unlocated_parameters

SCHEMA_VERSION = 1
MAX_LISTED = 8
"""The most values that are listed of those that differ in one tensor."""
MAX_CANDIDATES = 1000
"""The most instructions that are compared with an operator without one, to name what differs."""
MAX_LINES = 40
"""The most lines of one kind in the text; --json has all."""
_EXCEPTIONS = frozenset({"MUL", "SOFTMAX"})
"""Operators whose instruction is known with exceptions: SOFTMAX of compilers before 15.0, some products of tensors."""
_ROUNDING = 1e-5
"""The largest relative difference of two multipliers that other rounding can cause; each of 3 roundings: 6e-8."""


@dataclass(frozen=True)
class VerificationDifference:
    """Something that differs between the model and the compiled file.

    Attributes:
        message: what differs, for a person.
        operator: the index of the operator in the model; None for a difference outside of the Edge TPU's operators.
        kind: "weight", "bias", "multiplier", "zero point", "constant", "scale", "interface", "cpu" or "missing".
        count: the number of differing values.
        numbers: the first differing values: index in the tensor, value in the model, value in the compiled file.
    """

    message: str
    operator: int | None = None
    kind: str = "interface"
    tensor: str = ""
    count: int = 1
    numbers: tuple[tuple[tuple[int, ...], float, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the difference as a plain map."""
        return {
            "operator": self.operator,
            "kind": self.kind,
            "tensor": self.tensor,
            "count": self.count,
            "numbers": [
                {"index": list(index), "model": model, "compiled": compiled} for index, model, compiled in self.numbers
            ],
            "message": self.message,
        }


@dataclass(frozen=True)
class Undecided:
    """Something that cannot be compared.

    Attributes:
        operator: the index of the operator in the model; None if the reason is not about one operator.
        blocks: whether the answer can therefore not be "yes".
    """

    operator: int | None
    reason: str
    blocks: bool


@dataclass(frozen=True)
class Verification:
    """The answer, and what it is based on.

    Attributes:
        differences: the differences; empty unless the file holds another model.
        undecided: the reasons why something cannot be compared.
        compared: the number of values that were compared, by kind.
    """

    differences: tuple[VerificationDifference, ...]
    undecided: tuple[Undecided, ...]
    compared: dict[str, int]

    @property
    def holds(self) -> bool | None:
        """Whether the file holds the model; None if that cannot be decided."""
        if self.differences:
            return False
        return None if any(undecided.blocks for undecided in self.undecided) else True

    def to_json(self) -> dict[str, Any]:
        """Return the answer as a plain map."""
        return {
            "schema_version": SCHEMA_VERSION,
            "answer": {True: "yes", False: "no", None: "undecided"}[self.holds],
            "differences": [difference.to_json() for difference in self.differences],
            "undecided": [asdict(undecided) for undecided in self.undecided],
            "compared": self.compared,
        }

    def describe(self) -> str:
        """Return the answer as text for a person."""
        sentences = {
            True: "yes: the compiled file holds this model",
            False: "no: the compiled file does not hold this model",
            None: "cannot be decided: nothing proves that it is another model, but not everything is explained",
        }
        lines = [sentences[self.holds]]
        lines += _limited([f"  different: {difference.message}" for difference in self.differences])
        lines += _limited([f"  not explained: {undecided.reason}" for undecided in self.undecided])
        counts = ", ".join(f"{count:,} {kind}" for kind, count in self.compared.items() if count)
        return "\n".join([*lines, f"compared: {counts or 'inputs and outputs'}"]) + "\n"


def _limited(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LINES
    return lines if more <= 0 else [*lines[:MAX_LINES], f"  … and {more:,} more (--json lists all)"]


def verify(file: CompiledFile, model: Graph) -> Verification:
    """Compare a compiled file with a model.

    "No" needs a value of an identified operator that cannot follow from the model. A value that is not where it is
    expected is no such proof: compilers and their versions differ in what they store where.
    """
    if len(file.graph.inputs) != len(model.inputs) or len(file.graph.outputs) != len(model.outputs):
        messages = interface_differences(file.graph, model)
        return Verification(tuple(VerificationDifference(message) for message in messages), (), {})
    stated, moved = with_stated_outputs(file.graph, model, file.custom_operators)
    compared = _compare(file, stated)
    if compared.holds:
        undecided = [Undecided(None, f"output of a program {message}{_MOVED}", blocks=True) for message in moved]
        return replace(compared, undecided=(*undecided, *compared.undecided))
    outputs = [VerificationDifference(f"output of a program {message}", kind="scale") for message in moved]
    return replace(compared, differences=(*outputs, *compared.differences))


_MOVED = (
    "; all weights and biases that were compared are those of the model. The compiled file answers on its own scale, "
    "as a file of the same weights with other ranges does"
)
"""Source: the vendor's own bodypix_mobilenet_v1_075_512_512_16_quant_decoder, in google-coral/test_data."""


def _compare(file: CompiledFile, model: Graph) -> Verification:
    differences = [VerificationDifference(message) for message in interface_differences(file.graph, model)]
    cpu = compare_cpu_part(file.graph, model, file.custom_operators)
    differences += [VerificationDifference(message, kind="cpu") for message in cpu.differences]
    undecided = [Undecided(None, message, blocks=True) for message in cpu.unmatched]
    operators = [operator for operator in model.operators if operator.index not in cpu.operators]
    location = locate(file, model, operators)
    comparison = _Comparison(file, model, operators)
    outcomes = [
        *comparison.layer_differences(cpu.tensors),
        *comparison.number_differences(location, is_complete=not cpu.unmatched),
        *comparison.missing(location),
        *comparison.instruction_differences(location),
    ]
    differences += [outcome for outcome in outcomes if isinstance(outcome, VerificationDifference)]
    undecided += [outcome for outcome in outcomes if isinstance(outcome, Undecided)]
    return Verification(tuple(differences), tuple(undecided), comparison.compared(location))


class _Comparison:
    """The comparison of the operators on the Edge TPU.

    Attributes:
        operators: the model's operators on the Edge TPU.
    """

    def __init__(self, file: CompiledFile, model: Graph, operators: Sequence[Operator]) -> None:
        self.file = file
        self.model = model
        self.operators = operators
        self.instructions = [
            instruction
            for executable in file.executables
            if executable.type != "PARAMETER_CACHING"
            for stream in executable.instructions
            for instruction in vector_instructions(bundles(file.bytes_at(stream)))
        ]

    def layer_differences(self, tensors: dict[int, int]) -> Iterator[Undecided]:
        """Yield the inputs and outputs of the programs that have another scale than the file's tensors around them.

        `tensors`: see `CpuPart`.
        """
        by_name = {tensor.name.rstrip("\0"): tensor.index for tensor in self.file.graph.tensors}
        for executable in self.file.executables:
            for layer in (*executable.inputs, *executable.outputs):
                index = tensors.get(by_name.get(layer.name.rstrip("\0"), -1))
                tensor = self.model.tensors[index] if index is not None else None
                if tensor is None or tensor.quantization is None or tensor.dtype not in ("INT8", "UINT8"):
                    continue
                expected = quantization_of(tensor)
                if layer.scale and (layer.scale, layer.zero_point) != expected:
                    reason = (
                        f"input or output {layer.name}: scale {expected[0]:.9g} and zero point {expected[1]} in the "
                        f"model, {layer.scale:.9g} and {layer.zero_point} in the compiled program (as uint8)"
                    )
                    yield Undecided(None, reason, blocks=True)

    def number_differences(
        self, location: ParameterLocation, *, is_complete: bool
    ) -> Iterator[VerificationDifference | Undecided]:
        """Yield the weights, biases, multipliers and constants that differ, by tensor.

        With `is_complete`, all operators on the CPU are known, so that all others must be in the parameters.
        """
        unlocated = unlocated_parameters(self.file, self.model, location)
        is_proven = is_complete and bool(unlocated.contradiction)
        if is_proven:
            yield VerificationDifference(unlocated.contradiction, kind="missing", count=len(location.missing) or 1)
        for region, identified in unlocated.outputs.items():
            yield from self._region_differences(region, identified, is_proven=is_proven)

    def _region_differences(
        self, region: ParameterRegion, identified: NDArray[np.bool_], *, is_proven: bool
    ) -> Iterator[VerificationDifference | Undecided]:
        """Yield what differs in a region: outputs that are identified, or all if it is proven that they differ."""
        content = region_bytes(self.file, region)
        by_tensor: dict[tuple[NumberKind, int], list[NumberDifference]] = {}
        unproven = 0
        rows = output_of_each_number(self.model, region.parameters, region.values)
        for difference in region.layout.differences(content, region.values):
            if not is_proven and not identified[rows[difference.kind][difference.index]]:
                unproven += 1
                continue
            index, tensor = self._tensor(region, difference)
            by_tensor.setdefault((difference.kind, tensor.index), []).append(
                NumberDifference(difference.kind, index, difference.expected, difference.actual)
            )
        for (kind, tensor_index), differing in by_tensor.items():
            yield self._difference(region, kind, self.model.tensors[tensor_index], differing)
        name, index = describe(region.operator), region.operator.index
        if unproven:
            reason = (
                f"{name}: {unproven:,} values are not where they are expected; they are different, or stored elsewhere"
            )
            yield Undecided(index, reason, blocks=True)
        elif not by_tensor:
            yield Undecided(index, f"{name}: bytes of missing rows or channels are different", blocks=True)

    def _tensor(self, region: ParameterRegion, difference: NumberDifference) -> tuple[int, Tensor]:
        """Return the index of a number in its tensor, and the tensor."""
        index = difference.index
        candidates = [self.model.tensors[tensor_index] for tensor_index in region.parameters.tensors[difference.kind]]
        for tensor in candidates[:-1]:
            if index < tensor.elements:
                return index, tensor
            index -= tensor.elements
        return index, candidates[-1]

    def _difference(
        self, region: ParameterRegion, kind: NumberKind, tensor: Tensor, differing: Sequence[NumberDifference]
    ) -> VerificationDifference:
        offset = 128 if kind is NumberKind.WEIGHT and tensor.dtype == "INT8" else 0
        listed = []
        for difference in differing[:MAX_LISTED]:
            by_output = kind in (NumberKind.MULTIPLIER, NumberKind.ZERO_POINT)
            index: tuple[int, ...] = (difference.index,)
            if not by_output:
                index = tuple(map(int, np.unravel_index(difference.index, tensor.shape or (1,))))
            listed.append((index, difference.expected - offset, difference.actual - offset))
        total = region.values.arrays[kind].size
        what = {NumberKind.MULTIPLIER: "scale", NumberKind.CONSTANT: "constant"}.get(kind, kind.value)
        shown = ", ".join(f"{list(index)}: {_number(mine)} -> {_number(theirs)}" for index, mine, theirs in listed[:3])
        hint = ""
        if kind is NumberKind.MULTIPLIER:
            hint = " as multipliers (input scale x weight scale / output scale)"
        message = (
            f"{describe(region.operator)}: {len(differing):,} of {total:,} {what}s of {tensor.name} are different"
            f"{hint}, at index: model -> compiled file: {shown}{', …' if len(differing) > 3 else ''}"
        )
        return VerificationDifference(message, region.operator.index, what, tensor.name, len(differing), tuple(listed))

    def missing(self, location: ParameterLocation) -> list[Undecided]:
        """Return what was not found in the parameters."""
        reasons = [
            Undecided(
                part.operator.index,
                f"{describe(part.operator)}: its {part.purpose} were not found in the compiled file; "
                "they are different, or are stored in a layout that is not known",
                blocks=True,
            )
            for part in location.missing
        ]
        unknown = [leftover for leftover in location.leftovers if leftover.kind is LeftoverKind.UNKNOWN]
        if unknown:
            size = sum(len(leftover.extent) for leftover in unknown)
            reason = f"{size:,} bytes of parameters in the compiled file belong to no operator of the model"
            reasons.append(Undecided(None, reason, blocks=True))
        filled = sum(len(leftover.extent) for leftover in location.leftovers if leftover.kind is LeftoverKind.FILL)
        if filled:
            reason = f"{filled:,} bytes of parameters are zeros and one other value, as in matrices that move data"
            reasons.append(Undecided(None, reason, blocks=False))
        return reasons

    def instruction_differences(self, location: ParameterLocation) -> Iterator[VerificationDifference | Undecided]:
        """Yield the operators whose scales and zero points are not in the instructions."""
        equal = {region.operator.index for region in location.regions if region.is_equal}
        by_operator = {operator.index: forms(self.model, operator) for operator in self.operators}
        owners: dict[tuple[int, bool, Constants], set[int]] = {}
        for index, operator_forms in by_operator.items():
            for form in operator_forms:
                for kind in form.kinds:
                    owners.setdefault((kind, form.weights_per_channel, form.constants), set()).add(index)
        explained: set[int] = set()
        unexplained = []
        for instruction in self.instructions:
            matches = owners.get((instruction.kind, instruction.per_channel, instruction.constants), set())
            explained |= matches
            if not matches and not is_independent(instruction):
                unexplained.append(instruction)
        unknown = [operator for operator in self.operators if not by_operator[operator.index]]
        for operator in self.operators:
            # Values that move and keep their meaning need no instruction.
            scales = set(activation_quantizations(self.model, operator))
            moves_only = operator.name in DATA_MOVEMENT and len(scales) <= 1
            if not by_operator[operator.index]:
                reason = f"{describe(operator)}: how its instructions hold scales and zero points is not known"
                yield Undecided(operator.index, reason, blocks=False)
            elif operator.index not in explained and not moves_only:
                is_identified = operator.index in equal and not unknown
                yield self._not_explained(
                    operator, by_operator[operator.index], unexplained, is_identified=is_identified
                )
        if unexplained and not unknown:
            kinds = len(unexplained)
            reason = f"{kinds} instructions of the compiled file have scales or zero points of no operator of the model"
            yield Undecided(None, reason, blocks=True)

    def _not_explained(
        self,
        operator: Operator,
        expected: Sequence[Form],
        unexplained: Sequence[VectorInstruction],
        *,
        is_identified: bool,
    ) -> VerificationDifference | Undecided:
        """Return the most similar instruction of an operator without one: a proof if only its scales can differ.

        The operator is identified if its parameters are in the file, and no other operator has unknown
        instructions.
        """
        candidates = [
            (sum(map(eq, astuple(instruction.constants), astuple(form.constants))), form, instruction)
            for form in expected
            for instruction in unexplained[:MAX_CANDIDATES]
            if instruction.kind in form.kinds and instruction.per_channel == form.weights_per_channel
        ]
        _, form, instruction = max(candidates, key=lambda candidate: candidate[0], default=(0, None, None))
        if form is None or instruction is None:
            reason = f"{describe(operator)}: no instruction with its scales and zero points was found"
            return Undecided(operator.index, reason, blocks=operator.name not in _EXCEPTIONS)
        different = _different_fields(form.constants, instruction.constants)
        message = f"{describe(operator)}: scales or zero points are different in its instruction: {different}"
        if operator.name in WEIGHTED and is_identified and _only_scales_differ(form.constants, instruction.constants):
            output = self.model.output_tensors(operator)[0]
            return VerificationDifference(message, operator.index, "scale", output.name)
        reason = (
            f"{describe(operator)}: its scales or zero points may differ; the most similar instruction: {different}"
        )
        return Undecided(operator.index, reason, blocks=operator.name not in _EXCEPTIONS)

    def compared(self, location: ParameterLocation) -> dict[str, int]:
        """Return the number of compared values, by kind."""
        counts: Counter[str] = Counter()
        for region in location.regions:
            if not region.parameters.is_table:
                for kind, array in region.values.arrays.items():
                    counts[_PLURALS[kind]] += array.size
        return {
            "operators on the Edge TPU": len(self.operators),
            **{kind: counts[kind] for kind in _PLURALS.values()},
            "instructions": len(self.instructions),
        }


_PLURALS = {
    NumberKind.WEIGHT: "weights",
    NumberKind.BIAS: "biases",
    NumberKind.MULTIPLIER: "scales of channels",
    NumberKind.CONSTANT: "constants",
    NumberKind.ZERO_POINT: "zero points",
}


def _only_scales_differ(model: Constants, compiled: Constants) -> bool:
    """Return whether two instructions have the same zero points, and multipliers that no rounding explains.

    A compiler can move a zero point, and then the clamps with it; the function of the operator stays the same.
    """
    zero_points = ("offset", "output_zero_point", "input_zero_point", "weight_zero_point")
    mine, theirs = (float(np.uint32(constants.multiplier).view(np.float32)) for constants in (model, compiled))
    same = all(getattr(model, name) == getattr(compiled, name) for name in zero_points)
    return same and abs(mine - theirs) > _ROUNDING * abs(mine)


def _different_fields(model: Constants, compiled: Constants) -> str:
    """Return the constants that differ, as text: those of the model, then those of the compiled file."""
    parts = []
    for field in fields(Constants):
        mine, theirs = getattr(model, field.name), getattr(compiled, field.name)
        if mine != theirs:
            if field.name in ("multiplier", "upper", "lower"):
                mine, theirs = (float(np.uint32(bits).view(np.float32)) for bits in (mine, theirs))
            parts.append(f"{field.name.replace('_', ' ')} {_number(mine)} -> {_number(theirs)}")
    return ", ".join(parts)


def _number(value: float) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
