"""report.html: the record as plain values for the template report.html.j2."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compress import report as words
from compress.report import (
    Plain,
    charts,
    devices,
    pruning,
    quantization,
    replacement,
    selection,
    training,
    validity,
)
from compress.report.samples import seen

if TYPE_CHECKING:
    import jinja2

MAX_CLASSES_DRAWN = 40
MAX_CLASSES_IN_MATRIX = 30
MAX_CLASSES_BESIDE = 12
MAX_CLASSES_NAMED = 24
MAX_OPERATORS_OPEN = 8
#: In the page; report.json has names and reasons in full.
MAX_NAME, MAX_PROSE = 60, 300
#: A reason or condition longer than this goes below the table.
MAX_REMARK = 44

STATUS_MARKS = {"ok": "✓", "over budget": "▲", "degenerate": "✕", "failed": "✕", "interrupted": "■"}
STAGE_MARKS = {"made": "✓", "kept": "✓", "skipped": "»", "failed": "✕", "not run": "○"}
HOLDS = {True: ("good", "✓ within the limit"), False: ("bad", "✕ over the limit"), None: ("unsure", "? unknown")}


@cache
def _template() -> jinja2.Template:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2")


def page(record: Plain) -> str:
    """Return the page.

    Args:
        record: the run record, with its strings cleaned (`compress.report.tidy`).
    """
    status = str(record.get("status") or "unknown")
    target, took = record.get("target") or {}, record.get("seconds")
    return _template().render(
        name=words.shorten(str(record.get("name") or "(no name)"), 100),
        status=status,
        status_mark=STATUS_MARKS.get(status, "?"),
        finished=_moment(record.get("finished")),
        target=words.shorten(str(target.get("name") or "not recorded"), MAX_NAME),
        target_summary=words.shorten(str(target.get("summary") or ""), MAX_PROSE),
        quality=words.label(words.quality(record)),
        seconds="The run was not timed" if took is None else f"Total time {words.seconds(took)}",
        coralline=words.shorten(str(record.get("coralline") or "version not recorded"), MAX_NAME),
        seed=words.scalar(record.get("seed")),
        verdict=words.verdict(record),
        absent=words.absence(record),
        error=_error(record),
        budget=_budget(record),
        change=_changes(record),
        path=_path(record),
        stages=_stages(record),
        trained=training.lines(record),
        classes=_classes(record),
        latency=_latency(record),
        devices=_devices(record),
        quantization=quantization.section(record),
        pruning=pruning.section(record),
        replacements=replacement.section(record),
        placement=_placement(record),
        data=_data(record),
        outputs=_outputs(record),
        original_opens=quantization.original_opens(record),
        environment=_environment(record),
        settings=words.outline(record.get("pipeline") or {}),
    )


class Cell(NamedTuple):
    """A measurement in a table; `ref` is the number of its note below the table."""

    text: str
    fine: str
    how: str
    ref: int


@dataclass
class Notes:
    """The notes below a table, without duplicates."""

    texts: list[str] = field(default_factory=list)

    def cell(self, measurement: Plain | None, name: str = "", absent: str = "not recorded") -> Cell:
        """Return a measurement as a cell. Its conditions, or a long reason, become a note."""
        shown = words.show(measurement, name, absent)
        if shown.how != "missing":
            return Cell(
                shown.text,
                shown.fine.replace(", ", ",\N{NO-BREAK SPACE}"),
                shown.how,
                self._ref(shown.note) if shown.note else 0,
            )
        if len(shown.note) <= MAX_REMARK:
            return Cell(shown.text, shown.note, shown.how, 0)
        return Cell(shown.text, "see note", shown.how, self._ref(shown.note))

    def _ref(self, note: str) -> int:
        note = words.shorten(note, MAX_PROSE)
        if note not in self.texts:
            self.texts.append(note)
        return self.texts.index(note) + 1


def _moment(text: Any) -> str:
    """Return 2026-11-20T15:40:00+00:00 as 2026-11-20 15:40 UTC, and other texts unchanged."""
    moment = re.sub(r"^([\d-]+)T(\d\d:\d\d)[\d:.]*(Z|\+00:00)$", r"\1 \2 UTC", str(text or "date not recorded"))
    return words.shorten(moment, 40)


def _error(record: Plain) -> dict[str, Any] | None:
    error = record.get("error")
    if not error:
        return None
    return {
        "message": error.get("message") or "(no message)",
        "exit_code": words.scalar(error.get("exit_code")),
        "still_valid": validity.still_valid(record),
        "mild": record.get("status") == "over budget",
        "heading": validity.heading(record),
    }


def _budget(record: Plain) -> dict[str, Any]:
    notes, rows = Notes(), []
    for entry in record.get("budget") or []:
        name, measured = words.scalar(entry.get("name")), entry.get("measured")
        limit = entry.get("limit")
        unit = "ratio" if name.endswith("_ratio") else str(entry.get("unit") or "")
        kind, holds = HOLDS.get(entry.get("holds"), HOLDS[None])
        rows.append(
            {
                "name": words.label(name),
                "limit": "not recorded" if limit is None else words.number(limit, unit),
                "cell": notes.cell(measured, name, words.absence(record)),
                "kind": kind,
                "holds": holds,
            }
        )
    return {"rows": rows, "notes": notes.texts}


def _changes(record: Plain) -> dict[str, Any]:
    notes, rows, absent = Notes(), [], words.absence(record)
    for row in words.changes(record):
        before, after = (notes.cell(model, row.name, absent) for model in (row.before, row.after))
        change = notes.cell(row.change, row.change_name, absent)
        if row.name in words.QUALITY and change.how != "missing":
            change = change._replace(text=f"drop {change.text}")
        rows.append({"name": words.label(row.name), "before": before, "after": after, "change": change})
    alone = [name for name in words.names([words.comparisons(record)]) if name not in words.CHANGES.values()]
    compared = [(words.label(name), notes.cell(words.comparisons(record)[name], name)) for name in alone]
    models = record.get("models") or {}
    made_by = {w: words.shorten(str((models.get(w) or {}).get("stage") or ""), 40) for w in ("original", "result")}
    return {"rows": rows, "compared": compared, "notes": notes.texts, "made_by": made_by}


def _value(measurement: Plain | None) -> float | None:
    value = (measurement or {}).get("value")
    return None if value is None else float(value)


def _path(record: Plain) -> list[dict[str, str]]:
    """Return the two trade-off plots, each with a drawing or an empty one."""
    result = []
    for cost, name, unit in (("size", "size_bytes", "bytes"), ("MACs", "macs", "MACs")):
        points = []
        for stage in record.get("stages") or []:
            taken = stage.get("measurements") or {}
            accuracy, price = taken.get(words.quality(record)) or {}, taken.get(name) or {}
            x, y = _value(price), _value(accuracy)
            if x is not None and y is not None:
                sure = accuracy.get("how") == price.get("how") == "measured"
                label = words.shorten(words.scalar(stage.get("id")), 40)
                points.append(charts.Point(label, x, y, _end(accuracy, "low"), _end(accuracy, "high"), sure))
        svg = charts.trade_off(points, cost=cost, unit=unit) if points else ""
        result.append({"cost": cost, "svg": svg})
    return result


def _end(measurement: Plain, which: str) -> float | None:
    return None if measurement.get(which) is None else float(measurement[which])


def _stages(record: Plain) -> dict[str, Any]:
    stages, notes, rows = record.get("stages") or [], Notes(), []
    columns = words.names(stage.get("measurements") for stage in stages)
    for stage in stages:
        status, taken = words.scalar(stage.get("status")), stage.get("measurements") or {}
        absent = {"failed": "the stage failed", "not run": "did not run", "skipped": "skipped"}.get(status)
        identity, name, kind = (words.shorten(str(stage.get(key) or ""), MAX_NAME) for key in ("id", "stage", "kind"))
        rows.append(
            {
                "id": identity,
                "made_of": " · ".join(([name] if name != identity else []) + [kind or "no artifact"]),
                "status": status,
                "mark": STAGE_MARKS.get(status, "?"),
                "reason": words.shorten(str(stage.get("reason") or ""), MAX_PROSE),
                "seconds": words.seconds(stage.get("seconds")),
                "cells": [
                    (words.label(name), notes.cell(taken.get(name), name, absent or "not measured")) for name in columns
                ],
                "settings": words.outline(stage.get("settings") or {}),
                "facts": words.outline(stage.get("facts") or {}),
            }
        )
    labels = [words.label(name) + ", validation" * (name in words.QUALITY) for name in columns]
    return {"rows": rows, "columns": labels, "notes": notes.texts, "chosen": selection.lines(record)}


def _classes(record: Plain) -> dict[str, Any] | None:
    comparison = record.get("comparison") or {}
    rows = comparison.get("per_class") or []
    if not rows:
        return None
    labels = _told_apart([words.shorten(words.scalar(row.get("name")), 100) for row in rows])
    ranked = sorted(zip(labels, rows, strict=True), key=lambda pair: _class_change(pair[1]))
    notes, table, drawn = Notes(), [], []
    for name, row in ranked:
        before, after = row.get("original"), row.get("result")
        one, two = _value(before), _value(after)
        if one is not None and two is not None:
            drawn.append(
                charts.ClassChange(
                    name, row.get("samples") or 0, one, two, _end(after or {}, "low"), _end(after or {}, "high")
                )
            )
        change = notes.cell(words.derived(before, after, ratio=False), "accuracy_change")
        table.append((name, words.scalar(row.get("samples")), notes.cell(before), notes.cell(after), change))
    return {
        "count": len(rows),
        "drawn": min(len(drawn), MAX_CLASSES_DRAWN),
        "svg": charts.class_changes(drawn[:MAX_CLASSES_DRAWN]) if drawn else "",
        "table": table,
        "notes": notes.texts,
        **_confusion(comparison, labels),
    }


def _told_apart(classes: list[str]) -> list[str]:
    """Return the names, numbered if charts would shorten different names to the same text."""
    cut = {name if len(name) <= 11 else name[:7] + name[-3:] for name in classes}
    return classes if len(cut) == len(classes) else [f"{i} {name}" for i, name in enumerate(classes)]


def _class_change(row: Plain) -> float:
    """Return the sort key, worst class first; classes without a value are last."""
    before, after = _value(row.get("original")), _value(row.get("result"))
    return math.inf if before is None or after is None else after - before


def _confusion(comparison: Plain, classes: Sequence[str]) -> dict[str, Any]:
    """Return the matrix unless there are too many classes, and the most frequent confusions unless there are few."""
    matrix = ""
    counts = (comparison.get("confusion") or {}).get("result") or []
    if not counts or len(counts) != len(classes) or any(len(row) != len(counts) for row in counts):
        return {"matrix": "", "confusions": [], "wide": False}
    if len(counts) <= MAX_CLASSES_IN_MATRIX:
        matrix = charts.confusion_matrix(classes, counts)
    if len(counts) <= MAX_CLASSES_BESIDE:
        return {"matrix": matrix, "confusions": [], "wide": False}
    wrong = sorted((-n, i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if n and i != j)
    named = [words.shorten(name, MAX_NAME) for name in classes]
    worst = [(named[i], named[j], f"{-n:,}", f"{sum(counts[i]):,}") for n, i, j in wrong[:12]]
    return {"matrix": matrix, "confusions": worst, "wide": True}


def _latency(record: Plain) -> dict[str, Any] | None:
    latency = record.get("latency")
    if not latency:
        return None
    curves, rows, beyond, notes = [], [], [], Notes()
    for which in ("original", "result"):
        values = [float(ms) for ms in latency.get(which) or [] if ms is not None]
        taken = words.measurements(record, which) or {}
        cells = [notes.cell(taken.get(f"latency_{name}ms")) for name in ("", "p90_", "p99_")]
        rows.append((which.capitalize(), _count(len(values), "run"), cells))
        if not values:
            continue
        marks = []
        for key, name, share in (("", "median", 0.5), ("p90_", "p90", 0.9), ("p99_", "p99", 0.99)):
            ms = _value(taken.get(f"latency_{key}ms"))
            if ms is not None and (taken.get(f"latency_{key}ms") or {}).get("how") == "measured":
                marks.append((name, share, ms))
        curves.append(charts.LatencyCurve(which.capitalize(), which == "original", values, marks))
        beyond.append(f"{which} {words.number(min(values), 'ms')} to {words.number(max(values), 'ms')}")
    return {
        "svg": charts.latency_curves(curves) if curves else "",
        "rows": rows,
        "span": "; ".join(beyond),
        "few": min((len(curve.values) for curve in curves), default=100) < 100,
        "conditions": [(str(key), words.scalar(value)) for key, value in (latency.get("conditions") or {}).items()],
        "notes": notes.texts,
    }


def _devices(record: Plain) -> dict[str, Any]:
    notes = Notes()
    rows = devices.rows(record, notes.cell)
    return {"columns": list(devices.COLUMNS.values()), "rows": rows, "notes": notes.texts}


def _placement(record: Plain) -> dict[str, Any] | None:
    placement = record.get("placement")
    if not placement:
        return None
    ops, macs = placement.get("ops") or [], placement.get("macs") or {}
    strip = [
        charts.OperatorRow(words.scalar(op.get("op")), op.get("placement") == "tpu", op.get("macs") or 0) for op in ops
    ]
    rows = [_operator(op) for op in ops]
    on_tpu = sum(op.on_tpu for op in strip)
    tpu, cpu = macs.get("tpu") or 0, macs.get("cpu") or 0
    share = words.number(tpu / (tpu + cpu), "fraction") if tpu + cpu else "none"
    return {
        "summary": words.shorten(str(placement.get("summary") or "No summary was recorded."), MAX_PROSE),
        **{key: placement.get(key) or "" for key in ("how_to_compile", "failure")},
        "why_not_compiled": devices.why_not_compiled(placement),
        "compiled": bool(placement.get("compiled")),
        "compiles": placement.get("compiles"),
        "how": "measured" if devices.is_compiled(placement) else "predicted",
        "svg": charts.operator_strip(strip) if strip else "",
        "on_tpu": _count(on_tpu, "operator"),
        "on_cpu": _count(len(ops) - on_tpu, "operator"),
        "macs_tpu": words.number(tpu, "MACs").replace(" ", "\N{NO-BREAK SPACE}"),
        "macs_cpu": words.number(cpu, "MACs").replace(" ", "\N{NO-BREAK SPACE}"),
        "share": share,
        "expected": devices.expected(record),
        "long": len(ops) > MAX_OPERATORS_OPEN,
        "ops": rows,
        "cpu_ops": [op for op in rows if not op["on_tpu"]][:MAX_OPERATORS_OPEN],
    }


def _operator(op: Plain) -> dict[str, Any]:
    texts = {key: words.shorten(words.scalar(op.get(key)), MAX_NAME) for key in ("index", "op", "version", "output")}
    reasons = {key: words.shorten(str(op.get(key) or ""), MAX_PROSE) for key in ("reason", "advice")}
    status = words.shorten(str(op.get("status") or "status not recorded"), MAX_PROSE)
    macs = "not counted" if op.get("macs") is None else f"{op['macs']:,}"
    return {**texts, **reasons, "status": status, "macs": macs, "on_tpu": op.get("placement") == "tpu"}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def _data(record: Plain) -> dict[str, Any] | None:
    data = record.get("data")
    if not data:
        return None
    classes = [words.shorten(str(name), 80) for name in data.get("classes") or []]
    more = f" · … {len(classes) - MAX_CLASSES_NAMED} more" if len(classes) > MAX_CLASSES_NAMED else ""
    return {
        "source": data.get("source") or "not recorded",
        "count": len(classes),
        "noun": "targets" if data.get("targets") else "classes",
        "classes": " · ".join(classes[:MAX_CLASSES_NAMED]) + more,
        "samples": [(str(split), words.scalar(count)) for split, count in (data.get("samples") or {}).items()],
        "shape": f" {words.TIMES} ".join(words.scalar(side) for side in data.get("input_shape") or [])
        or "not recorded",
        "preprocess": words.outline(data.get("preprocess") or []),
        "seen": seen(data),
    }


def _outputs(record: Plain) -> list[tuple[str, str, str]]:
    rows = []
    for name, file in (record.get("outputs") or {}).items():
        size = file.get("size_bytes")
        text = "size not recorded" if size is None else f"{size:,} bytes"
        rows.append((str(name), text, str(file.get("sha256") or "not recorded")))
    return rows


def _environment(record: Plain) -> dict[str, list[tuple[str, str]]]:
    environment = record.get("environment") or {}
    host = [(str(key), words.scalar(value)) for key, value in environment.items() if key != "tools"]
    tools = [(str(tool), words.scalar(version)) for tool, version in (environment.get("tools") or {}).items()]
    return {"host": host, "tools": tools}
