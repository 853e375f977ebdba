"""Prediction of where each operator runs, without the compiler.

An operator runs on the Edge TPU if it violates no rule and does not depend, directly or indirectly, on a CPU operator
that itself depends on an Edge TPU operator: the compiler makes one partition. A float QUANTIZE or CAST at the start of
the model runs on the CPU and does not end the partition.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compress.model.tflite import macs as arithmetic
from compress.model.tflite.graph import NONE, Graph, Operator
from compress.results.placement import OperatorPlacement
from compress.targets.base import Target
from compress.targets.edgetpu import rules
from compress.targets.edgetpu.constants import CONSTANTS

MAPPED = "Mapped to Edge TPU"
COMPILED_OPERATOR = "edgetpu-custom-op"
AFTER_CPU_OPERATOR = "More than one subgraph is not supported"
_SMALLER = "Use a smaller map, or compile the model before you rely on this placement."


@dataclass(frozen=True)
class Placement:
    """The predicted placement of a model's operators.

    Attributes:
        ops: every operator, in execution order.
        failure: the reason why the compiler will reject the whole model, or None.
    """

    ops: tuple[OperatorPlacement, ...]
    failure: str | None

    @property
    def macs(self) -> dict[str, int]:
        """Multiply-accumulates on the Edge TPU and on the CPU."""
        counts = {"tpu": 0, "cpu": 0}
        for op in self.ops:
            counts[op.placement] += op.macs
        return counts

    @property
    def summary(self) -> str:
        """One line about the placement."""
        if self.failure:
            return f"the compiler will reject this model: {self.failure}"
        mapped = sum(op.placement == "tpu" for op in self.ops)
        if mapped == len(self.ops):
            return f"all {mapped} operators would run on the Edge TPU"
        return f"{mapped} of {len(self.ops)} operators would run on the Edge TPU"

    @property
    def complete(self) -> bool:
        """Whether every operator is mapped."""
        return all(op.placement == "tpu" for op in self.ops)

    def to_json(self) -> dict[str, Any]:
        """Return the placement as a plain map, for facts and reports."""
        return {
            "summary": self.summary,
            "compiles": self.failure is None,
            "failure": self.failure,
            "macs": self.macs,
            "ops": [asdict(op) for op in self.ops],
        }


def place(graph: Graph, target: Target, *, all_subgraphs: bool = False) -> Placement:
    """Predict the placement of every operator of a graph.

    With `all_subgraphs` (the compiler's `-a`), the compiler makes several partitions, and operators after a CPU
    operator are mapped too.
    """
    placed: list[OperatorPlacement] = []
    after_tpu: set[int] = set()  # tensors that depend on an Edge TPU operator
    after_exit: set[int] = set()  # tensors that depend on a CPU operator that depends on an Edge TPU operator
    for operator in graph.operators:
        inputs = set(operator.inputs) - {NONE}
        ends_partition = not inputs.isdisjoint(after_exit) and not all_subgraphs
        on_tpu, fields = _status(operator, graph, target, ends_partition)
        follows_tpu = not inputs.isdisjoint(after_tpu)
        if on_tpu or follows_tpu:
            after_tpu.update(operator.outputs)
        if not on_tpu and (ends_partition or follows_tpu):
            after_exit.update(operator.outputs)
        output = graph.output_tensors(operator)[0].name if operator.outputs else ""
        placement, macs = "tpu" if on_tpu else "cpu", arithmetic.macs(graph, operator)
        placed.append(
            OperatorPlacement(operator.index, operator.name, placement, macs, operator.version, output, **fields)
        )
    return Placement(tuple(placed), _failure(graph, placed))


def _status(operator: Operator, graph: Graph, target: Target, after_cpu: bool) -> tuple[bool, dict[str, str]]:
    """Return whether an operator is mapped, and the fields status, reason and advice."""
    violation = rules.first_violation(operator, graph, target)
    if violation:
        return False, rules.describe(*violation, operator)
    if after_cpu:
        reason = "comes after an operator that stays on the CPU"
        return False, {"status": AFTER_CPU_OPERATOR, "reason": reason, "advice": ""}
    reason, advice = rules.warning(operator, graph) or ("", "")
    risk = rules.size_risk(operator, graph)
    if risk:
        reason, advice = f"the compiler may leave it on the CPU: {risk}.", _SMALLER
    return True, {"status": MAPPED, "reason": reason, "advice": advice, "risk": risk}


def parser_rejection(operator: Operator) -> str | None:
    """Return why the compiler's TFLite parser rejects a model that contains an operator, or None."""
    parser = CONSTANTS.parser
    if operator.name == COMPILED_OPERATOR:
        return "it is already compiled"
    if operator.custom:
        if operator.name in parser["customs"]:
            return None
        return f"its TFLite parser does not know the custom operator {operator.name}"
    versions = [int(version) for version in parser if version.isdigit() and operator.name in parser[version]]
    newest = max(versions, default=0)
    if operator.version <= newest:
        return None
    supported = f"; the newest supported version is {newest}" if newest else ""
    name = f"{operator.name} version {operator.version} (operator {operator.index})"
    return f"{name} is newer than its TFLite parser{supported}"


def newer_than_boards(graph: Graph) -> list[str]:
    """Return the operators, with versions, that the TFLite runtime of old boards (TensorFlow 2.5) cannot load."""
    newest = {name: known.max_version for name, known in CONSTANTS.operators.items()}
    too_new = (
        f"{operator.name} {operator.version}"
        for operator in graph.operators
        if operator.version > newest.get(operator.name, operator.version) or parser_rejection(operator)
    )
    return sorted(set(too_new))


def _failure(graph: Graph, placed: list[OperatorPlacement]) -> str | None:
    """Return why the compiler will reject the whole model, or None."""
    for operator in graph.operators:
        rejection = parser_rejection(operator)
        if rejection:
            return rejection
    for index in graph.inputs:
        if graph.tensors[index].dynamic:
            return f"the input {graph.tensors[index].name} has a dynamic shape"
    if not any(op.placement == "tpu" for op in placed):
        return "no operator can run on the Edge TPU; is the model quantized to full integer?"
    return None
