"""The outputs of our detectors in the forms that other programs read: operators after the last convolutions.

`with_postprocess` decodes in the model, up to `TFLite_Detection_PostProcess`; `as_yolo` joins the raw values of all
maps as two tensors. The operators run on the CPU in a compiled model, in float32 for `with_postprocess`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite import detection_postprocess
from compress.model.tflite.dequantization import value_range
from compress.model.tflite.edit import Edit, reshape
from compress.model.tflite.graph import NONE, Graph, Quantization, Tensor
from deploy.contract.detection import Detector

YOLO_STRIDES = (8, 16, 32)
"""Source: the anchors of Frigate's post-processing of YOLO models."""
YOLO_BINS = 16
"""The bins of the boxes of YOLOv8 and YOLOv9 (reg_max)."""
CORNERS = ("ltrb", "ltrb_exp", "ltrb_relu", "dfl")
"""Codes of distances from a point to the sides of the box."""
SIZES = ("ssd", "yolox", "centernet")
"""Codes of a centre and a size."""
MOST = 20
"""The number of objects that Frigate reads."""
LEAST_SCORE = 0.4
"""The score below which Frigate ignores objects."""


def with_postprocess(graph: Graph, detector: Detector, where: str = "") -> Graph:
    """Return a detector that ends in `TFLite_Detection_PostProcess`, with the outputs of SSD models, for Frigate.

    The model has the outputs of the detector's specification, in 8 bits or float32, and may be compiled. Keypoints are
    left out.

    Raises:
        ModelError: the outputs are not those of the detector, or the operator cannot compute its code of boxes.
    """
    code = detector.specification["code"]
    if code not in (*SIZES, *CORNERS):
        what = f"decodes its boxes by the code {code}, which {detection_postprocess.NAME} cannot compute"
        raise ModelError(what, where=where, allowed=", ".join((*SIZES, *CORNERS)))
    head = _Head(graph, detector, where)
    boxes = head.encoded_boxes(head.joined("boxes"))
    scores = head.probabilities()
    settings = detector.specification
    head.edit.outputs = list(
        detection_postprocess.append(
            head.edit,
            boxes,
            scores,
            _anchors(detector),
            classes=head.classes,
            scales=[1 / variance for variance in settings["variances"]] if code == "ssd" else (1.0,) * 4,
            most=min(settings["most"], MOST),
            least_score=max(settings["least_score"], LEAST_SCORE),
            overlap=settings["overlap"],
            class_agnostic=settings["class_agnostic"],
        )
    )
    return head.edit.graph()


def yolo_misfit(detector: Detector, input_size: tuple[int, int]) -> str | None:
    """Return why a detector has no form as two tensors (see `as_yolo`); None if it has this form."""
    settings = detector.specification
    expected = [[length // stride for length in input_size] for stride in YOLO_STRIDES]
    required = {"code": "dfl", "bins": YOLO_BINS, "order": "xy", "offset": 0.5, "scores": "logits", "background": None}
    for key, value in required.items():
        if settings[key] != value:
            return f"{key} is {settings[key]!r} instead of {value!r}"
    if detector.has_objectness:
        return "it has an objectness"
    if [entry.get("cells") for entry in settings["maps"]] != expected:
        return f"its maps are not those of the strides {', '.join(map(str, YOLO_STRIDES))}"
    return None


def as_yolo(graph: Graph, detector: Detector, where: str = "") -> Graph:
    """Return a detector with two int8 outputs: boxes [1, n, 64] as distributions, scores [1, n, classes] as logits.

    Readers tell the two apart by their last dimension, which is 64 for boxes and at least 2. So one class, and 64
    classes, get one more column with the lowest score. Frigate subtracts the zero point of the scores in int8: it is at
    least 0, so that no difference is above 127. `yolo_misfit` is None for the detector; the model may be compiled.

    Raises:
        ModelError: the outputs are not those of the detector, or are not in 8 bits.
    """
    head = _Head(graph, detector, where)
    boxes = head.joined_in_8_bits("boxes", 4 * YOLO_BINS)
    extra = head.classes in (1, 4 * YOLO_BINS)
    scores = head.joined_in_8_bits("scores", head.classes, least_zero_point=0, extra=extra)
    head.edit.outputs = [boxes, scores]
    return head.edit.graph()


def _anchors(detector: Detector) -> NDArray[np.float32]:
    """Return centres and sizes of the locations: of the anchors for `ssd`, else of the points and their cells."""
    if detector.specification["code"] == "ssd":
        return np.asarray(detector.anchors, np.float32)
    points = (detector.at.cells + detector.specification["offset"]) * detector.at.steps
    return np.concatenate([points, detector.at.steps], axis=1).astype(np.float32)


class _Head:
    """An edit of a detector's model behind its outputs; `classes` counts no background."""

    def __init__(self, graph: Graph, detector: Detector, where: str) -> None:
        tensors = [graph.tensors[index] for index in graph.outputs]
        problem = detector.misfit([tensor.shape for tensor in self._ordered(detector, tensors)])
        if problem is not None:
            raise ModelError(f"its outputs are not those of its detector: {problem}", where=where)
        self.edit = Edit(graph)
        self.detector = detector
        self._where = where
        values = sum(tensor.elements for tensor in tensors)
        self._columns = detector.classes_of(values)
        self.classes = self._columns - (detector.specification["background"] is not None)
        entries = zip(detector.specification["tensors"], self._ordered(detector, tensors), strict=True)
        self._parts: dict[str, list[tuple[int, Tensor]]] = {}
        for entry, tensor in entries:
            self._parts.setdefault(entry["part"], []).append((entry.get("map", 0), tensor))

    @staticmethod
    def _ordered(detector: Detector, tensors: Sequence[Tensor]) -> list[Tensor]:
        details = [{"shape": tensor.shape, "tensor": tensor} for tensor in tensors]
        return [detail["tensor"] for detail in detector.ordered(details)]

    def _of(self, part: str) -> list[Tensor]:
        """Return the tensors of a part, in the order of the maps."""
        return [tensor for _, tensor in sorted(self._parts[part], key=lambda item: item[0])]

    # --- in float32 ----------------------------------------------------------------------

    def joined(self, part: str) -> int:
        """Return a float32 tensor [n, values] with a part of all maps."""
        sizes = zip(self.detector.specification["tensors"], self.detector.output_sizes(self._columns), strict=True)
        width = next(width for entry, (_, width) in sizes if entry["part"] == part)
        rows = []
        for tensor in self._of(part):
            values = tensor.index
            if tensor.dtype != "FLOAT32":
                values = self._float(f"{part}/real", tensor.shape)
                self.edit.add("DEQUANTIZE", [tensor.index], [values], self.edit.options("DequantizeOptions"), 2)
            rows.append(self._reshaped(values, part, (tensor.elements // width, width)))
        if len(rows) == 1:
            return rows[0]
        return self._step("CONCATENATION", rows, (len(self.detector.anchors), width), "ConcatenationOptions", axis=0)

    def encoded_boxes(self, raw: int) -> int:
        """Return boxes as the operator decodes them, [1, n, 4]: centre (y, x), and the logarithms of height, width."""
        settings = self.detector.specification
        code, count = settings["code"], len(self.detector.anchors)
        swap = np.eye(4, dtype=np.float32)[[1, 0, 3, 2] if settings["order"] == "xy" else [0, 1, 2, 3]]
        if code == "dfl":
            bins = settings["bins"]
            split = self._reshaped(raw, "bins", (count * 4, bins))
            shares = self._step("SOFTMAX", [split], (count * 4, bins), "SoftmaxOptions", beta=1.0)
            steps = np.arange(bins, dtype=np.float32)[np.newaxis]
            raw = self._reshaped(self._linear(shares, steps, count * 4), "distances", (count, 4))
        elif code == "ltrb_exp":
            raw = self._step("EXP", [raw], (count, 4), "ExpOptions")
        elif code == "ltrb_relu":
            raw = self._step("RELU", [raw], (count, 4))
        if code in ("ssd", "yolox"):
            return self._reshaped(self._linear(raw, swap, count), "encodings", (1, count, 4))
        # Top, left, bottom, right: the centre is half of (bottom - top) away from the point, the height their sum.
        half = np.array([[-0.5, 0, 0.5, 0], [0, -0.5, 0, 0.5]], np.float32)
        total = np.array([[1, 0, 1, 0], [0, 1, 0, 1]], np.float32)
        if code == "centernet":
            half, total = np.eye(4, dtype=np.float32)[:2], np.eye(4, dtype=np.float32)[2:]
        centre = self._linear(raw, half @ swap, count)
        size = self._linear(raw, total @ swap, count)
        least = self.edit.tensor("least", (1,), "FLOAT32", values=np.array([1e-6], np.float32))  # no logarithm of 0
        positive = self._step("MAXIMUM", [size, least], (count, 2), "MaximumMinimumOptions")
        logarithm = self._step("LOG", [positive], (count, 2))
        both = self._step("CONCATENATION", [centre, logarithm], (count, 4), "ConcatenationOptions", axis=1)
        return self._reshaped(both, "encodings", (1, count, 4))

    def probabilities(self) -> int:
        """Return the probabilities of the classes, without the background, [1, n, classes]."""
        settings = self.detector.specification
        count = len(self.detector.anchors)
        scores = self.joined("scores")
        if settings["scores"] == "softmax":
            scores = self._step("SOFTMAX", [scores], (count, self._columns), "SoftmaxOptions", beta=1.0)
        elif settings["scores"] == "logits":
            scores = self._step("LOGISTIC", [scores], (count, self._columns))
        if settings["background"] is not None:
            begin = self.edit.integers("begin", 0, 1 if settings["background"] == "first" else 0)
            size = self.edit.integers("size", count, self.classes)
            scores = self._step("SLICE", [scores, begin, size], (count, self.classes), "SliceOptions")
        if self.detector.has_objectness:
            objectness = self.joined("objectness")
            if settings["scores"] != "probabilities":
                objectness = self._step("LOGISTIC", [objectness], (count, 1))
            scores = self._step("MUL", [scores, objectness], (count, self.classes), "MulOptions")
            if settings["objectness"] == "geometric_mean":
                scores = self._step("SQRT", [scores], (count, self.classes))
        return self._reshaped(scores, "probabilities", (1, count, self.classes))

    def _float(self, name: str, shape: Sequence[int]) -> int:
        return self.edit.tensor(name, shape, "FLOAT32")

    def _step(self, name: str, inputs: Sequence[int], shape: Sequence[int], table: str = "", **options: Any) -> int:
        """Add a float operator with one output; `table` is the schema's name of its options."""
        output = self._float(name.lower(), shape)
        self.edit.add(name, inputs, [output], self.edit.options(table, **options) if table else None, 1)
        return output

    def _linear(self, values: int, weights: NDArray[np.float32], rows: int) -> int:
        """Return values [rows, k] times the transposed weights [m, k]: [rows, m]."""
        constant = self.edit.tensor("weights", weights.shape, "FLOAT32", values=np.asarray(weights, np.float32))
        return self._step("FULLY_CONNECTED", [values, constant, NONE], (rows, len(weights)), "FullyConnectedOptions")

    def _reshaped(self, values: int, name: str, shape: Sequence[int]) -> int:
        return reshape(self.edit, values, self._float(name, shape), shape)

    # --- in 8 bits -----------------------------------------------------------------------

    def joined_in_8_bits(self, part: str, width: int, *, least_zero_point: int = -128, extra: bool = False) -> int:
        """Return an int8 tensor [1, n, width] with a part of all maps, all with the scale that holds all of them.

        With `extra`, a column with the lowest value is appended.
        """
        tensors = self._of(part)
        common = _common(tensors, least_zero_point, self._where)
        rows = []
        for tensor in tensors:
            values = tensor.index
            if tensor.dtype != "INT8" or tensor.quantization != common:
                values = self.edit.tensor(f"{part}/common", tensor.shape, "INT8", common)
                self.edit.add("QUANTIZE", [tensor.index], [values], self.edit.options("QuantizeOptions"))
            shape = (1, tensor.elements // width, width)
            rows.append(reshape(self.edit, values, self.edit.tensor(part, shape, "INT8", common), shape))
        count = len(self.detector.anchors)
        joined = self._joined_in_8_bits(rows, 1, (1, count, width), common, part)
        if not extra:
            return joined
        lowest = np.full((1, count, 1), -128, np.int8)
        column = self.edit.tensor(f"{part}/none", lowest.shape, "INT8", common, lowest)
        return self._joined_in_8_bits([joined, column], 2, (1, count, width + 1), common, part)

    def _joined_in_8_bits(
        self, parts: list[int], axis: int, shape: Sequence[int], common: Quantization, name: str
    ) -> int:
        if len(parts) == 1:
            return parts[0]
        output = self.edit.tensor(name, shape, "INT8", common)
        self.edit.add("CONCATENATION", parts, [output], self.edit.options("ConcatenationOptions", axis=axis))
        return output


def _common(tensors: Sequence[Tensor], least_zero_point: int, where: str) -> Quantization:
    """Return the int8 quantization that holds the values of all tensors, which are in 8 bits."""
    ends: list[float] = []
    for tensor in tensors:
        if tensor.dtype not in ("INT8", "UINT8") or tensor.quantization is None:
            raise ModelError("its outputs are not all in 8 bits", where=where, hint="quantize the model")
        ends += value_range(tensor)
    first = tensors[0]
    alike = all((tensor.dtype, tensor.quantization) == ("INT8", first.quantization) for tensor in tensors)
    if alike and first.quantization is not None and first.quantization.zero_point[0] >= least_zero_point:
        return first.quantization
    low, high = min(0.0, *ends), max(0.0, *ends)
    low = min(low, -high * (128 + least_zero_point) / (127 - least_zero_point))
    scale = (high - low) / 255
    zero_point = int(np.clip(round(-128 - low / scale), least_zero_point, 127))
    return Quantization((float(np.float32(scale)),), (zero_point,), 0)
