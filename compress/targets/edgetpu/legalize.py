"""`legalize`: the same function in operators that the compiler takes and maps.

Every rewrite (`rewrites.REWRITES`) is small, and proved before it is kept: the operators
that it takes out and those that it puts in are both run in a real
interpreter, on what really arrives there, and where they are functions of one number on
all 256 codes too. What moves an output by more steps than the rewrite is allowed is left
alone; so is what would not be mapped any better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.targets.base import Target
from compress.targets.edgetpu import rules
from compress.targets.edgetpu.placement import AFTER_CPU_OPERATOR, PlacedOperator, Placement, place, parser_rejection
from compress.targets.edgetpu.rewrites import REWRITES, RewriteEntry, interface
from compress.targets.edgetpu.rewrites.elementwise import NotEightBitError
from compress.targets.edgetpu.rewrites.transposes import with_original_inputs, transposes, with_channels_last_inputs
from compress.tflite import comparison
from compress.tflite.edit import Edit, compact, extract
from compress.tflite.graph import NONE, Graph, Operator

MAX_STEPS = 10_000
"""Rewrites of one model, at most."""
MAX_MEAN_STEPS = 0.25
"""Steps on average that are not worth a dearer rewrite."""
LARGEST_INPUT = 1 << 26
MAX_FEEDS = 8
"""Real inputs that a rewrite is proved on, at most."""
TOO_LATE = "it comes after an operator that stays on the CPU"

Tried = tuple[str, tuple[int, ...]]
"""A rewrite and the outputs of the operator that it was tried on."""


@dataclass(frozen=True)
class RewriteOutcome:
    """A rewrite that was tried.

    Attributes:
        rewrite: its name.
        op: the operator it was for, or "" where it was for the whole graph.
        output: the tensor which that operator makes.
        kept: whether it is in the result.
        steps: by how much an output moved at most, in steps of its scale; None if it never ran.
        tolerance: what was allowed.
        reason: why it was left alone, or what else it was compared with; "" otherwise.
    """

    rewrite: str
    op: str
    output: str
    kept: bool
    steps: float | None
    tolerance: int
    reason: str = ""


@dataclass(frozen=True)
class Legalized:
    """A rewritten model.

    Attributes:
        graph: the result.
        changes: what was tried, in order.
        before: the placement of what came in.
        after: the placement of the result.
        difference: between both models' final outputs.
        real_inputs: whether the inputs of the proofs were real ones.
    """

    graph: Graph
    changes: tuple[RewriteOutcome, ...]
    before: Placement
    after: Placement
    difference: comparison.Difference
    real_inputs: bool

    @property
    def trailing(self) -> list[PlacedOperator]:
        """Operators on the CPU that nothing on the Edge TPU waits for: they cost a copy and no second partition."""
        waited: set[int] = set()
        found: list[PlacedOperator] = []
        if not any(op.placement == "tpu" for op in self.after.ops):
            return found
        for operator, op in zip(reversed(self.graph.operators), reversed(self.after.ops), strict=True):
            if op.placement == "tpu" or op.status == AFTER_CPU_OPERATOR or waited & set(operator.outputs):
                waited.update(operator.inputs)
            else:
                found.append(op)
        return found[::-1]

    def describe(self) -> str:
        """Return the changes as text for a person."""
        rows: dict[tuple[str, bool, str], list[RewriteOutcome]] = {}
        for change in self.changes:
            rows.setdefault((change.rewrite, change.kept, change.reason), []).append(change)
        lines = [_line(name, kept, reason, changes) for (name, kept, reason), changes in rows.items()]
        lines = lines or ["nothing to rewrite"]
        lines += [f"{op.op} ({op.output}) stays on the CPU, at the end of the model" for op in self.trailing]
        which = "real" if self.real_inputs else "random"
        lines.append(f"before  {self.before.summary}")
        lines.append(f"after   {self.after.summary}")
        difference = self.difference
        lines.append(
            f"outputs differ by at most {difference.largest:g} steps, {difference.mean:.3g} on average, "
            f"on {difference.feeds} {which} inputs"
        )
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """As a plain map."""
        sides = {"before": self.before, "after": self.after}
        return {
            **{name: {"summary": side.summary, "macs": side.macs} for name, side in sides.items()},
            "changes": [asdict(change) for change in self.changes],
            "difference": asdict(self.difference),
            "real_inputs": self.real_inputs,
            "trailing": [{"index": op.index, "op": op.op, "output": op.output} for op in self.trailing],
        }


def legalize(
    graph: Graph, target: Target, inputs: Sequence[comparison.Feed] = (), *, io: str | None = None
) -> Legalized:
    """Rewrite a model for the Edge TPU compiler.

    Args:
        graph: the model, quantized to full integer but for its ends.
        target: whose rules are to be met.
        inputs: real inputs that rewrites are proved on, real numbers where the model's inputs
            are quantized; without any, random ones.
        io: "INT8" or "UINT8", the type of inputs and outputs; None for what is inside.

    Raises:
        ModelError: the TFLite runtime cannot run the model as it is, or an operator is not as its kind must be.
    """
    largest = max((graph.tensors[index].elements for index in graph.inputs), default=0)
    if largest > LARGEST_INPUT:
        raise ModelError(f"has an input of {largest:,} numbers", allowed=f"at most {LARGEST_INPUT:,}, to be run here")
    try:
        return _legalize(graph, target, inputs, io)
    except (
        MemoryError,
        IndexError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        ZeroDivisionError,
        OverflowError,
    ) as error:
        raise ModelError(f"an operator is not as its kind must be ({error}): the file is damaged") from error


def _legalize(graph: Graph, target: Target, inputs: Sequence[comparison.Feed], io: str | None) -> Legalized:
    work = _Legalizer(graph, target, _inputs(graph, inputs))
    work.whole("fixed_shapes", interface.fixed_shapes(work.graph))
    work.whole("folded_constants", interface.folded_constants(work.graph))
    work.whole("integer_ends", interface.integer_interface(work.graph, io))
    work.whole("transposes", _without_transposes(work.graph, target))  # large ones keep all behind them on the CPU
    work.operators()
    work.whole("transposes", _without_transposes(work.graph, target))
    result = compact(_without_unused_operators(work.graph)) if any(change.kept for change in work.changes) else graph
    difference = interface.output_difference(graph, result, work.inputs if result is not graph else ())
    before, after = place(graph, target), place(result, target)
    return Legalized(result, tuple(work.changes), before, after, difference, bool(inputs))


@dataclass
class _Legalizer:
    """A model while it is rewritten."""

    graph: Graph
    target: Target
    inputs: Sequence[comparison.Feed]
    changes: list[RewriteOutcome] = field(default_factory=list)
    _known: dict[int, list[NDArray[Any]]] = field(default_factory=dict)

    def whole(self, name: str, changed: Graph | None) -> None:
        """A rewrite of the whole graph, kept if its outputs stay the same."""
        if changed is None:
            return
        moved = interface.output_difference(self.graph, changed, self.inputs).largest
        kept = moved <= 0.01  # float ends are rounded
        self.changes.append(
            RewriteOutcome(name, "", "", kept, moved, 0, "" if kept else f"moves outputs by {moved:g} steps")
        )
        if kept:
            self.graph = changed
            self._known.clear()

    def operators(self) -> None:
        """Every rewrite of an operator, as long as there is one."""
        tried: set[Tried] = set()
        for _ in range(MAX_STEPS):
            step = next(self._applicable(tried), None)
            if step is None:
                if not self._reconsidered(tried):
                    return
                continue
            entry, operator = step
            tried.add((entry.name, operator.outputs))
            self._try(entry, operator)

    def _reconsidered(self, tried: set[Tried]) -> bool:
        """Whether something that came too late may help by now: others were rewritten after it was tried."""
        late = [change for change in self.changes if change.reason == TOO_LATE]
        if not late or not any(change.kept for change in self.changes[self.changes.index(late[0]) :]):
            return False
        self.changes = [change for change in self.changes if change.reason != TOO_LATE]
        again = {(change.rewrite, change.output) for change in late}
        tried -= {(name, outputs) for name, outputs in tried if (name, self._name(outputs)) in again}
        return True

    def _name(self, outputs: tuple[int, ...]) -> str:
        return self.graph.tensors[outputs[0]].name

    def _applicable(self, tried: set[Tried]) -> Iterator[tuple[RewriteEntry, Operator]]:
        for operator in self.graph.operators:  # in order: what comes after a blocker helps once that one is gone
            broken = rules.first_violation(operator, self.graph, self.target)
            eight_bit = rules.eight_bit_tensors(operator, self.graph, self.target) is None
            for entry in REWRITES:
                new = broken is not None and broken[0] is rules.operator_version
                fits = operator.name in entry.operators or (new and not entry.operators)
                wanted = (broken or entry.always) and (eight_bit or entry.islands) and not operator.custom
                if fits and wanted and (entry.name, operator.outputs) not in tried:
                    yield entry, operator

    def _try(self, entry: RewriteEntry, operator: Operator) -> None:
        """The first of a rewrite's edits that is near enough, or else the nearest of those that are allowed."""
        allowed: list[tuple[comparison.Difference, Graph, str]] = []
        refused: tuple[float | None, str] | None = None
        for edit in _edits(entry, operator, self.graph):
            changed = edit.graph()
            parser_rejection = self._refusal(edit, changed, entry)
            moved = None if parser_rejection else self._moved(entry, edit, changed)
            if moved is not None and moved.largest <= entry.tolerance:
                allowed.append((moved, changed, self._note(edit)))
                if moved.mean <= MAX_MEAN_STEPS:
                    break
            else:
                refused = (moved.largest if moved else None, parser_rejection or _tolerance_message(moved, entry))
        output = self.graph.output_tensors(operator)[0].name
        if allowed:
            moved, self.graph, note = min(allowed, key=lambda each: each[0].mean)
            self.changes.append(
                RewriteOutcome(entry.name, operator.name, output, True, moved.largest, entry.tolerance, note)
            )
        elif refused:
            steps, reason = refused
            self.changes.append(
                RewriteOutcome(entry.name, operator.name, output, False, steps, entry.tolerance, reason)
            )

    def _refusal(self, edit: Edit, changed: Graph, entry: RewriteEntry) -> str | None:
        """Why an edit would not help: what it puts in breaks a rule too, or comes too late."""
        for operator in _added(edit, changed):
            broken = rules.first_violation(operator, changed, self.target)
            if broken and not entry.partly:
                return f"{operator.name} would not be mapped: {broken[1]}"
        better = entry.always or _cpu_operator_counts(changed, self.target) < _cpu_operator_counts(
            self.graph, self.target
        )
        return None if better else TOO_LATE

    def _moved(self, entry: RewriteEntry, edit: Edit, changed: Graph) -> comparison.Difference:
        """Return the difference that an edit makes to the outputs of what it replaces."""
        inputs, outputs = _boundary(edit)
        before = edit.exact or extract(edit.before, edit.removed, inputs, outputs)
        after = extract(changed, {operator.index for operator in _added(edit, changed)}, inputs, outputs)
        feeds = self._arriving(inputs)
        if entry.every_code:
            feeds = [*feeds, *comparison.ramp_feeds(before)]
        try:
            return comparison.compare(before, after, feeds)
        except ModelError:
            return comparison.Difference(float("inf"), float("inf"), 0)  # the interpreter refuses what was put in

    def _note(self, edit: Edit) -> str:
        """Return a note on the reference of the comparison, if it is not the operators that the edit replaces."""
        if edit.exact is None:
            return ""
        inputs, outputs = _boundary(edit)
        before = extract(edit.before, edit.removed, inputs, outputs)
        moved = comparison.compare(edit.exact, before, self._arriving(inputs)).largest
        return f"from the exact function; the operators that it replaces were {moved:g} steps away"

    def _arriving(self, wanted: Sequence[int]) -> list[list[NDArray[Any]]]:
        """Return the values of some tensors for every input."""
        if any(index not in self._known for index in wanted):
            feeds = [interface.quantized_feed(self.graph, each) for each in self.inputs]
            read = {index for entry, operator in self._applicable(set()) for index in self._around(operator)}
            missing = sorted((read | set(wanted)) - set(self._known))
            rows = comparison.record_tensors(self.graph, feeds, missing)
            self._known.update({index: [row[index] for row in rows] for index in missing})
        return [[self._known[index][number] for index in wanted] for number in range(len(self.inputs))]

    def _around(self, operator: Operator) -> set[int]:
        """Tensors that a rewrite of an operator may begin at."""
        makers = [self.graph.producer[index] for index in operator.inputs if index in self.graph.producer]
        found = {index for each in (operator, *makers) for index in each.inputs if index != NONE}
        return {index for index in found if not self.graph.tensors[index].is_constant}


def _cpu_operator_counts(graph: Graph, target: Target) -> tuple[int, int]:
    """Return the numbers of operators that the compiler's parser refuses, and that stay on the CPU."""
    refused = sum(parser_rejection(operator, target) is not None for operator in graph.operators)
    return refused, sum(op.placement == "cpu" for op in place(graph, target).ops)


def _edits(entry: RewriteEntry, operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Yield the edits that a rewrite proposes for an operator."""
    try:
        yield from entry.rewrite(operator, graph)
    except NotEightBitError:
        return


def _tolerance_message(moved: comparison.Difference | None, entry: RewriteEntry) -> str:
    if moved is None or not moved.feeds:
        return "the TFLite runtime refuses it"
    return f"moves its output by {moved.largest:g} steps; {entry.tolerance} are allowed"


def _inputs(graph: Graph, given: Sequence[comparison.Feed]) -> list[comparison.Feed]:
    """The inputs of the proofs as real numbers: those given, or random ones."""
    if given:
        return [interface.dequantized_feed(graph, feed) for feed in given[:MAX_FEEDS]]
    generator = np.random.default_rng(0)
    feeds = [comparison.random_feed(graph, generator) for _ in range(MAX_FEEDS)]
    return [interface.dequantized_feed(graph, feed) for feed in feeds]


def _added(edit: Edit, changed: Graph) -> list[Operator]:
    """The operators that an edit put in."""
    own = {id(each) for each in edit.added}
    stored = changed.source.subgraphs[0].operators
    return [changed.operators[index] for index, each in enumerate(stored) if id(each) in own]


def _boundary(edit: Edit) -> tuple[list[int], list[int]]:
    """The computed tensors that go into and come out of the operators that an edit takes out."""
    graph = edit.before
    removed = [graph.operators[index] for index in sorted(edit.removed)]
    made = [index for operator in removed for index in operator.outputs]
    given = dict.fromkeys(index for operator in removed for index in operator.inputs if index != NONE)
    inputs = [index for index in given if index not in made and not graph.tensors[index].is_constant]
    outside = {index for operator in graph.operators if operator.index not in edit.removed for index in operator.inputs}
    return inputs, [index for index in made if index in outside or index in graph.outputs]


def _without_transposes(graph: Graph, target: Target) -> Graph | None:
    """The graph with transposes moved along, if more is mapped then, or fewer are left."""

    def cost(each: Graph) -> tuple[tuple[int, int], int]:
        return _cpu_operator_counts(each, target), sum(operator.name == "TRANSPOSE" for operator in each.operators)

    best = min(
        (
            _move_transposes_back(graph),
            with_original_inputs(_move_transposes_back(with_channels_last_inputs(graph)), graph),
        ),
        key=cost,
    )
    return best if cost(best) < cost(graph) else None


def _move_transposes_back(graph: Graph) -> Graph:
    """The graph with every transpose as far behind as it goes."""
    for _ in range(len(graph.operators) * 4):
        found = (edit for each in graph.operators if each.name == "TRANSPOSE" for edit in transposes(each, graph))
        edit = next(found, None)
        if edit is None:
            break
        graph = edit.graph()
    return _without_unused_operators(graph)


def _without_unused_operators(graph: Graph) -> Graph:
    """The graph without operators whose outputs nobody takes."""
    wanted = set(graph.outputs)
    dead = []
    for operator in reversed(graph.operators):
        if wanted.isdisjoint(operator.outputs) and operator.outputs:
            dead.append(operator)
        else:
            wanted.update(operator.inputs)
    edit = Edit(graph)
    edit.remove(*dead)
    return edit.graph() if dead else graph


def _line(name: str, kept: bool, reason: str, changes: Sequence[RewriteOutcome]) -> str:
    measured = [change.steps for change in changes if change.steps is not None]
    told = reason
    if kept and measured:
        told = f"at most {max(measured):g} of {changes[0].tolerance} steps {reason}".rstrip()
    return f"{'kept' if kept else 'left'} {name:<22} {len(changes):>3}x  {told}"
