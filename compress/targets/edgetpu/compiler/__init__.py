"""The vendor's compiler: its options, its runs, and the validation of its results.

It is closed source, for x86-64 only and no longer developed, so most machines do not have it. It can be on PATH, at a
path in the settings, in a Docker image or on another host. A cache of its results can be shared, so that the same
model with the same options is compiled only once.

Source of the options: coral.ai/docs/edgetpu/compiler, table 1.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.core.artifact import MODEL_COMPILED, SEGMENT_COMPILED
from compress.core.errors import ModelError, StageError, StoreError
from compress.core.resources import manual
from compress.model.tflite import graph
from compress.model.tflite.graph import Graph
from compress.targets.base import Target
from compress.targets.edgetpu import inspection
from compress.targets.edgetpu.compiler import failures
from compress.targets.edgetpu.compiler.cache import Cache
from compress.targets.edgetpu.compiler.failures import Failure
from compress.targets.edgetpu.compiler.host import CompilerRun, Docker, Host, Local, Ssh
from compress.targets.edgetpu.compiler.log import CompilerReport, parse
from darwinn.package import OPERATOR

HOW_TO_COMPILE = (
    "run `edgetpu_compiler -s model.tflite` on an x86-64 Debian or Ubuntu machine (or container) that has the "
    "vendor's package edgetpu-compiler, then run the pipeline again with it on PATH, or say where it is: "
    "`compile: {compiler: /path/to/edgetpu_compiler}`, `compile: {docker: IMAGE}` or `compile: {ssh: HOST}`; "
    f"{manual('hardware/compiler.md')} has recipes for the image and for a hosted machine"
)


@dataclass(frozen=True)
class CompilerOptions:
    """The compiler's options. The table of operators (`-s`) is always requested.

    Attributes:
        all_subgraphs: make several partitions on the Edge TPU (`-a`).
        min_runtime: the oldest runtime that must load the result (`-m`).
        num_segments: the number of segments, one for each Edge TPU (`-n`).
        intermediate_tensors: the tensors at which the Edge TPU partition ends (`-i`).
        search_delegate: move operators at the end to the CPU until the rest compiles (`-d`; compiler 16).
        child_timeout_s: the compiler's own time limit for each attempt (`-t`; compiler 16).
    """

    all_subgraphs: bool = False
    min_runtime: int | None = None
    num_segments: int = 1
    intermediate_tensors: tuple[str, ...] = ()
    search_delegate: bool = False
    child_timeout_s: int | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments that the result depends on, always in the same order: part of the cache key."""
        chosen = {
            ("-a",): self.all_subgraphs,
            ("-d",): self.search_delegate,
            ("-i", ",".join(self.intermediate_tensors)): bool(self.intermediate_tensors),
            ("-m", str(self.min_runtime)): self.min_runtime is not None,
            ("-n", str(self.num_segments)): self.num_segments > 1,
        }
        return ("-s", *(part for argument, is_set in chosen.items() if is_set for part in argument))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the files that the compiler writes for model.tflite."""
        if self.num_segments == 1:
            return (MODEL_COMPILED,)
        return tuple(SEGMENT_COMPILED.format(index, self.num_segments) for index in range(self.num_segments))


def find_compiler(
    compiler: str | None, docker: str | None, ssh: str | None, target: Target, folder: Path | None
) -> Host | None:
    """Return the compiler's host from one of three settings, or from PATH; None if it is not found.

    Nothing is run or verified, because a cached result may make the compiler unnecessary.

    Args:
        compiler: the path of the program on this machine.
        docker: a Docker image with the program on its PATH.
        ssh: another host with the program on its PATH.
        target: the target, which has the compiler's name.
        folder: the working folder for the compiler on this machine; None for the system's folder for temporary files.
    """
    name = target.compiler.name
    if docker is not None:
        return Docker(docker, name)
    if ssh is not None:
        return Ssh(ssh, name)
    if compiler is not None:
        return Local(Path(compiler).expanduser().absolute(), folder)  # a bare name would be looked for on PATH
    program = shutil.which(name)
    return Local(Path(program), folder) if program else None


def identity(host: Host | None, cache: Cache | None) -> dict[str, str]:
    """Return the compiler's identity; without a compiler, the content of the cache."""
    known = host.identity() if host else "none"
    if known != "none" or cache is None:
        return {"compiler": known}
    return {"compiler": known, "cache": " ".join(cache.names)}


@dataclass(frozen=True)
class Compiled:
    """The result of a successful run.

    Attributes:
        log: the complete output of the compiler.
        reports: the parsed log: one report, or one for each segment.
        files: the compiled model, or its segments, by name.
    """

    log: str
    reports: tuple[CompilerReport, ...]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Compiler:
    """A compiler with its settings.

    Attributes:
        host: the host that it runs on; None: only cached results are available.
        options: the compiler's options.
        timeout_s: the time limit for one attempt.
        retries: the number of retries after a failure that may be random.
        cache: the cache of results.
        version: the required version, complete or its beginning; None: `usual` from the cache, any version from a host.
        usual: the target's version.
    """

    host: Host | None
    options: CompilerOptions
    timeout_s: float
    retries: int
    cache: Cache | None
    version: str | None
    usual: str

    def compile(self, model: bytes, note: Callable[[str], None]) -> Compiled | None:
        """Compile a model; return None without a compiler and a cached result.

        Args:
            model: the .tflite file.
            note: a function that shows progress, and the complete output of a failed compiler.

        Raises:
            ModelError: the model is not a .tflite file.
            StageError: the compiler failed, cannot be run, took too long or is another version, or the model does not
                have the intermediate tensors.
        """
        original = graph.parse(model)
        self._check_tensors(original)
        for path, outcome in self._cached(model, note):
            judged = self._judge(outcome, original)
            if isinstance(judged, Compiled):
                return judged
            if isinstance(judged, Failure) and judged.certain:
                note(f"{outcome.log}\nThis is an earlier run. Remove {path} to compile again.")
                raise judged.error("an earlier run, from the cache")
            note(f"the cached result {path} is not used: {judged if isinstance(judged, ModelError) else judged.cause}")
        return self._run(model, original, note) if self.host else None

    def _cached(self, model: bytes, note: Callable[[str], None]) -> Sequence[tuple[Path, CompilerRun]]:
        if self.cache is None:
            return ()
        version = self.version or self.usual
        entries = self.cache.find(model, self.options.arguments, version, self.options.outputs, note)
        return [(path, outcome) for path, outcome in entries if path.name.endswith(f"-{parse(outcome.log)[0].version}")]

    def _run(self, model: bytes, original: Graph, note: Callable[[str], None]) -> Compiled:
        """Run the compiler until it succeeds, or fails with a permanent error."""
        assert self.host is not None
        limit = self.options.child_timeout_s
        arguments = (*self.options.arguments, *(("-t", str(limit)) if limit is not None else ()))
        for attempt in itertools.count(1):
            outcome = self.host.run(model, arguments, self.options.outputs, self.timeout_s)
            self._check_version(parse(outcome.log)[0].version)
            judged = self._judge(outcome, original)
            if isinstance(judged, ModelError):
                note(outcome.log)
                raise StageError(f"the compiled model is invalid: {judged}", where=self.host.where)
            if isinstance(judged, Compiled) or judged.certain:
                self._keep(model, outcome, note)
            if isinstance(judged, Compiled):
                return judged
            if not judged.flaky or attempt > self.retries:
                note(outcome.log)
                raise judged.error(self.host.where)
            note(f"the compiler failed ({judged.what}); retry, attempt {attempt + 1} of {self.retries + 1}")
        raise AssertionError

    def _keep(self, model: bytes, outcome: CompilerRun, note: Callable[[str], None]) -> None:
        if self.cache is None:
            return
        try:
            self.cache.keep(model, self.options.arguments, parse(outcome.log)[0].version, outcome)
        except StoreError as error:  # the result is usable without the cache
            note(str(error))

    def _judge(self, outcome: CompilerRun, original: Graph) -> Compiled | Failure | ModelError:
        """Return a valid result, a failure, or the error in the compiled model."""
        if outcome.exit_code != 0 or not outcome.files.keys() >= set(self.options.outputs):
            return failures.recognize(outcome, original)
        reports = parse(outcome.log)
        try:
            parts = [graph.parse(outcome.files[name], name) for name in self.options.outputs]
            custom = [part for part in parts if part.custom_operators(OPERATOR)]
            if not custom and not any(report.mapped for report in reports):
                return failures.nothing_mapped(outcome, self.options.min_runtime)
            for part in custom or parts:
                inspection.inspect_graph(part)
        except ModelError as error:
            return error
        if len(parts) == 1 and not self._fits(parts[0], original):
            return ModelError("the compiled model has other inputs or outputs than the original: it is another model")
        return Compiled(outcome.log, reports, outcome.files)

    def _fits(self, part: Graph, original: Graph) -> bool:
        """Return whether inputs and outputs are those of the original, as in 29 of 29 published compiled models."""
        same_outputs = _tensors(part, part.outputs) == _tensors(original, original.outputs)
        cut = bool(self.options.intermediate_tensors) or self.options.search_delegate  # no such pair is published
        return _tensors(part, part.inputs) == _tensors(original, original.inputs) and (same_outputs or cut)

    def _check_version(self, version: str | None) -> None:
        if self.version is not None and version is not None and not f"{version}.".startswith(f"{self.version}."):
            assert self.host is not None
            raise StageError(
                f"is version {version} of the compiler, and compile.compiler_version requires {self.version}",
                where=self.host.where,
            )

    def _check_tensors(self, original: Graph) -> None:
        names = {tensor.name for op in original.operators for tensor in original.output_tensors(op)}
        absent = [name for name in self.options.intermediate_tensors if name not in names]
        if absent:
            raise StageError(
                f"no operator computes a tensor {absent[0]!r}",
                where="compile.intermediate_tensors",
                hint="`check --json` lists the outputs of all operators",
            )


def _tensors(model: Graph, indices: Sequence[int]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(tensor.name, tensor.shape, tensor.dtype) for tensor in (model.tensors[index] for index in indices)]


def known_version(version: str | None, target: Target) -> str | None:
    """Return the target's name ("16.0") for a version as the compiler prints it; None for an unknown version."""
    short = re.match(r"[0-9]+\.[0-9]+", version or "")
    return short[0] if short and short[0] in target.compiler.runtimes else None
