"""Poses: the interface of the vendor's `pose_engine` for PoseNet, and MoveNet's single pose.

The decoder of PoseNet is ours and runs on the CPU, so that the vendor's models run on every host.
"""

from __future__ import annotations

import enum
import math
import time
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from coralline_pycoral.adapters import common
from coralline_pycoral.posenet import EDGES, KEYPOINTS, DecodedPoses, DecoderSettings, decode_poses
from coralline_pycoral.posenet_file import without_decoder
from coralline_pycoral.utils import edgetpu
from deploy.contract.errors import LoadError
from deploy.contract.preprocessing import Array
from deploy.contract.tensors import TensorDescription

_NEAREST = 0
"""Pillow's number of the nearest-neighbour filter."""


class KeypointType(enum.IntEnum):
    """The keypoints of a person."""

    NOSE = 0
    LEFT_EYE = 1
    RIGHT_EYE = 2
    LEFT_EAR = 3
    RIGHT_EAR = 4
    LEFT_SHOULDER = 5
    RIGHT_SHOULDER = 6
    LEFT_ELBOW = 7
    RIGHT_ELBOW = 8
    LEFT_WRIST = 9
    RIGHT_WRIST = 10
    LEFT_HIP = 11
    RIGHT_HIP = 12
    LEFT_KNEE = 13
    RIGHT_KNEE = 14
    LEFT_ANKLE = 15
    RIGHT_ANKLE = 16


class Point(NamedTuple):
    """A position in pixels."""

    x: float
    y: float

    @staticmethod
    def distance(a: Point, b: Point) -> float:
        """Return the distance of two points."""
        return math.sqrt((a.x - b.x) ** 2 + (a.y - b.y) ** 2)


class Keypoint(NamedTuple):
    """A keypoint of a pose: its position and score."""

    point: Point
    score: float


class Pose(NamedTuple):
    """The keypoints of a person, and the score of all."""

    keypoints: Dict[KeypointType, Keypoint]
    score: float


class PoseEngine:
    """PoseNet on the Edge TPU or the CPU.

    Args:
        model_path: a PoseNet of the vendor with or without its decoder, compiled or not; or another .tflite file with
            the outputs heatmaps [.., 17], offsets [.., 34] and displacements [.., 64] or twice [.., 32].
        mirror: mirror the keypoints, as the vendor's class does.

    Raises:
        ValueError: the file cannot be read, or its input is not an RGB image.
        LoadError: the outputs are not those of PoseNet.
    """

    def __init__(self, model_path: str, mirror: bool = False) -> None:
        with open(model_path, "rb") as stream:
            content, settings = without_decoder(stream.read())
        self._interpreter = edgetpu.make_interpreter(content)
        self._interpreter.allocate_tensors()
        self._mirror = mirror
        shape = self.get_input_tensor_shape()
        if len(shape) != 4 or shape[3] != 3 or shape[0] != 1:
            what = "Image model should have input shape [1, height, width, 3]! This model has %s."
            raise ValueError(what % (shape,))
        _, self._input_height, self._input_width, self._input_depth = shape
        self._input_type = self._interpreter.get_input_details()[0]["dtype"]
        self._outputs = self._interpreter.get_output_details()
        self._heads = _heads([int(detail["shape"][-1]) for detail in self._outputs])
        rows = int(self._outputs[self._heads[0]]["shape"][1])
        self._settings = settings or DecoderSettings(stride=_stride(int(self._input_height), rows))
        self._inf_time = 0.0

    def run_inference(self, input_data: Any) -> float:
        """Run one inference; see `edgetpu.run_inference`. Return its time in milliseconds, without decoding."""
        start = time.monotonic()
        edgetpu.run_inference(self._interpreter, input_data)
        self._inf_time = time.monotonic() - start
        return self._inf_time * 1000

    def DetectPosesInImage(self, img: Any) -> Tuple[List[Pose], float]:  # noqa: N802 - the vendor's name
        """Return the poses of an image of Pillow, in pixels of the model's input, and the inference time in seconds."""
        resized: Array = np.asarray(img.resize((int(self._input_width), int(self._input_height)), _NEAREST))
        if self._input_type is np.float32:
            resized = np.float32(resized) / np.float32(128.0) - np.float32(1.0)
        self.run_inference(resized.flatten())
        return self.ParseOutput()

    def get_input_tensor_shape(self) -> Any:
        """Return the shape of the input."""
        return self._interpreter.get_input_details()[0]["shape"]

    def get_output_tensor(self, idx: int) -> Array:
        """Return an output of the decoder.

        Args:
            idx: 0: keypoints [poses, 17, 2], y and x; 1: keypoint scores [poses, 17]; 2: scores [poses]; 3: the number
                of poses. The number of rows is the largest number of poses.
        """
        decoded = self._decoded()
        if idx == 3:
            return np.asarray(len(decoded.scores), np.float32)
        rows = np.zeros((self._settings.max_detections,) + decoded[idx].shape[1:], np.float32)
        rows[: len(decoded.scores)] = decoded[idx]
        return rows

    def ParseOutput(self) -> Tuple[List[Pose], float]:  # noqa: N802 - the vendor's name
        """Return the poses of the last inference, the highest score first, and its time in seconds."""
        poses = []
        decoded = self._decoded()
        for positions, scores, score in zip(decoded.keypoints, decoded.keypoint_scores, decoded.scores):
            keypoints = {}
            for number in range(KEYPOINTS):
                y, x = positions[number]
                if self._mirror:
                    y = self._input_width - y  # y, as in the vendor's class
                keypoints[KeypointType(number)] = Keypoint(Point(x, y), scores[number])
            poses.append(Pose(keypoints, score))
        return poses, self._inf_time

    def _decoded(self) -> DecodedPoses:
        tensors = TensorDescription.of(self._outputs)
        values = []
        for index in self._heads:
            stored = common.output_tensor(self._interpreter, index)[0]
            values.append(tensors[index].real(stored))
        mid = values[2] if len(values) == 3 else np.concatenate(values[2:], axis=2)
        return decode_poses(values[0], values[1], mid, self._settings)


def get_pose(interpreter: Any, image_size: Tuple[int, int]) -> Pose:
    """Return the pose of the last inference of MoveNet (single pose), in pixels of the image.

    Args:
        interpreter: the interpreter of a model with one output [1, 1, 17, 3]: y, x and score, from 0 to 1.
        image_size: the width and height of the image.

    Returns:
        The keypoints, and the mean of their scores.
    """
    (tensor,) = TensorDescription.of(interpreter.get_output_details())
    rows = tensor.real(common.output_tensor(interpreter, 0).copy()).reshape(KEYPOINTS, 3)
    width, height = image_size
    keypoints = {}
    for kind, (y, x, score) in zip(KeypointType, rows):
        keypoints[kind] = Keypoint(Point(float(x) * width, float(y) * height), float(score))
    return Pose(keypoints, float(rows[:, 2].mean()))


def _heads(channels: Sequence[int]) -> List[int]:
    """Return the indices of heatmaps, short offsets and mid offsets; of two mid offsets the one from parents first.

    Raises:
        LoadError: the outputs are not those of PoseNet.
    """
    edges = len(EDGES)
    for expected in ([KEYPOINTS, 2 * KEYPOINTS, 4 * edges], [KEYPOINTS, 2 * KEYPOINTS, 2 * edges, 2 * edges]):
        if sorted(channels) == sorted(expected):
            return sorted(range(len(channels)), key=lambda index: expected.index(channels[index]))
    what = "the model has outputs of %s channels, and PoseNet has 17, 34 and 64, or 17, 34, 32 and 32"
    raise LoadError(what % ", ".join(map(str, channels)), "use a PoseNet file")


def _stride(input_rows: int, rows: int) -> int:
    """Return the stride of a model with these rows: 8, 16 or 32."""
    ratio = (input_rows - 1) / max(rows - 1, 1)
    return min((8, 16, 32), key=lambda stride: abs(stride - ratio))
