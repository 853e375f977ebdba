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
from compress.targets.base import CompilerSettings, Target
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


def arguments(settings: CompilerSettings) -> tuple[str, ...]:
    """Return the arguments that the result depends on, always in the same order: part of the cache key.

    The table of operators (`-s`) is always requested.
    """
    chosen = {
        ("-a",): settings.all_subgraphs,
        ("-d",): settings.search_delegate,
        ("-i", ",".join(settings.intermediate_tensors)): bool(settings.intermediate_tensors),
        ("-m", str(settings.min_runtime_version)): settings.min_runtime_version is not None,
        ("-n", str(settings.num_segments)): settings.num_segments > 1,
    }
    return ("-s", *(part for argument, is_set in chosen.items() if is_set for part in argument))


def output_names(settings: CompilerSettings) -> tuple[str, ...]:
    """Return the names of the files that the compiler writes for model.tflite."""
    if settings.num_segments == 1:
        return (MODEL_COMPILED,)
    return tuple(SEGMENT_COMPILED.format(index, settings.num_segments) for index in range(settings.num_segments))


def find_compiler(settings: CompilerSettings, name: str, folder: Path | None) -> Host | None:
    """Return the compiler's host from the settings, or from PATH; None if the compiler is not found.

    Nothing is run or verified, because a cached result may make the compiler unnecessary.

    On this machine, the compiler works in `folder`, or in the system's folder for temporary files if it is None.
    """
    if settings.docker is not None:
        return Docker(settings.docker, name)
    if settings.ssh is not None:
        return Ssh(settings.ssh, name)
    if settings.compiler is not None:  # a bare name would be looked for on PATH
        return Local(Path(settings.compiler).expanduser().absolute(), folder)
    program = shutil.which(name)
    return Local(Path(program), folder) if program else None


def cache_of(settings: CompilerSettings) -> Cache | None:
    """Return the cache of results; None without one."""
    return Cache(Path(settings.cache).expanduser()) if settings.cache is not None else None


def identity(settings: CompilerSettings, name: str) -> dict[str, str]:
    """Return the compiler's identity; without a compiler, the content of the cache."""
    host, cache = find_compiler(settings, name, None), cache_of(settings)
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
        usual: the version of cached results if the settings require none.
    """

    host: Host | None
    settings: CompilerSettings
    usual: str

    @property
    def cache(self) -> Cache | None:
        """The cache of results; None without one."""
        return cache_of(self.settings)

    def compile(self, model: bytes, note: Callable[[str], None]) -> Compiled | None:
        """Compile a model; return None without a compiler and a cached result.

        `note` shows progress, and the complete output of a failed compiler.

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
        version = self.settings.compiler_version or self.usual
        entries = self.cache.find(model, arguments(self.settings), version, output_names(self.settings), note)
        return [(path, outcome) for path, outcome in entries if path.name.endswith(f"-{parse(outcome.log)[0].version}")]

    def _run(self, model: bytes, original: Graph, note: Callable[[str], None]) -> Compiled:
        """Run the compiler until it succeeds, or fails with a permanent error."""
        assert self.host is not None
        limit = self.settings.child_timeout_s
        options = (*arguments(self.settings), *(("-t", str(limit)) if limit is not None else ()))
        for attempt in itertools.count(1):
            outcome = self.host.run(model, options, output_names(self.settings), self.settings.timeout_s)
            self._check_version(parse(outcome.log)[0].version)
            judged = self._judge(outcome, original)
            if isinstance(judged, ModelError):
                note(outcome.log)
                raise StageError(f"the compiled model is invalid: {judged}", where=self.host.where)
            if isinstance(judged, Compiled) or judged.certain:
                self._keep(model, outcome, note)
            if isinstance(judged, Compiled):
                return judged
            if not judged.flaky or attempt > self.settings.retries:
                note(outcome.log)
                raise judged.error(self.host.where)
            note(f"the compiler failed ({judged.what}); retry, attempt {attempt + 1} of {self.settings.retries + 1}")
        raise AssertionError

    def _keep(self, model: bytes, outcome: CompilerRun, note: Callable[[str], None]) -> None:
        if self.cache is None:
            return
        try:
            self.cache.keep(model, arguments(self.settings), parse(outcome.log)[0].version, outcome)
        except StoreError as error:  # the result is usable without the cache
            note(str(error))

    def _judge(self, outcome: CompilerRun, original: Graph) -> Compiled | Failure | ModelError:
        """Return a valid result, a failure, or the error in the compiled model."""
        if outcome.exit_code != 0 or not outcome.files.keys() >= set(output_names(self.settings)):
            return failures.recognize(outcome, original)
        reports = parse(outcome.log)
        try:
            parts = [graph.parse(outcome.files[name], name) for name in output_names(self.settings)]
            custom = [part for part in parts if part.custom_operators(OPERATOR)]
            if not custom and not any(report.mapped for report in reports):
                return failures.nothing_mapped(outcome, self.settings.min_runtime_version)
            for part in custom or parts:
                inspection.inspect_graph(part)
        except ModelError as error:
            return error
        if len(parts) == 1:
            # In 29 of 29 published compiled models, none of which was divided, the inputs and outputs are those of the
            # original model.
            cut = bool(self.settings.intermediate_tensors) or self.settings.search_delegate
            same_inputs = _tensors(parts[0], parts[0].inputs) == _tensors(original, original.inputs)
            same_outputs = _tensors(parts[0], parts[0].outputs) == _tensors(original, original.outputs)
            if not same_inputs or not (same_outputs or cut):
                return ModelError(
                    "the compiled model has other inputs or outputs than the original: it is another model"
                )
        return Compiled(outcome.log, reports, outcome.files)

    def _check_version(self, version: str | None) -> None:
        required = self.settings.compiler_version
        if required is not None and version is not None and not f"{version}.".startswith(f"{required}."):
            assert self.host is not None
            raise StageError(
                f"is version {version} of the compiler, and compile.compiler_version requires {required}",
                where=self.host.where,
            )

    def _check_tensors(self, original: Graph) -> None:
        names = {tensor.name for op in original.operators for tensor in original.output_tensors(op)}
        absent = [name for name in self.settings.intermediate_tensors if name not in names]
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
