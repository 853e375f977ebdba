"""The predicted schedule of a model, compared with that in its compiled file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from compress.core.errors import ModelError
from compress.model.tflite.graph import Graph, Operator
from compress.targets.base import Target
from compress.targets.edgetpu import estimate, latency
from compress.targets.edgetpu.check import Check, check
from darwinn import explainer
from darwinn.blocks import round_up
from darwinn.compiled_file import CompiledFile
from darwinn.cpu_part import compare_cpu_part, interface_differences
from darwinn.explanation import ExplainedOperator, ExplainedProgram, Explanation, ScheduleComparison, ScheduleDifference
from darwinn.parameter_location import locate

_WINDOWED = ("conv", "fc", "dw")
"""The kinds of layers whose cycles are compared."""
TRANSFER_BLOCK = 8
"""The bytes that a transfer is rounded up to. Source: the DMA hints of compiled models."""
MAX_ALIGNED = 4_000_000
"""The most pairs of operators that are aligned by their order; a large network has 10,000."""


def explain(file: CompiledFile, name: str, original: Graph, target: Target) -> Explanation:
    """Explain a compiled file, name its operators by those of the original, and compare the prediction with the file.

    `name` is the file's name in texts.

    Raises:
        ModelError: the file is damaged, or the original has other inputs or outputs.
    """
    explanation = explainer.explain(file, name)
    operators, comparison = compare(file, original, target, explanation.programs)
    programs = [
        replace(program, operators=named) for program, named in zip(explanation.programs, operators, strict=True)
    ]
    return replace(explanation, programs=tuple(programs), comparison=comparison)


def compare(
    file: CompiledFile, original: Graph, target: Target, programs: Sequence[ExplainedProgram]
) -> tuple[list[tuple[ExplainedOperator, ...]], ScheduleComparison]:
    """Name the recovered operators by those of the original, and compare the prediction with the file.

    Returns:
        The operators of each program with their originals, and the comparison.

    Raises:
        ModelError: the original has other inputs or outputs.
    """
    different = interface_differences(file.graph, original)
    if different:
        raise ModelError(
            f"the original is not the model that it was compiled from: {different[0]}",
            hint="give the model that edgetpu_compiler read",
        )
    comparison = _ComparedSchedule(file, original, target, programs)
    named = comparison.named()
    differences = list(comparison.differences(named))
    matched = {operator.original[0] for operators in named for operator in operators if operator.original}
    unmatched = tuple(
        f"{operator.index} {operator.name}" for operator in comparison.on_tpu if operator.index not in matched
    )
    version = comparison.target.compiler.version
    return named, ScheduleComparison(version, tuple(differences), dict(comparison.counts), unmatched)


class _ComparedSchedule:
    """A file, its original, and the prediction.

    Attributes:
        on_tpu: the original's operators that the file runs on the Edge TPU.
        counts: the number of comparisons, by figure.
    """

    def __init__(
        self, file: CompiledFile, original: Graph, target: Target, programs: Sequence[ExplainedProgram]
    ) -> None:
        self.file, self.original, self.programs = file, original, programs
        self.on_cpu = set(compare_cpu_part(file.graph, original, file.custom_operators).operators)
        self.on_tpu = [operator for operator in original.operators if operator.index not in self.on_cpu]
        parameter_bytes = sum(executable.parameter_bytes for executable in file.executables)
        self.target, self.predicted = _most_similar(original, target, parameter_bytes)
        self.layers = estimate.array_layers(original, self.target) if self.predicted.failure is None else []
        self.streamed = dict(
            zip((layer.index for layer in self.layers), latency.streamed_bytes(self.layers), strict=True)
        )
        self.counts: Counter[str] = Counter()

    def named(self) -> list[tuple[ExplainedOperator, ...]]:
        """Return the operators of each program with their originals: by their parameters, others by their order."""
        by_location = self._operators_by_parameters()
        taken = set(by_location.values())
        left = [original for original in self.on_tpu if original.index not in taken]
        named_operators = []
        for program in self.programs:
            locations = {
                (region.operator, region.is_cached, region.offset): region
                for region in program.parameters
                if region.operator is not None
            }
            originals: dict[int, Operator] = {}
            for operator, is_cached, offset in locations:
                index = by_location.get((program.part, is_cached, offset))
                if index is not None and operator is not None:
                    originals.setdefault(operator, self.original.operators[index])
            followed = self._following(program.operators, originals, left)
            originals.update(followed)
            left = [original for original in left if original not in followed.values()]
            aligned = align(program.operators, originals, left)
            left = [original for original in left if original not in aligned.values()]
            originals.update(aligned)
            named_operators.append(
                tuple(
                    replace(explained, original=(originals[explained.index].index, originals[explained.index].name))
                    if explained.index in originals
                    else explained
                    for explained in program.operators
                )
            )
        return named_operators

    def _following(
        self, operators: Sequence[ExplainedOperator], known: dict[int, Operator], left: Sequence[Operator]
    ) -> dict[int, Operator]:
        """Return the originals of operators that read a known one, if it has one consumer of their name."""
        followed: dict[int, Operator] = {}
        open_originals = {original.index for original in left}
        for operator in operators:
            sources = [followed.get(source) or known.get(source) for source in operator.reads]
            if operator.index in known or operator.name == "move" or len(sources) != 1 or sources[0] is None:
                continue
            consumers = [
                consumer
                for tensor in sources[0].outputs
                for consumer in self.original.consumers.get(tensor, ())
                if consumer.index in open_originals and consumer.name in operator.name.split(" or ")
            ]
            if len(consumers) == 1:
                followed[operator.index] = consumers[0]
                open_originals.discard(consumers[0].index)
        return followed

    def _operators_by_parameters(self) -> dict[tuple[int, bool, int], int]:
        """Return the original's operator by part, caching and offset of its parameters."""
        parts = [
            (part, executable.type == "PARAMETER_CACHING")
            for part, compiled in enumerate(self.file.operators, 1)
            for executable in compiled.package.executables
        ]
        location = locate(self.file, self.original, self.on_tpu)
        return {(*parts[region.executable], region.offset): region.operator.index for region in location.regions}

    def differences(self, named: Sequence[Sequence[ExplainedOperator]]) -> Iterator[ScheduleDifference]:
        """Yield what the prediction and the file do not have in common."""
        yield from self._placement()
        recovered: dict[int, ExplainedOperator] = {}
        for operators in named:
            for operator in operators:
                if operator.original is not None:
                    index = operator.original[0]
                    recovered[index] = _together(recovered[index], operator) if index in recovered else operator
        yield from self._operators(recovered)
        yield from self._order(named)
        yield from self._transfers()
        largest = max(program.memory_bytes for program in self.programs)
        yield from self._differs("memory", "bytes of a tile", self.predicted.activation_bytes, largest)

    def _differs(self, what: str, where: str, predicted: object, actual: object) -> Iterator[ScheduleDifference]:
        self.counts[what] += 1
        if predicted != actual:
            yield ScheduleDifference(what, where, _text(predicted), _text(actual))

    def _placement(self) -> Iterator[ScheduleDifference]:
        for operator in self.predicted.ops:
            actual = "cpu" if operator.index in self.on_cpu else "tpu"
            yield from self._differs("placement", f"{operator.index} {operator.op}", operator.placement, actual)
        yield from self._differs("partitions", "the file", self.predicted.subgraphs, len(self.file.operators))

    def _operators(self, recovered: dict[int, ExplainedOperator]) -> Iterator[ScheduleDifference]:
        """Yield differences of parameters, caching, passes and cycles of operators that both have."""
        for layer in self.layers:
            operator = recovered.get(layer.index)
            if operator is None:
                continue
            where = f"{layer.index} {layer.name}"
            size = layer.parameters.size_bytes
            if size or operator.parameter_bytes:
                yield from self._differs("parameter bytes", where, round_up(size, 64), operator.parameter_bytes)
            if size and operator.is_cached is not None:
                kinds = {True: "streamed", False: "cached"}
                is_streamed = bool(self.streamed.get(layer.index))
                yield from self._differs("cached", where, kinds[is_streamed], kinds[not operator.is_cached])
            yield from self._differs("passes", where, 1, operator.passes)
            if layer.kind in _WINDOWED and operator.passes == 1:
                yield from self._differs("cycles", where, round(layer.megacycles * 1e6), operator.cycles)

    def _order(self, named: Sequence[Sequence[ExplainedOperator]]) -> Iterator[ScheduleDifference]:
        """Yield the operators that run before one that is before them in the model."""
        for operators in named:
            latest = -1
            for operator in operators:
                if operator.original is None:
                    continue
                index, name = operator.original
                self.counts["order"] += 1
                if index < latest:
                    yield ScheduleDifference("order", f"{index} {name}", f"before {latest}", "after it")
                latest = max(latest, index)

    def _transfers(self) -> Iterator[ScheduleDifference]:
        """Yield differences of the bytes on the bus: inputs, outputs and parameters."""
        inputs, outputs = estimate.transfer_sizes(self.original, {operator.index for operator in self.on_tpu})
        actual = {"input": 0, "output": 0, "parameters": 0}
        for program in self.programs:
            if program.type != "PARAMETER_CACHING":
                for transfer in program.transfers:
                    if transfer.kind in actual:
                        actual[transfer.kind] += transfer.size_bytes
        yield from self._differs("transfer", "inputs", _on_bus(inputs), actual["input"])
        yield from self._differs("transfer", "outputs", _on_bus(outputs), actual["output"])
        if self.predicted.parameters is not None:
            yield from self._differs(
                "transfer", "streamed parameters", self.predicted.parameters.streamed_bytes, actual["parameters"]
            )


def _most_similar(original: Graph, target: Target, parameter_bytes: int) -> tuple[Target, Check]:
    """Return the target with the version of its compiler whose rules predict the parameters best, and its prediction.

    The file does not say its version: its minimum runtime alone fits several.
    """
    candidates: list[tuple[int, bool, int, Target, Check]] = []
    for version in target.compiler.runtimes:
        candidate = target.compiled_by(version)
        predicted = check(original, candidate)
        sizes = predicted.parameters
        total = sizes.cached_bytes + sizes.streamed_bytes if sizes else 0
        is_own = version == target.compiler.version
        candidates.append((abs(total - parameter_bytes), not is_own, len(candidates), candidate, predicted))
    _, _, _, candidate, predicted = min(candidates, key=lambda option: option[:3])
    return candidate, predicted


def _together(first: ExplainedOperator, second: ExplainedOperator) -> ExplainedOperator:
    """Return two recovered operators that are one of the original, as one."""
    return replace(
        first,
        parameter_bytes=first.parameter_bytes + second.parameter_bytes,
        cycles=first.cycles + second.cycles,
        passes=max(first.passes, second.passes),
    )


def _on_bus(sizes: Sequence[int]) -> int:
    """Return the bytes of tensors on the bus: each is rounded up to TRANSFER_BLOCK."""
    return sum(round_up(size, TRANSFER_BLOCK) for size in sizes)


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def align(
    operators: Sequence[ExplainedOperator], known: dict[int, Operator], left: Sequence[Operator]
) -> dict[int, Operator]:
    """Return originals of the operators that are not known: of all assignments in order, one of the longest.

    Names must fit, and an original must be between those of the known operators around it in the program, unless the
    program is in another order than the model.
    """
    open_operators = [operator for operator in operators if operator.index not in known and operator.name != "move"]
    if not open_operators or len(open_operators) * len(left) > MAX_ALIGNED:
        return {}
    rows, columns = len(open_operators), len(left)
    lengths = [[0] * (columns + 1) for _ in range(rows + 1)]
    for row in range(rows - 1, -1, -1):
        names = open_operators[row].name.split(" or ")
        for column in range(columns - 1, -1, -1):
            best = max(lengths[row + 1][column], lengths[row][column + 1])
            if left[column].name in names:
                best = max(best, lengths[row + 1][column + 1] + 1)
            lengths[row][column] = best
    aligned: dict[int, Operator] = {}
    row = column = 0
    while row < rows and column < columns:
        names = open_operators[row].name.split(" or ")
        if left[column].name in names and lengths[row][column] == lengths[row + 1][column + 1] + 1:
            aligned[open_operators[row].index] = left[column]
            row, column = row + 1, column + 1
        elif lengths[row + 1][column] >= lengths[row][column + 1]:
            row += 1
        else:
            column += 1
    return aligned
