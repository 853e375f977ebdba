"""The report's section on pruning: what became smaller, where, and what each set of channels means to the network."""

from __future__ import annotations

from typing import Any

from compress import report as words
from compress.report import Plain, svg

MAX_LAYERS = 40
COLUMNS, CELL, GAP = 4, (108.0, 60.0), (12.0, 34.0)
FIGURES = {
    "macs": ("multiply-accumulates", "MACs"),
    "parameters": ("parameters", "parameters"),
    "size_bytes": ("8-bit file, about", "bytes"),
    "compute_ms": ("time of the array", "ms"),
    "latency_ms": ("latency", "ms"),
    "streamed_bytes": ("parameters sent at every inference", "bytes"),
}


def section(record: Plain) -> dict[str, Any] | None:
    """What every step of every `prune` did, and curves if any were measured, as texts; None where there is neither."""
    stages = [stage for stage in record.get("stages") or [] if stage.get("stage") == "prune"]
    rows = [
        _step(str(stage.get("id")), number, step, (stage.get("facts") or {}).get("objective") or {})
        for stage in stages
        for number, step in enumerate((stage.get("facts") or {}).get("steps") or [], 1)
    ]
    curves = _curves(record, stages)
    missing = words.shorten(str((record.get("sensitivity") or {}).get("missing") or ""), 300)
    if not (rows or curves or missing):
        return None
    return {"steps": rows, "svg": sensitivity(curves) if curves else "", "missing": missing}


def _curves(record: Plain, stages: list[Plain]) -> list[Plain]:
    """What was measured before anything was removed; else before the first step that measured it."""
    if (record.get("sensitivity") or {}).get("curves"):
        return list(record["sensitivity"]["curves"])
    steps = [step for stage in stages for step in (stage.get("facts") or {}).get("steps") or []]
    return next((list(step["sensitivity"]) for step in steps if step.get("sensitivity")), [])


def _step(stage: str, number: int, step: Plain, objective: Plain) -> dict[str, Any]:
    before, after = ((step.get("figures") or {}).get(when) or {} for when in ("before", "after"))
    tried = step.get("tried") or {}
    layers = list((step.get("layers") or {}).items())
    return {
        "title": words.shorten(f"{stage}, step {number}", 80),
        "objective": words.shorten(words.scalar(objective.get("name") or "not recorded"), 40),
        "figures": [
            (text, words.number(before[name], unit), words.number(after[name], unit), _share(before[name], after[name]))
            for name, (text, unit) in FIGURES.items()
            if name in before and name in after
        ],
        "allocation": words.shorten(words.scalar(step.get("allocation")), 40),
        "tried": ", ".join(f"{way} {words.number(float(value), 'fraction')}" for way, value in tried.items()),
        "layers": [
            (words.shorten(str(name), 60), words.scalar(each.get("before")), words.scalar(each.get("after")))
            for name, each in layers[:MAX_LAYERS]
        ],
        "more": max(len(layers) - MAX_LAYERS, 0),
        "warnings": [words.shorten(words.scalar(each), 300) for each in (step.get("warnings") or [])[:MAX_LAYERS]],
        "held": [words.shorten(str(name), 60) for name in (step.get("held") or [])[:MAX_LAYERS]],
    }


def _share(before: float, after: float) -> str:
    return f"{after / before:.3f}" if before else ""


def sensitivity(curves: list[Plain]) -> str:
    """A small chart for each set of channels: accuracy against the share that is kept; what loses most comes first."""
    curves = sorted(curves, key=lambda curve: -max(map(float, curve["divergence"])))[:MAX_LAYERS]
    lines = -(-len(curves) // COLUMNS)
    size = (svg.WIDTH, lines * (CELL[1] + GAP[1]) + 14)
    parts, told = [], []
    for place, curve in enumerate(curves):
        left = place % COLUMNS * (CELL[0] + GAP[0])
        top = place // COLUMNS * (CELL[1] + GAP[1]) + 20
        parts += _small(curve, left, top)
        name = _name(curve)
        told.append(f"{name}: " + ", ".join(f"{kept} kept, accuracy {a:.3f}" for kept, a in _pairs(curve)))
    return svg.svg("sensitivity", size, "Accuracy when channels of one set are removed", "; ".join(told), parts)


def _name(curve: Plain) -> str:
    layers = [str(each) for each in curve.get("layers") or ["?"]]
    return layers[0] + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")


def _pairs(curve: Plain) -> list[tuple[int, float]]:
    return [(int(kept), float(a)) for kept, a in zip(curve["kept"], curve["accuracy"], strict=True)]


def _small(curve: Plain, left: float, top: float) -> list[str]:
    """One set: from all channels on the left to the fewest on the right, accuracy from 0 to 1."""
    pairs, (width, height) = _pairs(curve), CELL
    whole = max(pairs[0][0], 1)
    x, y = svg.Axis(0, 1, left, left + width), svg.Axis(0, 1, top + height, top)
    points = [(x.at(1 - kept / whole), y.at(accuracy)) for kept, accuracy in pairs]
    way = " ".join(f"{svg.n(a)},{svg.n(b)}" for a, b in points)
    parts = [svg.text(left, top - 6, _name(curve), "tick", room=width)]
    parts += [svg.line(left, y.at(level), left + width, y.at(level), "grid") for level in (0, 0.5, 1)]
    parts.append(f'<polyline points="{way}" class="curve result" fill="none"/>')
    for (a, b), (kept, accuracy) in zip(points, pairs, strict=True):
        tip = svg.tip(f"{_name(curve)}: {kept} of {whole} kept, accuracy {accuracy:.3f}")
        parts.append(f'<circle cx="{svg.n(a)}" cy="{svg.n(b)}" r="3" class="result">{tip}</circle>')
    return parts
