"""The constants in edgetpu.toml that do not depend on the compiler's version, for modules that have no `Target`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("edgetpu.toml").read_text(encoding="utf-8"))
ARRAY: dict[str, int] = TABLES["array"]
LATENCY: dict[str, Any] = TABLES["latency"]
MEMORY: dict[str, int] = TABLES["memory"]
PARAMETERS: dict[str, Any] = TABLES["parameters"]
