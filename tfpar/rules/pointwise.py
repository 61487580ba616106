"""Elementwise ops, broadcasting included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor, is_floating
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, RuleFields, make_rule

if TYPE_CHECKING:
    from typing_extensions import Unpack


def pointwise(op: Op, **fields: Unpack[RuleFields]) -> OpRule:
    """Make a rule in which every operand broadcasts against the others; every factor passes
    through."""
    # The length of a tensor list stays whole.
    dims = ". ..." if op.outputs and op.outputs[0].dtype == "variant" else "..."
    left = ", ".join([dims] * len(op.inputs))
    right = ", ".join([dims] * len(op.outputs))
    return make_rule(op, f"{left} -> {right}", **fields)


_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BesselI0e BesselI1e BesselJ0 BesselJ1 BesselY0 BesselY1 "
    "BesselI0 BesselI1 BesselK0 BesselK1 BesselK0e BesselK1e Ceil Cos Cosh "
    "Digamma Elu Erf Erfc Erfinv Exp Expm1 Floor Inv Invert IsFinite IsInf IsNan Lgamma Log Log1p "
    "LogicalNot Ndtri Reciprocal Relu Relu6 LeakyRelu Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh "
    "Softplus Softsign Spence Dawsn Expint FresnelCos FresnelSin "
    "Sqrt Square Tan Tanh PopulationCount ClipByValue Angle ComplexAbs "
    "OnesLike Lgamma"
).split()

_BINARY = (
    "ApproximateEqual Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex Equal "
    "Greater GreaterEqual Igamma Igammac IgammaGradA LeftShift Less LessEqual LogicalAnd "
    "LogicalOr Maximum Minimum "
    "NextAfter NotEqual Polygamma RightShift SquaredDifference Xdivy "
    "Xlog1py Xlogy Zeta Betainc"
).split()

# Gradients of the form g(y or x, dy): linear in dy, the second input.
_GRADIENTS_SECOND = "InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad".split()
# Gradients of the form g(dy, x or y): linear in dy, the first input.
_GRADIENTS_FIRST = (
    "EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad"
).split()


@rule(*dict.fromkeys(_UNARY), *_BINARY)
def _plain(op: Op, constants: Constants) -> OpRule:
    return pointwise(op)


@rule(*_GRADIENTS_FIRST)
def _gradient_first(op: Op, constants: Constants) -> OpRule:
    return pointwise(op, linear=((0,),))


@rule(*_GRADIENTS_SECOND)
def _gradient_second(op: Op, constants: Constants) -> OpRule:
    return pointwise(op, linear=((1,),))


@rule("Neg", "Conj", "Real", "Imag")
def _linear_unary(op: Op, constants: Constants) -> OpRule:
    return pointwise(op, linear=((0,),))


@rule(
    "Identity",
    "StopGradient",
    "PreventGradient",
    "Snapshot",
    "CheckNumerics",
    "CheckNumericsV2",
    "DebugGradientIdentity",
    "CopyHost",
    "Copy",
)
def _relabel(op: Op, constants: Constants) -> OpRule:
    return pointwise(op, monotone=(0,))


@rule("ZerosLike")
def _zeros_like(op: Op, constants: Constants) -> OpRule:
    # Zero of any Partial is zero.
    return pointwise(op, monotone=(0,))


@rule("Cast")
def _cast(op: Op, constants: Constants) -> OpRule:
    # A sum of casts is the cast of the sum where the target can hold fractions.
    linear = is_floating(op.outputs[0].dtype) or not is_floating(op.inputs[0].dtype)
    return pointwise(op, linear=((0,),) if linear and op.outputs[0].dtype != "bool" else ())


@rule("Bitcast")
def _bitcast(op: Op, constants: Constants) -> OpRule:
    """An element of another width becomes, or is made of, a last dim of its own."""
    ranks = len(op.inputs[0].shape), len(op.outputs[0].shape)
    left, right = ("... ." if rank > min(ranks) else "..." for rank in ranks)
    return make_rule(op, f"{left} -> {right}")


@rule("Add", "AddV2", "AddN", "Sub")
def _additive(op: Op, constants: Constants) -> OpRule:
    return pointwise(op, linear=(tuple(range(len(op.inputs))),))


@rule("Mul", "MulNoNan")
def _product(op: Op, constants: Constants) -> OpRule:
    return pointwise(op, linear=((0,), (1,)))


@rule("Div", "RealDiv", "DivNoNan")
def _quotient(op: Op, constants: Constants) -> OpRule:
    if not _is_integer(op):
        return pointwise(op, linear=((0,),))
    return pointwise(op, lower=_lower_with_ones, any_pattern=True)


@rule("FloorDiv", "FloorMod", "Mod", "TruncateDiv", "TruncateMod", "Pow")
def _refusing(op: Op, constants: Constants) -> OpRule:
    """Of integers, a divisor of zero and a negative exponent are errors."""
    if not _is_integer(op):
        return pointwise(op)
    return pointwise(op, lower=_lower_with_ones, any_pattern=True)


def _is_integer(op: Op) -> bool:
    return op.outputs[0].dtype.startswith(("int", "uint"))


def _lower_with_ones(local: LocalOp) -> Sequence[Tensor]:
    """Ones in the padding of the second operand."""
    return local.copy([local.inputs[0], local.filled(1, 1)]).outputs


@rule("SelectV2")
def _select_v2(op: Op, constants: Constants) -> OpRule:
    return pointwise(op, linear=((1, 2),))


@rule("Select")
def _select(op: Op, constants: Constants) -> OpRule:
    if len(op.inputs[0].shape) == len(op.inputs[1].shape):
        return pointwise(op, linear=((1, 2),))
    # A vector condition picks whole rows; a scalar one picks all.
    condition = "r" if len(op.inputs[0].shape) == 1 else ""
    return make_rule(op, f"{condition}, r ..., r ... -> r ...", linear=((1, 2),))


@rule("IdentityN")
def _identity_n(op: Op, constants: Constants) -> OpRule:
    """Element i of the result is element i of the input, each with dims of its own."""
    sides = []
    for i, tensor in enumerate(op.inputs):
        sides.append(" ".join(f"t{i}d{d}" for d in range(len(tensor.shape))))
    notation = ", ".join(sides)
    return make_rule(op, f"{notation} -> {notation}")
