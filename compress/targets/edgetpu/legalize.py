"""`legalize`: rewrite a model with operators that the compiler accepts and maps.

Every rewrite (`rewrites.REWRITES`) is small, and is verified before it is kept: the TFLite interpreter runs the removed
operators and the new ones on the values that occur there in the model. Element-wise functions are also compared on all
256 codes. A rewrite is rejected if an output changes by more steps than its tolerance, or if no more operators are
mapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import dropwhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite import comparison
from compress.model.tflite.edit import Edit, compact, extract
from compress.model.tflite.graph import NONE, Graph, Operator
from compress.results.placement import OperatorPlacement
from compress.results.quantization import RewriteOutcome
from compress.targets.base import Target
from compress.targets.edgetpu import rules
from compress.targets.edgetpu.placement import AFTER_CPU_OPERATOR, Placement, parser_rejection, place
from compress.targets.edgetpu.rewrites import REWRITES, RewriteEntry, interface
from compress.targets.edgetpu.rewrites.elementwise import NotEightBitError, Rewrite
from compress.targets.edgetpu.rewrites.transposes import transposes, with_channels_last_inputs, with_original_inputs

MAX_STEPS = 10_000
"""The most rewrites of one model."""
MAX_MEAN_STEPS = 0.25
"""The mean difference in steps below which no other edit of the same rewrite is tried."""
MAX_INPUT_ELEMENTS = 1 << 26
"""Rewrites are verified on MAX_FEEDS inputs, which are in memory together."""
MAX_FEEDS = 8
"""The most inputs on which a rewrite is verified."""
TOO_LATE = "it comes after an operator that stays on the CPU"

Tried = tuple[str, tuple[int, ...]]
"""A rewrite, and the outputs of the operator on which it was tried."""


@dataclass(frozen=True)
class Legalized:
    """A rewritten model.

    Attributes:
        changes: the rewrites that were tried, in order.
        before: the placement of the original.
        after: the placement of the result.
        difference: the difference between the outputs of both models.
        real_inputs: whether rewrites were verified on real inputs, not on random ones.
    """

    graph: Graph
    changes: tuple[RewriteOutcome, ...]
    before: Placement
    after: Placement
    difference: comparison.Difference
    real_inputs: bool

    @property
    def trailing(self) -> list[OperatorPlacement]:
        """CPU operators at the end of the model, which no Edge TPU operator depends on."""
        required: set[int] = set()
        operators: list[OperatorPlacement] = []
        if not any(op.placement == "tpu" for op in self.after.ops):
            return operators
        for operator, op in zip(reversed(self.graph.operators), reversed(self.after.ops), strict=True):
            if op.placement == "tpu" or op.status == AFTER_CPU_OPERATOR or required & set(operator.outputs):
                required.update(operator.inputs)
            else:
                operators.append(op)
        return operators[::-1]

    def describe(self) -> str:
        """Return the changes as text for a person."""
        rows: dict[tuple[str, bool, str], list[RewriteOutcome]] = {}
        for change in self.changes:
            rows.setdefault((change.rewrite, change.kept, change.reason), []).append(change)
        lines = [_line(name, kept, reason, changes) for (name, kept, reason), changes in rows.items()]
        lines = lines or ["nothing to rewrite"]
        lines += [f"{op.op} ({op.output}) stays on the CPU, at the end of the model" for op in self.trailing]
        kind = "real" if self.real_inputs else "random"
        lines.append(f"before  {self.before.summary}")
        lines.append(f"after   {self.after.summary}")
        difference = self.difference
        lines.append(
            f"outputs differ by at most {difference.largest:g} steps, {difference.mean:.3g} on average, "
            f"on {difference.feeds} {kind} inputs"
        )
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the result as a plain map."""
        return {
            "before": {"summary": self.before.summary, "macs": self.before.macs},
            "after": {"summary": self.after.summary, "macs": self.after.macs},
            "changes": [asdict(change) for change in self.changes],
            "difference": asdict(self.difference),
            "real_inputs": self.real_inputs,
            "trailing": [{"index": op.index, "op": op.op, "output": op.output} for op in self.trailing],
        }


@rules.refusing_damaged(MemoryError)
def legalize(
    graph: Graph, target: Target, inputs: Sequence[comparison.Feed] = (), *, io: str | None = None
) -> Legalized:
    """Rewrite a model for the Edge TPU compiler.

    See `Target.legalize`. Rewrites are verified on random inputs if `inputs` is empty.

    Raises:
        ModelError: the TFLite runtime cannot run the model, or an operator is invalid.
    """
    largest = max((graph.tensors[index].elements for index in graph.inputs), default=0)
    if largest > MAX_INPUT_ELEMENTS:
        raise ModelError(f"has an input of {largest:,} elements", allowed=f"at most {MAX_INPUT_ELEMENTS:,}")
    work = _Legalizer(graph, target, _inputs(graph, inputs))
    work.rewrite_graph("fixed_shapes", interface.fixed_shapes(work.graph))
    work.rewrite_graph("folded_constants", interface.folded_constants(work.graph))
    work.rewrite_graph("integer_interface", interface.integer_interface(work.graph, io))
    # A large transpose stays on the CPU, and so do all operators after it: remove transposes before other rewrites.
    work.rewrite_graph("transposes", _without_transposes(work.graph, target))
    work.rewrite_operators()
    work.rewrite_graph("transposes", _without_transposes(work.graph, target))
    work.rewrite_operators(refused=True)
    result = compact(_without_unused_operators(work.graph)) if any(change.kept for change in work.changes) else graph
    difference = interface.output_difference(graph, result, work.inputs if result is not graph else ())
    before, after = place(graph, target), place(result, target)
    return Legalized(result, tuple(work.changes), before, after, difference, bool(inputs))


@dataclass
class _Legalizer:
    """A model while it is rewritten, and the rewrites that were tried."""

    graph: Graph
    target: Target
    inputs: Sequence[comparison.Feed]
    changes: list[RewriteOutcome] = field(default_factory=list)
    _known: dict[int, list[NDArray[Any]]] = field(default_factory=dict)

    def rewrite_graph(self, name: str, changed: Graph | None) -> None:
        """Keep a rewrite of the whole graph if its outputs do not change."""
        if changed is None:
            return
        moved = interface.output_difference(self.graph, changed, self.inputs).largest
        kept = moved <= 0.01  # float inputs and outputs are rounded
        self.changes.append(
            RewriteOutcome(name, "", "", kept, moved, 0, "" if kept else f"changes outputs by {moved:g} steps")
        )
        if kept:
            self.graph = changed
            self._known.clear()

    def rewrite_operators(self, *, refused: bool = False) -> None:
        """Try every rewrite on every operator, until none applies.

        With `refused`, try the rewrites for operators that make the compiler refuse the model, instead of all others.
        """
        tried: set[Tried] = set()
        for _ in range(MAX_STEPS):
            step = next(self._applicable(tried, refused=refused), None)
            if step is None:
                if not self._retry_late_rewrites(tried):
                    return
                continue
            entry, operator = step
            tried.add((entry.name, operator.outputs))
            self._try(entry, operator)

    def _retry_late_rewrites(self, tried: set[Tried]) -> bool:
        """Forget rewrites that were rejected because of an earlier CPU operator, if others were kept since then."""
        since = list(dropwhile(lambda change: change.reason != TOO_LATE, self.changes))
        if not any(change.kept for change in since):
            return False
        again = {(change.rewrite, change.output) for change in since if change.reason == TOO_LATE}
        self.changes = [change for change in self.changes if change.reason != TOO_LATE]
        tried -= {(name, outputs) for name, outputs in tried if (name, self.graph.tensors[outputs[0]].name) in again}
        return True

    def _applicable(self, tried: set[Tried], *, refused: bool = False) -> Iterator[tuple[RewriteEntry, Operator]]:
        """Yield rewrites with their operators, in execution order: those after a blocker help only when it is gone."""
        runnable = {operator.outputs for operator in comparison.without_unknown_customs(self.graph).operators}
        for operator in self.graph.operators:
            if operator.custom or operator.outputs not in runnable:
                continue
            violation = rules.first_violation(operator, self.graph, self.target)
            eight_bit = rules.eight_bit_tensors(operator, self.graph) is None
            for entry in REWRITES:
                if entry.if_refused != refused:
                    continue
                if refused:
                    applies = parser_rejection(operator) is not None
                elif not entry.operators:
                    applies = violation is not None and violation[0] is rules.operator_version
                else:
                    applies = operator.name in entry.operators and (violation is not None or entry.also_if_mapped)
                is_new = (entry.name, operator.outputs) not in tried
                if applies and is_new and (eight_bit or entry.float_islands):
                    yield entry, operator

    def _try(self, entry: RewriteEntry, operator: Operator) -> None:
        """Keep the first edit with a small mean difference, otherwise the best edit within the tolerance."""
        allowed: list[tuple[comparison.Difference, Graph, str]] = []
        refused: tuple[float | None, str] | None = None
        for edit in _edits(entry.rewrite, operator, self.graph):
            changed = edit.graph()
            refusal = self._refusal(edit, changed, entry)
            difference = None if refusal else self._moved(entry, edit, changed)
            if difference is not None and difference.largest <= entry.tolerance:
                allowed.append((difference, changed, self._note(edit)))
                if difference.mean <= MAX_MEAN_STEPS:
                    break
            else:
                comparable = difference is not None and np.isfinite(difference.largest)
                steps = difference.largest if difference is not None and comparable else None
                message = "the TFLite runtime rejects it"
                if difference is not None and difference.feeds:
                    message = f"changes its output by {difference.largest:g} steps; {entry.tolerance} are allowed"
                refused = (steps, refusal or message)
        output = self.graph.output_tensors(operator)[0].name
        if allowed:
            difference, self.graph, reason = min(allowed, key=lambda candidate: candidate[0].mean)
            steps = difference.largest
        elif refused:
            steps, reason = refused
        else:
            return
        self.changes.append(
            RewriteOutcome(entry.name, operator.name, output, bool(allowed), steps, entry.tolerance, reason)
        )

    def _refusal(self, edit: Edit, changed: Graph, entry: RewriteEntry) -> str | None:
        """Return why an edit maps no more operators, or None."""
        for operator in _added(edit, changed):
            violation = rules.first_violation(operator, changed, self.target)
            if violation and not entry.allows_cpu:
                return f"{operator.name} would not be mapped: {violation[1]}"
        better = entry.also_if_mapped or _cpu_operator_counts(changed, self.target) < _cpu_operator_counts(
            self.graph, self.target
        )
        return None if better else TOO_LATE

    def _moved(self, entry: RewriteEntry, edit: Edit, changed: Graph) -> comparison.Difference:
        """Return the difference between the outputs of an edit and of the operators that it replaces."""
        inputs, outputs = _boundary(edit)
        before = edit.exact or extract(edit.before, edit.removed, inputs, outputs)
        after = extract(changed, {operator.index for operator in _added(edit, changed)}, inputs, outputs)
        feeds = self._arriving(inputs)
        if entry.all_codes:
            feeds = [*feeds, *comparison.ramp_feeds(before)]
        try:
            return comparison.compare(before, after, feeds)
        except ModelError:
            return comparison.Difference(float("inf"), float("inf"), 0)  # the interpreter rejects the new operators

    def _note(self, edit: Edit) -> str:
        """Return a note on the reference of the comparison, if it is not the operators that the edit replaces."""
        if edit.exact is None:
            return ""
        inputs, outputs = _boundary(edit)
        before = extract(edit.before, edit.removed, inputs, outputs)
        moved = comparison.compare(edit.exact, before, self._arriving(inputs)).largest
        return f"from the exact function; the operators that it replaces differ from it by {moved:g} steps"

    def _arriving(self, tensors: Sequence[int]) -> list[list[NDArray[Any]]]:
        """Return the values of tensors for every input."""
        if any(index not in self._known for index in tensors):
            feeds = [interface.quantized_feed(self.graph, values) for values in self.inputs]
            read = {index for entry, operator in self._applicable(set()) for index in self._around(operator)}
            missing = sorted((read | set(tensors)) - set(self._known))
            rows = comparison.record_tensors(self.graph, feeds, missing)
            self._known.update({index: [row[index] for row in rows] for index in missing})
        return [[self._known[index][number] for index in tensors] for number in range(len(self.inputs))]

    def _around(self, operator: Operator) -> set[int]:
        """Return the tensors that a rewrite of an operator may start from."""
        makers = [self.graph.producer[index] for index in operator.inputs if index in self.graph.producer]
        indices = {index for maker in (operator, *makers) for index in maker.inputs if index != NONE}
        return {index for index in indices if not self.graph.tensors[index].is_constant}


def _cpu_operator_counts(graph: Graph, target: Target) -> tuple[int, int]:
    """Return the number of operators that the compiler's parser rejects, and of those that stay on the CPU."""
    refused = sum(parser_rejection(operator) is not None for operator in graph.operators)
    return refused, sum(op.placement == "cpu" for op in place(graph, target).ops)


def _edits(rewrite: Rewrite, operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Yield the edits that a rewrite proposes for an operator."""
    try:
        yield from rewrite(operator, graph)
    except NotEightBitError:
        return


def _inputs(graph: Graph, inputs: Sequence[comparison.Feed]) -> list[comparison.Feed]:
    """Return the inputs for the verification as real numbers; random values without inputs."""
    if inputs:
        return [interface.dequantized_feed(graph, feed) for feed in inputs[:MAX_FEEDS]]
    generator = np.random.default_rng(0)
    feeds = [comparison.random_feed(graph, generator) for _ in range(MAX_FEEDS)]
    return [interface.dequantized_feed(graph, feed) for feed in feeds]


def _added(edit: Edit, changed: Graph) -> list[Operator]:
    """Return the operators that an edit added."""
    added = {id(stored_operator) for stored_operator in edit.added}
    stored = changed.source.subgraphs[0].operators
    return [changed.operators[index] for index, stored_operator in enumerate(stored) if id(stored_operator) in added]


def _boundary(edit: Edit) -> tuple[list[int], list[int]]:
    """Return the computed input and output tensors of the operators that an edit removes."""
    graph = edit.before
    removed = [graph.operators[index] for index in sorted(edit.removed)]
    outputs = [index for operator in removed for index in operator.outputs]
    inputs_of_removed = dict.fromkeys(index for operator in removed for index in operator.inputs if index != NONE)
    inputs = [index for index in inputs_of_removed if index not in outputs and not graph.tensors[index].is_constant]
    outside = {index for operator in graph.operators if operator.index not in edit.removed for index in operator.inputs}
    return inputs, [index for index in outputs if index in outside or index in graph.outputs]


def _without_transposes(graph: Graph, target: Target) -> Graph | None:
    """Return the graph with moved or cancelled transposes, if more operators are mapped or fewer transposes remain."""

    def cost(candidate: Graph) -> tuple[tuple[int, int], int]:
        return _cpu_operator_counts(candidate, target), sum(
            operator.name == "TRANSPOSE" for operator in candidate.operators
        )

    best = min(
        (
            _move_transposes_back(graph),
            with_original_inputs(_move_transposes_back(with_channels_last_inputs(graph)), graph),
        ),
        key=cost,
    )
    return best if cost(best) < cost(graph) else None


def _move_transposes_back(graph: Graph) -> Graph:
    """Move every transpose as far to the end of the graph as possible."""
    for _ in range(len(graph.operators) * 4):
        edits = (
            edit
            for operator in graph.operators
            if operator.name == "TRANSPOSE"
            for edit in _edits(transposes, operator, graph)
        )
        edit = next(edits, None)
        if edit is None:
            break
        graph = edit.graph()
    return _without_unused_operators(graph)


def _without_unused_operators(graph: Graph) -> Graph:
    """Return the graph without operators whose outputs are not used."""
    used = set(graph.outputs)
    unused = []
    for operator in reversed(graph.operators):
        if used.isdisjoint(operator.outputs) and operator.outputs:
            unused.append(operator)
        else:
            used.update(operator.inputs)
    edit = Edit(graph)
    edit.remove(*unused)
    return edit.graph() if unused else graph


def _line(name: str, kept: bool, reason: str, changes: Sequence[RewriteOutcome]) -> str:
    measured = [change.steps for change in changes if change.steps is not None]
    remark = reason
    if kept and measured:
        remark = f"at most {max(measured):g} of {changes[0].tolerance} steps {reason}".rstrip()
    return f"{'kept' if kept else 'left'} {name:<22} {len(changes):>3}x  {remark}"
