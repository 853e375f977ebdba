"""The report of a run, computed from its record alone: report.html, report.json and report.md.

Here is how things are worded: numbers with their origin, the verdict, what a failed run
leaves valid. `html` and `markdown` arrange the words, `charts` draws.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from compress.report import answers
from compress.report.json_values import decode
from compress.report.record import AnswersOfModels, RunRecord

Plain = Mapping[str, Any]

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
MAX_TEXT = 4000
"""Longer strings are cut in the pages; report.json has all of every string."""
MAX_OUTLINE_LINES, MAX_INLINE_ITEMS = 400, 24

#: What has no place in a page: control characters, characters that turn the direction of the
#: text around (https://trojansource.codes), halves of surrogate pairs, and noncharacters.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)

LABELS = {
    "accuracy": "Accuracy",
    "ap": "Average precision",
    "ap50": "Average precision at IoU 0.5",
    "r2": "R²",
    "mae": "Mean absolute error",
    "size_bytes": "Size",
    "compressed_bytes": "Compressed size",
    "macs": "MACs",
    "macs_ratio": "MACs ratio",
    "parameters": "Parameters",
    "latency_ms": "Latency, median",
    "latency_p90_ms": "Latency, p90",
    "latency_p99_ms": "Latency, p99",
}
#: Which comparison belongs to which measurement of the two models.
CHANGES = {"accuracy": "accuracy_drop", "size_bytes": "size_ratio", "macs": "macs_ratio", "latency_ms": "latency_ratio"}
CHANGES |= {"ap": "ap_drop", "ap50": "ap50_drop"}
CHANGES |= {"r2": "r2_drop", "mae": "mae_increase"}
QUALITY = ("accuracy", "ap", "ap50", "r2", "mae")
#: Units that are part of the name of what is measured, and not said again.
_SILENT = {"fraction", "ratio", "MACs", "parameters", "samples", ""}


def render(record: RunRecord) -> dict[str, bytes]:
    """The report's files, by name; the same record gives the same bytes.

    Args:
        record: the run record. Strings in it are not trusted.

    Returns:
        report.html (one file that needs nothing else), report.json (the record) and report.md.
    """
    from compress.report import html, markdown

    plain = record.to_json()
    shown = tidy(plain)
    exact = json.dumps(tidy(plain, text=str), indent=2, allow_nan=False) + "\n"
    return {
        "report.html": html.page(shown).encode(),
        "report.json": exact.encode(),
        "report.md": markdown.summary(shown).encode(),
    }


def clean(text: str) -> str:
    """Return a string without characters that a page cannot contain, shortened."""
    text = _UNFIT.sub("\ufffd", text.replace("\r\n", "\n"))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


def tidy(value: Any, text: Callable[[str], str] = clean) -> Any:
    """Return plain values with every string passed through `text`, and None for infinity and NaN."""
    if isinstance(value, Mapping):
        return {text(str(key)): tidy(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tidy(item, text) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    return text(str(value))


def shorten(text: str, limit: int) -> str:
    """Return a string on one line with at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


@dataclass(frozen=True)
class Shown:
    """A measurement as text.

    Attributes:
        text: the number with its unit; "missing" if there is none.
        interval: the 95% interval, or nothing.
        full: the number with all its digits, where `text` has been scaled.
        how: measured, predicted or missing.
        note: conditions; for a missing number why it is missing.
    """

    text: str
    interval: str
    full: str
    how: str
    note: str

    @property
    def fine(self) -> str:
        """The small text next to the value."""
        if self.how == "missing":
            return self.note
        return " · ".join(part for part in (self.interval, self.full, self.how) if part)


def show(measurement: Plain | None, name: str = "", absent: str = "not recorded") -> Shown:
    """Return a measurement as text.

    Args:
        measurement: from the record; None if the record has none.
        name: what is measured; `*_ratio` and `*_drop` are written in their own way.
        absent: the reason to give where the record has no measurement.
    """
    m = measurement or {}
    value, unit = m.get("value"), str(m.get("unit") or "")
    note = str(m.get("note") or "")
    if value is None or m.get("how") == "missing":
        reason = note if m.get("how") == "missing" and note else f"no finite value was recorded {note}".rstrip()
        return Shown("missing", "", "", "missing", reason if m else absent)
    unit, signed = (
        ("ratio", False) if name.endswith("_ratio") else (unit, name.endswith(("_drop", "_increase", "_change")))
    )
    step, decimals, suffix = _scale(value, unit)
    ends = (m.get("low"), m.get("high"))
    low, high = ("" if end is None else _digits(end / step, decimals, signed) for end in ends)
    interval = f"[{low}, {high}]" if low and high else f"≥ {low}" if low else f"≤ {high}" if high else ""
    full = f"{value:,.0f} {'' if unit in _SILENT else unit}".rstrip() if step != 1 else ""
    how = str(m.get("how") or "origin not recorded")
    return Shown(_digits(value / step, decimals, signed) + suffix, interval, full, how, note)


def number(value: float, unit: str, *, signed: bool = False) -> str:
    """Return a value with its unit: 0.984, 104.3 KiB, 1.18 M, 0.252 ms."""
    step, decimals, suffix = _scale(value, unit)
    return _digits(value / step, decimals, signed) + suffix


def seconds(value: float | None) -> str:
    """Return a duration: 12.3 s, 2 min 05 s."""
    if value is None:
        return "not timed"
    if value < 99.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _digits(value: float, decimals: int, signed: bool) -> str:
    text = f"{value:{'+' if signed else ''},.{decimals}f}"
    if not any(digit in text for digit in "123456789"):
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def _scale(value: float, unit: str) -> tuple[float, int, str]:
    """Return the divisor of a value, its number of decimals, and its suffix."""
    size = abs(value)
    if unit == "bytes":
        for step, suffix in ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB")):
            if size >= step:
                return step, 1, suffix
        return 1, 0, " bytes"
    behind = TIMES if unit == "ratio" else "" if unit in _SILENT else f" {unit}"
    if unit == "fraction":
        decimals = 3  # more where three would make a nought or a one of what is neither
        while decimals < 6 and float(f"{size:.{decimals}f}") in (0, 1) and size not in (0, 1):
            decimals += 1
        return 1, decimals, behind
    if size >= 1e6:
        return (1e9, 2, f" G{behind}") if size >= 1e9 else (1e6, 2, f" M{behind}")
    if size == 0 or (float(value).is_integer() and unit not in ("ratio", "ms")):
        return 1, 0, behind
    digits = 2 if unit == "ratio" and size < 10 else 3
    return 1, max(0, min(6, digits - 1 - math.floor(math.log10(size)))), behind


def label(name: str) -> str:
    """Return the text for the name of a measurement."""
    return LABELS.get(name) or shorten(name.replace("_", " ").capitalize(), 60) or "(no name)"


def names(maps: Iterable[Plain | None]) -> list[str]:
    """Return the names of all measurements in some maps, the known ones first and in their order."""
    known = dict.fromkeys(name for measured in maps for name in measured or ())
    return [name for name in LABELS if name in known] + [name for name in known if name not in LABELS]


def measurements(record: Plain, which: str) -> Plain | None:
    """Return the measurements of the `original` or the `result`; None if the run did not produce that model."""
    model = (record.get("models") or {}).get(which)
    return None if model is None else model.get("measurements") or {}


def quality(record: Plain) -> str:
    """Return the name of the quality measurement: accuracy, or ap for detectors."""
    known = names(stage.get("measurements") for stage in record.get("stages") or ())
    return next((name for name in QUALITY if name in known), "accuracy")


def comparisons(record: Plain) -> Plain:
    """Return the measurements that compare result and original; empty if there are none."""
    return (record.get("comparison") or {}).get("measurements") or {}


@dataclass(frozen=True)
class BeforeAfter:
    """A row of the comparison: three measurements, and the name that determines the format of the third."""

    name: str
    before: Plain | None
    after: Plain | None
    change: Plain | None
    change_name: str


def changes(record: Plain) -> list[BeforeAfter]:
    """Return every measurement of the two models with its ratio or drop."""
    before, after, compared = measurements(record, "original"), measurements(record, "result"), comparisons(record)
    rows = []
    for name in names((before, after)):
        one, two = (before or {}).get(name), (after or {}).get(name)
        change_name = CHANGES.get(name, f"{name}_ratio")
        change = compared.get(change_name)
        if change is None and name not in QUALITY:
            change = derived(one, two, ratio=True)
        rows.append(BeforeAfter(name, one, two, change, change_name))
    return rows


def derived(before: Plain | None, after: Plain | None, *, ratio: bool) -> Plain:
    """Return result divided by original, or their difference. It is measured only if both are."""
    one, two = (before or {}).get("value"), (after or {}).get("value")
    unit = "ratio" if ratio else "fraction"
    if one is None or two is None or (ratio and one == 0):
        why = "the original is 0" if one == 0 else "a value is missing"
        return {"value": None, "unit": unit, "how": "missing", "note": why}
    sure = all((m or {}).get("how") == "measured" for m in (before, after))
    how, note = "measured" if sure else "predicted", "result divided by original" if ratio else ""
    return {"value": two / one if ratio else two - one, "unit": unit, "how": how, "note": note}


def culprit(record: Plain) -> str:
    """Return the id of the stage that failed, or an empty string."""
    return str((record.get("error") or {}).get("stage") or "")


def absence(record: Plain) -> str:
    """Return the reason why a part of the record is missing."""
    where = f" in stage “{shorten(culprit(record), 60)}”" if culprit(record) else ""
    if record.get("status") == "failed":
        return f"the run failed{where} before this step"
    if record.get("status") == "interrupted":
        return f"the run was interrupted{where} before this step"
    return "not part of this run"


def verdict(record: Plain, quote: Callable[[str], str] = "“{}”".format, prose: Callable[[str], str] = str) -> str:
    """Return the outcome in one or two sentences.

    Args:
        record: the run record.
        quote: writes names that come from the user.
        prose: writes text that contains such names.
    """
    status, where = record.get("status"), culprit(record)
    findings = _findings(record)
    if status in ("failed", "interrupted"):
        what = "Failed" if status == "failed" else "Interrupted"
        head = what + (f" in stage {quote(shorten(where, 60))}" if where else "")
        head += "" if record.get("seconds") is None else f" after {seconds(record['seconds'])}"
        return f"{head}; results before that: {findings}." if findings else f"{head}; there is no result."
    outcome = f"{findings or 'No result was measured'}; {_budget_kept(record, quote)}."
    verdicts = decode(AnswersOfModels, record["answers"]) if record.get("answers") else None
    answer_verdict = answers.in_words(verdicts)
    if not answer_verdict:
        return outcome
    answer_verdict = prose(answer_verdict)
    head = "Not usable" if record.get("status") == "degenerate" else "Note"
    return f"{head}: {answer_verdict}. {outcome[0].upper()}{outcome[1:]}"


def _findings(record: Plain) -> str:
    compared, words = comparisons(record), []
    for name, noun in (("size_ratio", "size"), ("macs_ratio", "MACs"), ("latency_ratio", "latency")):
        ratio = show(compared.get(name), name)
        if ratio.how != "missing":
            words.append(f"{ratio.text} the {noun}{_doubt(ratio)}")
        elif name in compared:
            words.append(f"{noun} not compared")
    name = quality(record)
    one, two = (show((measurements(record, which) or {}).get(name)) for which in ("original", "result"))
    drop = show(compared.get(f"{name}_drop"), f"{name}_drop")
    if "missing" not in (one.how, two.how):
        text = f"{label(name).lower()} {one.text}{_doubt(one)} → {two.text}{_doubt(two)}"
        if drop.how != "missing":
            text += f" (drop {' '.join(part for part in (drop.text, drop.interval) if part)}{_doubt(drop)})"
        words.append(text)
    elif words:
        words.append(f"{label(name).lower()} not compared")
    return ", ".join(words)


def _doubt(shown: Shown) -> str:
    return "" if shown.how == "measured" else f" ({shown.how})"


def _budget_kept(record: Plain, quote: Callable[[str], str]) -> str:
    budget = record.get("budget") or []
    if not budget:
        return "no budget was set"
    broken = [entry for entry in budget if entry.get("holds") is False]
    unsure = [entry for entry in budget if entry.get("holds") is None]
    for entries, what in ((broken, "over budget in"), (unsure, "budget undecided for")):
        if entries:
            listed = [quote(shorten(scalar(entry.get("name")), 60)) for entry in entries[:3]]
            more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
            return f"{what} {', '.join(listed)}{more}"
    return "fits the budget"


def scalar(value: Any) -> str:
    """Return a plain value on one line."""
    if value is None or value == "":
        return "not recorded" if value is None else "empty"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping | list | tuple):
        return shorten(", ".join(line.strip() for line in _lines(value, 0)), 400)
    return shorten(str(value), 400)


def outline(value: Any) -> str:
    """Return plain values like YAML; empty for an empty value, cut if it is very long."""
    lines = list(islice(_lines(value, 0), MAX_OUTLINE_LINES + 1)) if value else []
    if len(lines) > MAX_OUTLINE_LINES:
        lines[-1] = "… the rest is in report.json"
    return "\n".join(lines)


def _lines(value: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if depth > 12:
        yield f"{indent}… deeper values are in report.json"
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            if _is_inline(item):
                yield f"{indent}{_plain(str(key))}: {_inline(item)}"
            else:
                yield f"{indent}{_plain(str(key))}:"
                yield from _lines(item, depth + 1)
    elif isinstance(value, list | tuple) and not _is_inline(value):
        for item in value:
            first, *rest = islice(_lines(item, depth + 1), MAX_OUTLINE_LINES)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
    else:
        yield f"{indent}{_inline(value)}"


def _is_inline(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(not isinstance(item, Mapping | list | tuple) for item in value)
    return not isinstance(value, Mapping) or not value


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        items = [_inline(item) for item in value[:MAX_INLINE_ITEMS]]
        more = [f"… {len(value) - MAX_INLINE_ITEMS} more"] if len(value) > MAX_INLINE_ITEMS else []
        return f"[{', '.join(items + more)}]"
    if value is None or isinstance(value, bool):
        return "not set" if value is None else str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else _plain(str(value))


def _plain(text: str) -> str:
    """Return a string on one line, quoted if YAML would read it differently."""
    line = shorten(text, 400)
    return line if line and line == text and not set(line) & set(":#[]{},\"'") else f'"{line}"'
