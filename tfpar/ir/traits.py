"""Traits of op types: one table, and one meaning for each word in it.

Each set below holds the op types that have one trait. Whoever asks for a trait asks here, so
that two modules cannot answer in two ways: what the memory estimate takes for a view, the roles
of a step take for a view too. What an op's *operands* say (how it splits, what is known of its
values) is the business of its rule, in `tfpar.rules`.

From the narrowest to the widest, these ops give values that they were given:

    UNCHANGED    the tensor itself                                  Identity
    VIEWS        the same bytes, in another shape                   ... Reshape
    REARRANGED   the same values, in another order                  ... Transpose
    HANDED_ON    the same values, in another precision or place     ... Cast, ReadVariableOp

A step's ops are those of TensorFlow, and a few of our own (`RankConst`: a constant that differs
from rank to rank).
"""

from __future__ import annotations

from collections.abc import Collection

from tfpar.ir.graph import Op, Tensor

# --- values handed on -----------------------------------------------------------------------------

UNCHANGED = frozenset({"Identity", "IdentityN", "StopGradient", "PreventGradient"})
"""They hand on what they read, as it is: values, shape and dtype."""

VIEWS = UNCHANGED | {"Reshape", "ExpandDims", "Squeeze"}
"""They give the bytes of their first input a shape, and move none."""

REARRANGED = VIEWS | {"Transpose"}
"""They give the values of their first input, all of them and no others, in some order."""

CONVERTED = frozenset({"Cast", "ReadVariableOp"})
"""They give entry by entry what their input holds, in another precision or out of a variable. Not
every partial value passes through them (a maximum of rounded numbers is rounded)."""

HANDED_ON = REARRANGED | CONVERTED
"""They give what their first input holds, and nothing else, in some order and precision."""

INSPECTIONS = frozenset(
    {
        "CheckNumerics",
        "CheckNumericsV2",
        "Print",
        "DebugIdentity",
        "DebugIdentityV2",
        "DebugIdentityV3",
    }
)
"""They look at their first input and hand it on unchanged: a step is the same without them."""

READ_PART = frozenset(
    {"GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd", "Slice", "StridedSlice"}
)
"""They touch only the part of their first input that they return."""

# --- values from nowhere --------------------------------------------------------------------------

CONSTANTS = frozenset({"Const", "RankConst"})
"""Their value is written in the graph."""

SOURCES = CONSTANTS | {"Placeholder", "VarHandleOp"}
"""They give a value without reading or computing any: it is written, fed or kept elsewhere."""

SIZES = frozenset({"Shape", "ShapeN", "Size", "Rank", "VariableShape"})
"""They read of a tensor only its size, which is known beforehand."""

STATEFUL_DRAWS = frozenset(
    {
        "RandomUniform",
        "RandomUniformInt",
        "RandomStandardNormal",
        "TruncatedNormal",
        "ParameterizedTruncatedNormal",
        "RandomShuffle",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "Multinomial",
    }
)
"""They draw other numbers each time they run, from a state of the kernel's own."""

KEYED_DRAWS = frozenset(
    {
        "StatelessRandomUniformV2",
        "StatelessRandomNormalV2",
        "StatelessTruncatedNormalV2",
        "StatelessRandomUniformIntV2",
        "StatelessRandomUniformFullIntV2",
    }
)
"""They draw numbers that a key and a counter determine; their first input is the shape."""

# --- time -----------------------------------------------------------------------------------------

FREE = SOURCES | SIZES | VIEWS | {"ReadVariableOp", "NoOp"}
"""They compute nothing and move nothing."""

MATRIX_PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"})
"""They multiply matrices."""

CONVOLUTIONS = frozenset(
    {
        "Conv2D",
        "Conv2DBackpropInput",
        "Conv2DBackpropFilter",
        "Conv3D",
        "Conv3DBackpropInputV2",
        "Conv3DBackpropFilterV2",
    }
)
"""Convolutions in which all channels meet, and their gradients: products, as far as work goes."""

# --- what XLA fuses -------------------------------------------------------------------------------

ELEMENTWISE = frozenset(
    (
        "Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh "
        "BesselI0e BesselI1e Betainc BiasAdd BitwiseAnd BitwiseOr BitwiseXor BroadcastTo Cast "
        "Ceil ClipByValue Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu EluGrad Equal "
        "Erf Erfc Erfinv Exp Expm1 Fill Floor FloorDiv FloorMod Greater GreaterEqual Igamma "
        "IgammaGradA Igammac Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad "
        "LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum "
        "Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Polygamma PopulationCount "
        "Pow Real RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint "
        "Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh "
        "Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Sub "
        "Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta"
    ).split()
)
"""They compute each entry by itself, of entries that are broadcast if need be, and XLA has kernels
for them."""

REDUCTIONS = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "Any", "All", "L2Loss", "BiasAddGrad"})
"""They add up entries, or take the largest and the like, and XLA has kernels for them."""

# --- arithmetic on gradients ----------------------------------------------------------------------

ADDITIONS = frozenset({"AddN", "AddV2", "Add"})
"""They add up all that they read."""

TO_THE_UPDATE = HANDED_ON | ADDITIONS | {"Mul", "RealDiv", "UnsortedSegmentSum"}
"""Ops that a weight's gradient may pass on its way to the update: it is handed on, added up,
scaled."""

# --- variables ------------------------------------------------------------------------------------

VARIABLE_READS = frozenset(
    {"ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd"}
)
"""They read a variable and leave it as it is. Whatever else takes a handle may write to it."""

ASSIGNMENTS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
"""They set all of a variable, add to all of it, or subtract."""

OPTIMIZERS = frozenset(
    {
        "ResourceApplyAdaMax",
        "ResourceApplyAdadelta",
        "ResourceApplyAdagrad",
        "ResourceApplyAdagradDA",
        "ResourceApplyAdagradV2",
        "ResourceApplyAdam",
        "ResourceApplyAdamWithAmsgrad",
        "ResourceApplyAddSign",
        "ResourceApplyCenteredRMSProp",
        "ResourceApplyFtrl",
        "ResourceApplyFtrlV2",
        "ResourceApplyGradientDescent",
        "ResourceApplyKerasMomentum",
        "ResourceApplyMomentum",
        "ResourceApplyPowerSign",
        "ResourceApplyProximalAdagrad",
        "ResourceApplyProximalGradientDescent",
        "ResourceApplyRMSProp",
    }
)
"""They update all of a variable, and of its slots, by a gradient."""

SPARSE_OPTIMIZERS = frozenset(
    {
        "ResourceSparseApplyAdadelta",
        "ResourceSparseApplyAdagrad",
        "ResourceSparseApplyAdagradDA",
        "ResourceSparseApplyAdagradV2",
        "ResourceSparseApplyCenteredRMSProp",
        "ResourceSparseApplyFtrl",
        "ResourceSparseApplyFtrlV2",
        "ResourceSparseApplyKerasMomentum",
        "ResourceSparseApplyMomentum",
        "ResourceSparseApplyProximalAdagrad",
        "ResourceSparseApplyProximalGradientDescent",
        "ResourceSparseApplyRMSProp",
    }
)
"""They update some rows of a variable, and of its slots, by a gradient."""

SCATTERS = frozenset(
    {
        "ResourceScatterAdd",
        "ResourceScatterDiv",
        "ResourceScatterMax",
        "ResourceScatterMin",
        "ResourceScatterMul",
        "ResourceScatterNdAdd",
        "ResourceScatterNdMax",
        "ResourceScatterNdMin",
        "ResourceScatterNdSub",
        "ResourceScatterNdUpdate",
        "ResourceScatterSub",
        "ResourceScatterUpdate",
    }
)
"""They change some rows or entries of a variable."""

WHOLE_UPDATES = ASSIGNMENTS | OPTIMIZERS
"""They write every entry of a variable."""

# --- effects --------------------------------------------------------------------------------------

REPEATABLE = SOURCES | VARIABLE_READS
"""Some of these are marked stateful, but how often they run changes nothing."""

TRACELESS = REPEATABLE | STATEFUL_DRAWS
"""Some of these are marked stateful, but nothing is lost when no one reads what they give."""

# --- regions: ops that hold graphs ----------------------------------------------------------------

LOOPS = frozenset({"While", "StatelessWhile"})
"""They run a body as long as a condition holds."""

CONDITIONALS = frozenset({"If", "StatelessIf"})
"""They run one of two bodies."""

BRANCHES = CONDITIONALS | {"Case", "StatelessCase"}
"""They run one of their bodies. Their first input says which; the bodies take the others."""

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
"""They run their body once."""

REGIONS = LOOPS | BRANCHES | CALLS
"""They hold function bodies. Whether running one changes anything, its bodies tell."""

# --- memory of hosts ------------------------------------------------------------------------------

ON_HOST = "_tfpar_on_host"
"""The attribute of an op that runs on the host of a rank (see `ir.passes.slots`): whether
it `TAKES` what it reads from the device, or `GIVES` what it makes to the device."""

TAKES, GIVES = b"takes", b"gives"

IN_FLIGHT = 2
"""Number of weights whose slots, or blocks whose activations, are on the device at the same time:
those of one are used while those of the next are on their way."""

# --- references and lists -------------------------------------------------------------------------

REFERENCES = frozenset({"resource", "variant"})
"""The dtypes of tensors that stand for something that lies where it is: a variable, a list. No
collective moves them."""

NEW_LISTS = frozenset({"TensorListReserve", "EmptyTensorList", "OptionalNone"})
"""They make a list that holds nothing yet: it can be had in any spec, as zeros can."""

LIST_MAKERS = frozenset(
    {
        "TensorListFromTensor",
        "TensorListSetItem",
        "TensorListPushBack",
        "TensorListResize",
        "TensorListScatter",
        "TensorListScatterV2",
        "TensorListScatterIntoExistingList",
        "TensorListSplit",
        "TensorListConcatLists",
        "OptionalFromValue",
        "ZerosLike",
        "Identity",
    }
)
"""Their one result is a list, which can be made anew, in another spec, of what they read."""

FIXED_LISTS = frozenset(
    {
        "TensorListReserve",
        "EmptyTensorList",
        "TensorListFromTensor",
        "TensorListStack",
        "TensorListGetItem",
        "TensorListSetItem",
        "TensorListPushBack",
        "TensorListPopBack",
        "TensorListLength",
        "TensorListElementShape",
    }
)
"""List ops that XLA compiles, if it knows the most that the lists may hold."""

RESIZED_LISTS = frozenset({"TensorListResize", "TensorListConcatLists"})
"""Their list is not as long as the one that they take."""


def is_free(op: Op) -> bool:
    """Whether an op computes nothing and moves nothing."""
    return op.type in FREE and ON_HOST not in op.attrs


def body_offset(op_type: str) -> int:
    """Count the inputs of a region that its bodies do not take: they come first."""
    return 1 if op_type in BRANCHES else 0


def forwarded_input_index(tensor: Tensor) -> int:
    """Return the index of the input that an op gives as `tensor`; of an op type in `HANDED_ON` or
    `INSPECTIONS`."""
    return tensor.index if tensor.op.type == "IdentityN" else 0


def forwarded_input(tensor: Tensor) -> Tensor:
    """Return the input that an op gives as `tensor`; of an op type in `HANDED_ON` or
    `INSPECTIONS`."""
    return tensor.op.inputs[forwarded_input_index(tensor)]


def origin(tensor: Tensor, through: Collection[str]) -> Tensor:
    """Trace `tensor` back, past ops of the types `through`, which hand on what they read."""
    while tensor.op.type in through:
        tensor = forwarded_input(tensor)
    return tensor
