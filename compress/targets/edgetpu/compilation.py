"""The compile stage on the Edge TPU: the vendor's compiler where there is one, and what `check` expects of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from compress.artifact import Facts
from compress.errors import ModelError
from compress.targets.base import Target
from compress.targets.compiler_settings import CompilerSettings
from compress.targets.edgetpu import compiler
from compress.targets.edgetpu.check import Check, check
from compress.targets.edgetpu.compiler import Compiled, Compiler, CompilerOptions, log
from compress.targets.edgetpu.compiler.cache import Cache
from compress.targets.edgetpu.compiler.host import LOG, Host
from compress.targets.edgetpu.compiler.log import CompilerReport
from compress.targets.edgetpu.estimate import estimate_all_hosts
from compress.targets.edgetpu.inspection import Inspection, inspect_graph
from compress.tflite import graph
from compress.tflite.graph import Graph

Note = Callable[[str], None]


def compile_model(model: bytes, settings: CompilerSettings, target: Target, folder: Path, note: Note) -> Facts:
    """Compile a model if there is a compiler or a cached result, and check it in any case.

    Args:
        model: the .tflite file.
        settings: where the compiler is, and its options.
        target: the Edge TPU.
        folder: where the compiled model, or its segments, and the compiler's log go.
        note: a function that shows a message at once.

    Raises:
        ModelError: the model is not a .tflite file.
        StageError: the compiler failed, cannot be run, took too long or is another version.
    """
    parsed = graph.parse(model)
    done = _compiler(settings, target, folder).compile(model, note)
    if done is None:
        return _not_compiled(parsed, settings, target)
    (folder / LOG).write_text(done.log, encoding="utf-8")
    for file, content in done.files.items():
        (folder / file).write_bytes(content)
    return _compiled(parsed, done, settings, target, note)


def identity(settings: CompilerSettings, target: Target) -> dict[str, str]:
    """Return which compiler there is; without one, which results are cached."""
    return compiler.identity(_host(settings, target, None), _cache(settings))


def _compiler(settings: CompilerSettings, target: Target, folder: Path) -> Compiler:
    return Compiler(
        _host(settings, target, folder),
        _options(settings),
        settings.timeout_s,
        settings.retries,
        _cache(settings),
        settings.compiler_version,
        str(target.tables["compiler"]["version"]),
    )


def _host(settings: CompilerSettings, target: Target, folder: Path | None) -> Host | None:
    return compiler.find_compiler(settings.compiler, settings.docker, settings.ssh, target, folder)


def _cache(settings: CompilerSettings) -> Cache | None:
    return Cache(Path(settings.cache).expanduser()) if settings.cache is not None else None


def _options(settings: CompilerSettings) -> CompilerOptions:
    return CompilerOptions(
        settings.all_subgraphs,
        settings.min_runtime_version,
        settings.num_segments,
        settings.intermediate_tensors,
        settings.search_delegate,
        settings.child_timeout_s,
    )


def _not_compiled(parsed: Graph, settings: CompilerSettings, target: Target) -> Facts:
    """The facts without a compiled model: what is expected, and how to compile."""
    checked, report = expected(parsed, settings, target, settings.compiler_version)
    cached = " and no result is cached" if settings.cache else ""
    return {
        "placement": checked.to_json(),
        "expected": report.to_json(),
        "expected_latency": estimate_all_hosts(parsed, target),
        "compiled": False,
        "reason": f"not compiled: {target.tables['compiler']['name']} was not found{cached}",
        "how_to_compile": compiler.HOW_TO_COMPILE,
    }


def _compiled(parsed: Graph, done: Compiled, settings: CompilerSettings, target: Target, note: Note) -> Facts:
    """The facts with a compiled model: the compiler's report, and where it differs from what was expected."""
    checked, report = expected(parsed, settings, target, done.reports[0].version)
    parts = [graph.parse(part) for part in done.files.values()]
    placement = log.actual_placement(checked.placement, parsed, parts, done.reports)
    mapped = sum(op.placement == "tpu" for op in placement.ops)
    summary = f"{mapped} of {len(placement.ops)} operators run on the Edge TPU"
    # Each segment has its own table and memory; the expectation is for the whole model.
    alone = done.reports[0] if len(done.reports) == 1 else None
    differences = log.differences(report, alone) if alone else None
    for each in differences or ():
        note(f"{each['name']}: {each['predicted']} expected, {each['real']} found by the compiler")
    return {
        "placement": {**checked.to_json(), **placement.to_json(), "summary": summary},
        "expected": report.to_json(),
        "expected_latency": estimate_all_hosts(parsed, target, _inspected(parts)),
        "reports": [report.to_json() for report in done.reports],
        "differences": differences,
        "compiled": True,
        "report_on_chip_bytes": alone.on_chip_bytes if alone else None,
        "report_off_chip_bytes": alone.off_chip_bytes if alone else None,
    }


def expected(
    parsed: Graph, settings: CompilerSettings, target: Target, version: str | None
) -> tuple[Check, CompilerReport]:
    """The expected placement and log of one version of the compiler; of the target's version if it is unknown."""
    known = compiler.known_version(version, target) or str(target.tables["compiler"]["version"])
    target = target.compiled_by(known)
    if settings.min_runtime_version is not None:
        target = _limited(target, known, settings.min_runtime_version)
    checked = check(parsed, target, all_subgraphs=settings.all_subgraphs)
    return checked, log.expected_report(checked, parsed, known)


def _limited(target: Target, version: str, runtime: int) -> Target:
    """The target whose compiler writes for an older runtime: operators that need a newer one stay on the CPU."""
    tables = target.tables["compiler"]
    runtimes = {**tables["runtimes"], version: min(runtime, tables["runtimes"][version])}
    return replace(target, tables={**target.tables, "compiler": {**tables, "runtimes": runtimes}})


def _inspected(parts: Sequence[Graph]) -> Inspection | None:
    """The content of a compiled model; None for segments, each on its own Edge TPU, and where nothing is mapped."""
    try:
        return inspect_graph(parts[0]) if len(parts) == 1 else None
    except ModelError:
        return None
