"""PoseNet: the decoder is removed from the file, and numpy decodes the poses of several people."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import one_op
import pytest
from flatbuffers import flexbuffers
from paths import ROOT

from compress.model.tflite import graph
from coralline_pycoral.pose_engine import KeypointType, PoseEngine, get_pose
from coralline_pycoral.posenet import EDGES, DecodedPoses, DecoderSettings, decode_poses
from coralline_pycoral.posenet_file import without_decoder
from deploy.contract.errors import LoadError

SETTINGS = DecoderSettings(max_detections=7, score_threshold=0.25, stride=8, nms_radius=12.5)
PAIR = ROOT.parent / "shared/edgetpu/pairs/posenet_mobilenet_v1_075_353_481_16_quant_decoder/model.tflite"


def with_decoder(*, masks: bool = False, **changes: Any) -> bytes:
    """Return a file whose decoder is not its last operator."""
    heads = ["heatmaps", "short", "mid"]
    poses = ["keypoints", "keypoint scores", "scores", "number", *(["masks"] if masks else [])]
    tensors = {name: one_op.Tensor((1, 4), "FLOAT32", scales=()) for name in ("image", *heads, *poses)}
    add = [one_op.Op("ADD", ["image", "image"], [name]) for name in heads]
    decoder = one_op.Op("PosenetDecoderOp", heads, poses, custom=True)
    model = one_op.model(tensors, [*add[:2], decoder, add[2]], ["image"], poses)
    facts = {
        "_output_quantized": True,
        "max_detections": SETTINGS.max_detections,
        "nms_radius": SETTINGS.nms_radius,
        "score_threshold": SETTINGS.score_threshold,
        "stride": SETTINGS.stride,
    }
    model.subgraphs[0].operators[2].customOptions = np.frombuffer(flexbuffers.Dumps({**facts, **changes}), np.uint8)
    return graph.serialize(SimpleNamespace(source=model))  # type: ignore[arg-type]


def test_the_decoder_is_taken_off() -> None:
    content, settings = without_decoder(with_decoder())
    assert settings == SETTINGS
    main = graph.parse(content).source.subgraphs[0]
    names = [main.tensors[index].name for index in main.outputs]
    assert names == [b"heatmaps", b"short", b"mid"]
    assert [main.tensors[operator.outputs[0]].name for operator in main.operators] == names


def test_files_without_it_or_with_masks() -> None:
    assert without_decoder(b"another file") == (b"another file", None)
    with pytest.raises(LoadError, match="instance masks"):
        without_decoder(with_decoder(masks=True))
    with pytest.raises(LoadError, match="cannot be read"):
        without_decoder(with_decoder()[:200] + b"PosenetDecoderOp")


@pytest.mark.parametrize("name", ["max_detections", "score_threshold", "stride", "nms_radius"])
@pytest.mark.parametrize("value", [-1, 2**40, float("nan"), float("inf")])
def test_settings_of_the_decoder_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(LoadError, match=f"its decoder has {name} "):
        without_decoder(with_decoder(**{name: value}))


def skeleton(left: float, top: float) -> Any:
    """The keypoints [17, 2] of a person, y and x in pixels."""
    random = np.random.default_rng(4)
    return np.array([top, left]) + random.uniform(0, 60, (17, 2))


def outputs_of(people: list[Any], logits: list[float], rows: int = 30, columns: int = 40) -> list[Any]:
    """Return heatmaps, short and mid offsets as an exact PoseNet with a stride of 8 gives them."""
    heatmaps = np.full((rows, columns, 17), -8, np.float32)
    cells = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=2) * 8.0
    distances = [np.sum((cells[:, :, None] - person) ** 2, axis=3) for person in people]
    nearest = np.argmin(distances, axis=0)
    targets = np.stack(people)
    short = np.zeros((rows, columns, 2, 17), np.float32)
    mid = np.zeros((rows, columns, 2, 2, len(EDGES)), np.float32)
    for row, column in np.ndindex(rows, columns):
        for keypoint in range(17):
            person = nearest[row, column, keypoint]
            short[row, column, :, keypoint] = targets[person, keypoint] - cells[row, column]
            if distances[person][row, column, keypoint] < 16**2:
                heatmaps[row, column, keypoint] = logits[person]
        for edge, ends in enumerate(EDGES):
            for direction, (source, target) in enumerate((ends, ends[::-1])):
                person = nearest[row, column, source]
                mid[row, column, direction, :, edge] = targets[person, target] - targets[person, source]
    return [heatmaps, short.reshape(rows, columns, 34), mid.reshape(rows, columns, 64)]


def decoded(logits: list[float], **changes: Any) -> DecodedPoses:
    people = [skeleton(20, 30), skeleton(200, 120)]
    settings = DecoderSettings(**{"stride": 8, **changes})
    return decode_poses(*outputs_of(people, logits), settings)


def test_two_people() -> None:
    poses = decoded([2.0, 4.0])
    assert len(poses.scores) == 2
    assert np.abs(poses.keypoints[0] - skeleton(200, 120)).max() < 1
    assert np.abs(poses.keypoints[1] - skeleton(20, 30)).max() < 1
    assert poses.scores == pytest.approx([1 / (1 + np.exp(-4)), 1 / (1 + np.exp(-2))], abs=1e-3)
    assert (np.diff(poses.scores) < 0).all()


def test_limits_of_the_decoder() -> None:
    assert len(decoded([2.0, 4.0], max_detections=1).scores) == 1
    assert len(decoded([2.0, 4.0], score_threshold=0.95).scores) == 1
    nobody = decoded([-8.0, -8.0])
    assert nobody.keypoints.shape == (0, 17, 2)


def test_movenet(prepared: Any) -> None:
    rows = np.random.default_rng(0).random((1, 1, 17, 3)).astype(np.float32)
    pose = get_pose(prepared([rows]), (200, 100))
    keypoint = pose.keypoints[KeypointType.LEFT_HIP]
    assert keypoint.point == pytest.approx((200 * rows[0, 0, 11, 1], 100 * rows[0, 0, 11, 0]))
    assert (keypoint.score, pose.score) == pytest.approx((rows[0, 0, 11, 2], rows[..., 2].mean()))


@pytest.mark.skipif(not PAIR.exists(), reason="the vendor's PoseNet is not there")
def test_the_vendors_file_runs_on_the_cpu() -> None:
    engine = PoseEngine(str(PAIR))
    engine.run_inference(np.random.default_rng(0).integers(0, 256, 353 * 481 * 3).astype(np.uint8))
    poses, seconds = engine.ParseOutput()
    assert engine.get_output_tensor(0).shape == (20, 17, 2)
    assert int(engine.get_output_tensor(3)) == len(poses)
    assert seconds > 0
