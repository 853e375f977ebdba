"""The report's section on pruning: the costs and widths before and after each step, and the sensitivity curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress import report as words
from compress.report import Plain, svg

MAX_LAYERS = 40
COLUMNS = 4
CELL_WIDTH, CELL_HEIGHT = 108.0, 60.0
GAP_X, GAP_Y = 12.0, 34.0
FIGURES = {
    "macs": ("multiply-accumulates", "MACs"),
    "parameters": ("parameters", "parameters"),
    "size_bytes": ("8-bit file, about", "bytes"),
    "compute_ms": ("arithmetic of the Edge TPU", "ms"),
    "latency_ms": ("latency", "ms"),
    "streamed_bytes": ("parameters sent at every inference", "bytes"),
}


@dataclass(frozen=True)
class _Curve:
    """A sensitivity curve, as read from the record."""

    layers: list[str]
    points: list[tuple[int, float]]
    """Width and accuracy."""
    largest_divergence: float

    @property
    def name(self) -> str:
        """The first layer, and the number of the others."""
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        return self.layers[0] + more

    @property
    def size(self) -> int:
        """The width with all channels."""
        return max(self.points[0][0], 1)


def section(record: Plain) -> dict[str, Any] | None:
    """Return every step of every `prune`, and the sensitivity curves, as texts; None without any."""
    stages = [stage for stage in record.get("stages") or [] if stage.get("stage") == "prune"]
    rows = []
    for stage in stages:
        facts = stage.get("facts") or {}
        for number, step in enumerate(facts.get("steps") or [], 1):
            title = f"{stage.get('id')}, step {number}"
            rows.append(_step(title, step, facts.get("objective") or {}))
    curves = _curves(record, stages)
    missing = words.shorten(str((record.get("sensitivity") or {}).get("missing") or ""), 300)
    if not (rows or curves or missing):
        return None
    return {"steps": rows, "svg": sensitivity_chart(curves) if curves else "", "missing": missing}


def _curves(record: Plain, stages: list[Plain]) -> list[_Curve]:
    """Return the curves of the model before pruning; else those of the first step that measured some."""
    curves = (record.get("sensitivity") or {}).get("curves")
    steps = [step for stage in stages for step in (stage.get("facts") or {}).get("steps") or []]
    for step in steps:
        curves = curves or step.get("sensitivity")
    return [_curve(curve) for curve in curves or []]


def _curve(curve: Plain) -> _Curve:
    points = zip(map(int, curve["kept"]), map(float, curve["accuracy"]), strict=True)
    layers = [str(layer) for layer in curve.get("layers") or ["?"]]
    return _Curve(layers, list(points), max(map(float, curve["divergence"])))


def _step(title: str, step: Plain, objective: Plain) -> dict[str, Any]:
    figures = step.get("figures") or {}
    layers = list((step.get("layers") or {}).items())
    trials = step.get("trials") or {}
    warnings = (step.get("warnings") or [])[:MAX_LAYERS]
    return {
        "title": words.shorten(title, 80),
        "objective": words.shorten(words.scalar(objective.get("name") or "not recorded"), 40),
        "figures": _figures(figures.get("before") or {}, figures.get("after") or {}),
        "allocation": words.shorten(words.scalar(step.get("allocation")), 40),
        "trials": ", ".join(f"{method} {words.number(float(value), 'fraction')}" for method, value in trials.items()),
        "layers": [
            (words.shorten(str(name), 60), words.scalar(widths.get("before")), words.scalar(widths.get("after")))
            for name, widths in layers[:MAX_LAYERS]
        ],
        "more": max(len(layers) - MAX_LAYERS, 0),
        "warnings": [words.shorten(words.scalar(warning), 300) for warning in warnings],
        "unsupported": [words.shorten(str(name), 60) for name in (step.get("unsupported") or [])[:MAX_LAYERS]],
    }


def _figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return (name, before, after, ratio) of each cost that is known at both times."""
    rows = []
    for name, (text, unit) in FIGURES.items():
        if name in before and name in after:
            ratio = f"{after[name] / before[name]:.3f}" if before[name] else ""
            rows.append((text, words.number(before[name], unit), words.number(after[name], unit), ratio))
    return rows


def sensitivity_chart(curves: list[_Curve]) -> str:
    """Return small charts of accuracy by the share of channels kept, the most sensitive layer group first."""
    curves = sorted(curves, key=lambda curve: -curve.largest_divergence)[:MAX_LAYERS]
    lines = -(-len(curves) // COLUMNS)
    size = (svg.WIDTH, lines * (CELL_HEIGHT + GAP_Y) + 14)
    parts = []
    descriptions = []
    for index, curve in enumerate(curves):
        left = index % COLUMNS * (CELL_WIDTH + GAP_X)
        top = index // COLUMNS * (CELL_HEIGHT + GAP_Y) + 20
        parts += _small_chart(curve, left, top)
        points = ", ".join(f"{kept} kept, accuracy {accuracy:.3f}" for kept, accuracy in curve.points)
        descriptions.append(f"{curve.name}: {points}")
    title = "Accuracy when one group of layers gets narrower"
    return svg.svg("sensitivity", size, title, "; ".join(descriptions), parts)


def _small_chart(curve: _Curve, left: float, top: float) -> list[str]:
    """Return the chart of one layer group: all channels on the left, accuracy from 0 to 1."""
    x = svg.Axis(0, 1, left, left + CELL_WIDTH)
    y = svg.Axis(0, 1, top + CELL_HEIGHT, top)
    positions = [(svg.n(x.at(1 - kept / curve.size)), svg.n(y.at(accuracy))) for kept, accuracy in curve.points]
    line = " ".join(f"{at_x},{at_y}" for at_x, at_y in positions)
    parts = [svg.text(left, top - 6, curve.name, "tick", room=CELL_WIDTH)]
    parts += [svg.line(left, y.at(level), left + CELL_WIDTH, y.at(level), "grid") for level in (0, 0.5, 1)]
    parts.append(f'<polyline points="{line}" class="curve result" fill="none"/>')
    for (at_x, at_y), (kept, accuracy) in zip(positions, curve.points, strict=True):
        tip = svg.tip(f"{curve.name}: {kept} of {curve.size} kept, accuracy {accuracy:.3f}")
        parts.append(f'<circle cx="{at_x}" cy="{at_y}" r="3" class="result">{tip}</circle>')
    return parts
