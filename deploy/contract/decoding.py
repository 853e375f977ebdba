"""How a bundle says that files become samples, so that the device decodes them as training did::

    {"image_channels": 1 or 3, "sound_channels": "mix" or "first", "sound_rate": samples in a second}

Each key may be missing. Runs on Python 3.7 alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional


class Decoding(NamedTuple):
    """How files become samples.

    Attributes:
        image_channels: 3: colours, 1: grey levels; None: what a file has.
        sound_channels: what becomes of several: "mix", their mean, or "first".
        sound_rate: samples in a second that a recording must have; None: any.
    """

    image_channels: Optional[int] = None
    sound_channels: str = "mix"
    sound_rate: Optional[int] = None


AS_THEY_ARE = Decoding()
"""Where nothing is known."""


def parsed(entry: Any, rate: Optional[int] = None) -> Decoding:
    """What a manifest says; unknown keys, of later versions, count for nothing.

    Args:
        entry: the manifest's `decoding`.
        rate: the rate that the preprocessing is for, which holds where the manifest says none.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(entry, dict):
        raise ValueError("it is no map")
    given = {name: entry[name] for name in Decoding._fields if name in entry}
    for name, value in given.items():
        if not _allowed(name, value):
            raise ValueError("%s cannot be %r" % (name, value))
    return Decoding(**dict({"sound_rate": rate}, **given))


def _allowed(name: str, value: Any) -> bool:
    if name == "sound_channels":
        return value in ("mix", "first")
    return type(value) is int and (value in (1, 3) if name == "image_channels" else value > 0)
