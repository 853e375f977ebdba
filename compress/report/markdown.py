"""report.md: the report in a few tables, for the log of a build or the text of a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from compress import report as words
from compress.report import Plain, devices, quantization, replacement, selection, training, validity

MAX_CELL = 120
MAX_CLASSES = 5
MAX_CPU_OPERATORS = 10

#: Text in which no renderer finds markup, a link, a mention, an issue or an emoji.
_HARMLESS = re.compile(r"(?!.*(www\.|GH-\d))[\w ,;.()'/=+%×→≥≤…−“”-]*", re.IGNORECASE)  # noqa: RUF001
_FENCES = re.compile("`+")


def summary(record: Plain) -> str:
    """Return the report in Markdown, as GitHub and GitLab read it.

    Args:
        record: the run record, with its strings cleaned (`compress.report.tidy`).
    """
    parts = [
        f"# {quote(str(record.get('name') or '(no name)'))}: {quote(words.scalar(record.get('status')))}",
        words.verdict(record, quote, quote),
        *_error(record),
        "## Budget",
        *_budget(record),
        "## Before and after",
        *_changes(record),
        "## Stages",
        *_stages(record),
        "## Classes with the largest loss",
        *_classes(record),
        *_replacements(record),
        "## Where operators run",
        *_placement(record),
        *_devices(record),
        "## Latency, data, outputs",
        *_rest(record),
    ]
    return "\n\n".join(parts) + "\n"


def quote(text: str, limit: int = MAX_CELL) -> str:
    """Return an external string, unchanged if it is harmless, otherwise as a code span; safe in a table."""
    text = words.shorten(text, limit) or "(empty)"
    if _HARMLESS.fullmatch(text) and "_" not in text:
        return text
    fence = "`" * (1 + max((len(run) for run in _FENCES.findall(text)), default=0))
    pad = " " if text[:1] in "`" or text[-1:] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _cell(measurement: Plain | None, name: str = "", absent: str = "not recorded") -> str:
    """Return a measurement with its interval and its origin, or the reason why it is missing."""
    shown = words.show(measurement, name, absent)
    if shown.how == "missing":
        return f"missing: {quote(shown.note)}"
    return " ".join(part for part in (f"**{shown.text}**", shown.interval, shown.how) if part)


def _absent(record: Plain) -> str:
    return f"Missing: {quote(words.absence(record))}."


def _error(record: Plain) -> list[str]:
    error = record.get("error")
    if not error:
        return []
    stage = f"stage {quote(str(error['stage']))}" if error.get("stage") else "outside of any stage"
    place = "the run is complete" if validity.is_complete(record) else stage
    valid = validity.of_complete(record)
    if not validity.is_complete(record):
        done = [s for s in record.get("stages") or [] if s.get("status") in ("made", "kept", "skipped")]
        valid = f"Still valid: the measurements of the completed stages ({len(done)})."
    message = quote(str(error.get("message") or "(no message)"), 500)
    return [f"> **Error**, {place}, exit code {quote(words.scalar(error.get('exit_code')))}: {message}\n>\n> {valid}"]


def _budget(record: Plain) -> list[str]:
    rows = []
    for entry in record.get("budget") or []:
        name, limit = words.scalar(entry.get("name")), entry.get("limit")
        unit = "ratio" if name.endswith("_ratio") else str(entry.get("unit") or "")
        rows.append(
            (
                quote(words.label(name)),
                "not recorded" if limit is None else words.number(limit, unit),
                _cell(entry.get("measured"), name, words.absence(record)),
                {True: "✓ within the limit", False: "✕ **over the limit**"}.get(entry.get("holds"), "? unknown"),
            )
        )
    return [_table(("Quantity", "Limit", "Actual", "Outcome"), rows)] if rows else ["No budget was set."]


def _changes(record: Plain) -> list[str]:
    rows = []
    for row in words.changes(record):
        change = _cell(row.change, row.change_name, words.absence(record))
        drop = "drop " if row.name in words.QUALITY and not change.startswith("missing") else ""
        before, after = (_cell(m, row.name, words.absence(record)) for m in (row.before, row.after))
        rows.append((quote(words.label(row.name)), before, after, drop + change))
    for name, measurement in words.comparisons(record).items():
        if name not in words.CHANGES.values():
            rows.append((quote(words.label(name)), "compared", "compared", _cell(measurement, name)))
    return [_table(("Test split", "Original", "Result", "Change"), rows)] if rows else [_absent(record)]


def _stages(record: Plain) -> list[str]:
    stages = record.get("stages") or []
    columns = words.names(stage.get("measurements") for stage in stages)
    rows = []
    for stage in stages:
        status, reason = words.scalar(stage.get("status")), stage.get("reason")
        taken = stage.get("measurements") or {}
        outcome = quote(status) + (f": {quote(str(reason))}" if reason else "")
        cells = [_cell(taken.get(name), name, f"not measured: stage {status}") for name in columns]
        rows.append((quote(words.scalar(stage.get("id"))), outcome, words.seconds(stage.get("seconds")), *cells))
    labels = [quote(words.label(name)) + ", validation" * (name in words.QUALITY) for name in columns]
    if not rows:
        return [_absent(record)]
    sentences = [*selection.lines(record), *training.lines(record)]
    listed = "\n".join(f"- {quote(sentence, 200)}" for sentence in sentences)
    return [_table(("Stage", "Outcome", "Time (measured)", *labels), rows), *([listed] if listed else [])]


def _classes(record: Plain) -> list[str]:
    known = []
    for row in (record.get("comparison") or {}).get("per_class") or []:
        change = words.derived(row.get("original"), row.get("result"), ratio=False)
        if change["value"] is not None:
            known.append((change["value"], change, row))
    if not known:
        return [_absent(record)]
    known.sort(key=lambda entry: entry[0])
    rows = [
        (
            quote(words.scalar(row.get("name"))),
            words.scalar(row.get("samples")),
            _cell(row.get("original")),
            _cell(row.get("result")),
            _cell(change, "accuracy_change"),
        )
        for value, change, row in known[:MAX_CLASSES]
        if value < 0
    ]
    head = ("Class", "Samples", "Original", "Result", "Change")
    return (
        [_table(head, rows)]
        if rows
        else [f"None of {len(known)} classes lost {words.label(words.quality(record)).lower()}."]
    )


def _replacements(record: Plain) -> list[str]:
    section = replacement.section(record)
    if section is None:
        return []
    rows = [[quote(row[key]) for key in ("what", "by", "count", "layers")] for row in section["replaced"]]
    lines = [f"- Accuracy {row['when']}: {row['text']} ({quote(row['fine'], 200)})" for row in section["accuracy"]]
    lines += [f"- Requested, but not in the model: {quote(name)}" for name in section["not_found"]]
    lines += [f"- Not replaced: {quote(row['layer'])}: {quote(row['text'], 200)}" for row in section["skipped"]]
    lines += [f"- {quote(row['layer'])}: {quote(row['text'], 200)}" for row in section["details"]]
    table = _table(("Original", "Replacement", "Count", "Layers"), rows)
    return ["## Activation replacement", table, "\n".join(lines)]


def _placement(record: Plain) -> list[str]:
    placement = record.get("placement")
    if not placement:
        return [_absent(record)]
    how = "compiled, measured" if devices.is_compiled(placement) else "predicted"
    parts = [f"{quote(str(placement.get('summary') or 'No summary'), 300)} ({how})."]
    if placement.get("compiles") is False:
        failure = quote(str(placement.get("failure") or "reason not recorded"), 300)
        parts.append(f"**{'Did not' if placement.get('compiled') else 'Is not expected to'} compile**: {failure}")
    if not placement.get("compiled"):
        parts.append(f"{quote(devices.why_not_compiled(placement), 300)}.")
        if placement.get("how_to_compile"):
            parts.append(f"How to compile: {quote(str(placement['how_to_compile']), 300)}")
    expected = [tuple(map(quote, row)) for row in devices.expected(record)]
    if expected:
        parts.append(_table(("Predicted latency", "Median", "Interval", "CPU alone (rough)"), expected))
    on_cpu = [op for op in placement.get("ops") or [] if op.get("placement") != "tpu"]
    rows = [
        (
            f"{words.scalar(op.get('index'))} {quote(words.scalar(op.get('op')))}",
            f"{op.get('macs') or 0:,}",
            quote(str(op.get("reason") or "reason not recorded"), 200),
            quote(str(op.get("advice") or "no advice"), 200),
        )
        for op in on_cpu[:MAX_CPU_OPERATORS]
    ]
    if rows:
        parts.append(_table(("On the CPU", "MACs (counted)", "Reason", "Advice"), rows))
    if len(on_cpu) > MAX_CPU_OPERATORS:
        parts.append(f"… and {len(on_cpu) - MAX_CPU_OPERATORS} more operators on the CPU.")
    return parts


def _devices(record: Plain) -> list[str]:
    rows = devices.rows(record, lambda measurement, name: _cell(measurement, name))
    if not rows:
        return []
    head = ["Device", *devices.COLUMNS.values(), "Golden outputs"]
    table = [[quote(row["name"]), *row["cells"], quote(row["golden"] or "not compared")] for row in rows]
    doubts = []
    for row in rows:
        doubts += [f"- {quote(row['name'])} cannot be compared: {quote(doubt, 300)}" for doubt in row["doubts"]]
    return ["## On the device", _table(head, table), *(["\n".join(doubts)] if doubts else [])]


def _rest(record: Plain) -> list[str]:
    latency, data = record.get("latency") or {}, record.get("data") or {}
    conditions = [f"{key} {words.scalar(value)}" for key, value in (latency.get("conditions") or {}).items()]
    samples = [f"{words.scalar(count)} {split}" for split, count in (data.get("samples") or {}).items()]
    noun = "targets" if data.get("targets") else "classes"
    source = f"{words.scalar(data.get('source'))}: {', '.join(samples)}; {len(data.get('classes') or [])} {noun}"
    if count := (data.get("corrupt") or {}).get("count"):
        source += f"; {count:,} unreadable samples were left out"
    environment = record.get("environment") or {}
    host = ", ".join(str(environment.get(key) or f"{key} not recorded") for key in ("cpu", "system", "python"))
    lines = [
        f"- Latency conditions: {quote(', '.join(conditions), 400) if conditions else _absent(record)}",
        f"- Data (counted): {quote(source, 300) if data else _absent(record)}",
        f"- Host: {quote(host, 300)}; Coralline {quote(words.scalar(record.get('coralline')))}, "
        f"seed {quote(words.scalar(record.get('seed')))}, {words.seconds(record.get('seconds'))} (measured)",
    ]
    outputs = []
    for name, file in (record.get("outputs") or {}).items():
        size, digest = (words.scalar(file.get(key)) for key in ("size_bytes", "sha256"))
        outputs.append(f"- {quote(str(name))}: {size} bytes (measured), SHA-256 {quote(digest)}")
    if opens := quantization.original_opens(record):
        outputs.append(f"- The float original in the bundle opens {quote(opens, 300)}")
    return ["\n".join(lines + (outputs or [f"- Outputs: {_absent(record)}"]))]
