"""Counters, gauges and histograms as text that Prometheus reads.

The format is version 0.0.4 of "Exposition formats" in the documentation of Prometheus. Nothing here
is thread-safe: one thread counts and writes (in `serve`, the one of the sockets).
Runs on Python 3.7 with the standard library alone.
"""

from __future__ import annotations

import bisect
import math
from typing import Dict, Iterable, List, Mapping, Sequence, Tuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of a histogram of times."""
Labels = Tuple[Tuple[str, str], ...]


class Counter:
    """What only grows; one number for each set of labels. Also used for gauges, which are set.

    Args:
        name: as Prometheus sees it, with its unit.
        text: what it counts.
        kind: `counter` or `gauge`.
    """

    def __init__(self, name: str, text: str, kind: str = "counter") -> None:
        self.name, self.text, self.kind = name, text, kind
        self.values: Dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Counts."""
        key = tuple(sorted(labels.items()))
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self.values[tuple(sorted(labels.items()))] = value

    def total(self) -> float:
        """The sum over all labels."""
        return sum(self.values.values())

    def lines(self) -> Iterable[str]:
        """Its part of the text."""
        yield from _head(self.name, self.text, self.kind)
        for labels, value in sorted(self.values.items()):
            yield "%s%s %s" % (self.name, _labels(dict(labels)), _number(value))


class Histogram:
    """How often a value was up to each of some bounds.

    Args:
        name: as Prometheus sees it, with its unit.
        text: what is measured.
        bounds: upper ends, ascending; infinity is added.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float] = SECONDS) -> None:
        self.name, self.text, self.bounds = name, text, tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Takes one value in."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> Iterable[str]:
        """Its part of the text."""
        yield from _head(self.name, self.text, "histogram")
        total = 0
        for bound, count in zip(self.bounds + (math.inf,), self.counts):
            total += count
            yield '%s_bucket{le="%s"} %d' % (self.name, _number(bound), total)
        yield "%s_sum %s" % (self.name, _number(self.sum))
        yield "%s_count %d" % (self.name, total)


def text(families: Iterable[object]) -> bytes:
    """All of it, as the answer to a scrape."""
    lines: List[str] = []
    for family in families:
        lines.extend(family.lines())  # type: ignore[attr-defined]
    return ("\n".join(lines) + "\n").encode()


def _head(name: str, explanation: str, kind: str) -> Iterable[str]:
    yield "# HELP %s %s" % (name, explanation.replace("\\", r"\\").replace("\n", r"\n"))
    yield "# TYPE %s %s" % (name, kind)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{%s}" % ",".join('%s="%s"' % pair for pair in escaped.items())


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "%d" % value if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
