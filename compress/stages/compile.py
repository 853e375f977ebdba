"""`compile`: the vendor's compiler where there is one, and what the static check expects of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from compress.artifact import MODEL_TFLITE, Artifact, Facts, Kind
from compress.errors import ModelError
from compress.stage import Context, Need, Stage
from compress.targets.base import Target, load
from compress.targets.edgetpu import compiler
from compress.targets.edgetpu.check import Check, check
from compress.targets.edgetpu.compiler import IMAGE, SSH_HOST, Compiled, Compiler, Options, log
from compress.targets.edgetpu.compiler.cache import Cache
from compress.targets.edgetpu.compiler.host import LOG, Host
from compress.targets.edgetpu.compiler.log import Report
from compress.targets.edgetpu.estimate import everywhere
from compress.targets.edgetpu.inspection import Inspection, opened
from compress.tflite import graph
from compress.tflite.graph import Graph


class Compile(Stage):
    """Compiles for the Edge TPU if the vendor's compiler is found; checks statically in any case."""

    name: ClassVar[str] = "compile"
    version: ClassVar[int] = 2
    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.TFLITE})
    produces: ClassVar[Kind] = Kind.COMPILED
    needs: ClassVar[frozenset[Need]] = frozenset({"target"})

    compiler: str | None = None
    """Path of edgetpu_compiler on this machine; by default the one on PATH, if any."""
    docker: Annotated[str, Field(pattern=IMAGE)] | None = None
    """A Docker image that has edgetpu_compiler on its PATH: it runs there, without network."""
    ssh: Annotated[str, Field(pattern=SSH_HOST)] | None = None
    """Another host, user@host or a name in ~/.ssh/config, that has edgetpu_compiler on its PATH."""
    compiler_version: Annotated[str, Field(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}(\.[0-9]{1,12})?$")] | None = None
    """The compiler's version, 16.0 or in full; another is refused. By default any, and 16.0 from the cache."""
    cache: str | None = None
    """A folder of results that may be shared: what it holds is not compiled again, and needs no compiler."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """How long one try may take, transport included."""
    child_timeout_s: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """The compiler's own limit for each part that it tries (-t; 16.0 only, where it is 180 by itself)."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """How often a failure that may be chance is tried again."""
    all_subgraphs: bool = False
    """Whether operators after one that stays on the CPU are compiled too, as further parts (-a)."""
    min_runtime_version: Annotated[int, Field(ge=10, le=14)] | None = None
    """The oldest Edge TPU runtime that must run the result (-m); by default the compiler's own."""
    num_segments: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts that the model is cut into, for as many Edge TPUs (-n); package takes whole models only."""
    intermediate_tensors: tuple[Annotated[str, Field(pattern=r"^[^,\-][^,]*$")], ...] = ()
    """Names of tensors where the Edge TPU's part ends (-i)."""
    search_delegate: bool = False
    """Whether operators at the end are left to the CPU until the rest compiles (-d; 16.0 only)."""

    @model_validator(mode="after")
    def _one_host(self) -> Self:
        if sum(host is not None for host in (self.compiler, self.docker, self.ssh)) > 1:
            raise ValueError("only one of the keys 'compiler', 'docker' and 'ssh' can be given")
        return self

    def skip(self, given: Kind, *, from_file: bool, target: Target) -> str | None:
        """A target without accelerator needs no compiler."""
        return None if target.accelerated else f"the target {target.name} needs no compiler"

    def environment(self) -> dict[str, str]:
        """Which compiler there is; without one, which results are cached."""
        return compiler.identity(self._host(load("edgetpu"), None), self._cache())

    def run(self, given: Artifact, context: Context) -> Facts:
        """The placement, and the compiled model if there is a compiler or a cached result."""
        content = given.file(MODEL_TFLITE).read_bytes()
        (context.folder / MODEL_TFLITE).write_bytes(content)
        parsed = graph.read(context.folder / MODEL_TFLITE)
        found, expected = self._expected(parsed, context.target, self.compiler_version)
        name, usual = (str(context.target.tables["compiler"][key]) for key in ("name", "version"))
        host = self._host(context.target, context.folder)
        job = Compiler(host, self._options(), self.timeout_s, self.retries, self._cache(), self.compiler_version, usual)
        done = job.compile(content, context.progress.note)
        if done is None:
            cached = " and no result is cached" if self.cache else ""
            return {
                "placement": found.to_json(),
                "expected": expected.to_json(),
                "expected_latency": everywhere(parsed, context.target),
                "compiled": False,
                "reason": f"not compiled: {name} was not found{cached}",
                "how_to_compile": compiler.HOW_TO_COMPILE,
            }
        (context.folder / LOG).write_text(done.log, encoding="utf-8")
        for file, part in done.files.items():
            (context.folder / file).write_bytes(part)
        return self._facts(parsed, done, context)

    def _facts(self, parsed: Graph, done: Compiled, context: Context) -> Facts:
        """What was expected of the compiler that did it, what it said, and where they differ."""
        found, expected = self._expected(parsed, context.target, done.reports[0].version)
        parts = [graph.parse(part) for part in done.files.values()]
        placement = log.as_compiled(found.placement, parsed, parts, done.reports)
        mapped = sum(op.placement == "tpu" for op in placement.ops)
        summary = f"{mapped} of {len(placement.ops)} operators run on the Edge TPU"
        # Segments have a table and memory each; what is expected is for the whole.
        alone = done.reports[0] if len(done.reports) == 1 else None
        differences = log.differences(expected, alone) if alone else None
        for each in differences or ():
            context.progress.note(f"{each['name']}: {each['predicted']} expected, {each['real']} found by the compiler")
        return {
            "placement": {**found.to_json(), **placement.to_json(), "summary": summary},
            "expected": expected.to_json(),
            "expected_latency": everywhere(parsed, context.target, _inspected(parts)),
            "reports": [report.to_json() for report in done.reports],
            "differences": differences,
            "compiled": True,
            "report_on_chip_bytes": alone.on_chip_bytes if alone else None,
            "report_off_chip_bytes": alone.off_chip_bytes if alone else None,
        }

    def _expected(self, parsed: Graph, target: Target, version: str | None) -> tuple[Check, Report]:
        """What a version of the compiler, if it is known, would do and print."""
        known = compiler.known_version(version, target) or target.tables["compiler"]["version"]
        target = target.compiled_by(known)
        if self.min_runtime_version is not None:  # operators that need a newer runtime stay on the CPU
            tables, runtimes = target.tables["compiler"], target.tables["compiler"]["runtimes"]
            runtimes = {**runtimes, known: min(self.min_runtime_version, runtimes[known])}
            target = replace(target, tables={**target.tables, "compiler": {**tables, "runtimes": runtimes}})
        found = check(parsed, target, all_subgraphs=self.all_subgraphs)
        return found, log.expected(found, parsed, known)

    def _host(self, target: Target, folder: Path | None) -> Host | None:
        return compiler.find(self.compiler, self.docker, self.ssh, target, folder)

    def _cache(self) -> Cache | None:
        return Cache(Path(self.cache).expanduser()) if self.cache is not None else None

    def _options(self) -> Options:
        return Options(
            self.all_subgraphs,
            self.min_runtime_version,
            self.num_segments,
            self.intermediate_tensors,
            self.search_delegate,
            self.child_timeout_s,
        )


def _inspected(parts: list[Graph]) -> Inspection | None:
    """What a compiled model holds; None for segments, each for an Edge TPU of its own, and where nothing is mapped."""
    try:
        return opened(parts[0]) if len(parts) == 1 else None
    except ModelError:
        return None
