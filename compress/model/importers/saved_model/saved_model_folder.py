"""SavedModel folders: the content of a folder, read without TensorFlow, so that no code in it runs.

A folder written by Keras 2 contains the configuration of its model (keras_metadata.pb, or the object graph of older
releases); the model is rebuilt from it and the weights. Any other folder is a graph of TensorFlow functions, which can
be converted to a float .tflite file.

Source: tensorflow/core/protobuf/{saved_model,meta_graph,saved_object_graph}.proto, keras/protobuf/saved_metadata.proto.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.core.errors import ModelError
from compress.core.files import MOST_FILES, SAVED_MODEL
from compress.model.importers.common import protobuf_wire
from compress.model.importers.common.unsupported import Refused
from compress.model.importers.keras.keras_config import Judged, judged, loadable, shown

METADATA, WEIGHTS = "keras_metadata.pb", "variables/variables"
ALLOWED = "a folder with saved_model.pb, as model.export() or tf.saved_model.save() write it"
LARGEST_GRAPH = 2**28
"""The graph has no weights but constants; protobuf itself stops at 2 GB."""
IGNORED = "__saved_model_init_op", "__saved_model_train_op"
_NETWORKS = {"_tf_keras_network", "_tf_keras_sequential", "_tf_keras_model"}
# Operators that a graph from an unknown source may run: those that compute, without access to the system.
# Source: tensorflow.org/api_docs/python/tf/raw_ops (2.21).
FILES = {"MergeV2Checkpoints", "RestoreV2", "SaveV2", "ShardedFilename"}
"""Operators that save and restore the variables of every SavedModel; they are allowed because they are not run."""

_COMPUTE = """
Abs AccumulateNV2 Acos Acosh Add AddN AddV2 AdjustContrastv2 AdjustHue AdjustSaturation All Any ArgMax ArgMin Asin
Asinh Atan Atan2 Atanh AudioSpectrogram AvgPool AvgPool3D BatchMatMul BatchMatMulV2 BatchMatMulV3 BatchToSpace
BatchToSpaceND BiasAdd BiasAddV1 Bincount Bitcast BitwiseAnd BitwiseOr BitwiseXor BroadcastArgs BroadcastTo Bucketize
Cast Ceil CheckNumerics CheckNumericsV2 ClipByValue CombinedNonMaxSuppression Complex ComplexAbs Concat ConcatOffset
ConcatV2 Conj Const Conv Conv2D Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D Conv3DBackpropInputV2 Cos Cosh
CropAndResize Cross Cumprod Cumsum DenseBincount DepthToSpace DepthwiseConv2dNative Diag DiagPart Dilation2D Div
DivNoNan Einsum Elu Empty EnsureShape Equal Erf Erfc Erfinv EuclideanNorm Exp ExpandDims Expm1 ExtractImagePatches
ExtractVolumePatches FFT FFT2D FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel Fill
Floor FloorDiv FloorMod FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Gather GatherNd GatherV2 Greater GreaterEqual
GuaranteeConst HSVToRGB HashTableV2 IFFT IFFT2D IRFFT IRFFT2D Identity IdentityN Imag ImageProjectiveTransformV2
ImageProjectiveTransformV3 Inv Invert InvertPermutation IsFinite IsInf IsNan L2Loss LRN LeakyRelu LeftShift Less
LessEqual LinSpace Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr LookupTableFindV2 LookupTableImportV2
LookupTableSizeV2 MatMul MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3
MatrixSetDiag MatrixSetDiagV3 Max MaxPool MaxPool3D MaxPoolV2 MaxPoolWithArgmax Maximum Mean Mfcc Min Minimum
MirrorPad Mod Mul MulNoNan Neg NoOp NonMaxSuppression NonMaxSuppressionV2 NonMaxSuppressionV3 NonMaxSuppressionV4
NonMaxSuppressionV5 NotEqual OneHot OnesLike Pack Pad PadV2 ParallelConcat Placeholder PlaceholderV2
PlaceholderWithDefault Pow Prod QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 RFFT RFFT2D
RGBToHSV RandomStandardNormal RandomUniform RandomUniformInt Range Rank Real RealDiv Reciprocal Relu Relu6 Reshape
ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor Reverse ReverseSequence ReverseV2 RightShift Rint Roll
Round Rsqrt ScaleAndTranslate ScatterNd SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum Select SelectV2 Selu
Shape ShapeN Sigmoid Sign Sin Sinh Size Slice Snapshot Softmax Softplus Softsign SpaceToBatch SpaceToBatchND
SpaceToDepth Split SplitV Sqrt Square SquaredDifference Squeeze StatelessRandomNormalV2 StatelessRandomUniformV2
StaticRegexFullMatch StopGradient StridedSlice StringJoin Sub Sum Tan Tanh TensorScatterAdd TensorScatterUpdate Tile
TopK TopKV2 Transpose TruncateDiv TruncateMod TruncatedNormal Unique Unpack UnravelIndex UnsortedSegmentMax
UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum Where Xdivy Xlogy ZerosLike"""
_STATE = """AssignAddVariableOp AssignSubVariableOp AssignVariableOp DestroyResourceOp DisableCopyOnRead ReadVariableOp
ResourceGather ResourceGatherNd VarHandleOp VarIsInitializedOp Variable VariableShape VariableV2"""
_FLOW = """Assert Case ControlTrigger Enter Exit If LoopCond Merge NextIteration PartitionedCall StatefulPartitionedCall
StatelessCase StatelessIf StatelessWhile Switch TensorListConcatV2 TensorListElementShape TensorListFromTensor
TensorListGather TensorListGetItem TensorListLength TensorListReserve TensorListResize TensorListSetItem
TensorListStack TensorListPushBack TensorListPopBack EmptyTensorList While"""
# Keras 2 stores its LSTM and GRU for GPUs too.
_CUDNN = """CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3
CudnnRNNParamsSize CudnnRNNCanonicalToParams CudnnRNNCanonicalToParamsV2"""
COMPUTE = set(f"{_COMPUTE} {_STATE} {_FLOW} {_CUDNN}".split())
"""Operators that compute, hold variables, or control the flow in the graph."""

_REASONS = {
    **dict.fromkeys(("PyFunc", "PyFuncStateless", "EagerPyFunc"), "runs a Python function"),
    **dict.fromkeys(("ReadFile", "MatchingFiles", "LoadAndRemapMatrix", "RestoreV2", "Restore"), "reads files"),
    **dict.fromkeys(("RestoreSlice", "ImmutableConst", "GenerateVocabRemapping"), "reads files"),
    **dict.fromkeys(("InitializeTableFromTextFile", "InitializeTableFromTextFileV2"), "reads files"),
    **dict.fromkeys(("WriteFile", "SaveV2", "Save", "SaveSlices", "MergeV2Checkpoints"), "writes files"),
    **dict.fromkeys(("PrintV2", "Print"), "writes files or messages"),
    **dict.fromkeys(("RemoteCall", "RpcCall", "RpcClient", "RpcServer"), "runs a function somewhere else"),
}
_DTYPES = {1: "float32", 2: "float64", 3: "int32", 4: "uint8", 6: "int8", 7: "string", 9: "int64", 10: "bool"}


@dataclass(frozen=True)
class Port:
    """An input or output of a signature: shape with the batch, None for an open dimension."""

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Signature:
    """A signature: a function of the folder with named inputs and outputs."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True)
class Content:
    """The content of a SavedModel folder.

    Attributes:
        version: version of TensorFlow that wrote the folder.
        keras_version: version of Keras, if the folder has a Keras model; otherwise "".
        config: configuration of the Keras model, if there is one.
        refused: operators of the graph that access files, run code, or are unknown.
    """

    path: Path
    version: str
    keras_version: str
    config: dict[str, Any] | None
    judged: Judged
    signatures: tuple[Signature, ...]
    refused: tuple[Refused, ...]


def port_order(name: str) -> list[tuple[bool, int, str]]:
    """Return the sort key of an input or output: by its name, with output_2 before output_10.

    A folder stores inputs and outputs without an order, and Keras numbers them.
    """
    parts = re.split(r"([0-9]{1,9})", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts if part]


def files(path: Path) -> dict[str, Path]:
    """Return every file of the folder, by its relative path.

    Raises:
        ModelError: the folder contains links or too many files.
    """
    paths: dict[str, Path] = {}
    for entry in sorted(path.rglob("*")):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise refusal(path, f"has a link or a device in it: {shown(entry.name)}")
        if entry.is_file():
            paths[str(entry.relative_to(path))] = entry
        if len(paths) > MOST_FILES:
            raise refusal(path, f"has more than {MOST_FILES:,} files")
    return paths


def read(path: Path) -> Content:
    """Read the content of a folder, without TensorFlow and without running any code.

    Raises:
        ModelError: the folder is not a SavedModel, is damaged, or is malicious.
    """
    if not (path / SAVED_MODEL).is_file():
        raise refusal(path, f"has no {SAVED_MODEL}" if path.is_dir() else "is not a folder")
    known = files(path)
    try:
        data = _bytes(path, known[SAVED_MODEL])
        graphs = list(protobuf_wire.messages(data, 2))
        if len(graphs) != 1:
            raise refusal(path, f"has {len(graphs)} graphs in it, not one")
        root = _described(path, known, graphs[0])
        version, config, checks = _configuration(path, root)
        info = protobuf_wire.message(graphs[0], 1)
        signatures = tuple(signature for signature in _signatures(graphs[0]) if signature.name not in IGNORED)
        return Content(path, protobuf_wire.text(info, 5), version, config, checks, signatures, _refused(graphs[0]))
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"cannot be read: {str(error)[:200]}") from error
    except OSError as error:
        raise refusal(path, f"cannot be read: {error.strerror}") from error


def refusal(path: Path, what: str) -> ModelError:
    """Return the error for an invalid folder."""
    return ModelError(what, where=str(path), allowed=ALLOWED, hint="save it again")


def _bytes(path: Path, file: Path) -> bytes:
    if (size := file.stat().st_size) > LARGEST_GRAPH:
        raise refusal(path, f"its {file.name} has {size:,} bytes, more than {LARGEST_GRAPH:,}")
    return file.read_bytes()


def _described(path: Path, known: dict[str, Path], graph: memoryview) -> dict[str, Any] | None:
    """Return what Keras 2 stored of the model: in a separate file since 2.5, in the object graph before."""
    if METADATA in known:
        for node in protobuf_wire.messages(_bytes(path, known[METADATA]), 1):
            if protobuf_wire.integer(node, 2) == 0 and protobuf_wire.text(node, 4) in _NETWORKS:
                return _object(protobuf_wire.text(node, 5))
    for objects in protobuf_wire.messages(graph, 7):
        first = protobuf_wire.message(objects, 1)
        for user in protobuf_wire.messages(first, 4):
            if protobuf_wire.text(user, 1) in _NETWORKS:
                return _object(protobuf_wire.text(user, 3))
    return None


def _object(text: str) -> dict[str, Any] | None:
    value = json.loads(text) if text else None
    return value if isinstance(value, dict) else None


def _configuration(path: Path, root: dict[str, Any] | None) -> tuple[str, dict[str, Any] | None, Judged]:
    """Return version and configuration of the Keras model, if its layers are stored; a custom model has none."""
    if root is None or not isinstance(root.get("config"), dict) or "layers" not in root["config"]:
        return "", None, Judged()
    config = {"class_name": root.get("class_name"), "config": loadable(root["config"])}
    judgement = judged(config)
    if judgement.problem:
        raise refusal(path, judgement.problem)
    return str(root.get("keras_version") or "2")[:20], config, judgement


def _signatures(graph: memoryview) -> Iterator[Signature]:
    for entry in protobuf_wire.messages(graph, 5):
        signature = protobuf_wire.message(entry, 2)
        ports = [tuple(sorted(_ports(signature, number), key=lambda port: port_order(port.name))) for number in (1, 2)]
        yield Signature(protobuf_wire.text(entry, 1), *ports)


def _ports(signature: memoryview, number: int) -> Iterator[Port]:
    for entry in protobuf_wire.messages(signature, number):
        info = protobuf_wire.message(entry, 2)
        shape = protobuf_wire.message(info, 3)
        dims = [protobuf_wire.integer(dim, 1) for dim in protobuf_wire.messages(shape, 2)]
        shape_with_none = tuple(None if dim >= 2**63 else dim for dim in dims)  # -1
        dtype = _DTYPES.get(protobuf_wire.integer(info, 2), "another type")
        yield Port(protobuf_wire.text(entry, 1), dtype, None if protobuf_wire.integer(shape, 3) else shape_with_none)


def _refused(graph: memoryview) -> tuple[Refused, ...]:
    """Return the nodes that must not run. Operators that save and restore are allowed if nothing calls them."""
    if not any(protobuf_wire.messages(graph, 7)):
        why = "was saved by TensorFlow 1, whose graphs run as a whole when they are loaded"
        return (Refused(SAVED_MODEL, "SavedModel", why),)
    refused: list[Refused] = []
    defined = protobuf_wire.message(graph, 2)
    functions = [
        function for library in protobuf_wire.messages(defined, 2) for function in protobuf_wire.messages(library, 1)
    ]
    bodies = {
        protobuf_wire.text(protobuf_wire.message(function, 1), 1): list(protobuf_wire.messages(function, 3))
        for function in functions
    }
    top = list(protobuf_wire.messages(defined, 1))
    callable_ones = _called(graph, bodies, top)
    for name, nodes in [("", top), *bodies.items()]:
        savers = not name or name not in callable_ones
        for node in nodes:
            operator = protobuf_wire.text(node, 2)
            if operator in COMPUTE or operator in bodies or (savers and operator in FILES):
                continue
            reason = _REASONS.get(operator, "is not known to only compute")
            refused.append(Refused(f"{name}/{protobuf_wire.text(node, 1)}".strip("/"), shown(operator)[1:-1], reason))
    return tuple(dict.fromkeys(refused))[:100]


def _called(graph: memoryview, bodies: dict[str, list[memoryview]], top: list[memoryview]) -> set[str]:
    """Return the functions that another function, an object or a signature calls."""
    saver = {"saver_filename", "save", "Const", "NoOp"}
    called: set[str] = set()
    for name, nodes in bodies.items():
        for node in nodes:
            called |= _attributes(node, bodies) - {name}
    for node in top:
        if (
            not protobuf_wire.text(node, 1).startswith(tuple(saver))
            and protobuf_wire.text(node, 2) != "StatefulPartitionedCall"
        ):
            called |= _attributes(node, bodies)
    for objects in protobuf_wire.messages(graph, 7):
        called |= {protobuf_wire.text(entry, 1) for entry in protobuf_wire.messages(objects, 2)}
    return called


def _attributes(node: memoryview, bodies: dict[str, list[memoryview]]) -> set[str]:
    """Return the functions that a node names: as its operator, or in its attributes."""
    names = {protobuf_wire.text(node, 2)}
    for entry in protobuf_wire.messages(node, 5):
        for value in protobuf_wire.messages(entry, 2):
            listed = [
                function for group in protobuf_wire.messages(value, 1) for function in protobuf_wire.messages(group, 9)
            ]
            names |= {protobuf_wire.text(function, 1) for function in [*protobuf_wire.messages(value, 10), *listed]}
    return names & bodies.keys()
