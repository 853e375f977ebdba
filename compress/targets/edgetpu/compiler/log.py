"""The output of the vendor's compiler, parsed.

`parse` reads a log, `expected_report` converts the prediction of `check` into the same form, and `differences`
compares the two. Unknown lines are kept unchanged.

Source: logs of versions 1.0 to 16.0 published with compiled models and in issue threads of google-coral/edgetpu. 1.0
and 2.0 print no memory with `-s -o`; 2.0 may print the available memory where later versions print the remaining
memory; 15.0 omits memory in some logs; 16.0 adds its child process, and with `-n` prints a report for each segment.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from compress.model.tflite.graph import Graph, Operator
from compress.results.placement import OperatorPlacement
from compress.targets.edgetpu.check import Check
from compress.targets.edgetpu.placement import MAPPED, Placement


@dataclass(frozen=True, order=True)
class StatusRow:
    """A line of the compiler's table: the number of operators with a name and a status."""

    op: str
    status: str
    count: int


@dataclass(frozen=True)
class CompilerReport:
    """The compiler's report about a model, real or predicted. None means that a figure is not in the report.

    Attributes:
        operations: the table of operators, in alphabetical order.
        subgraphs: partitions on the Edge TPU.
        on_tpu: operators on the Edge TPU (printed only if some stay on the CPU).
        on_cpu: operators on the CPU (printed only if there are any).
        on_chip_bytes: parameters kept on the chip, rounded as printed.
        on_chip_remaining_bytes: remaining on-chip memory, rounded.
        on_chip_available_bytes: available on-chip memory (2.0), rounded.
        off_chip_bytes: parameters sent at every inference, rounded.
        errors: lines with error messages, unchanged.
        unknown: unknown lines, unchanged.
    """

    version: str | None = None
    operations: tuple[StatusRow, ...] = ()
    subgraphs: int | None = None
    total: int | None = None
    on_tpu: int | None = None
    on_cpu: int | None = None
    on_chip_bytes: float | None = None
    on_chip_remaining_bytes: float | None = None
    on_chip_available_bytes: float | None = None
    off_chip_bytes: float | None = None
    errors: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def mapped(self) -> int | None:
        """The number of operators on the Edge TPU: from the table, or from its own line."""
        if self.operations:
            return sum(row.count for row in self.operations if row.status == MAPPED)
        return self.on_tpu

    def to_json(self) -> dict[str, Any]:
        """Return the report as a plain map, for facts."""
        return {**asdict(self), "operations": [asdict(row) for row in self.operations]}


_VERSION = re.compile(r"Edge TPU Compiler version (\S+)")
_INPUT = re.compile(r"Input(?: model)?: .*")
_HEAD = re.compile(r"Operator +Count +Status")
_ROW = re.compile(r"(\S+) +([0-9]{1,9}) +(\S.*)")
_SIZE = re.compile(r"(.+): *([0-9]{1,9}(?:\.[0-9]{1,9})?)(B|KiB|MiB|GiB)")
_NUMBER = re.compile(r"(.+): *([0-9]{1,9})")
_UNITS = {"B": 1.0, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}
_SIZES = {
    "On-chip memory used for caching model parameters": "on_chip_bytes",
    "On-chip memory remaining for caching model parameters": "on_chip_remaining_bytes",
    "On-chip memory available for caching model parameters": "on_chip_available_bytes",
    "Off-chip memory used for streaming uncached model parameters": "off_chip_bytes",
}
_NUMBERS = {
    "Number of Edge TPU subgraphs": "subgraphs",
    "Total number of operations": "total",
    "Number of operations that will run on Edge TPU": "on_tpu",
    "Number of operations that will run on CPU": "on_cpu",
}
_ERROR = re.compile(
    r"ERROR: .*|Compilation failed.*|Compilation timeout.*|Internal compiler error.*|Invalid model: .*"
    r"|Model could not be parsed.*|Model not quantized.*|.*terminating with uncaught exception.*"
    r"|.*Segmentation fault.*"
)
_NOTHING_MORE = re.compile(
    r"Models? compiled successfully in [0-9]+ ms\.|Model successfully compiled but not all operations are supported.*"
    r"|Started a compilation timeout timer of [0-9]+ seconds\.|Compilation child process completed within.*"
    r"|Compilation succeeded!|Output(?: model)?: .*|(?:Input|Output) size: .*|Operation log: .*"
    r"|See the operation log file for individual operation details\."
    r"|Searching for valid delegate with step [0-9]+|Try to compile segment with [0-9]+ ops|Intermediate tensors: .*"
)
"""Known lines without figures; the last three are printed with `-d`."""


@dataclass
class _Block:
    """The section of a log about one model, while it is parsed."""

    has_input: bool = False
    in_table: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[StatusRow] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        """Parse a line."""
        row = _ROW.fullmatch(line) if self.in_table else None
        self.in_table = bool(row or _HEAD.fullmatch(line))
        size, number = _SIZE.fullmatch(line), _NUMBER.fullmatch(line)
        if row:
            self.rows.append(StatusRow(row[1], row[3], int(row[2])))
        elif size and size[1] in _SIZES:
            self.values[_SIZES[size[1]]] = float(size[2]) * _UNITS[size[3]]
        elif number and number[1] in _NUMBERS:
            self.values[_NUMBERS[number[1]]] = int(number[2])
        elif _ERROR.fullmatch(line):
            self.errors.append(line)
        elif not (self.in_table or _INPUT.fullmatch(line) or _NOTHING_MORE.fullmatch(line)):
            self.unknown.append(line)

    def report(self, version: str | None) -> CompilerReport:
        rows, errors, unknown = tuple(sorted(self.rows)), tuple(self.errors), tuple(self.unknown)
        return CompilerReport(version, rows, errors=errors, unknown=unknown, **self.values)


def parse(log: str) -> tuple[CompilerReport, ...]:
    """Return a report for every model in a log: one, or one for each segment. Only blank lines are ignored."""
    version, blocks = None, [_Block()]
    for line in filter(None, (line.strip() for line in log.splitlines())):
        match = _VERSION.fullmatch(line)
        if match and version in (None, match[1]):
            version = match[1]
            continue
        if _INPUT.fullmatch(line):
            if blocks[-1].has_input:
                blocks.append(_Block())
            blocks[-1].has_input = True
        blocks[-1].take(line)
    return tuple(block.report(version) for block in blocks)


def expected_report(result: Check, graph: Graph, version: str) -> CompilerReport:
    """Return the predicted report for a checked graph."""
    ops = result.ops
    names = ["CUSTOM" if operator.custom else operator.name for operator in graph.operators]
    counted = Counter((name, op.status) for name, op in zip(names, ops, strict=True))
    sizes = result.parameters
    on_tpu = sum(op.placement == "tpu" for op in ops)
    return CompilerReport(
        version,
        tuple(sorted(StatusRow(op, status, count) for (op, status), count in counted.items())),
        subgraphs=result.subgraphs,
        total=len(ops),
        on_tpu=on_tpu,
        on_cpu=len(ops) - on_tpu,
        on_chip_bytes=sizes.report_on_chip_bytes if sizes else None,
        off_chip_bytes=sizes.report_off_chip_bytes if sizes else None,
    )


def differences(predicted: CompilerReport, real: CompilerReport) -> list[dict[str, Any]]:
    """Return the figures in the compiler's report that differ from the prediction.

    Sizes are compared with the precision in which the compiler prints them.
    """
    predicted_counts = _status_counts(predicted)
    real_counts = _status_counts(real)
    rows = sorted(predicted_counts.keys() | real_counts.keys()) if real_counts else []
    pairs = [(": ".join(row), predicted_counts[row], real_counts[row], 0.0) for row in rows]
    for name in ("subgraphs", "total", "on_tpu", "on_cpu", "on_chip_bytes", "off_chip_bytes"):
        one, other = getattr(predicted, name), getattr(real, name)
        if one is not None and other is not None:
            # The compiler prints two decimal digits in the largest unit that is not larger than the size.
            unit = max(unit for unit in _UNITS.values() if unit <= max(other, 1.0))
            pairs.append((name, one, other, 0.01 * unit if name.endswith("_bytes") else 0.0))
    return [
        {"name": name, "predicted": one, "real": other}
        for name, one, other, step in pairs
        if abs(one - other) > step * 1.001  # rounded or truncated: both are within one step of the printed value
    ]


def _status_counts(report: CompilerReport) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for row in report.operations:
        counts[row.op, row.status] += row.count
    return counts


def actual_placement(
    placement: Placement, original: Graph, compiled: Sequence[Graph], real: Sequence[CompilerReport]
) -> Placement:
    """Return the placement in a compiled model, which still contains its CPU operators, with their names and outputs.

    The reasons of the predicted placement are kept where the prediction is correct.
    """
    left = {_named(graph, operator) for graph in compiled for operator in graph.operators}
    ops = []
    for op, operator in zip(placement.ops, original.operators, strict=True):
        side = "cpu" if _named(original, operator) in left else "tpu"
        ops.append(op if side == op.placement else _unexpected_operator(op, side, real))
    return Placement(tuple(ops), None)


def _named(graph: Graph, operator: Operator) -> tuple[str, ...]:
    return operator.name, *(tensor.name for tensor in graph.output_tensors(operator))


def _unexpected_operator(op: OperatorPlacement, side: str, real: Sequence[CompilerReport]) -> OperatorPlacement:
    """Return an operator with a placement that differs from the prediction."""
    known = {row.status for report in real for row in report.operations if row.op == op.op and row.status != MAPPED}
    status = MAPPED if side == "tpu" else " or ".join(sorted(known))
    reason = "" if side == "tpu" else "the compiler did not map it; no known rule explains this"
    return replace(op, placement=side, status=status, reason=reason, advice="")
