"""The embedding as a second output: the scores stay, and the last dense layer gives the same classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_shop
import tiny
from one_op import Tensor, one

from compress.core.errors import ModelError
from compress.model.tflite import embedding, graph
from compress.model.tflite.interpreter import LoadedModel
from deploy.contract import confidence


def loaded(folder: Path, content: bytes) -> LoadedModel:
    path = folder / "model.tflite"
    path.write_bytes(content)
    return LoadedModel(path, reproducible=True)


def test_scores_stay_and_the_head_gives_them(tmp_path: Path) -> None:
    before = small_shop.model()
    after = loaded(tmp_path, small_shop.exposed(before))
    assert [tensor.shape for tensor in after.output_tensors] == [(1, 8), (1, small_shop.HIDDEN)]
    assert after.output_tensors[1].name == embedding.OUTPUT
    samples = small_shop.dataset().inputs("test")[:50]
    rows = after.scores(samples)
    scores, vectors = after.output_layout.parts(rows)
    np.testing.assert_array_equal(scores, loaded(tmp_path, before).scores(samples))
    logits = embedding.head_of(graph.parse(before)).logits(vectors)
    likely = np.exp(confidence.log_softmax(logits))
    assert np.abs(likely - scores).max() < 0.05  # int8 logits and a softmax of 256 steps
    assert (likely.argmax(axis=1) == scores.argmax(axis=1)).mean() > 0.97


@pytest.mark.parametrize("int8", [True, False])
def test_a_convolution_on_one_pixel_is_a_dense_layer(tmp_path: Path, int8: bool) -> None:
    """The vendor's classifiers end with a convolution, SQUEEZE and SOFTMAX."""
    builder = tiny.TfliteBuilder(int8=int8)
    x = builder.activation("image", [1, 1, 1, 3], (0.0, 1.0))
    hidden = builder.activation("hidden", [1, 1, 1, 4], (0.0, 3.0))
    scores = builder.activation("scores", [1, 1, 1, 2], (-9.0, 9.0))
    random = np.random.default_rng(0)
    builder.convolution(x, random.uniform(-1, 1, (4, 1, 1, 3)), np.zeros(4), hidden)
    options = builder.schema.Conv2DOptionsT()
    options.padding, options.strideH, options.strideW = builder.schema.Padding.SAME, 1, 1
    kernel, bias = random.uniform(-1, 1, (2, 1, 1, 4)), np.array([0.5, -0.5])
    builder.operator(
        "CONV_2D", [hidden, *builder.weights("last", kernel, bias, hidden, per_channel=True)], scores, options
    )
    parsed = graph.parse(builder.finish([x], [scores]))
    head = embedding.head_of(parsed)
    np.testing.assert_allclose(head.weights, kernel.reshape(2, 4), atol=0.01)
    np.testing.assert_allclose(head.biases, bias, atol=0.01)
    model = loaded(tmp_path, graph.serialize(embedding.exposed(parsed)))
    scores_found, vectors = model.output_layout.parts(model.scores(random.random((20, 1, 1, 3), np.float32)))
    np.testing.assert_allclose(head.logits(vectors), scores_found, atol=0.08)


def test_a_compiler_may_append_to_the_name() -> None:
    assert embedding.is_embedding({"name": f"{embedding.OUTPUT}:0"})
    assert not embedding.is_embedding({"name": "hidden"})


IMAGE, KERNEL, BIAS = Tensor((1, 4, 4, 2)), Tensor((2, 3, 3, 2), data=1), Tensor((2,), "INT32", 0, ())
ROW, WEIGHTS = Tensor((1, 2)), Tensor((2, 2), data=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: one("CONV_2D", [IMAGE, KERNEL, BIAS], IMAGE), "ends with CONV_2D, not with a dense layer"),
        (lambda: one("FULLY_CONNECTED", [ROW, WEIGHTS, BIAS], ROW), "has no layer in front of its last dense layer"),
        (lambda: graph.parse(small_shop.exposed(small_shop.model())), "has the outputs scores, coralline_embedding"),
    ],
)
def test_refused(make: Callable[[], graph.Graph], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        embedding.exposed(make())


def test_a_head_with_a_relu_is_refused() -> None:
    with pytest.raises(ModelError, match="the last dense layer has an activation"):
        embedding.head_of(graph.parse(small_shop.model(head=False)))


def test_probabilities_are_recognized() -> None:
    assert embedding.gives_probabilities(graph.parse(small_shop.model()))
    assert not embedding.gives_probabilities(graph.parse(small_shop.model(softmax=False)))
