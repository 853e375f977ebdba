"""Values as text: numbers with their units, measurements with their origin, plain values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from compress.core.measurement import Measurement, Measurements, Metric
from compress.report.blocks import Cell, joined
from compress.results.run import RunRecord
from deploy.contract.printable import UNPRINTABLE

MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
MAX_TEXT = 4000
"""Longer strings are cut in the pages; report.json has all of every string."""
MAX_OUTLINE_LINES = 400  # chosen; bounds the page
MAX_INLINE_ITEMS = 24  # chosen; about two lines
MAX_DEPTH = 12  # chosen; bounds the page
MAX_NAME = 60  # chosen; half a line of the page
MAX_PROSE = 300
"""Longest sentence in the pages."""

_CODE = re.compile(r"[_`/=]|\.\w")
"""Pattern of a name that has to be written as it is."""
_BYTE_UNITS = ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"))
_PREFIXES = ((1e9, " G"), (1e6, " M"))
#: Units that are part of the name of what is measured, and not said again.
_SILENT = {"fraction", "ratio", "MACs", "parameters", "samples", ""}


def clean(text: str) -> str:
    """Return a string without characters that a page cannot contain."""
    kept = "\n\t"
    return UNPRINTABLE.sub(lambda match: match[0] if match[0] in kept else "\ufffd", text.replace("\r\n", "\n"))


def cut(text: str) -> str:
    """Return a string of several lines, shortened if it is very long."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


def shorten(text: str, limit: int = MAX_NAME) -> str:
    """Return a string on one line with at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def sentence(text: str) -> str:
    """Return a text with a capital at the beginning, unless that is a name of a file or program, and a full stop."""
    first = text.split(maxsplit=1)[:1]
    if not _CODE.search("".join(first)):
        text = text[:1].upper() + text[1:]
    return text if text.endswith(("?", ".", "…")) else f"{text}."


def moment(text: str) -> str:
    """Return an ISO 8601 time in UTC without its seconds; other text unchanged."""
    return re.sub(r"^([\d-]+)T(\d\d:\d\d)[\d:.]*(Z|\+00:00)$", r"\1 \2 UTC", shorten(text, 40))


def noun(label: str) -> str:
    """Return a label for the middle of a sentence: accuracy, MACs, R²."""
    return label[:1].lower() + label[1:] if label[1:2].islower() else label


def count(number: int, thing: str) -> str:
    """Return a number with its noun: 1 run, 2 runs."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def first(names: Iterable[str], limit: int, separator: str = ", ") -> str:
    """Return the first `limit` names in one line, and the number of the others."""
    listed = [shorten(name) for name in names]
    if len(listed) > limit:
        listed[limit:] = [f"… {len(listed) - limit} more"]
    return separator.join(listed)


def metric(record: RunRecord, name: str) -> Metric:
    """Return the metric of a name; an unknown name becomes its label."""
    known = {metric.name: metric for metric in record.known_metrics}
    label = shorten(name.replace("_", " ").capitalize()) or "(no name)"
    return known.get(name) or Metric(name, label, "", f"{name}_ratio")


def names(record: RunRecord, maps: Iterable[Measurements]) -> list[str]:
    """Return the names of all measurements in some maps, the known metrics first and in their order."""
    present = {name for measurements in maps for name in measurements}
    known = [metric.name for metric in record.known_metrics if metric.name in present]
    return known + sorted(present - set(known))


def show(measurement: Measurement | None, name: str = "", absent: str = "not recorded") -> Cell:
    """Return a measurement as text.

    Args:
        measurement: from the record; None if the record has none.
        name: what is measured; `*_ratio` and `*_drop` are written in their own way.
        absent: the reason to give where the record has no measurement.
    """
    if measurement is None:
        return Cell("missing", style="missing", note=shorten(absent, MAX_PROSE))
    note = shorten(measurement.note, MAX_PROSE)
    if measurement.how == "missing":
        return Cell("missing", style="missing", note=note)
    value = measurement.value
    if value is None or not math.isfinite(value):
        return Cell("missing", style="missing", note=f"no finite value was recorded {note}".rstrip())
    unit = _unit(measurement, name)
    scale = _scale(value, unit)
    exact = f"{value:,.0f}{_suffix(unit)}" if scale.divisor != 1 else ""
    small = joined(" · ", interval(measurement, name), exact, measurement.how)
    return Cell(scale.digits(value, signed=_is_signed(name)) + scale.suffix, small, measurement.how, note)


def interval(measurement: Measurement, name: str = "") -> str:
    """Return the 95% interval of a measurement in its unit; empty if it has none."""
    scale = _scale(measurement.value or 0.0, _unit(measurement, name))
    ends = (measurement.low, measurement.high)
    low, high = ("" if end is None else scale.digits(end, signed=_is_signed(name)) for end in ends)
    if low and high:
        return f"[{low}, {high}]"
    if low:
        return f"≥ {low}"
    if high:
        return f"≤ {high}"
    return ""


def _unit(measurement: Measurement, name: str) -> str:
    return "ratio" if name.endswith("_ratio") else measurement.unit


def _is_signed(name: str) -> bool:
    return name.endswith(("_drop", "_increase", "_change"))


def _suffix(unit: str) -> str:
    return "" if unit in _SILENT else f" {unit}"


def number(value: float, unit: str) -> str:
    """Return a value with its unit: 0.984, 104.3 KiB, 1.18 M, 0.252 ms."""
    scale = _scale(value, unit)
    return scale.digits(value, signed=False) + scale.suffix


def span(low: float | None, high: float | None, unit: str) -> str:
    """Return an interval in words, "1.47 ms to 2.45 ms"; empty if an end is not known."""
    return "" if low is None or high is None else f"{number(low, unit)} to {number(high, unit)}"


def seconds(value: float | None) -> str:
    """Return a duration: 12.3 s, 2 min 05 s."""
    if value is None or not math.isfinite(value):
        return "not timed"
    if value < 99.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class _Scale(NamedTuple):
    """How a value is written: its divisor, the number of decimals, and the suffix."""

    divisor: float
    decimals: int
    suffix: str

    def digits(self, value: float, signed: bool) -> str:
        """Return the digits of a value, with its sign if `signed` or negative."""
        text = f"{value / self.divisor:{'+' if signed else ''},.{self.decimals}f}"
        if not any(digit in text for digit in "123456789"):
            text = text.lstrip("+-")
        return text.replace("-", MINUS)


def _scale(value: float, unit: str) -> _Scale:
    size = abs(value)
    if unit == "fraction":
        return _Scale(1, _decimals_of_fraction(size), "")
    if unit == "ratio":
        return _Scale(1, _decimals(size, 2 if size < 10 else 3), TIMES)
    if unit == "bytes":
        larger = [_Scale(divisor, 1, suffix) for divisor, suffix in _BYTE_UNITS if size >= divisor]
        return next(iter(larger), _Scale(1, 0, " bytes"))
    for divisor, prefix in _PREFIXES:
        if size >= divisor:
            return _Scale(divisor, 2, prefix + _suffix(unit))
    if float(value).is_integer() and unit != "ms":
        return _Scale(1, 0, _suffix(unit))
    return _Scale(1, _decimals(size, 3), _suffix(unit))


def _decimals_of_fraction(size: float) -> int:
    """Return 3, or more where three decimals would show a 0 or a 1 that the value is not."""
    decimals = 3
    while decimals < 6 and float(f"{size:.{decimals}f}") in (0, 1) and size not in (0, 1):
        decimals += 1
    return decimals


def _decimals(size: float, digits: int) -> int:
    """Return the number of decimals of a value of this size for `digits` significant digits."""
    return 0 if size == 0 else max(0, min(6, digits - 1 - math.floor(math.log10(size))))


def scalar(value: object) -> str:
    """Return a plain value on one line."""
    if value is None:
        return "not recorded"
    if value == "":
        return "empty"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping | list | tuple):
        return shorten(", ".join(line.strip() for line in _lines(value, 0)), MAX_PROSE)
    return shorten(str(value), MAX_PROSE)


def outline(value: Any) -> str:
    """Return plain values like YAML; empty for an empty value, cut if it is very long."""
    if not value:
        return ""
    lines = list(islice(_lines(value, 0), MAX_OUTLINE_LINES + 1))
    if len(lines) > MAX_OUTLINE_LINES:
        lines[-1] = "… the rest is in report.json"
    return "\n".join(lines)


def _lines(value: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if depth > MAX_DEPTH:
        yield f"{indent}… deeper values are in report.json"
    elif _is_inline(value):
        yield f"{indent}{_inline(value)}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            name = f"{indent}{_plain(str(key))}:"
            if _is_inline(item):
                yield f"{name} {_inline(item)}"
            else:
                yield name
                yield from _lines(item, depth + 1)
    else:
        for item in value:
            start, *rest = islice(_lines(item, depth + 1), MAX_OUTLINE_LINES)
            yield f"{indent}- {start.lstrip()}"
            yield from rest


def _is_inline(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(not isinstance(item, Mapping | list | tuple) for item in value)
    return not isinstance(value, Mapping) or not value


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return f"[{first(map(_inline, value), MAX_INLINE_ITEMS)}]"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else _plain(str(value))


def _plain(text: str) -> str:
    """Return a string on one line, quoted if YAML would read it differently."""
    line = shorten(text, 400)
    return line if line and line == text and not set(line) & set(":#[]{},\"'") else f'"{line}"'


def absence(record: RunRecord) -> str:
    """Return the reason why a part of the record is missing."""
    if record.status == "failed":
        return f"the run failed{in_stage(record)} before this step"
    if record.status == "interrupted":
        return f"the run was interrupted{in_stage(record)} before this step"
    return "not part of this run"


def in_stage(record: RunRecord) -> str:
    """Return where a run failed, for the middle of a sentence; empty if it is not known."""
    return f" in stage “{shorten(record.failed_stage)}”" if record.failed_stage else ""
