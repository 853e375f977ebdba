"""Segments in threads give the same results, in the same order, as segments that run one after the other."""

from __future__ import annotations

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
    with pytest.raises(RuntimeError, match="closed"):
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


def test_a_failed_input_does_not_end_the_pipeline() -> None:
    runner = PipelinedModelRunner([segment("a", "b")])
    runner.push({"a": np.zeros(5, np.float32)})
    runner.push({"a": np.ones((1, 4), np.float32)})
    with pytest.raises(RuntimeError, match="segment of the pipeline failed"):
        runner.pop()
    result = runner.pop()
    assert result is not None
    assert result["b"].tolist() == [[1, 1, 1, 1]]
