"""Tensor lists and optionals: what a loop or branch reads, writes and keeps for its gradient.

A list has the dims `(length, *element)`, an optional those of a list of one. The length stays
whole; elements are cut in the same way, so that each rank has a list of local elements. Element
shapes that ops are given are those of the rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, ShapeAttr, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import SAME, Lowering, OpRule, make_rule, replicate_rule
from tfpar.spec import RuleError


def _rule(
    op: Op,
    notation: str,
    element: Sequence[int | None],
    *,
    reduce: Mapping[str, str] | None = None,
    linear: tuple[tuple[int, ...], ...] = (),
    lower: Lowering | None = None,
) -> OpRule | None:
    """A rule in which `E` stands for the dims of an element, `W` for those after its first.

    None where the elements differ in their dims.
    """
    # An element that is itself a list has its length in front, which stays whole.
    whole = 1 if op.attrs.get("element_dtype") == "variant" else 0
    text = notation.replace("E", _dims(element, whole)).replace("W", _dims(element, 1))
    try:
        return make_rule(op, text, reduce=reduce, linear=linear, lower=lower, any_pattern=True)
    except RuleError:
        return None


def _dims(shape: Sequence[int | None], whole: int) -> str:
    """A factor for each dim but the first `whole` ones."""
    return " ".join("." if d < whole else f"d{d}" for d in range(len(shape)))


def _about(element: Sequence[int | None]) -> dict[str, str]:
    """The `reduce` of ops that tell something of a list: the same on every rank."""
    return {f"d{d}": SAME for d in range(len(element))}


def _element(tensor: Tensor) -> tuple[int, ...]:
    shape: tuple[int, ...] = tensor.shape[1:]
    return shape


def _shape_lowering(operand: int, lists: str) -> Lowering:
    """Lowering that gives input `operand` the local shape of an element.

    The element is that of the first list of the op's `lists`, "inputs" or "outputs".
    """

    def lower(local: LocalOp) -> Sequence[Tensor]:
        given = local.op.inputs[operand]
        if lists == "inputs":
            shape = _element(local.inputs[0])
        else:
            shape = local.local_output_shape(0)[1:]
        inputs = list(local.inputs)
        # A scalar says that the shape is unknown, which holds anywhere; lists are scalars.
        if given.shape and local.op.attrs["element_dtype"] != "variant":
            inputs[operand] = local.build.const(np.array(shape), given.dtype)
        return local.copy(inputs).outputs

    return lower


@rule("TensorListReserve", "EmptyTensorList", "OptionalNone")
def _new(op: Op, constants: Constants) -> OpRule:
    # Takes the spec of what is put into it: see `traits.NEW_LISTS`.
    return replicate_rule(op)


class _Plain(NamedTuple):
    """Op on a list whose rule follows from the dims of an element alone.

    Attributes:
        notation: of `_rule`.
        lists: "inputs" or "outputs": the first of these is a list of such elements.
        linear: as of `make_rule`.
        shape: the position of the operand that is the shape of an element; None: there is none.
    """

    notation: str
    lists: str
    linear: tuple[tuple[int, ...], ...] = ((0,),)
    shape: int | None = None


_PLAIN = {
    "TensorListFromTensor": _Plain(". E, ... -> . E", "outputs", shape=1),
    "TensorListStack": _Plain(". E, ... -> . E", "inputs", shape=1),
    "TensorListGetItem": _Plain(". E, , ... -> E", "inputs", shape=2),
    "TensorListSetItem": _Plain(". E, , E -> . E", "inputs", ((0, 2),)),
    "TensorListPushBack": _Plain(". E, E -> . E", "inputs", ((0, 1),)),
    "TensorListPopBack": _Plain(". E, ... -> . E, E", "inputs", shape=1),
    "TensorListSplit": _Plain("W, ..., . -> . W", "outputs", shape=1),
    "TensorListGather": _Plain(". E, ., ... -> . E", "inputs", shape=2),
    "TensorListScatter": _Plain(". E, ., ... -> . E", "outputs", shape=2),
    "TensorListScatterV2": _Plain(". E, ., ...,  -> . E", "outputs", shape=2),
    "TensorListScatterIntoExistingList": _Plain(". E, . E, . -> . E", "inputs", ((0, 1),)),
    "TensorListResize": _Plain(". E,  -> . E", "inputs"),
    "TensorListConcatLists": _Plain(". E, . E -> . E", "inputs", ((0, 1),)),
}


@rule(*_PLAIN)
def _plain(op: Op, constants: Constants) -> OpRule | None:
    notation, lists, linear, shape = _PLAIN[op.type]
    element = _element((op.inputs if lists == "inputs" else op.outputs)[0])
    lower = None if shape is None else _shape_lowering(shape, lists)
    return _rule(op, notation, element, linear=linear, lower=lower)


@rule("TensorListLength", "OptionalHasValue")
def _length(op: Op, constants: Constants) -> OpRule | None:
    element = _element(op.inputs[0])
    return _rule(op, ". E -> ", element, reduce=_about(element))


@rule("TensorListElementShape")
def _element_shape(op: Op, constants: Constants) -> OpRule | None:
    """Make the rule of an op that reads a list's element shape: of a list of lists it is copied (an
    element is a scalar). Others are folded."""
    element = _element(op.inputs[0])
    return _rule(op, ". E -> .", element, reduce=_about(element))


@rule("TensorListConcatV2")
def _concat(op: Op, constants: Constants) -> OpRule | None:
    # Elements are laid end to end along their first dim.
    element = _element(op.inputs[0])
    return _rule(
        op,
        ". W, ..., . -> W, .",
        element,
        reduce=_about(element),
        lower=_shape_lowering(1, "inputs"),
    )


@rule("OptionalFromValue")
def _optional(op: Op, constants: Constants) -> OpRule | None:
    if len(op.inputs) != 1:
        return None
    return _rule(op, "E -> . E", op.inputs[0].shape, linear=((0,),))


@rule("OptionalGetValue")
def _value(op: Op, constants: Constants) -> OpRule | None:
    if len(op.outputs) != 1:
        return None
    return _rule(op, ". E -> E", op.outputs[0].shape, linear=((0,),), lower=_lower_value)


def _lower_value(local: LocalOp) -> Sequence[Tensor]:
    return local.copy(output_shapes=[ShapeAttr(local.local_output_shape())]).outputs
