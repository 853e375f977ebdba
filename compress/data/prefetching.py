"""Decoding of samples by several threads, into memory or into a file."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray

from compress.core.progress import SILENT, Phase, Progress
from compress.data.source import LEAVE_OUT, CorruptError, several

WORKERS = min(os.cpu_count() or 1, 8)
CHUNK = 16
"""Number of samples that a thread decodes at a time."""
AHEAD = 4
"""Number of chunks for each thread that may be waiting."""
READING = Phase("reading the data", unit="sample")
Read = Callable[[int], NDArray[Any]]
Put = Callable[[int, NDArray[Any]], None]


def decode(read: Read, count: int, put: Put, progress: Progress = SILENT, hint: str = LEAVE_OUT) -> None:
    """Decode samples 0 to `count` in parallel, and pass them on in order.

    Args:
        read: decodes one sample; several threads call it at once.
        count: the number of samples.
        put: receives index and sample, in this thread.
        progress: the receiver of progress reports.
        hint: advice for several corrupt samples.

    Raises:
        CorruptError: samples are corrupt; the message has their number and names.
    """
    problems = corrupt(read, count, put, progress)
    if problems:
        raise several([error for _, error in problems], hint)


def decoded(read: Read, count: int, progress: Progress = SILENT, hint: str = LEAVE_OUT) -> list[NDArray[Any]]:
    """Return samples 0 to `count`; arguments and errors as in `decode`."""
    samples: list[NDArray[Any]] = []
    decode(read, count, lambda index, sample: samples.append(sample), progress, hint)
    return samples


def corrupt(
    read: Read, count: int, put: Put | None = None, progress: Progress = SILENT
) -> list[tuple[int, CorruptError]]:
    """Decode samples, pass them on until one is unreadable, and return the errors of all unreadable samples."""
    problems: list[tuple[int, CorruptError]] = []
    with (
        progress.phase(READING),
        warnings.catch_warnings(action="ignore"),  # decoders warn often; threads share the filters, so it is set here
        contextlib.redirect_stdout(sys.stderr),  # a user's function may print, and stdout is for results
        ThreadPoolExecutor(WORKERS) as pool,
        contextlib.closing(_chunks(read, count, pool)) as chunks,
    ):
        for begin, samples in chunks:
            for index, sample in enumerate(samples, begin):
                if isinstance(sample, CorruptError):
                    problems.append((index, sample))
                elif put and not problems:
                    put(index, sample)
            progress.update(min(begin + CHUNK, count), count)
    return problems


def _chunks(
    read: Read, count: int, pool: ThreadPoolExecutor
) -> Generator[tuple[int, list[NDArray[Any] | CorruptError]]]:
    """Yield decoded samples in order with the index of the first, while a limited number of chunks is in progress."""
    pending: deque[tuple[int, Future[list[NDArray[Any] | CorruptError]]]] = deque()
    try:
        for start in range(0, count, CHUNK):
            pending.append((start, pool.submit(_chunk, read, start, min(start + CHUNK, count))))
            if len(pending) >= AHEAD * WORKERS:
                begin, future = pending.popleft()
                yield begin, future.result()
        while pending:
            begin, future = pending.popleft()
            yield begin, future.result()
    finally:
        for _, future in pending:
            future.cancel()


def _chunk(read: Read, start: int, end: int) -> list[NDArray[Any] | CorruptError]:
    results: list[NDArray[Any] | CorruptError] = []
    for index in range(start, end):
        try:
            results.append(read(index))
        except CorruptError as error:
            results.append(error)
    return results
