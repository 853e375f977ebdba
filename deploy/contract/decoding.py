"""The decoding settings of a bundle, so that the device decodes files into the same samples as training::

    {"image_channels": 1 or 3, "orientation": "exif" or "ignore",
     "sound_channels": "mix" or "first", "sound_rate": samples per second, "text_bytes": bytes of a text}

Each key may be missing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from deploy.contract.pictures import EXIF, IGNORE
from deploy.contract.text import MAX_BYTES


class Decoding(NamedTuple):
    """The decoding of files into samples.

    Attributes:
        image_channels: 3: RGB; 1: grey levels; None: the channels of the file.
        sound_channels: the channel of a recording with several: "mix", their mean, or "first".
        sound_rate: the samples per second that a recording must have; None: any.
        orientation: "exif": images are rotated and mirrored by their EXIF orientation; "ignore": they are not.
        text_bytes: the bytes of a text as a sample; None: the samples are not texts.
    """

    image_channels: Optional[int] = None
    sound_channels: str = "mix"
    sound_rate: Optional[int] = None
    orientation: str = EXIF
    text_bytes: Optional[int] = None


AS_THEY_ARE = Decoding()
"""The decoding without settings."""


def parsed(entry: Any, rate: Optional[int] = None) -> Decoding:
    """Return the decoding of a manifest. Unknown keys, of later versions, are ignored.

    Args:
        entry: the manifest's `decoding`.
        rate: the sample rate of the preprocessing, used if the manifest has none.

    Raises:
        ValueError: the entry is invalid.
    """
    if not isinstance(entry, dict):
        raise ValueError("it is not a map")
    settings = {name: entry[name] for name in Decoding._fields if name in entry}
    for name, value in settings.items():
        if not _allowed(name, value):
            raise ValueError("%s cannot be %r" % (name, value))
    return Decoding(**dict({"sound_rate": rate}, **settings))


def _allowed(name: str, value: Any) -> bool:
    if name == "orientation":
        return value in (EXIF, IGNORE)
    if name == "sound_channels":
        return value in ("mix", "first")
    if name == "text_bytes":
        return type(value) is int and 0 < value <= MAX_BYTES
    return type(value) is int and (value in (1, 3) if name == "image_channels" else value > 0)
