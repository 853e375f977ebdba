"""The process that runs trials, seen from both ends.

TensorFlow takes 10 s to import, and does not give all memory back. So one process runs many trials; after a crash, and
after TRIALS_PER_PROCESS, the next trial gets a new process. Requests and answers are lines of JSON in pipes. The
process ends with its parent, which renews the heartbeat of the trial while TensorFlow is busy here.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Literal

from compress.core.errors import CorallineError, StageError, StoreError
from compress.core.files import explain
from compress.data.dataset import Dataset
from compress.pipeline import runner, schema
from compress.pipeline.execution import LOG, Monitor, PipelineRun
from compress.pipeline.search.early_stop import reason_to_stop
from compress.pipeline.search.goals import Goals
from compress.pipeline.search.trial import PipelineTrial, models_of
from compress.pipeline.shared_store import store_in
from compress.pipeline.store import Store
from compress.pipeline.yaml_file import Document
from compress.results.encoding import decode, encode
from compress.results.run import RunRecord
from compress.results.search import TrialRecord

TRIALS_PER_PROCESS = 20
"""Trials of one process; chosen: its start of 10 s is then a small part of 20 trials, and its memory stays bounded."""
FIRST_HINT = "its last lines on stderr say why"
PATIENCE_S = 30.0
"""Time for a process to end after it was interrupted."""
WorkKind = Literal["trial", "front"]
Open = Callable[[Path, str], AbstractContextManager[Monitor]]
"""Opens the display of one piece of work, from its log file and its title."""


@dataclass(frozen=True)
class WorkRequest:
    """One piece of work for the process.

    Attributes:
        kind: "trial": the models on the validation split; "front": the complete run with its report.
        path: the pipeline file; paths in the content are relative to its folder.
        content: the content of the pipeline file.
        out: the folder with the store.
        folder: the folder for the results of the run.
        title: its name in messages.
        goals: what decides whether a trial goes on after each stage; None for a complete run.
        seen: the trials so far, which the decision takes into account.
    """

    kind: WorkKind
    path: str
    content: Mapping[str, Any]
    out: str
    folder: str
    title: str
    goals: Goals | None = None
    seen: tuple[TrialRecord, ...] = ()


def trial_record(number: int, settings: Mapping[str, Any], result: Mapping[str, Any], took_s: float) -> TrialRecord:
    """Return the record of a trial from the result of `WorkerProcess.run`."""
    failed = TrialRecord(number, "failed", reason=result.get("failed", ""))
    record = failed if "failed" in result else decode(TrialRecord, result["done"])
    return replace(record, number=number, settings=settings, seconds=round(took_s, 3))


class _CrashError(StageError):
    """The process of a trial ended without an answer."""


class WorkerProcess:
    """The process that runs trials; it starts with the first of them.

    Args:
        command: the program.
        environment: its environment variables; None for those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = False
        self._done = 0

    def run(self, request: WorkRequest) -> dict[str, Any]:
        """Run one piece of work, and return its result, with one of the keys "done" and "failed".

        Raises:
            StageError: the process cannot start.
            StoreError: a file could not be written: a full disk, with which other work would fail, too.
            KeyboardInterrupt: this process was interrupted, or the other one. The work is over.
        """
        try:
            process = self._started()
            self._done += 1
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # then there is no answer
                line = json.dumps({**encode(replace(request, content={})), "content": request.content})
                process.stdin.write(line + "\n")
                process.stdin.flush()
            result = self._received(process)
        except _CrashError as error:
            return {"failed": str(error)}
        except KeyboardInterrupt:
            self.interrupt()
            raise
        if "interrupted" in result:
            raise KeyboardInterrupt
        if result.get("exit_code") == StoreError.exit_code:
            raise StoreError(result["failed"])
        return result

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._done >= TRIALS_PER_PROCESS:
            self.close()
        if self._process is None or self._process.poll() is not None:
            self._done, self._is_ready = 0, False
            # Ctrl-C in a terminal goes to its own session only: `interrupt` passes it on.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
            try:
                self._received(self._process)
            except _CrashError as error:
                raise StageError(f"{error.what} before its first trial", where="search", hint=FIRST_HINT) from error
            self._is_ready = True
        return self._process

    def _received(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Return the next message."""
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.endswith("\n"):
            raise self._crashed(process)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _crashed(self, process: subprocess.Popen[str]) -> _CrashError:
        code = process.wait()
        self.close()
        if code == -signal.SIGKILL:
            hint = "the system ends a process when memory is short: see the setting batch_size"
            return _CrashError("the process of the trial was killed (signal 9)", hint=hint)
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return _CrashError(f"the process of the trial ended with {cause}", hint="its output is in the log")

    def interrupt(self) -> None:
        """Interrupt the work, as Ctrl-C does, and wait for its end."""
        try:
            if self._process is not None and self._is_ready and self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(PATIENCE_S)
        finally:  # a second Ctrl-C does not wait
            self.close()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def serve(display: Open, location: str | None = None) -> None:
    """Run the work that is asked for on stdin, in the new process. Other output goes to stderr.

    Args:
        display: opens the display of one piece of work.
        location: the shared store, if there is one.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, lines), daemon=True).start()
    _send(answers, {"ready": True})

    @cache  # a shared store that is away later must not end the search
    def store_of(out: str) -> Store:
        store = store_in(Path(out), location)
        store.prepare()
        return store

    data: dict[str, Dataset] = {}
    try:
        while True:
            request = decode(WorkRequest, json.loads(lines.get()))
            _send(answers, _result(request, store_of, display, data))
    except KeyboardInterrupt:
        _send(answers, {"interrupted": True})


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Pass lines on; end this process when the one that started it has ended."""
    for line in stream:
        lines.put(line)
    os._exit(0)


def _send(stream: IO[str], message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _result(
    request: WorkRequest, store_of: Callable[[str], Store], display: Open, data: dict[str, Dataset]
) -> dict[str, Any]:
    """Return the result of one piece of work; an error is a result, too. Decoded samples stay for the next one."""
    folder = Path(request.folder)
    try:
        with display(folder / LOG, request.title) as monitor:
            pipeline = schema.check(Document(Path(request.path), request.content, {}))
            if pipeline.data.digest not in data:
                data.clear()  # the samples of one size, in case that varies
            pipeline = replace(pipeline, data=data.setdefault(pipeline.data.digest, pipeline.data))
            if request.kind == "front":
                # The results of an earlier command stay if this one is interrupted.
                record = runner.run(
                    pipeline, folder.parent, monitor, store=store_of(request.out), reports_interruption=False
                )
                return {"done": _run_facts(record)}
            assert request.goals is not None
            judge = partial(reason_to_stop, goals=request.goals, trials=request.seen)
            session = PipelineRun(models_of(pipeline), store_of(request.out), folder=folder, monitor=monitor)
            return {"done": encode(PipelineTrial(session, judge).run())}
    except CorallineError as error:
        return {"failed": str(error), "exit_code": error.exit_code}
    except OSError as error:
        failure = explain(error, request.title)
        return {"failed": str(failure), "exit_code": failure.exit_code}


def _run_facts(record: RunRecord) -> dict[str, Any]:
    """Return what the front shows of a complete run."""
    assert record.models is not None
    return {
        "files": list(record.outputs),
        "test": record.models.result.measurements[record.quality.name].to_json(),
        "verdict": "" if record.verdict is None else record.verdict.level,
    }
