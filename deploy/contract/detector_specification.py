"""The specification of a detector: its keys, their defaults, and checks of what comes from outside.

`maps` say where boxes are looked for, `code` and the keys after it how raw numbers become boxes and scores, `tensors`
which tensors hold them, and the last four keys which boxes are kept (docs/detection.md).
"""

from __future__ import annotations

from typing import Any, Dict, List

from deploy.contract.box_codes import CODES, WITH_ANCHORS

DEFAULTS: Dict[str, Any] = {
    "code": "ssd",
    "order": None,
    "variances": [0.1, 0.1, 0.2, 0.2],
    "offset": None,
    "bins": 16,
    "input_size": None,
    "scores": "logits",
    "background": None,
    "objectness": "product",
    "keypoints": None,
    "tensors": None,
    "least_score": 0.01,
    "overlap": 0.5,
    "most": 100,
    "class_agnostic": False,
}
PARTS = ("boxes", "scores", "objectness", "keypoints")
WHOLE_MODEL = [{"part": "boxes"}, {"part": "scores"}]
"""The default of `tensors`: all boxes in one tensor, all scores in another."""
WORDS = {
    "code": tuple(CODES),
    "order": ("yx", "xy"),
    "scores": ("logits", "probabilities", "softmax"),
    "background": (None, "first", "last"),
    "objectness": ("product", "geometric_mean"),
}
KEYPOINTS = {"count": None, "scale": 1.0, "offset": 0.0, "unit": "cell", "visibility": False}
UNITS = ("cell", "anchor", "box")
MAX_ANCHORS = 1 << 20
"""Chosen: the locations of as many anchors take 36 MB. YOLOX with an input of 1280 x 1280 has 33,600."""


class DetectionError(ValueError):
    """A specification, or outputs, that cannot be used."""


def checked(specification: Any) -> Dict[str, Any]:
    """Return a specification with every default written out.

    Raises:
        DetectionError: an unknown or missing key, or a value that cannot be used.
    """
    if not isinstance(specification, dict) or "maps" not in specification:
        raise DetectionError("a detector's specification must be a map with the key 'maps'")
    _refuse_unknown(specification, ["maps", *DEFAULTS], "a detector's specification")
    settings = dict(DEFAULTS, **specification)
    if settings["order"] is None:
        settings["order"] = "yx" if settings["code"] == "ssd" else "xy"
    for name, words in WORDS.items():
        if settings[name] not in words or isinstance(settings[name], bool):
            allowed = ", ".join("nothing" if word is None else repr(word) for word in words)
            raise DetectionError("%s must be one of %s, not %r" % (name, allowed, settings[name]))
    settings["variances"] = _positive(settings["variances"], 4, "variances")
    settings["offset"] = _offset(settings)
    settings["bins"] = _integer(settings["bins"], 2, 256, "bins")
    if settings["input_size"] is not None:
        settings["input_size"] = _cells(settings["input_size"], "input_size")
    for name in ("least_score", "overlap"):
        settings[name] = _positive([settings[name]], 1, name)[0]
    if settings["least_score"] >= 1 or settings["overlap"] > 1:
        raise DetectionError("least_score must be below 1, and overlap at most 1")
    settings["most"] = _integer(settings["most"], 1, 1000, "most")
    if not isinstance(settings["class_agnostic"], bool):
        raise DetectionError("class_agnostic must be true or false, not %r" % (settings["class_agnostic"],))
    settings["maps"] = _maps(settings["maps"], settings["code"])
    settings["keypoints"] = _keypoints(settings["keypoints"])
    settings["tensors"] = _tensors(settings)
    return settings


def _refuse_unknown(entry: Dict[str, Any], allowed: List[str], what: str) -> None:
    for key in entry:
        if key not in allowed:
            raise DetectionError("unknown key %r in %s; allowed: %s" % (key, what, ", ".join(allowed)))


def _offset(settings: Dict[str, Any]) -> float:
    offset = settings["offset"]
    if offset is None:
        return 0.0 if settings["code"] in ("yolox", "centernet") else 0.5
    if not _is_number(offset) or not -1 <= offset <= 1:
        raise DetectionError("offset must be a number from -1 to 1, not %r" % (offset,))
    return float(offset)


def _maps(maps: Any, code: str) -> List[Dict[str, Any]]:
    if not isinstance(maps, (list, tuple)) or not 1 <= len(maps) <= 64:
        raise DetectionError("maps must be a list of 1 to 64 maps with 'cells' and 'boxes'")
    parsed = [_map(entry, code) for entry in maps]
    total = sum(locations_of(entry) for entry in parsed)
    if total > MAX_ANCHORS:
        raise DetectionError("maps give %d anchors; allowed: 1 to %d" % (total, MAX_ANCHORS))
    return parsed


def _map(entry: Any, code: str) -> Dict[str, Any]:
    """Return a checked entry of `maps`: cells, with the sizes of anchors if the code has them, or single anchors."""
    with_anchors = code in WITH_ANCHORS
    keys = {"cells", "boxes"} if with_anchors else {"cells"}
    optional = {"centre_scale"} if code == "yolov3" else set()
    if not isinstance(entry, dict) or set(entry) - optional not in (keys, {"anchors"}):
        shown = " and ".join(map(repr, sorted(keys, reverse=True)))
        raise DetectionError("each of maps must have the keys %s, or 'anchors', not %r" % (shown, entry))
    scale = {"centre_scale": entry["centre_scale"]} if "centre_scale" in entry else {}
    for value in scale.values():
        _positive([value], 1, "centre_scale")
    if "anchors" in entry:
        return dict(scale, anchors=_anchors(entry["anchors"]))
    parsed: Dict[str, Any] = dict(scale, cells=_cells(entry["cells"], "cells"))
    if with_anchors:
        if not isinstance(entry["boxes"], (list, tuple)) or not entry["boxes"]:
            raise DetectionError("boxes must be a list of pairs of height and width")
        parsed["boxes"] = [_positive(box, 2, "boxes") for box in entry["boxes"]]
    return parsed


def locations_of(entry: Dict[str, Any]) -> int:
    """Return the number of locations of a checked entry of `maps`."""
    if "anchors" in entry:
        return len(entry["anchors"])
    return int(entry["cells"][0] * entry["cells"][1] * len(entry.get("boxes", [0])))


def _cells(values: Any, name: str) -> List[int]:
    dimensions = _positive(values, 2, name)
    if any(dimension != int(dimension) or dimension > 4096 for dimension in dimensions):
        raise DetectionError("%s must be two whole numbers up to 4096, not %r" % (name, values))
    return [int(dimension) for dimension in dimensions]


def _anchors(anchors: Any) -> List[List[float]]:
    is_list = isinstance(anchors, (list, tuple)) and 1 <= len(anchors) <= MAX_ANCHORS
    if not is_list or not all(isinstance(row, (list, tuple)) and len(row) == 4 for row in anchors):
        raise DetectionError("anchors must be a list of [y, x, height, width]")
    return [[*_numbers(row[:2], 2, "anchors"), *_positive(row[2:], 2, "anchors")] for row in anchors]


def _keypoints(keypoints: Any) -> Any:
    if keypoints is None:
        return None
    if not isinstance(keypoints, dict) or "count" not in keypoints:
        raise DetectionError("keypoints must be a map with the key 'count'")
    _refuse_unknown(keypoints, list(KEYPOINTS), "keypoints")
    settings = dict(KEYPOINTS, **keypoints)
    if settings["unit"] not in UNITS or not isinstance(settings["visibility"], bool):
        raise DetectionError("keypoints have a unit, one of %s, and visibility: true or false" % ", ".join(UNITS))
    scale, offset = _numbers([settings["scale"], settings["offset"]], 2, "scale and offset of keypoints")
    return dict(settings, count=_integer(settings["count"], 1, 1000, "count"), scale=scale, offset=offset)


def _tensors(settings: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Return the entries of `tensors`, after a check that each part is there once."""
    outputs = WHOLE_MODEL if settings["tensors"] is None else settings["tensors"]
    if not isinstance(outputs, (list, tuple)) or not outputs:
        raise DetectionError("tensors must be a list of maps with 'part' and 'map'")
    count = len(settings["maps"])
    maps_by_part: Dict[str, List[Any]] = {}
    for entry in outputs:
        if not isinstance(entry, dict) or not {"part"} <= set(entry) <= {"part", "map"} or entry["part"] not in PARTS:
            raise DetectionError("each of tensors must have 'part' (one of %s) and may have 'map'" % ", ".join(PARTS))
        if "map" in entry:
            _integer(entry["map"], 0, count - 1, "map of tensors")
        maps_by_part.setdefault(entry["part"], []).append(entry.get("map"))
    for part, maps in maps_by_part.items():
        if maps != [None] and sorted(maps, key=str) != sorted(range(count), key=str):
            raise DetectionError("tensors must have one entry of %s for all maps, or one for each map" % part)
    required = {"boxes", "scores"} | ({"keypoints"} if settings["keypoints"] else set())
    if set(maps_by_part) - {"objectness"} != required:
        raise DetectionError("tensors must have the parts %s" % ", ".join(sorted(required)))
    return [dict(entry) for entry in outputs]


def _numbers(values: Any, count: int, name: str, above: float = -1e6, meaning: str = "numbers") -> List[float]:
    is_list = isinstance(values, (list, tuple)) and len(values) == count
    if not is_list or not all(_is_number(value) and above < value < 1e6 for value in values):
        raise DetectionError("%s must be %d %s, not %r" % (name, count, meaning, values))
    return [float(value) for value in values]


def _positive(values: Any, count: int, name: str) -> List[float]:
    return _numbers(values, count, name, 0, "numbers above 0")


def _integer(value: Any, low: int, high: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise DetectionError("%s must be a whole number from %d to %d, not %r" % (name, low, high, value))
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
