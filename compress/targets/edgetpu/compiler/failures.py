"""Failures of the vendor's compiler: one function for each.

The first paragraph of a function's docstring is the cause of the failure, the second one is the fix. Error messages
contain both. A function returns the matching text of the log with the operators that caused it, or None.

Source: issue threads of google-coral/edgetpu (numbers at each function).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compress.core.errors import StageError
from compress.core.memory import killed_for_memory
from compress.model.tflite.graph import Graph, Operator
from compress.targets.edgetpu.compiler.host import CompilerRun
from compress.targets.edgetpu.compiler.log import parse
from compress.targets.edgetpu.rules import documentation

MAX_NAMED = 3
"""The most operators in a message."""


@dataclass(frozen=True)
class FailureMatch:
    """A recognized failure: its description, and the operators that cause it, the most important first."""

    what: str
    operators: Sequence[Operator] = ()


@dataclass(frozen=True)
class Failure:
    """A failure of the compiler with its cause and fix.

    Attributes:
        name: the name of the function that recognizes it.
        what: the exit code, and the compiler's message.
        operators: the operators that cause it, each with its layer.
        flaky: whether a retry may succeed.
    """

    name: str
    cause: str
    what: str
    operators: tuple[str, ...]
    fix: str
    flaky: bool

    @property
    def certain(self) -> bool:
        """Whether every retry will fail; false for an unknown failure."""
        return not self.flaky and self.name != "unknown"

    def error(self, where: str) -> StageError:
        """Return the failure as an error; `where` is the compiler's host."""
        more = len(self.operators) - MAX_NAMED
        named = ", ".join(self.operators[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        what = f"the compiler failed: {_clause(self.cause)} ({self.what})"
        return StageError(f"{what}; look at {named}" if named else what, where=where, hint=_clause(self.fix))


def _clause(sentence: str) -> str:
    """Return a sentence as a part of another sentence."""
    return sentence[:1].lower() + sentence[1:].removesuffix(".")


def layer(tensor: str) -> str:
    """Return the Keras layer from a tensor's name.

    "model/block_1/conv2d_3/Relu;model/block_1/conv2d_3/BiasAdd" is in the layer "block_1/conv2d_3". A name without a
    layer ("StatefulPartitionedCall:0") is returned unchanged.
    """
    parts = tensor.partition(";")[0].split("/")
    return "/".join(parts[1:-1] or parts[:1])


def operator_description(operator: Operator, graph: Graph) -> str:
    """Return text about an operator: index, name, version and layer."""
    output = graph.output_tensors(operator)[0].name if operator.outputs else ""
    named = f"layer {layer(output)}" + (f", tensor {output}" if layer(output) != output else "")
    return f"operator {operator.index} {operator.name} version {operator.version} ({named})"


def unknown_version(log: str, graph: Graph) -> FailureMatch | None:
    """The model has an operator in a version that is newer than the compiler.

    Quantize again with Coralline, which writes the oldest possible versions, or replace the layer. `check` shows the
    supported versions.
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

    Replace the layer by one that `python -m compress manual operators` lists, for instance GELU by ReLU.
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

    Cut the model before this operator, and compute the rest in the application.
    """
    said = re.search(r"Encountered unresolved custom op: ([^\n]+?)\.?(?=\s|$)", log)
    if not said:
        return None
    return FailureMatch(said[0], graph.custom_operators(said[1]))


def not_prepared(log: str, graph: Graph) -> FailureMatch | None:
    """The compiler's TFLite runtime cannot prepare an operator of the model.

    Run the model with a TFLite runtime on this machine for a more detailed message, then convert it again.
    """
    said = re.search(r"Node number (\d+) \(([^)\n]*)\) failed to prepare[^\n]*", log)
    return FailureMatch(said[0], [op for op in graph.operators if op.index == int(said[1])]) if said else None


def dynamic_sizes(log: str, graph: Graph) -> FailureMatch | None:
    """The model has tensors with dynamic shapes.

    Fix every dimension before you convert the model, and set the batch to 1.
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

    Use a smaller input, or fewer channels in the first layers; or set compile.search_delegate, which moves the end of
    the model to the CPU until the rest compiles; or cut the model into parts.
    """
    # #439, #449, #512, #608, #653, #444
    said = next((line.strip() for line in log.splitlines() if "due to large activation tensors" in line), None)
    return FailureMatch(said, _largest(graph)) if said else None


def ran_out_of_time(log: str, graph: Graph) -> FailureMatch | None:
    """The compiler stopped at its own time limit, in most cases because of large activations.

    Increase compile.child_timeout_s, or reduce the activations: smaller input, fewer channels in the first layers,
    compile.search_delegate.
    """
    # #686
    said = re.search(r"Compilation timeout[^\n]*", log)
    return FailureMatch(said[0].strip(), _largest(graph)) if said else None


def not_quantized(log: str, graph: Graph) -> FailureMatch | None:
    """The model is not quantized to full integer.

    Add the stage quantize before compile.
    """
    del graph
    return FailureMatch("Model not quantized") if "Model not quantized" in log else None


def not_parsed(log: str, graph: Graph) -> FailureMatch | None:
    """The compiler cannot read the model.

    Convert it again, and use the newest compiler, 16.0.
    """
    del graph
    if "Model could not be parsed" not in log:
        return None
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    return FailureMatch(" ".join(errors) or "Model could not be parsed")


def internal_error(log: str, graph: Graph) -> FailureMatch | None:
    """The compiler had an internal error: often because of large activations, sometimes at random.

    Increase compile.retries; use compiler 16.0, which gives more details; try a smaller input; look for scales that are
    not finite.
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

    Increase compile.retries; try compile.search_delegate, which shows how much of the model compiles; remove options.
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
"""Every known failure in the order in which they are tried, and whether a retry may succeed."""


def recognize(outcome: CompilerRun, graph: Graph) -> Failure:
    """Return the failure in a log without a compiled model; for an unknown one, with the last line of the log."""
    if killed_for_memory(outcome.exit_code):
        cause = "The system killed the compiler: most likely memory was short."
        fix = "End other programs, give the container more memory, or compile on another machine."
        return Failure("killed", cause, f"exit code {outcome.exit_code}", (), fix, flaky=False)
    for function, flaky in FAILURES.items():
        match = function(outcome.log, graph)
        if match:
            cause, fix = documentation(function)
            operators = tuple(operator_description(operator, graph) for operator in match.operators)
            what = f"exit code {outcome.exit_code}, {match.what.rstrip('.')}"
            return Failure(function.__name__, cause, what, operators, fix, flaky)
    last = next((line.strip() for line in reversed(outcome.log.splitlines()) if line.strip()), "no message")
    what = f"exit code {outcome.exit_code}, {last.rstrip('.')}"
    return Failure("unknown", "This failure is unknown.", what, (), "read the compiler's output", flaky=False)


def nothing_mapped(outcome: CompilerRun, min_runtime: int | None) -> Failure:
    """Return the failure for a successful run that mapped no operator; `min_runtime` is the option `-m`.

    #358: with `-m 11` for operators that need a newer runtime, the compiler reports success.
    """
    fix = "Run `check`, which shows the reason for each operator."
    if min_runtime is not None:
        fix = "Increase or remove compile.min_runtime_version."
    cause = "No operator of the model would run on the Edge TPU."
    return Failure("nothing_mapped", cause, f"exit code {outcome.exit_code}", (), fix, flaky=False)


def _largest(graph: Graph) -> list[Operator]:
    """Return the operator with the largest inputs and outputs: there the activations are most likely too large."""

    def elements(operator: Operator) -> int:
        tensors = (*graph.input_tensors(operator), *graph.output_tensors(operator))
        return sum(tensor.elements for tensor in tensors if not tensor.is_constant)

    return sorted(graph.operators, key=elements, reverse=True)[:1]
