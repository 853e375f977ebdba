"""The key `search` of a pipeline file. `compress.pipeline.search` uses it; an ordinary run ignores it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from compress.core.settings import Settings

MAX_SETTINGS = 100
"""Settings of one search."""


class SearchSettings(Settings):
    """The settings that `python -m compress search` tries. An ordinary run ignores them."""

    trials: Annotated[int, Field(ge=1, le=100_000)] = 60
    """Number of trials, failed and stopped ones included."""
    objectives: Annotated[tuple[str, ...], Field(max_length=3)] = ()
    """One to three quantities to improve: a metric of the task, latency_ms (predicted for `measure.host`),
    streamed_bytes, size_bytes, compressed_bytes, macs or parameters. By default the task's first metric, and
    latency_ms where the target predicts it, otherwise size_bytes."""
    constraints: dict[str, float | bool] = {}
    """Constraints on the result: `mapped_whole: true`, `fits_cache: true`, a limit of a cost, or the least value of a
    metric (the largest, if less is better)."""
    settings: Annotated[dict[str, Any], Field(min_length=1, max_length=MAX_SETTINGS)]
    """The settings to vary, by name (`prune.keep`, `model.width`, `stages`): a list of choices, or a range
    `{from: 0.3, to: 0.9}`, optionally with `step` or `log: true`."""
