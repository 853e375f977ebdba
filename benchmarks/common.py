"""What several benchmarks share: results that are kept, intervals, the commit of the project, and Markdown tables."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import repository  # noqa: F401 - the search path

import numpy as np
from numpy.typing import NDArray

from deploy.contract.durable_files import write_atomically

DRAWS = 10_000
"""Resamples of an interval: its bounds repeat to the fourth digit."""


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a result file, or the result of `make` if there is no file.

    The file is not written if its name contains "dirty", which is in `commit()` after uncommitted changes.
    """
    if path.exists():
        return dict(json.loads(path.read_text(), object_hook=_arrays))
    result = make()
    if "dirty" not in path.name:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(result, default=lambda array: array.tolist()).encode())
    return result


def _arrays(row: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(value, bool) if name in ("hits", "float") else value for name, value in row.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress stderr and warnings: the progress bars and advice of the tools."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def commit() -> str:
    """Return the commit of the project, with "-dirty" if there are uncommitted changes outside of results/."""

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!results")
    return git("describe", "--always") + ("-dirty" if changed else "")


def interval(differences: NDArray[Any]) -> tuple[float, float]:
    """Return the 95% interval of the mean, by resampling the samples (bootstrap)."""
    values, counts = np.unique(differences, return_counts=True)
    total = counts.sum()
    means = np.random.default_rng(0).multinomial(total, counts / total, DRAWS) @ values / total
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
