"""The report's section on quantization: the candidates, the result, and the tensors with the largest error."""

from __future__ import annotations

from typing import Any

from compress import report as words
from compress.report import Plain

MAX_LAYERS = 12
MAX_TRIALS = 40
MAX_REWRITES = 20


def section(record: Plain) -> dict[str, Any] | None:
    """Return the facts of the last `quantize` of a run as texts for a template; None without that stage."""
    facts = next((stage["facts"] for stage in reversed(record.get("stages") or []) if _quantized(stage)), None)
    if facts is None:
        return None
    layers = facts.get("layers") or []
    return {
        "ranges": words.shorten(words.scalar(facts.get("ranges") or "not recorded"), 200),
        "kept": words.scalar(facts.get("kept") or "not recorded"),
        "samples": words.scalar(facts.get("calibration_samples")),
        "agreement": _share(facts.get("agreement")),
        "warnings": [words.shorten(words.scalar(warning), 300) for warning in facts.get("warnings") or []],
        "trials": [_trial(trial) for trial in (facts.get("tried") or [])[:MAX_TRIALS]],
        "not_tried": [_skipped(row) for row in (facts.get("not_tried") or [])[:MAX_TRIALS]],
        "layers": [_layer(row) for row in layers[:MAX_LAYERS]],
        "more": max(len(layers) - MAX_LAYERS, 0),
        "rewrites": [_rewrite(change) for change in (facts.get("rewritten") or [])[:MAX_REWRITES]],
    }


def original_opens(record: Plain) -> str:
    """Return where the float file of the bundle runs; an empty string without a bundle."""
    places = [(stage.get("facts") or {}).get("original_opens") for stage in record.get("stages") or []]
    return words.shorten(next((str(place) for place in places if place), ""), 300)


def _quantized(stage: Plain) -> bool:
    facts = stage.get("facts") or {}
    return stage.get("stage") == "quantize" and "calibration_samples" in facts


def _trial(trial: Plain) -> dict[str, Any]:
    return {
        "step": words.shorten(words.scalar(trial.get("step")), 40),
        "choice": words.shorten(words.scalar(trial.get("choice")), 80),
        "snr": _decibels(trial.get("snr_db")),
        "measured_on": words.shorten(words.scalar(trial.get("measured_on") or "file"), 20),
        "agreement": words.number(float(trial.get("agreement") or 0.0), "fraction"),
        "kept": bool(trial.get("kept")),
    }


def _skipped(row: Plain) -> dict[str, str]:
    return {key: words.shorten(words.scalar(row.get(key)), 120) for key in ("step", "choice", "reason")}


def _layer(row: Plain) -> dict[str, Any]:
    texts = {key: words.shorten(str(row.get(key) or ""), 120) for key in ("point", "kind", "cause", "setting")}
    share = float(row.get("share") or 0.0)
    return {**texts, "share": words.number(share, "fraction"), "snr": _decibels(row.get("snr_db"))}


def _rewrite(change: Plain) -> dict[str, Any]:
    texts = {key: words.shorten(str(change.get(key) or ""), 120) for key in ("rewrite", "op", "output", "reason")}
    steps = change.get("steps")
    return {**texts, "kept": bool(change.get("kept")), "steps": "not run" if steps is None else f"{float(steps):g}"}


def _share(value: Any) -> str:
    return "" if value is None else words.number(float(value), "fraction")


def _decibels(value: Any) -> str:
    return "" if value is None else f"{float(value):.1f} dB"
