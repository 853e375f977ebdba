"""The samples of a data set, in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress import report as words


def seen(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows about the samples; none if an older run did not record them."""
    if "looked_at" not in data:
        return []
    low, high = data["range"]
    rows = [("values", f"{low:g} to {high:g}, {', '.join(data['dtypes'])}, in {data['looked_at']:,} samples looked at")]
    if data["missing"]:
        rows.append(("no training sample", words.shorten(", ".join(data["missing"]), 300)))
    elif data["imbalance"]:
        rows.append(("imbalance", f"the most frequent class has {data['imbalance']:g} samples for one of the rarest"))
    for target in data.get("targets") or ():
        text = f"{target['least']:g} to {target['most']:g}, mean {target['mean']:g}, in the training split"
        rows.append((f"target {words.shorten(str(target['name']), 80)}", text))
    corrupt = data["corrupt"]
    if corrupt["count"]:
        first = words.shorten("; ".join(corrupt["first"][:10]), 2000)
        rows.append((f"left out, {corrupt['count']:,} that cannot be read", first))
    return rows + [("note", note) for note in data["notes"]]
