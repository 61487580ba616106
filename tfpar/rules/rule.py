"""OpRule: how the dimensions of an op may split, in factor notation.

A rule names *factors* and says which dimension of which operand each one is:

    MatMul   "i k, k j -> i j"   reduce={"k": "sum"}

Along one mesh axis an op then runs in one of these ways:

* a factor is split: every operand that has it is sharded there, the others are
  replicated; a result that lacks it is `Partial` by the factor's reduction;
* `Partial` inputs pass through, where the op is linear in them;
* everything is replicated.

A compound dimension `(a b)` comes from a reshape, major factor first; splitting
its minor factor is the strided shard of Rhino §4.1. Propagation, cost, pattern
generation and rewriting all read this one description.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from tfpar.ir.graph import Op, Tensor
from tfpar.ir.traits import CONVERTED
from tfpar.spec.arguments import argument_error, mapping, text
from tfpar.spec.errors import RuleError
from tfpar.spec.placement import REDUCTIONS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tfpar.ir.graph import Graph
    from tfpar.rules.local import LocalOp

Dim = tuple[int, ...]
"""Factors of one dimension, major to minor; empty for one that must stay whole."""
Dims = tuple[Dim, ...]
Pattern = tuple[int | None, int]
"""Pattern in which a factor is cut: (stride, unit) as in `Shard`."""
PLAIN: Pattern = (None, 1)

SAME = "same"
"""In place of a reduction: the outputs that lack the factor are whole, and alike on every rank."""

Expansion = Callable[[Op, int], "Graph"]
"""Builds the decomposition of an op for a factor that is split into so many parts."""

Lowering = Callable[["LocalOp"], Sequence[Tensor]]
"""Emits the local op on what the ranks have; returns its outputs."""

_PLACEHOLDER_TOKENS = {".", "1"}


@dataclasses.dataclass(frozen=True, eq=False)
class OpRule:
    """The rule of one op instance, shapes and attributes known.

    Attributes:
        names: factor names, for messages.
        sizes: global size of each factor.
        inputs: the dims of each input; outputs: the dims of each output.
        reduce: factor -> reduction (`sum`, `max`, ..., or SAME) for factors that some
            outputs lack. A factor that an output lacks and that is not here
            cannot be split.
        linear: groups of inputs in which the op is jointly linear: when all of a
            group are Partial(sum) and the other inputs replicated, the outputs
            are Partial(sum). `(0, 1)` for Add, `(0,), (1,)` for Mul.
        monotone: inputs through which any Partial passes (pure relabelling:
            Identity, Reshape, Transpose).
        shape_operands: input -> output whose *local* shape replaces this input's
            value in the local op (Reshape's `shape`, BroadcastTo's, Fill's).
        lower: emits the local op where copying it with local inputs is not it
            (an offset subtracted, a mean turned into a sum). Called only when
            some factor is split, but for a pseudo op.
        pseudo: the op is none of TensorFlow's, but a step of some decomposition: `lower`
            always emits it.
        any_pattern: whether factors may be cut in strided patterns too, or the names of those
            that may. Holds where the op is copied or `lower` does not use positions.
        drawn: the op reads nothing that is sharded and its one output can be made in any spec
            that its factors allow: it waits for the spec that the first reader wants.
        generates: factors that no input has may be split where all readers want it so.
        masked: whether inputs come with the padding of reduced factors neutral; not needed
            where `lower` keeps padding out itself.
        sparse: what the op reads may be far less than what it gives (the rows of a batch, summed
            into a table): gathering that is weighed against reducing this, unless this is added
            to something that is reduced as well (the gradient of a tied table).
        expand: factor -> builder of the graph of simpler ops that the op stands
            for; used instead of the op when that factor is split.
        blocks: factor -> the fewest entries that a rank may hold, of a factor that is cut into
            equal blocks or not at all (rows of an image: a neighbour's are read with them).
        stands_for: builder of the graph that the op stands for where no factor of `expand` is
            split; None: the op is one of TensorFlow's, or `lower` emits it.
        permutes: the factor whose blocks change places, so that each rank sends what it has of
            the input to another where it is split.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    reduce: Mapping[int, str] = dataclasses.field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    monotone: tuple[int, ...] = ()
    shape_operands: Mapping[int, int] = dataclasses.field(default_factory=dict)
    lower: Lowering | None = None
    pseudo: bool = False
    any_pattern: bool | Collection[str] | None = None
    drawn: bool = False
    generates: bool = False
    masked: bool = True
    sparse: bool = False
    expand: Mapping[int, Expansion] = dataclasses.field(default_factory=dict)
    blocks: Mapping[int, int] = dataclasses.field(default_factory=dict)
    stands_for: Expansion | None = None
    permutes: int | None = None

    def takes_pattern(self, factor: int, pattern: Pattern) -> bool:
        """Whether the op may run with `factor` cut in `pattern`."""
        if pattern == PLAIN:
            return True
        allowed = self.lower is None if self.any_pattern is None else self.any_pattern
        if not isinstance(allowed, bool):
            allowed = self.names[factor] in allowed
        if not allowed or factor in self.expand:
            return False
        # Within a compound dim the leading factor's blocks stay blocks, of whole units.
        return all(
            len(dim) == 1 or dim[0] == factor
            for dims in self.inputs + self.outputs
            for dim in dims
            if factor in dim
        )

    def factor(self, name: str) -> int:
        """Index of the factor called `name`."""
        return self.names.index(name)

    def can_split(self, factor: int) -> bool:
        return factor in self._splittable

    def can_cut(self, factor: int, size: int, parts: int) -> bool:
        """Whether `size` entries of `factor` can be cut into `parts` blocks; see `blocks`."""
        least = self.blocks.get(factor)
        return least is None or (size % parts == 0 and size // parts >= least)

    @functools.cached_property
    def splittable(self) -> tuple[int, ...]:
        """Factors that a mesh axis may split."""
        kept = []
        for f, size in enumerate(self.sizes):
            if size <= 1 or self.names[f].startswith("."):
                continue
            everywhere = all(any(f in dim for dim in dims) for dims in self.outputs)
            used = any(f in dim for dims in self.inputs + self.outputs for dim in dims)
            if used and (everywhere or f in self.reduce or f in self.expand):
                kept.append(f)
        return tuple(kept)

    @functools.cached_property
    def _splittable(self) -> frozenset[int]:
        return frozenset(self.splittable)

    def has_factor(self, dims: Dims, factor: int) -> bool:
        return any(factor in dim for dim in dims)


def find_relabelled_inputs(op: Op, rule: OpRule) -> tuple[int, ...]:
    """Find the inputs that `op` only hands on, so that they may have the spec that its output is to
    have."""
    return rule.monotone or ((0,) if op.type in CONVERTED else ())


class RuleFields(TypedDict, total=False):
    """Further fields of `OpRule`, as `make_rule` takes them."""

    linear: tuple[tuple[int, ...], ...]
    monotone: tuple[int, ...]
    shape_operands: Mapping[int, int]
    lower: Lowering | None
    pseudo: bool
    any_pattern: bool | Collection[str] | None
    drawn: bool
    generates: bool
    masked: bool
    sparse: bool
    stands_for: Expansion | None


def make_rule(
    op: Op,
    notation: str,
    *,
    reduce: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    expand: Mapping[str, Expansion] | None = None,
    blocks: Mapping[str, int] | None = None,
    permutes: str | None = None,
    **fields: Unpack[RuleFields],
) -> OpRule:
    """Make the rule of `op` in factor notation.

    `notation` lists inputs and outputs, comma separated, around `->`. A token is a
    factor name, `(a b)` for a compound dimension, `.` or `1` for a dimension
    that must stay whole, and `...` once per operand for the broadcast dimensions,
    which align on the right. In a compound dimension `.3` is a part of size 3 that
    must stay whole. Inputs not listed stay replicated.

    Args:
        reduce: factor name -> reduction.
        sizes: factor name -> size, needed for factors of compound dimensions.
        expand: factor name -> builder of the decomposition.
        blocks: factor name -> the shortest block it may be cut into.
        permutes: the name of the factor whose blocks change places.
        **fields: further fields of `OpRule`.

    Raises:
        ArgumentError: no op, no notation or an unknown reduction.
        RuleError: the notation does not fit the op's ranks or sizes.
    """
    if not isinstance(op, Op):
        raise argument_error(
            "op", op, "the op that the rule is asked for, as a rule's function gets it"
        )
    parsed_in, parsed_out = _parse(text("notation", notation, "factors, such as 'i k, k j -> i j'"))
    by_factor = {"reduce": reduce, "sizes": sizes, "expand": expand, "blocks": blocks}
    for what, given in by_factor.items():
        if given is not None:
            mapping(what, given, object)
    for factor, reduction in (reduce or {}).items():
        if reduction not in (*REDUCTIONS, SAME):
            allowed = ", ".join(map(repr, (*REDUCTIONS, SAME)))
            raise argument_error(
                f"The reduction of factor {factor!r}", reduction, f"one of {allowed}"
            )
    if len(parsed_in) > len(op.inputs) or len(parsed_out) > len(op.outputs):
        raise RuleError(
            f"Rule {notation!r} names {len(parsed_in)} inputs and {len(parsed_out)} outputs; "
            f"{op.type} {op.name} has {len(op.inputs)} and {len(op.outputs)}."
        )
    known: dict[str, int] = dict(sizes or {})
    order: dict[str, int] = {}
    operands = [
        *zip(op.inputs, parsed_in, strict=False),
        *zip(op.outputs, parsed_out, strict=False),
    ]
    expanded = [_expand_ellipsis(op, t, tokens, notation) for t, tokens in operands]
    for tensor, dims in expanded:
        for names, size in zip(dims, tensor.shape or (), strict=True):
            for name in names:
                order.setdefault(name, len(order))
            if len(names) == 1 and size not in (1, None):
                if known.setdefault(names[0], size) != size:
                    raise RuleError(
                        f"Rule {notation!r} of {op.type} {op.name}: factor {names[0]!r} "
                        f"has sizes {known[names[0]]} and {size}."
                    )
    for name in order:
        known.setdefault(name, int(name[1:]) if name.startswith(".") else 1)

    def finish(tensor: Tensor, dims: list[tuple[str, ...]]) -> Dims:
        out: list[Dim] = []
        for names, size in zip(dims, tensor.shape or (), strict=True):
            # A size-1 dimension of a larger factor broadcasts: it stays whole.
            whole = size == 1 or size is None
            out.append(() if whole else tuple(order[n] for n in names if known[n] != 1))
        return tuple(out)

    inputs = [finish(t, d) for t, d in expanded[: len(parsed_in)]]
    outputs = [finish(t, d) for t, d in expanded[len(parsed_in) :]]
    inputs += [((),) * len(t.shape or ()) for t in op.inputs[len(parsed_in) :]]
    outputs += [((),) * len(t.shape or ()) for t in op.outputs[len(parsed_out) :]]
    return OpRule(
        names=tuple(order),
        sizes=tuple(known[n] for n in order),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        reduce={order[n]: r for n, r in (reduce or {}).items() if n in order},
        expand={order[n]: e for n, e in (expand or {}).items() if n in order},
        blocks={order[n]: b for n, b in (blocks or {}).items() if n in order},
        permutes=None if permutes is None else order.get(permutes),
        **fields,
    )


def replicate_rule(op: Op) -> OpRule:
    """Make the rule that splits nothing: all inputs gathered, every rank computes."""
    return OpRule(
        names=(),
        sizes=(),
        inputs=tuple(((),) * len(t.shape or ()) for t in op.inputs),
        outputs=tuple(((),) * len(t.shape or ()) for t in op.outputs),
    )


@functools.cache
def _parse(notation: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    if notation.count("->") != 1:
        raise RuleError(f"Rule {notation!r} needs exactly one '->'.")
    left, right = notation.split("->")
    return tuple(
        tuple(_tokens(operand) for operand in side.split(",")) if side.strip() else ()
        for side in (left, right)
    )


def _tokens(operand: str) -> tuple[str, ...]:
    tokens: list[str] = []
    text = operand.replace("(", " ( ").replace(")", " ) ").split()
    group: list[str] | None = None
    for word in text:
        if word == "(":
            group = []
        elif word == ")":
            if group is None:
                raise RuleError(f"Unbalanced parenthesis in rule operand {operand!r}.")
            tokens.append(" ".join(group))
            group = None
        elif group is not None:
            group.append(word)
        else:
            tokens.append(word)
    if group is not None:
        raise RuleError(f"Unbalanced parenthesis in rule operand {operand!r}.")
    return tuple(tokens)


def _expand_ellipsis(
    op: Op, tensor: Tensor, tokens: tuple[str, ...], notation: str
) -> tuple[Tensor, list[tuple[str, ...]]]:
    rank = len(tensor.shape or ())
    explicit = len(tokens) - ("..." in tokens)
    if "..." in tokens and rank >= explicit:
        at = tokens.index("...")
        extra = rank - explicit
        middle = tuple(f"_{extra - 1 - i}" for i in range(extra))
        tokens = tokens[:at] + middle + tokens[at + 1 :]
    if len(tokens) != rank:
        raise RuleError(
            f"Rule {notation!r} gives {tokens} for {tensor.name} of rank {rank} "
            f"({op.type} {op.name})."
        )
    return tensor, [
        () if token in _PLACEHOLDER_TOKENS else tuple(token.split()) for token in tokens
    ]
