"""The table of op types: what has a rule, and what a Keras step meets besides."""

from __future__ import annotations

import inspect

from scripts.tables import code, markdown_table
from tfpar.ir.traits import REGIONS
from tfpar.rules import FAMILIES
from tfpar.rules.registry import _RULES

COMMAND = "python -m scripts.coverage_tables ops"

KERAS_STEP_OPS = """
Abs AddN AddV2 All Any ArgMax AssignAddVariableOp AssignSubVariableOp AssignVariableOp AvgPool
AvgPool3D AvgPool3DGrad AvgPoolGrad BatchMatMulV2 BatchToSpaceND BiasAdd BiasAddGrad Bitcast
BitwiseAnd BroadcastGradientArgs BroadcastTo Cast Ceil Complex ConcatOffset ConcatV2 Const Conv2D
Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2 Cos
Cumsum DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
DepthwiseConv2dNativeBackpropInput DivNoNan Einsum Elu EluGrad Empty EmptyTensorList EnsureShape
Equal Erfc Exp ExpandDims FFT2D Fill Floor FloorDiv FloorMod GatherV2 Greater GreaterEqual IFFT2D
Identity IdentityN If Imag ImageProjectiveTransformV3 InTopKV2 InvertPermutation IsFinite IsNan
L2Loss LeakyRelu LeakyReluGrad Less LessEqual Log Log1p LogSoftmax LogicalAnd LogicalOr MatMul
MatrixBandPart MatrixDiagV3 Max MaxPool MaxPool3D MaxPool3DGrad MaxPoolGrad Maximum Mean Minimum
Mul Neg NoOp NotEqual OneHot Pack Pad PadV2 PartitionedCall Placeholder Pow Prod Range
ReadVariableOp Real RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Reshape
ResizeBilinear ResizeBilinearGrad ResourceScatterAdd ResourceScatterSub ReverseV2 Roll Round Rsqrt
RsqrtGrad ScatterNd Select SelectV2 Shape ShapeN Sigmoid SigmoidGrad Sign Sin Slice Softmax
Softplus SpaceToBatchND SparseSoftmaxCrossEntropyWithLogits Split SplitV Sqrt SqrtGrad Square
SquaredDifference Squeeze StatefulPartitionedCall StatelessIf StatelessRandomGetKeyCounter
StatelessRandomNormalV2 StatelessRandomUniformV2 StatelessWhile StopGradient StridedSlice
StridedSliceGrad Sub Sum Tanh TanhGrad TensorListElementShape TensorListFromTensor
TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack TensorListReserve
TensorListSetItem TensorListStack TensorScatterAdd TensorScatterUpdate Tile TopKV2 Transpose Unpack
UnsortedSegmentSum VariableShape Where While XlaDynamicUpdateSlice ZerosLike
""".split()
"""Op types seen in the training steps of 108 Keras models (TensorFlow 2.21, Keras 3.15)."""

_WITHOUT_RULE = {
    "Const": "a value, the same on every rank",
    "Placeholder": "an input or a variable's handle; the plan places it",
    "NoOp": "removed; its order is kept",
    "Where": "runs replicated: the size of its result depends on the values",
    **dict.fromkeys(REGIONS, "partitioned through its body"),
}


def ops_page() -> str:
    """`docs/coverage/ops.md`, without a date: the same as long as the rules are."""
    by_family = {m.__name__: [] for m in FAMILIES}
    for op_type, function in sorted(_RULES.items()):
        if function.__module__ in by_family:  # others are a user's
            by_family[function.__module__].append(op_type)
    ruled = {t for types in by_family.values() for t in types}
    without = [t for t in KERAS_STEP_OPS if t not in ruled]
    others = [[f"`{t}`", _WITHOUT_RULE.get(t, "replicated")] for t in without]
    rows = [
        [
            f"`{module.__name__.rpartition('.')[2]}`",
            _first_line(module),
            str(len(types)),
            code(types),
        ]
        for module, types in zip(FAMILIES, by_family.values(), strict=True)
        if types
    ]
    return f"""# Coverage of op types

Made by `{COMMAND}`; a test fails when it is out of date.

{len(ruled)} op types have a rule. A type without one runs *replicated*: its inputs are gathered,
and every rank computes all of it. The numbers are the same, the work is not shared. A rule may
also decline some attributes or shapes; `tap.coverage(model)` says so for your model.

## In the training steps of Keras models

{len(KERAS_STEP_OPS)} op types were seen in the training steps of 108 models (Keras applications,
KerasHub, and models as users write them; TensorFlow 2.21, Keras 3.15).
{len(KERAS_STEP_OPS) - len(without)} of them have a rule. The others:

{markdown_table(["Op type", "How it runs"], others)}

## All rules, by family

Families are modules of `tfpar/rules`. Types that start with `Tfpar` are steps of decompositions,
not ops of TensorFlow.

{markdown_table(["Family", "What", "Types", "Op types"], rows)}
"""


def _first_line(module) -> str:
    return (inspect.getdoc(module) or "").splitlines()[0].rstrip(".")
