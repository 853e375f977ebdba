"""Gradient accumulation: the number of batches in an update of the weights, and those that are left over at the end.

Batches that are too few for an update change no weight.
"""

from __future__ import annotations

from compress.core.errors import StageError

LARGEST_REST = 0.1
"""Part of the batches of a training that may be left over."""


def batches_per_update(setting: int, total: int) -> int:
    """Return the number of batches in each update.

    It is that of the setting, unless too many batches would be left over. Then it is the number that leaves the fewest,
    at least half of the setting.

    Args:
        setting: the setting `gradient_accumulation`.
        total: number of batches of the training.

    Raises:
        StageError: the training has fewer batches than one update.
    """
    if total < setting:
        raise StageError(
            f"gradient_accumulation: {setting} batches make one update, but the whole training "
            f"has only {total} batches: no weight would change",
            allowed=f"up to {total}",
            hint="lower it, or train for more epochs",
        )
    if total % setting <= LARGEST_REST * total:
        return setting
    return min(range(setting, (setting + 1) // 2 - 1, -1), key=lambda count: total % count)


def note(setting: int, total: int) -> str | None:
    """Return what to tell the user if another number than that of the setting is used, or many batches are left over.

    Args:
        setting: the setting `gradient_accumulation`.
        total: number of batches of the training.
    """
    count = batches_per_update(setting, total)
    lowered = "" if count == setting else f"{count} batches instead of {setting} make an update, to leave over fewer"
    rest = total % count
    lost = f"the last {rest} of {total} batches change no weight" if rest > LARGEST_REST * total else ""
    text = "; ".join(filter(None, (lowered, lost)))
    return f"gradient_accumulation: {text}" if text else None
