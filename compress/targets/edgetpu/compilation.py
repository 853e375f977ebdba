"""The compile stage for the Edge TPU: run the vendor's compiler, and compare its result with the prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from compress.core.artifact import Facts
from compress.core.errors import ModelError
from compress.model.tflite import graph
from compress.model.tflite.graph import Graph
from compress.results.encoding import encode
from compress.targets.base import CompilerSettings, Target
from compress.targets.edgetpu import compiler
from compress.targets.edgetpu.check import Check, check
from compress.targets.edgetpu.compiler import Compiled, Compiler, log
from compress.targets.edgetpu.compiler.host import LOG
from compress.targets.edgetpu.compiler.log import CompilerReport
from compress.targets.edgetpu.estimate import estimate_all_hosts
from compress.targets.edgetpu.inspection import Inspection, inspect_graph

Note = Callable[[str], None]


def compile_model(model: bytes, settings: CompilerSettings, target: Target, folder: Path, note: Note) -> Facts:
    """Check a model, and compile it if a compiler or a cached result is available.

    The folder gets the compiled model, or its segments, and the compiler's log.

    Raises:
        ModelError: the model is not a .tflite file.
        StageError: the compiler failed, cannot be run, took too long or is another version.
    """
    parsed = graph.parse(model)
    host = compiler.find_compiler(settings, target.compiler.name, folder)
    compiled = Compiler(host, settings, target.compiler.version).compile(model, note)
    if compiled is None:
        return _facts_without_compiler(parsed, settings, target)
    (folder / LOG).write_text(compiled.log, encoding="utf-8")
    for file, content in compiled.files.items():
        (folder / file).write_bytes(content)
    return _facts_with_compiler(parsed, compiled, settings, target, note)


def _facts_without_compiler(parsed: Graph, settings: CompilerSettings, target: Target) -> Facts:
    """Return the facts without a compiled model: the prediction, and how to compile."""
    checked, report = expected(parsed, settings, target, settings.compiler_version)
    name = target.compiler.name
    cached = " and no result is cached" if settings.cache else ""
    return {
        "placement": checked.to_json(),
        "expected": report.to_json(),
        "expected_latency": encode(estimate_all_hosts(parsed, target)),
        "compiled": False,
        "reason": f"not compiled: {name} was not found{cached}; run `{name} -s model.tflite` on x86-64 Linux",
        "how_to_compile": compiler.HOW_TO_COMPILE,
    }


def _facts_with_compiler(
    parsed: Graph, compiled: Compiled, settings: CompilerSettings, target: Target, note: Note
) -> Facts:
    """Return the facts with a compiled model: the compiler's report, and its differences from the prediction."""
    checked, report = expected(parsed, settings, target, compiled.reports[0].version)
    parts = [graph.parse(part) for part in compiled.files.values()]
    placement = log.actual_placement(checked, parsed, parts, compiled.reports)
    mapped = sum(op.placement == "tpu" for op in placement.ops)
    summary = f"{mapped} of {len(placement.ops)} operators run on the Edge TPU"
    # Each segment has its own table and memory; the prediction is for the whole model.
    single_report = compiled.reports[0] if len(compiled.reports) == 1 else None
    differences = log.differences(report, single_report) if single_report else None
    for difference in differences or ():
        note(f"{difference['name']}: predicted {difference['predicted']}, compiler {difference['real']}")
    return {
        "placement": {**checked.to_json(), **placement.to_json(), "summary": summary},
        "expected": report.to_json(),
        "expected_latency": encode(estimate_all_hosts(parsed, target, _inspected(parts))),
        "reports": [report.to_json() for report in compiled.reports],
        "differences": differences,
        "compiled": True,
        "report_on_chip_bytes": single_report.on_chip_bytes if single_report else None,
        "report_off_chip_bytes": single_report.off_chip_bytes if single_report else None,
    }


def expected(
    parsed: Graph, settings: CompilerSettings, target: Target, version: str | None
) -> tuple[Check, CompilerReport]:
    """Return the predicted placement and log for a compiler version; for the target's version if it is unknown."""
    known = compiler.known_version(version, target) or target.compiler.version
    target = target.compiled_by(known, settings.min_runtime_version)
    checked = check(parsed, target, all_subgraphs=settings.all_subgraphs)
    return checked, log.expected_report(checked, parsed, known)


def _inspected(parts: Sequence[Graph]) -> Inspection | None:
    """Return the contents of a compiled model; None for several segments, or if no operator is mapped."""
    try:
        return inspect_graph(parts[0]) if len(parts) == 1 else None
    except ModelError:
        return None
