"""`run`: a pipeline file as a function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from compress.core.artifact import MODEL_TFLITE
from compress.core.measurement import Measurement
from compress.core.progress import SILENT, Progress, RunStep
from compress.results.run import RunRecord

FilePath = str | PathLike[str]


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        status: "ok", "over budget" or "not usable".
        folder: the folder with the report and the models.
        original: measurements of the original model by name, such as "accuracy", "size_bytes", "latency_ms".
        result: the same of the last model.
        record: the run record; `record.to_json()` is the content of report.json.
    """

    status: str
    folder: Path
    original: Mapping[str, Measurement]
    result: Mapping[str, Measurement]
    record: RunRecord

    @classmethod
    def of(cls, record: RunRecord, folder: Path) -> RunResult:
        """Return the result of a run from its record."""
        if record.models is None:
            return cls(record.status, folder, {}, {}, record)
        original, result = record.models.original, record.models.result
        return cls(record.status, folder, original.measurements, result.measurements, record)

    @property
    def report(self) -> Path:
        """The path of report.html."""
        return self.folder / "report.html"

    @property
    def model(self) -> Path | None:
        """The path of the .tflite file; None if no stage wrote one."""
        return self._output(MODEL_TFLITE)

    @property
    def bundle(self) -> Path | None:
        """The path of the bundle; None without the stage `package`."""
        return self._output(f"{self.record.name}.coralline")

    def _output(self, name: str) -> Path | None:
        return self.folder / name if name in self.record.outputs else None


def run(
    pipeline: FilePath, *, out: FilePath = "runs", force: Sequence[str] = (), store: str | None = None
) -> RunResult:
    """Run a pipeline file, and write the report and the models to `out/<name of the pipeline>`.

    Stages whose settings, data and tools have not changed are taken from `out/.store`.

    Args:
        pipeline: the YAML file.
        out: the folder for the results.
        force: ids of stages to re-run.
        store: shares results with other machines, a folder or "s3://BUCKET/PREFIX": docs/search.md.

    Returns:
        The measurements and the paths. A result that is over the budget or degenerate is not an error: see `status`.

    Raises:
        PipelineError: the file is wrong, or `force` names a stage that it does not have.
        CorallineError: a stage failed; the report says where.
    """
    from compress.core.errors import PipelineError
    from compress.pipeline import runner, schema
    from compress.pipeline.execution import LOG
    from compress.pipeline.shared_store import store_in

    checked = schema.load(Path(pipeline))
    if checked.head.recipe is not None:
        hint = "run the file with `python -m compress`, or write the stages"
        raise PipelineError("`recipe: auto` is for the command line", where=str(pipeline), hint=hint)
    known = [step.id for step in checked.steps]
    for name in force:
        if name not in known:
            raise PipelineError(f"force: unknown stage {name!r}", where=str(pipeline), allowed=", ".join(known))
    folder = Path(out) / checked.head.name
    shared = store_in(Path(out), store)
    record = runner.run(checked, Path(out), SilentMonitor(folder / LOG), frozenset(force), shared)
    return RunResult.of(record, folder)


class SilentMonitor:
    """A `compress.pipeline.execution.Monitor` that shows nothing, and writes tracebacks to a log file.

    Attributes:
        path: the log file; text is appended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def working(self, job: RunStep) -> Iterator[Progress]:
        """Yield a progress that shows nothing."""
        del job
        yield SILENT

    def done(self, title: str, status: str, seconds: float | None, remark: str = "") -> None:
        """Show nothing."""

    def log(self, text: str) -> None:
        """Append text to the log file."""
        with suppress(OSError):  # a full disk must not hide the error that is logged
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text.rstrip() + "\n")
