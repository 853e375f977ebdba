"""Failures of the vendor's compiler: one function for each.

A function's docstring is what the user is told: its first line gives the cause, the rest what to
do. A function returns what it found in the log and which operators it concerns, or None.

Source: issue threads of google-coral/edgetpu (numbers at each function).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compress.errors import StageError
from compress.targets.edgetpu.compiler.host import CompilerRun
from compress.targets.edgetpu.compiler.log import parse
from compress.tflite.graph import Graph, Operator

MAX_NAMED = 3
"""So many operators are named in a message."""


@dataclass(frozen=True)
class FailureMatch:
    """A recognized failure: its description, and the operators that it concerns, the worst first."""

    what: str
    operators: Sequence[Operator] = ()


@dataclass(frozen=True)
class Failure:
    """A failure of the compiler, translated.

    Attributes:
        name: of the function that knows it.
        cause: why the compiler failed.
        what: what it said, or what was found.
        operators: which operators of the model it concerns, each with its layer.
        fix: what to do.
        flaky: whether the same again may succeed.
    """

    name: str
    cause: str
    what: str
    operators: tuple[str, ...]
    fix: str
    flaky: bool

    @property
    def certain(self) -> bool:
        """Whether the same again fails again. Of what is not known here nobody can tell."""
        return not self.flaky and self.name != "unknown"

    def error(self, where: str) -> StageError:
        """As an error; `where`: the host it happened on."""
        more = len(self.operators) - MAX_NAMED
        named = ", ".join(self.operators[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        what = f"the compiler failed: {_clause(self.cause)} ({self.what})"
        return StageError(f"{what}; look at {named}" if named else what, where=where, todo=_clause(self.fix))


def _clause(sentence: str) -> str:
    """A sentence as a part of another."""
    return sentence[:1].lower() + sentence[1:].removesuffix(".")


def layer(tensor: str) -> str:
    """The layer of the original model in a tensor's name as Keras and the converter write it.

    "model/block_1/conv2d_3/Relu;model/block_1/conv2d_3/BiasAdd" is of the layer "block_1/conv2d_3". A name that
    tells of no layer ("StatefulPartitionedCall:0") is given whole.
    """
    parts = tensor.partition(";")[0].split("/")
    return "/".join(parts[1:-1] or parts[:1])


def operator_description(operator: Operator, graph: Graph) -> str:
    """An operator for people: index, kind, version and the layer it comes from."""
    output = graph.output_tensors(operator)[0].name if operator.outputs else ""
    named = f"layer {layer(output)}" + (f", tensor {output}" if layer(output) != output else "")
    return f"operator {operator.index} {operator.name} version {operator.version} ({named})"


def unknown_version(log: str, graph: Graph) -> FailureMatch | None:
    """The model has an operator in a version that is newer than the compiler.

    Quantize again with Coralline, which writes old versions where there are any; otherwise replace the layer. `check`
    tells which versions are known.
    """
    # #631, #845, #879, #45, #34, #147, #340, #384
    said = re.search(r"Didn't find op for builtin opcode '(\w+)' version '(\d+)'", log)
    if not said:
        return None
    name, version = said[1], int(said[2])
    return FailureMatch(
        said[0], [op for op in graph.operators if (op.name, op.version) == (name, version) and not op.custom]
    )


def unknown_operator(log: str, graph: Graph) -> FailureMatch | None:
    """The model has an operator that is newer than the compiler.

    Replace the layer by one of the operations in docs/operators.md: GELU, for instance, by ReLU.
    """
    # #862
    said = re.search(r"Op builtin_code out of range: (\d+)", log)
    if not said:
        return None
    codes = [code.builtinCode for code in graph.source.operatorCodes]
    main = graph.source.subgraphs[0].operators
    return FailureMatch(said[0], [op for op in graph.operators if codes[main[op.index].opcodeIndex] == int(said[1])])


def custom_operator(log: str, graph: Graph) -> FailureMatch | None:
    """The model has a custom operator that the compiler does not know.

    Leave it to the application: cut the model before it, and compute the rest in the program that uses the model.
    """
    said = re.search(r"Encountered unresolved custom op: ([^\n]+?)\.?(?=\s|$)", log)
    if not said:
        return None
    return FailureMatch(said[0], [op for op in graph.operators if op.custom and op.name == said[1]])


def not_prepared(log: str, graph: Graph) -> FailureMatch | None:
    """TFLite itself cannot prepare an operator of the model.

    Run the model with a TFLite runtime on this machine: it says more. Then convert it again.
    """
    said = re.search(r"Node number (\d+) \(([^)\n]*)\) failed to prepare[^\n]*", log)
    return FailureMatch(said[0], [op for op in graph.operators if op.index == int(said[1])]) if said else None


def dynamic_sizes(log: str, graph: Graph) -> FailureMatch | None:
    """The model has tensors whose size is only known when it runs.

    Fix every dimension before converting, the batch included (to 1).
    """
    # #829, #831
    if "only supports static-sized tensors" not in log:
        return None
    operators = [
        op for op in graph.operators if any(t.dynamic for t in (*graph.input_tensors(op), *graph.output_tensors(op)))
    ]
    return FailureMatch("it takes static-sized tensors only", operators)


def large_activations(log: str, graph: Graph) -> FailureMatch | None:
    """The activations of the model are too large for the chip.

    Make the input smaller, or the first layers narrower; or set compile.search_delegate, which leaves the end of the
    model to the CPU until the rest compiles; or cut the model in parts.
    """
    # #439, #449, #512, #608, #653, #444
    said = next((line.strip() for line in log.splitlines() if "due to large activation tensors" in line), None)
    return FailureMatch(said, _largest(graph)) if said else None


def ran_out_of_time(log: str, graph: Graph) -> FailureMatch | None:
    """The compiler ended itself at its own time limit, mostly because of large activations.

    Raise compile.child_timeout_s; or treat it as too large activations: smaller input, narrower first layers,
    compile.search_delegate.
    """
    # #686
    said = re.search(r"Compilation timeout[^\n]*", log)
    return FailureMatch(said[0].strip(), _largest(graph)) if said else None


def not_quantized(log: str, graph: Graph) -> FailureMatch | None:
    """The model is not quantized to full integer.

    Put quantize before compile.
    """
    del graph
    return FailureMatch("Model not quantized") if "Model not quantized" in log else None


def not_parsed(log: str, graph: Graph) -> FailureMatch | None:
    """The compiler cannot read the model.

    Convert it again; and use the newest compiler, 16.0.
    """
    del graph
    if "Model could not be parsed" not in log:
        return None
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    return FailureMatch(" ".join(errors) or "Model could not be parsed")


def internal_error(log: str, graph: Graph) -> FailureMatch | None:
    """The compiler met something that it has no words for: often too large activations, sometimes mere chance.

    Raise compile.retries; use compiler 16.0, which says more; try a smaller input; look for scales that are not finite.
    """
    # #92, #189, #157, #378, #148, #104, #47, #49, #275, #394, #107, #309, #283; by chance: #211, #173; scales: #350
    said = re.search(r"Internal compiler error[^\n]*", log)
    return FailureMatch(said[0].strip(), _largest(graph)) if said else None


def crashed(log: str, graph: Graph) -> FailureMatch | None:
    """The compiler crashed.

    Try compile.search_delegate, or other options: fewer segments, one subgraph.
    """
    # #728, #669
    del graph
    said = re.search(r"terminating with uncaught exception[^\n]*|Segmentation fault", log)
    return FailureMatch(said[0]) if said else None


def silent(log: str, graph: Graph) -> FailureMatch | None:
    """The compiler gave no reason.

    Raise compile.retries; try compile.search_delegate, which tells how much of the model compiles; leave out options.
    """
    # #714, #800, #903; #411: the version and nothing else
    del graph
    reports = parse(log)
    if any(report.unknown for report in reports):
        return None
    errors = {line.strip() for report in reports for line in report.errors}
    return FailureMatch("no error message and no compiled model") if errors <= {"Compilation failed!"} else None


FAILURES: Mapping[Callable[[str, Graph], FailureMatch | None], bool] = {
    unknown_version: False,
    unknown_operator: False,
    custom_operator: False,
    not_prepared: False,
    dynamic_sizes: False,
    large_activations: False,
    not_quantized: False,
    not_parsed: False,
    ran_out_of_time: True,
    internal_error: True,
    crashed: True,
    silent: True,
}
"""Every known failure in the order they are looked for, and whether the same again may succeed."""


def recognize(outcome: CompilerRun, graph: Graph) -> Failure:
    """The failure that a log without a compiled model tells of. What nothing here knows is told in its own words."""
    for function, flaky in FAILURES.items():
        found = function(outcome.log, graph)
        if found:
            cause, fix = documentation(function)
            operators = tuple(operator_description(operator, graph) for operator in found.operators)
            what = f"exit code {outcome.exit_code}, {found.what.rstrip('.')}"
            return Failure(function.__name__, cause, what, operators, fix, flaky)
    last = next((line.strip() for line in reversed(outcome.log.splitlines()) if line.strip()), "no message")
    what = f"exit code {outcome.exit_code}, {last.rstrip('.')}"
    return Failure("unknown", "This failure is not known here.", what, (), "read what it printed", flaky=False)


def nothing_mapped(outcome: CompilerRun, min_runtime: int | None) -> Failure:
    """A success that put nothing on the Edge TPU; `min_runtime`: what was asked for with `-m`.

    #358: with `-m 11` for operators that need more, the compiler says that it succeeded.
    """
    old = min_runtime is not None
    cause = "Nothing of the model would run on the Edge TPU."
    fix = "Raise or leave out compile.min_runtime_version." if old else "See what `check` says about each operator."
    return Failure("nothing_mapped", cause, f"exit code {outcome.exit_code}", (), fix, flaky=False)


def documentation(function: Callable[[str, Graph], FailureMatch | None]) -> tuple[str, str]:
    """The cause and the fix: the two parts of a failure's docstring."""
    cause, _, fix = (inspect.getdoc(function) or "").partition("\n\n")
    return cause, " ".join(fix.split())


def _largest(graph: Graph) -> list[Operator]:
    """The operators whose inputs and outputs together are largest: where activations are most likely too large."""

    def elements(operator: Operator) -> int:
        tensors = (*graph.input_tensors(operator), *graph.output_tensors(operator))
        return sum(tensor.elements for tensor in tensors if not tensor.is_constant)

    return sorted(graph.operators, key=elements, reverse=True)[:1]
