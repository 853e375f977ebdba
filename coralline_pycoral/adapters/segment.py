"""Functions for segmentation models."""

from __future__ import annotations

from typing import Any

import numpy as np

from coralline_pycoral.adapters import common
from deploy.contract.preprocessing import Array


def get_output(interpreter: Any) -> Array:
    """Return the first output of the last inference as uint8: [height, width], or [height, width, classes]."""
    return common.output_tensor(interpreter, 0)[0].astype(np.uint8)
