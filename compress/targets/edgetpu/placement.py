"""Which operator would run where, found without the compiler.

An operator runs on the Edge TPU if and only if it breaks no rule and does not depend,
however indirectly, on a CPU operator that itself depends on a TPU operator (the compiler
makes one partition). A leading float QUANTIZE or CAST on the CPU does not end it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compress.targets.base import Target
from compress.targets.edgetpu import rules
from compress.tflite import macs as arithmetic
from compress.tflite.graph import NONE, Graph, Operator

MAPPED = "Mapped to Edge TPU"
COMPILED_OPERATOR = "edgetpu-custom-op"
AFTER_CPU_OPERATOR = "More than one subgraph is not supported"


@dataclass(frozen=True)
class PlacedOperator:
    """One operator and where it would run; names as in report.json."""

    index: int
    op: str
    version: int
    output: str
    placement: str
    status: str
    reason: str
    advice: str
    macs: int


@dataclass(frozen=True)
class Placement:
    """The expected placement of a model's operators.

    Attributes:
        ops: every operator, in order.
        failure: why the compiler would refuse the whole model, or None.
    """

    ops: tuple[PlacedOperator, ...]
    failure: str | None

    @property
    def macs(self) -> dict[str, int]:
        """Multiply-accumulates on each side."""
        return {side: sum(op.macs for op in self.ops if op.placement == side) for side in ("tpu", "cpu")}

    @property
    def summary(self) -> str:
        """One line."""
        if self.failure:
            return f"the compiler would refuse this model: {self.failure}"
        mapped = sum(op.placement == "tpu" for op in self.ops)
        if mapped == len(self.ops):
            return f"all {mapped} operators would run on the Edge TPU"
        return f"{mapped} of {len(self.ops)} operators would run on the Edge TPU"

    @property
    def complete(self) -> bool:
        """Whether every operator is mapped."""
        return all(op.placement == "tpu" for op in self.ops)

    def to_json(self) -> dict[str, Any]:
        """As a plain map, for facts and reports."""
        return {
            "summary": self.summary,
            "compiles": self.failure is None,
            "failure": self.failure,
            "macs": self.macs,
            "ops": [asdict(op) for op in self.ops],
        }


def place(graph: Graph, target: Target, *, all_subgraphs: bool = False) -> Placement:
    """Place every operator of a graph.

    Args:
        graph: the model.
        target: the target, with its rules' numbers and the compiler's version.
        all_subgraphs: whether the compiler is asked for several partitions (`-a`): then what
            comes after a CPU operator is mapped too.
    """
    placed: list[PlacedOperator] = []
    after_tpu: set[int] = set()  # tensors that depend on a TPU operator
    after_exit: set[int] = set()  # tensors that depend on a CPU operator that depends on a TPU operator
    for operator in graph.operators:
        given = {index for index in operator.inputs if index != NONE}
        broken = rules.first_violation(operator, graph, target)
        late = bool(given & after_exit) and not all_subgraphs
        if broken:
            fields = rules.describe(*broken, operator, target)
        elif late:
            fields = {
                "status": AFTER_CPU_OPERATOR,
                "reason": "comes after an operator that stays on the CPU",
                "advice": "",
            }
        else:
            reason, advice = rules.warning(operator, graph, target) or ("", "")
            fields = {"status": MAPPED, "reason": reason, "advice": advice}
        on_tpu = not broken and not late
        if on_tpu or given & after_tpu:
            after_tpu.update(operator.outputs)
        if late or (not on_tpu and given & after_tpu):
            after_exit.update(operator.outputs)
        placed.append(_placed(operator, graph, "tpu" if on_tpu else "cpu", fields))
    return Placement(tuple(placed), _failure(graph, placed, target))


def _placed(operator: Operator, graph: Graph, side: str, fields: dict[str, str]) -> PlacedOperator:
    output = graph.output_tensors(operator)[0].name if operator.outputs else ""
    cost = arithmetic.macs(graph, operator)
    return PlacedOperator(operator.index, operator.name, operator.version, output, side, macs=cost, **fields)


def parser_rejection(operator: Operator, target: Target) -> str | None:
    """Why the compiler's TFLite parser refuses a whole model for the sake of one operator, or None."""
    parser = target.tables["parser"]
    if operator.name == COMPILED_OPERATOR:
        return "it is compiled already"
    if operator.custom:
        known = operator.name in parser["customs"]
        return None if known else f"its TFLite parser does not know the custom operator {operator.name}"
    newest = max(
        (int(version) for version in parser if version.isdigit() and operator.name in parser[version]), default=0
    )
    if operator.version <= newest:
        return None
    since = f"; the newest known is {newest}" if newest else ""
    return (
        f"{operator.name} version {operator.version} (operator {operator.index}) is newer than its TFLite parser{since}"
    )


def newer_than_boards(graph: Graph, target: Target) -> list[str]:
    """The operators, with their versions, that the TFLite of old boards (TensorFlow 2.5) does not open."""
    tables = target.tables["operators"]
    newest = {name: row["max_version"] for name, row in tables.items()}
    return sorted(
        {
            f"{operator.name} {operator.version}"
            for operator in graph.operators
            if operator.version > newest.get(operator.name, operator.version) or parser_rejection(operator, target)
        }
    )


def _failure(graph: Graph, placed: list[PlacedOperator], target: Target) -> str | None:
    """Why the compiler would refuse the whole model: what its TFLite parser does not know, or nothing to map."""
    refused = next((reason for operator in graph.operators if (reason := parser_rejection(operator, target))), None)
    if refused:
        return refused
    dynamic = [graph.tensors[index].name for index in graph.inputs if graph.tensors[index].dynamic]
    if dynamic:
        return f"the input {dynamic[0]} has a dynamic shape"
    if not any(op.placement == "tpu" for op in placed):
        return "no operator can run on the Edge TPU; is the model quantized to full integer?"
    return None
