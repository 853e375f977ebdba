"""The tables of benchmarks/other_tools.py, from its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tool_runs import MADE

Results = Mapping[str, Any]
LONGEST = 160
"""Characters of an error in a table."""


def pair_name(subject: str, tool: str) -> str:
    """Return the key of a subject and a tool in the results."""
    return f"{subject}/{tool}"


def tables(results: Results, tools: Sequence[str], unsuitable: Sequence[tuple[str, str, str]]) -> str:
    parts = [
        quality_table(results, tools),
        cost_table(results, tools),
        latency_table(results, tools),
        cannot_table(results, tools, unsuitable),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _matrix(results: Results, tools: Sequence[str], cell: Any, label: Any) -> str:
    """Return a table with a row for each subject and a column for each tool."""
    rows = []
    for subject, about in results["subjects"].items():
        pairs = [results["pairs"].get(pair_name(subject, tool)) for tool in tools]
        rows.append([label(subject, about, pairs), *(_cell(pair, cell) for pair in pairs)])
    return _table(["model", *tools], rows)


def _cell(pair: Mapping[str, Any] | None, cell: Any) -> str:
    if pair is None:
        return ""
    return str(cell(pair) if pair["status"] == MADE else pair["status"])


def quality_table(results: Results, tools: Sequence[str]) -> str:
    return _matrix(results, tools, _quality, _quality_label)


def _quality_label(subject: str, about: Mapping[str, Any], pairs: Sequence[Mapping[str, Any] | None]) -> str:
    """Return the name of a model with the quality of the float model."""
    judgements = [pair["judgement"] for pair in pairs if pair is not None and pair["status"] == MADE]
    for name, metric in (("float_accuracy", "accuracy"), ("float_ap50", "AP50")):
        value = next((judgement[name] for judgement in judgements if name in judgement), None)
        if value is not None:
            return f"{subject} (float {metric} {value:.3f})"
    return subject


def _quality(pair: Mapping[str, Any]) -> str:
    judgement = pair["judgement"]
    if "error" in judgement:
        return "not comparable"
    ratio = f"{judgement['mean_sqnr_db']:.1f} dB"
    for name in ("accuracy", "ap50", "agreement"):
        if name in judgement:
            return f"{judgement[name]:.3f}, {ratio}"
    return ratio


def cost_table(results: Results, tools: Sequence[str]) -> str:
    return _matrix(results, tools, _cost, lambda subject, about, pairs: subject)


def _cost(pair: Mapping[str, Any]) -> str:
    judgement = pair["judgement"]
    mapped = "rejected" if judgement["rejected"] else f"{judgement['mapped']} of {judgement['operators']}"
    integer = "" if judgement["full_integer"] else ", not full integer"
    size = f"{judgement['size_bytes'] / 1000:,.0f} kB"
    return f"{mapped}{integer}; {size}; {pair['cpu_seconds']:.0f} s"


def latency_table(results: Results, tools: Sequence[str]) -> str:
    def cell(pair: Mapping[str, Any]) -> str:
        predicted = pair["judgement"].get("latency_ms")
        tpu = "rejected" if pair["judgement"]["rejected"] else f"{predicted[0]:.2f} ms" if predicted else "on the CPU"
        return f"{tpu}; {pair['cpu_ratio']:.2f}" if pair.get("cpu_ratio") else tpu

    return _matrix(results, tools, cell, lambda subject, about, pairs: subject)


def cannot_table(results: Results, tools: Sequence[str], unsuitable: Sequence[tuple[str, str, str]]) -> str:
    """Return the table of what the tools cannot do; the models of one reason are one row."""
    rows = []
    for tool in tools:
        reasons: dict[str, list[str]] = {}
        for subject in results["subjects"]:
            pair = results["pairs"].get(pair_name(subject, tool))
            for reason in _reasons(pair):
                reasons.setdefault(reason, []).append(subject)
        version = results["versions"].get(tool, "")
        rows += [[tool, version, ", ".join(models), reason] for reason, models in reasons.items()]
    rows += [[tool, version, "all", reason] for tool, version, reason in unsuitable]
    return _table(["tool", "version", "models", "why"], rows)


def _reasons(pair: Mapping[str, Any] | None) -> list[str]:
    """Return why a pair has no usable file."""
    if pair is None:
        return []
    if pair["status"] != MADE:
        return [_short(pair["error"])]
    judgement = pair["judgement"]
    texts = list(judgement["remarks"])
    if judgement["rejected"]:
        texts.append(f"the Edge TPU compiler rejects the file: {judgement['rejected']}")
    if "error" in judgement:
        texts.append(judgement["error"])
    return [_short(text) for text in texts]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
