"""Frigate's own detector plugin, from a copy of its source that is not part of this project, with what it imports."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pydantic
import pytest

from deploy.contract.suppression import suppressed

SOURCE = "CORALLINE_FRIGATE_SOURCE"
PLUGIN = "frigate/detectors/plugins/edgetpu_tfl.py"


def plugin(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the plugin's source and return its global names. Skip the test if the source is not there."""
    folder = os.environ.get(SOURCE)
    if not folder or not Path(folder, PLUGIN).exists():
        pytest.skip(f"Frigate's source is not there: set {SOURCE} to a folder with {PLUGIN}")
    from ai_edge_litert.interpreter import Interpreter

    model_types = enum.Enum("ModelTypeEnum", {"ssd": "ssd", "yologeneric": "yolo-generic"})
    modules = {
        "cv2": {"dnn": SimpleNamespace(NMSBoxes=_suppressed)},
        "tflite_runtime": {},
        "tflite_runtime.interpreter": {
            "Interpreter": lambda model_path, experimental_delegates: Interpreter(model_path),
            "load_delegate": lambda name, options: None,
        },
        "frigate": {},
        "frigate.detectors": {},
        "frigate.detectors.detection_api": {"DetectionApi": object},
        "frigate.detectors.detector_config": {
            "BaseDetectorConfig": pydantic.BaseModel,
            "ModelTypeEnum": model_types,
        },
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    code = compile(Path(folder, PLUGIN).read_text(), PLUGIN, "exec", dont_inherit=True)
    names: dict[str, Any] = {"__name__": "edgetpu_tfl"}
    exec(code, names)  # the source that the user names
    return {**names, "model_types": model_types}


def detector(names: dict[str, Any], path: Path, exported: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from an image to rows of class, score, ymin, xmin, ymax, xmax."""
    model = SimpleNamespace(
        path=str(path),
        width=exported.width,
        height=exported.height,
        model_type=names["model_types"](exported.model_type),
    )
    edgetpu_detector = names["EdgeTpuTfl"](SimpleNamespace(device="usb", model=model))
    return lambda image: np.asarray(edgetpu_detector.detect_raw(image))


def _suppressed(bboxes: Any, scores: Any, score_threshold: float, nms_threshold: float) -> np.ndarray:
    """Return the result of OpenCV's NMSBoxes. It takes boxes as x, y, width, height, but Frigate passes corners."""
    boxes, scores = np.asarray(bboxes, np.float64), np.asarray(scores)
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > score_threshold]
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)[order]
    return order[suppressed(corners, np.zeros(len(order)), nms_threshold, len(order))]
