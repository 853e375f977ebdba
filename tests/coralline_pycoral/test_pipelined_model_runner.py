"""Segments in threads give the same results, in the same order, as segments that run one after the other."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import one_op
import pytest
import tiny

from coralline_pycoral.pipeline.pipelined_model_runner import PipelinedModelRunner
from coralline_pycoral.utils.edgetpu import make_interpreter


def segment(first: str, last: str) -> Any:
    """A segment that squares its values."""
    tensor = one_op.Tensor((1, 4), "FLOAT32", scales=())
    operator = one_op.Op("MUL", [first, first], [last])
    return make_interpreter(one_op.content({first: tensor, last: tensor}, [operator], [first], [last]))


@pytest.mark.parametrize("limit", [0, 1])
def test_results_and_their_order(limit: int) -> None:
    runner = PipelinedModelRunner([segment("a", "b"), segment("b", "c")])
    runner.set_input_queue_size(limit)
    runner.set_output_queue_size(limit)
    inputs = [np.full((1, 4), value, np.float32) for value in range(10)]

    def produce() -> None:
        for values in inputs:
            runner.push({"a": values})
        runner.push({})

    producer = threading.Thread(target=produce)
    producer.start()
    for values in inputs:
        result = runner.pop()
        assert result is not None
        assert result.keys() == {"c"}
        assert (result["c"] == values**4).all()
    producer.join()
    assert runner.pop() is None
    assert runner.pop() is None
    assert len(runner.interpreters()) == 2
    with pytest.raises(RuntimeError, match="turned off"):
        runner.push({"a": inputs[0]})


def test_wrong_segments_and_inputs() -> None:
    with pytest.raises(ValueError, match="At least one interpreter"):
        PipelinedModelRunner([])
    with pytest.raises(ValueError, match="Interpreter 1 can not get"):
        PipelinedModelRunner([segment("a", "b"), make_interpreter(tiny.classifier())])
    runner = PipelinedModelRunner([segment("a", "b")])
    with pytest.raises(ValueError, match="type"):
        runner.push({"a": np.zeros((1, 4), np.uint8)})
    with pytest.raises(ValueError, match="length 1, but got 2"):
        runner.push({"a": np.zeros((1, 4), np.float32), "b": np.zeros((1, 4), np.float32)})


@pytest.mark.parametrize("segments", [1, 3])
def test_a_full_pipeline_blocks_push(segments: int) -> None:
    """Two inputs per segment wait, and one result."""
    names = "abcd"[: segments + 1]
    runner = PipelinedModelRunner([segment(*pair) for pair in itertools.pairwise(names)])
    runner.set_input_queue_size(1)
    runner.set_output_queue_size(1)
    accepted: list[int] = []

    def produce() -> None:
        for number in range(20):
            runner.push({"a": np.full((1, 4), 1 + number / 100, np.float32)})
            accepted.append(number)
        runner.push({})

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    producer.join(1)
    assert len(accepted) == 2 * segments + 1
    for number in range(20):
        result = runner.pop()
        assert result is not None
        np.testing.assert_allclose(result[names[-1]], (1 + number / 100) ** 2**segments, rtol=1e-5)
    assert runner.pop() is None
    producer.join(10)
    assert not producer.is_alive()


@pytest.mark.parametrize("position", [0, 1])
def test_an_error_ends_the_pipeline(position: int) -> None:
    class Failing:
        def __init__(self, interpreter: Any) -> None:
            self.interpreter, self.runs = interpreter, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.interpreter, name)

        def invoke(self) -> None:
            self.runs += 1
            if self.runs == 2:
                raise RuntimeError("the device is gone")
            self.interpreter.invoke()

    interpreters = [segment("a", "b"), segment("b", "c")]
    interpreters[position] = Failing(interpreters[position])
    runner = PipelinedModelRunner(interpreters)
    message = f"Segment {position} runner error: the device is gone"
    values = {"a": np.ones((1, 4), np.float32)}
    runner.push(values)
    first = runner.pop()
    assert first is not None
    assert first["c"].tolist() == [[1, 1, 1, 1]]
    runner.push(values)
    with pytest.raises(RuntimeError, match=message):
        runner.pop()
    for tensors in (values, {}):
        with pytest.raises(RuntimeError, match=message):
            runner.push(tensors)
    assert runner.pop() is None


def test_push_does_not_wait_for_a_failed_segment() -> None:
    runner = PipelinedModelRunner([segment("a", "b")])
    runner.set_input_queue_size(1)
    failed = threading.Event()

    def produce() -> None:
        try:
            while True:
                runner.push({"a": np.zeros(5, np.float32)})
        except RuntimeError:
            failed.set()

    threading.Thread(target=produce, daemon=True).start()
    assert failed.wait(10)
    with pytest.raises(RuntimeError, match="Segment 0 runner error"):
        runner.pop()
