"""TensorFlow operators that a graph from an unknown source may run: those that compute, without access to the system.

Source: tensorflow.org/api_docs/python/tf/raw_ops (2.21).
"""

from __future__ import annotations

from collections.abc import Container

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


def reason(operator: str, functions: Container[str]) -> str | None:
    """Return why a graph with an operator is not run; None if it only computes, or is a function of the graph."""
    if operator in COMPUTE or operator in functions:
        return None
    return _REASONS.get(operator, "is not known to only compute")
