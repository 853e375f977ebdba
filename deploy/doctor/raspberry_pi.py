"""The model of a Raspberry Pi, its config.txt, and what its firmware reports on the power supply.

All files are read below a root folder, as in `deploy.runner.host`. It imports only the standard library.
"""

from __future__ import annotations

import os
import re
from typing import List, Optional

from deploy.runner.host import text_of

CONFIGS = ("/boot/firmware/config.txt", "/boot/config.txt")
"""Where config.txt is: since Raspberry Pi OS of Debian 12, and before."""
_MODEL_5 = re.compile(r"Raspberry Pi (5|500|Compute Module 5)\b")


def model(root: str) -> str:
    """Return the name of the board; empty if it is not a Raspberry Pi."""
    name = text_of(root, "proc/device-tree/model") or ""
    return name if "Raspberry Pi" in name else ""


def is_model_5(root: str) -> bool:
    """Return whether this is a Raspberry Pi 5, 500 or Compute Module 5."""
    return _MODEL_5.search(model(root)) is not None


def config(root: str) -> str:
    """Return the path of config.txt, without the root folder."""
    paths = [path for path in CONFIGS if os.path.exists(os.path.join(root, path[1:]))]
    return (paths or ["/boot/config.txt"])[0]


def settings(root: str) -> List[str]:
    """Return the lines of config.txt without comments, spaces and sections. Files that it includes are not read."""
    text = text_of(root, config(root)[1:]) or ""
    lines = ("".join(line.partition("#")[0].split()) for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("[")]


def has_setting(root: str, start: str, *words: str) -> bool:
    """Return whether a line of config.txt begins with `start` and contains all words."""
    return any(line.startswith(start) and all(word in line for word in words) for line in settings(root))


def usb_limited(root: str) -> Optional[bool]:
    """Return whether the firmware limits the USB ports to 600 mA in total; None if it does not say.

    The firmware of a Raspberry Pi 5 writes big-endian numbers of 32 bits into the device tree.
    """
    path = os.path.join(root, "proc/device-tree/chosen/power/usb_max_current_enable")
    try:
        with open(path, "rb") as stream:
            content = stream.read(4)
    except OSError:
        return None
    return int.from_bytes(content, "big") == 0 if len(content) == 4 else None
