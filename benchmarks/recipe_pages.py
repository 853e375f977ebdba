"""The tables of benchmarks/recipes.py: in docs/recipes/index.md, on the page of each recipe, and a line in its file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import repository

from paths import ROOT
from recipe_rows import ROWS, Row

BEGIN, END = "<!-- begin: python benchmarks/recipes.py -->", "<!-- end -->"
RESULT = re.compile(r"^# Result:.*$", re.MULTILINE)
NOT_RUN = "not measured yet"
Results = Mapping[str, Mapping[str, Any]]
__all__ = ["page_of", "table", "write", "written"]
del repository  # only its search path is needed, for `paths`


def _number(value: float, digits: int) -> str:
    return f"{value + 0.0:.{digits}f}"


def _interval(measured: Mapping[str, Any], digits: int = 3, factor: float = 1.0) -> str:
    """Return a measurement with its interval, if it has one."""
    text = _number(measured["value"] * factor, digits)
    if measured["low"] is None or measured["high"] is None:
        return text
    return f"{text} ({_number(measured['low'] * factor, digits)} to {_number(measured['high'] * factor, digits)})"


def _alarms(counts: Mapping[str, Any]) -> str:
    are_found = counts["found"]
    alarms = f"{counts['false_alarms']} false alarms in {counts['weeks']} weeks"
    return f"{sum(are_found)} of {len(are_found)} anomalies found, {alarms}"


def quality(row: Row, result: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the quality of the float model and of the int8 file, and the points that were lost."""
    if row.metric == "auc":
        alarms = result["alarms"]
        return _alarms(alarms["original"]), _alarms(alarms["int8"]), ""
    if row.metric == "agreement":
        noise = min(output["sqnr_db"] for output in result["outputs"])
        same = f"same class as float: {_interval(result['agreement'])}; SQNR {_number(noise, 1)} dB"
        return "reference", same, "no labels"
    values = result["metrics"][row.metric]
    label = "" if row.metric == "accuracy" else f"{row.metric.upper()} "
    drop = "" if result["drop"] is None else _interval(result["drop"], 1, 100)
    return label + _interval(values["float"]), label + _interval(values["int8"]), drop


def table(results: Results, rows: Iterable[Row] = ROWS, links: bool = False) -> str:
    """Return the table of quality and cost, in Markdown."""
    finished = [row for row in rows if row.name in results]
    if not finished:
        return NOT_RUN
    lines = [
        "| recipe | split of the test | float | int8 | lost, points | size | USB 3, ms | CPU minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in finished:
        result = results[row.name]
        name = f"[{row.name}]({row.recipe}.md)" if links else row.name
        value, low, high = result["latency_ms"]["usb3"]
        costs = (f"{result['size_bytes'] / 1000:,.0f} kB", f"{value:.2f} ({low:.2f} to {high:.2f})")
        cells = (name, row.split, *quality(row, result), *costs, f"{result['cpu_minutes']:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def line_of(row: Row, results: Results) -> str:
    """Return the line of a recipe's file that states its result."""
    if row.name not in results:
        return f"# Result:  {NOT_RUN}; `make bench-recipes` runs it"
    floats, ints, _ = quality(row, results[row.name])
    return f"# Result:  float {floats}; int8 {ints}" if row.metric != "agreement" else f"# Result:  {ints}"


def page_of(recipe: str) -> Path:
    """Return the page of a recipe."""
    return ROOT / "docs" / "recipes" / f"{recipe}.md"


def _with_table(text: str, content: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{content}\n{END}{rest.partition(END)[2]}"


def written(results: Results) -> dict[Path, str]:
    """Return the text of each file that shows results: recipes, their pages, and the page of all recipes."""
    index = ROOT / "docs" / "recipes" / "index.md"
    texts = {index: _with_table(index.read_text(), table(results, links=True))}
    for recipe in dict.fromkeys(row.recipe for row in ROWS):
        rows = [row for row in ROWS if row.recipe == recipe]
        page, file = page_of(recipe), ROOT / "models" / f"{recipe}.yaml"
        texts[page] = _with_table(page.read_text(), table(results, rows))
        texts[file] = RESULT.sub(line_of(rows[0], results), file.read_text(), count=1)
    return texts


def write(results: Results) -> None:
    """Write the files with results."""
    for path, text in written(results).items():
        path.write_text(text)
