"""Reading and writing .tflite files: the graph has the content of the file, and all of it is written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import one_op
import pytest
import tiny
from one_op import Op, Tensor

from compress.core.errors import ModelError
from compress.model.tflite import comparison, graph
from compress.model.tflite.runtime import IsolatedInterpreter

CONV = {
    "x": Tensor((1, 4, 4, 2), scales=(0.25,), signature=(-1, 4, 4, 2)),
    "w": Tensor((3, 1, 1, 2), data=[[[[1, 2]]], [[[3, 4]]], [[[5, 6]]]], scales=(0.5, 0.25, 0.125)),
    "b": Tensor((3,), "INT32", [7, 8, 9], ()),
    "y": Tensor((1, 2, 2, 3), "UINT8"),
}
OPTIONS = {"strideH": 2, "strideW": 2, "fusedActivationFunction": 1}


def conv(**tensors: Tensor) -> Any:
    return {**CONV, **tensors}, [Op("CONV_2D", "xwb", "y", 3, OPTIONS)], "x", "y"


# --- reading ----------------------------------------------------------------------------


def test_tensors() -> None:
    x, w, b, y = one_op.read(*conv()).tensors
    assert (x.index, x.name, x.dtype, x.shape, x.elements) == (0, "x", "INT8", (1, 4, 4, 2), 32)
    assert x.quantization == graph.Quantization((0.25,), (0,), 0)
    assert not x.quantization.per_channel
    assert not x.is_constant
    assert w.quantization
    assert w.quantization.per_channel
    assert w.is_constant
    np.testing.assert_array_equal(w.array()[:, 0, 0], [[1, 2], [3, 4], [5, 6]])
    assert b.quantization is None
    assert b.array().dtype == np.int32
    np.testing.assert_array_equal(b.array(), [7, 8, 9])
    assert (y.dtype, y.is_variable) == ("UINT8", False)


def test_operators() -> None:
    parsed = one_op.read(*conv())
    (op,) = parsed.operators
    assert (op.index, op.name, op.custom, op.version) == (0, "CONV_2D", False, 3)
    assert (op.inputs, op.outputs) == ((0, 1, 2), (3,))
    assert (op.option("strideW"), op.option("dilationHFactor"), op.option("unknown", 5)) == (2, 1, 5)
    assert [tensor.name for tensor in parsed.input_tensors(op)] == ["x", "w", "b"]
    assert [tensor.name for tensor in parsed.output_tensors(op)] == ["y"]
    assert (parsed.inputs, parsed.outputs, parsed.subgraphs) == ((0,), (3,), 1)
    assert parsed.producer == {3: op}


def test_a_dynamic_batch_is_not_dynamic() -> None:
    assert not one_op.read(*conv()).tensors[0].dynamic
    assert one_op.read(*conv(x=Tensor((1, 1, 4, 2), signature=(-1, -1, 4, 2)))).tensors[0].dynamic


def test_custom_operators_and_new_ones() -> None:
    custom = one_op.one("MyOp", [Tensor((1, 2))], Tensor((1, 2)), custom=True).operators[0]
    assert (custom.name, custom.custom) == ("MyOp", True)
    source = one_op.model(*conv())
    source.operatorCodes[0].builtinCode = 100_000
    assert parsed_again(source).operators[0].name == "BUILTIN_100000"


def test_codes_of_old_files() -> None:
    """Files of 2019 have only the byte; in those of 2020 and later, the larger number counts."""
    source = one_op.model(*conv())
    source.operatorCodes[0].deprecatedBuiltinCode, source.operatorCodes[0].builtinCode = 4, 0
    assert parsed_again(source).operators[0].name == "DEPTHWISE_CONV_2D"
    source.operatorCodes[0].deprecatedBuiltinCode, source.operatorCodes[0].builtinCode = 127, 150
    assert parsed_again(source).operators[0].name == "GELU"


def parsed_again(source: Any) -> graph.Graph:
    return graph.parse(graph.serialize(graph.Graph((), (), (), (), 1, source)))


def test_a_constant_that_does_not_fill_its_shape() -> None:
    source = one_op.model(*conv())
    source.subgraphs[0].tensors[1].shape = [3, 1, 1, 3]
    with pytest.raises(ModelError, match="tensor 1 has 6 bytes, and needs 9"):
        parsed_again(source)
    source.subgraphs[0].tensors[1].shape = [3, 1, 1, 2]
    with pytest.raises(ModelError, match="no readable constant value"):
        parsed_again(source).tensors[0].array()
    source.subgraphs[0].tensors[1].type = 5  # STRING
    with pytest.raises(ModelError, match="no readable constant value"):
        parsed_again(source).tensors[1].array()


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(one_op.content(*conv()))
    assert graph.read(path).operators[0].name == "CONV_2D"
    with pytest.raises(ModelError, match=r"absent\.tflite: cannot be read: No such file"):
        graph.read(tmp_path / "absent.tflite")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        graph.read(tmp_path)


# --- writing ----------------------------------------------------------------------------


def buffer_places(content: bytes) -> list[int]:
    """Return the positions where the data of the buffers begins."""
    from ai_edge_litert import schema_py_generated as schema

    file_bytes = np.frombuffer(content, np.uint8)
    file = schema.Model.GetRootAs(content, 0)
    data = [file.Buffers(index).DataAsNumpy() for index in range(file.BuffersLength())]
    start = file_bytes.__array_interface__["data"][0]
    return [values.__array_interface__["data"][0] - start for values in data if not isinstance(values, int)]


def test_buffers_are_aligned() -> None:
    tensors = {f"c{index}": Tensor((size,), data=index) for index, size in enumerate((1, 3, 15, 16, 17, 33))}
    tensors |= {"x": Tensor((1, 2)), "y": Tensor((1, 2))}
    written = one_op.content(tensors, [Op("MyOp", list(tensors)[:-1], "y", custom=True)], "x", "y")
    places = buffer_places(written)
    assert len(places) == 6
    assert [place % 16 for place in places] == [0] * 6
    for tensor, size in zip(graph.parse(written).tensors, (1, 3, 15, 16, 17, 33), strict=False):
        np.testing.assert_array_equal(tensor.array(), np.full(size, tensor.index))


def test_writing_is_stable_and_leaves_the_graph_as_it_was() -> None:
    parsed = graph.parse(tiny.classifier())
    kinds = [type(buffer) for buffer in parsed.source.buffers]
    first = graph.serialize(parsed)
    assert [type(buffer) for buffer in parsed.source.buffers] == kinds
    assert graph.serialize(parsed) == first
    assert graph.serialize(graph.parse(first)) == first


def test_equal_zero_points_are_written_once() -> None:
    channels = 1000
    source = graph.parse(tiny.classifier()).source
    for tensor in source.subgraphs[0].tensors[:4]:
        tensor.shape, tensor.buffer, tensor.quantization.quantizedDimension = [channels], 0, 0
        tensor.quantization.scale = np.arange(1, channels + 1, dtype=np.float32)
        tensor.quantization.zeroPoint = np.zeros(channels, np.int64)
    source.subgraphs[0].tensors[3].quantization.zeroPoint = np.arange(channels) % 100
    different = len(graph.serialize(graph.from_source(source)))
    source.subgraphs[0].tensors[3].quantization.zeroPoint = np.zeros(channels, np.int64)
    content = graph.serialize(graph.from_source(source))
    assert len(content) < different - 8 * channels + 64
    assert len(content) < len(tiny.classifier()) + (4 * 4 + 8) * channels + 64
    assert [tensor.quantization.zero_point for tensor in graph.parse(content).tensors[:4]] == [(0,) * channels] * 4


def test_everything_is_kept() -> None:
    """Custom options, metadata, signatures, descriptions, and parts that no rule or count reads are kept."""
    from ai_edge_litert import schema_py_generated as schema

    source = one_op.model({"x": Tensor((1, 2)), "y": Tensor((1, 2))}, [Op("MyOp", "x", "y", 7, custom=True)], "x", "y")
    source.description = b"a description"
    source.subgraphs[0].operators[0].customOptions = np.arange(9, dtype=np.uint8)
    source.metadata = [schema.MetadataT(name=b"min_runtime_version", buffer=len(source.buffers))]
    source.metadataBuffer = [1]
    source.buffers.append(schema.BufferT(data=np.frombuffer(b"min version 9", np.uint8)))
    ends = [schema.TensorMapT(name=name, tensorIndex=index) for index, name in enumerate((b"image", b"scores"))]
    signature = schema.SignatureDefT(signatureKey=b"serving_default", inputs=ends[:1], outputs=ends[1:])
    source.signatureDefs = [signature]
    source.subgraphs.append(schema.SubGraphT(name=b"other", tensors=[], operators=[], inputs=[], outputs=[]))

    parsed = parsed_again(parsed_again(source).source)
    assert parsed.subgraphs == 2
    again = parsed.source
    assert again.description == b"a description"
    assert (parsed.operators[0].name, parsed.operators[0].version) == ("MyOp", 7)
    assert bytes(again.subgraphs[0].operators[0].customOptions) == bytes(range(9))
    assert [(entry.name, bytes(again.buffers[entry.buffer].data)) for entry in again.metadata] == [
        (b"min_runtime_version", b"min version 9")
    ]
    assert list(again.metadataBuffer) == [1]
    (kept,) = again.signatureDefs
    assert kept.signatureKey == b"serving_default"
    assert [(row.name, row.tensorIndex) for row in (*kept.inputs, *kept.outputs)] == [(b"image", 0), (b"scores", 1)]
    assert again.subgraphs[1].name == b"other"


# --- real models ------------------------------------------------------------------------


def outputs(content: bytes) -> list[np.ndarray]:
    """Return the outputs of a model for random input, with kernels that give identical results."""
    parsed = graph.parse(content)
    feed = comparison.random_feed(parsed, np.random.default_rng(0))
    return IsolatedInterpreter(content).run(dict(zip(parsed.inputs, feed, strict=True)), list(parsed.outputs))


def plain(value: Any) -> Any:
    """Return an object of the schema as plain values, for comparison."""
    if isinstance(value, np.ndarray):
        return (value.dtype.kind, value.tobytes())
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in vars(value).items()} if hasattr(value, "__dict__") else value


def test_real_models_survive_being_written(real_model: Path) -> None:
    content = real_model.read_bytes()
    parsed = graph.parse(content)
    written = graph.serialize(parsed)
    assert plain(graph.parse(written).source) == plain(parsed.source)
    assert {place % 16 for place in buffer_places(written)} == {0}
    if any(op.custom for op in parsed.operators):
        return  # there are no kernels for it here
    for before, after in zip(outputs(content), outputs(written), strict=True):
        np.testing.assert_array_equal(before, after)


def test_small_models_survive_being_written() -> None:
    for int8 in (True, False):
        content = tiny.classifier(int8=int8)
        before, after = outputs(content)[0], outputs(graph.serialize(graph.parse(content)))[0]
        np.testing.assert_array_equal(before, after)
        assert len(set(before.flatten().tolist())) > 1
