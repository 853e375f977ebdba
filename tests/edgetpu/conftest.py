"""Finds the builder of small models, which stands beside the tests of compress.tflite."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tflite"))
