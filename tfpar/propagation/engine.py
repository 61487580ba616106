"""Propagation: from a plan's anchors to the spec of every tensor.

One pass over the graph in its own order, forward, backward and update alike.
Each op takes its inputs as they come and runs the way that moves the fewest bytes
(`decide`); what differs from how an input came is a reshard. A pure function of the
prepared graph and the anchors, with decisions memoised by rule and specs, so
that searching calls it many times a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.propagation.decide import FREE, CannotHold, Choice, Operand, choose
from tfpar.propagation.factors import WHOLE, spec_of, splits_of
from tfpar.propagation.follow import followed_weights
from tfpar.propagation.generated import split_generated
from tfpar.propagation.lists import makes_list, remaking, sources
from tfpar.propagation.opened import split_opened
from tfpar.propagation.own_splits import axes_of_data, ends_at_weight
from tfpar.propagation.partitioned import (
    Anchors,
    Decision,
    PartitionedGraph,
    Reshard,
)
from tfpar.propagation.planned import run_as_planned
from tfpar.propagation.prepared import (
    NEW_LIST_TYPES,
    PINNED_DTYPES,
    REGION_TYPES,
    PreparedGraph,
    prepare,
)
from tfpar.propagation.regions import partition_region
from tfpar.propagation.reshard import lower_reshard
from tfpar.propagation.wish import known_spec, wish
from tfpar.rules.rule import OpRule
from tfpar.spec import (
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    SpecError,
    fitted,
    format_spec,
    replicated,
)


def propagate(
    prepared: PreparedGraph, mesh: Mesh, anchors: Anchors, *,
    confined: bool = False, zeros: frozenset[Tensor] = frozenset(),
) -> PartitionedGraph:  # fmt: skip
    """Specs for every tensor of the graph from the plan's anchors.

    Args:
        confined: the graph is the body of a loop, branch or call, where nothing may cross
            ranks; Partials come out as they are.
        zeros: inputs that are zero everywhere, or lists that can be had in any spec.

    Raises:
        SpecError: a constraint that cannot hold; the message names op and variable.
        CannotHold: a confined graph that needs a collective along some mesh axes.
    """
    whole: frozenset[tuple[Op, int]] = frozenset()
    while True:
        try:
            return Propagation(prepared, mesh, anchors, confined, zeros, whole).run()
        except HoldWhole as error:
            whole |= error.ops


class HoldWhole(Exception):
    """Lists came out laid in a way that a later op cannot take: their makers must not split."""

    def __init__(self, ops: frozenset[tuple[Op, int]]) -> None:
        super().__init__(ops)
        self.ops = ops


class Propagation:
    """One run of the pass; see `propagate`."""

    def __init__(
        self, prepared: PreparedGraph, mesh: Mesh, anchors: Anchors,
        confined: bool, zeros: frozenset[Tensor], whole: frozenset[tuple[Op, int]],
    ) -> None:  # fmt: skip
        self.confined = confined
        self.zeros = zeros | prepared.zeros
        self.whole = whole
        self.prepared = prepared
        self.graph = prepared.graph
        self.mesh = mesh
        self.anchors = anchors
        self.result = PartitionedGraph(prepared, mesh)
        self.specs: dict[Tensor, Spec | None] = {}
        self.done: set[tuple[Tensor, Spec]] = set()
        self.replicated = replicated(mesh.num_axes)
        # Decisions of ordinary ops on this mesh that leave no Partials, by rule and specs, and
        # by whether they would be carried on.
        self.ordinary: dict[tuple[OpRule, tuple[Spec | None, ...], bool], Decision] = (
            prepared.memo.setdefault(("ordinary", mesh), {})
        )
        self.axes_of_data = axes_of_data(anchors)
        # Weights left open and numbers to draw, with the ops that only relabel them, until a
        # reader settles them.
        self.open: dict[Variable | Op, list[Op]] = {}
        self.open_root: dict[Tensor, Variable | Op] = {}

    def run(self) -> PartitionedGraph:
        self.place_variables()
        for tensor, spec in zip(self.graph.inputs, self.anchors.inputs, strict=False):
            self.specs[tensor] = self.canonical(spec, tensor.shape)
        for op in self.graph.ops:
            self.visit(op)
        for root in list(self.open):
            self.settle_root(root, self.replicated)
        self.finish_outputs()
        result = self.result
        result.specs = {t: s for t, s in self.specs.items() if s is not None}
        for variable in self.graph.variables:
            result.variable_specs[variable] = result.specs[variable.handle]
        return result

    def canonical(self, spec: Spec, shape: Sequence[int | None] | None) -> Spec:
        """`spec` without shards that divide nothing: axes of size 1, dims of one entry."""
        lengths = list(shape or ())
        out: list[Placement] = []
        for placement, parts in zip(spec, self.mesh.shape, strict=True):
            kept: Placement = Replicate() if parts == 1 else placement
            if isinstance(kept, Shard) and kept.dim < len(lengths):
                length = lengths[kept.dim]
                if length == 1:
                    kept = Replicate()
                elif length is not None:
                    lengths[kept.dim] = kept.local_length(length, parts)
            out.append(kept)
        return tuple(out)

    # --- variables ---------------------------------------------------------------

    def place_variables(self) -> None:
        if "follow" not in self.prepared.memo:
            self.prepared.memo["follow"] = followed_weights(self.graph, self.prepared.rules)
        follow = self.prepared.memo["follow"]
        self.followers: dict[Variable, list[tuple[Variable, tuple[int | None, ...]]]] = {}
        for variable in self.graph.variables:
            spec = self.anchors.variables.get(variable.name)
            if spec is not None:
                self.specs[variable.handle] = self.canonical(spec, variable.shape)
            elif variable.trainable:
                self.specs[variable.handle] = FREE
                self.open[variable] = []
                self.open_root[variable.handle] = variable
        for variable in self.graph.variables:
            if variable.handle in self.specs:
                continue
            if variable in follow:
                weight, mapping = follow[variable]
                self.followers.setdefault(weight, []).append((variable, mapping))
                if self.specs[weight.handle] is not FREE:
                    self.specs[variable.handle] = self.followed_spec(weight, mapping)
                else:  # what reads it first has its say, as what reads the weight first does
                    self.specs[variable.handle] = FREE
                    self.open_root[variable.handle] = weight
            else:
                self.specs[variable.handle] = self.replicated

    def followed_spec(self, weight: Variable, mapping: tuple[int | None, ...]) -> Spec:
        inverse = {w: d for d, w in enumerate(mapping)}
        return _renumbered(self.spec(weight.handle), inverse)

    def settle_root(self, root: Variable | Op, spec: Spec) -> None:
        """Fix an open weight or draw, and everything that only relabelled it."""
        relabelled = self.open.pop(root)
        if isinstance(root, Op):
            self.record(root, self._drawn_as(root, spec))
        else:
            self.specs[root.handle] = spec
            for follower, mapping in self.followers.get(root, ()):
                self.specs[follower.handle] = self.followed_spec(root, mapping)
        for op in relabelled:
            self._visit_settled(op)

    def _drawn_as(self, op: Op, spec: Spec) -> Decision:
        """`op`, which reads nothing that is sharded, making its output as `spec` where it can."""
        rule = self.prepared.rules[op]
        splits = tuple(
            s if s is not None and rule.can_split(s[0]) and rule.takes_pattern(*s) else WHOLE
            for s in splits_of(rule.outputs[0], spec, rule.sizes, self.mesh.shape)
        )
        made = spec_of(rule.outputs[0], rule, splits, self.mesh.shape, is_output=True)
        return Decision(Choice(splits, (self.replicated,) * len(op.inputs), (made,)))

    def _settle(self, tensor: Tensor, spec: Spec) -> None:
        """Make the open `tensor` come out as `spec` where its root can be laid so."""
        root = self.open_root[tensor]
        start = root.outputs[0] if isinstance(root, Op) else root.handle
        following = {}
        if isinstance(root, Variable):
            following = {v.handle: mapping for v, mapping in self.followers.get(root, ())}
        want: Spec = spec
        while tensor is not start and tensor not in following:
            op = tensor.op
            rule = self.prepared.rules[op]
            source = next(i for i, t in enumerate(op.inputs) if self.open_root.get(t) is root)
            splits = splits_of(rule.outputs[tensor.index], want, rule.sizes, self.mesh.shape)
            chosen = tuple(WHOLE if s is None else s for s in splits)
            want = spec_of(rule.inputs[source], rule, chosen, self.mesh.shape)
            tensor = op.inputs[source]
        if tensor in following:
            want = _renumbered(want, dict(enumerate(following[tensor])))
        self.settle_root(root, tuple(p if isinstance(p, Shard) else Replicate() for p in want))

    # --- ops ---------------------------------------------------------------------

    def visit(self, op: Op) -> None:
        planned = self.anchors.ops.get(op.name)
        if planned is not None and run_as_planned(self, op, planned):
            return
        if not self._visit_known(op):
            self._visit_any(op)

    def _visit_known(self, op: Op) -> bool:
        """The short way for what is nearly all of a graph: an op that decided so before."""
        if op not in self.prepared.ordinary or self.whole or self.confined or self.anchors.tensors:
            return False
        rule, specs = self.prepared.rules[op], self.specs
        arriving = tuple([specs[t] for t in op.inputs])
        deferred = op in self.prepared.deferred
        decision = self.ordinary.get((rule, arriving, deferred))
        if decision is None:
            if FREE in arriving:
                return False
            loose = (False,) * len(arriving)
            key = (rule, arriving, loose, self.mesh, False, (), deferred)
            decision = self.prepared.memo.get(key)
            if decision is None or any(
                isinstance(p, Partial) for made in decision.choice.out_specs for p in made
            ):
                return False
            self.ordinary[rule, arriving, deferred] = decision
        choice = decision.choice
        if choice.in_specs != arriving:
            for tensor, need in zip(op.inputs, choice.in_specs, strict=True):
                self._reshard(tensor, need)
        self.result.decisions[op] = decision
        for tensor, made in zip(op.outputs, choice.out_specs, strict=True):
            specs[tensor] = made
        return True

    def _visit_any(self, op: Op) -> None:
        if op.type == "Placeholder":
            for tensor in op.outputs:
                self.specs.setdefault(tensor, self.replicated)
            return
        if self._stays_open(op):
            return
        self._visit_settled(op)

    def _stays_open(self, op: Op) -> bool:
        """Draws, and ops that only relabel a draw or an open weight, wait for the first reader."""
        if len(op.outputs) != 1 or self.anchor_of(op.outputs[0]) is not None:
            return False
        moving = [i for i, t in enumerate(op.inputs) if self.specs.get(t, 0) is FREE]
        if self.prepared.rules[op].drawn and not moving and not self.confined:
            root: Variable | Op = op
            self.open[op] = []
        elif len(moving) == 1 and self._relabels(op, moving[0]):
            root = self.open_root[op.inputs[moving[0]]]
            self.open[root].append(op)
        else:
            return False
        self.open_root[op.outputs[0]] = root
        self.specs[op.outputs[0]] = FREE
        return True

    def _relabels(self, op: Op, position: int) -> bool:
        """Whether the open input at `position` has its like in the output of `op`."""
        tensor, rule = op.inputs[position], self.prepared.rules[op]
        if tensor not in self.open_root:
            return False
        others = [t for i, t in enumerate(op.inputs) if i != position]
        if isinstance(self.open_root[tensor], Op):
            # Scaled and compared with scalars: a draw is worth cutting down to the mask it is for.
            alike = rule.inputs[position] == rule.outputs[0] and rule.lower is None
            return alike and all(
                t.num_elements == 1 and self.specs[t] == self.replicated for t in others
            )
        relabels = position in rule.monotone or op.type in ("ReadVariableOp", "Cast")
        return relabels and all(t.op.type == "Const" for t in others)

    def _visit_settled(self, op: Op) -> None:
        try:
            if op.type in REGION_TYPES:
                self._settle_all(op)
                decision = partition_region(self, op)
            else:
                decision = self._decided(op)
            if self.confined:
                for tensor, need in zip(op.inputs, decision.choice.in_specs, strict=True):
                    self.check_local(tensor, need)
        except CannotHold as error:
            raise self._cannot_hold(op, error) from None
        self.record(op, decision)

    def _decided(self, op: Op) -> Decision:
        rule = self.prepared.rules[op]
        specs = tuple(self.specs[t] for t in op.inputs)
        whole = self.whole_axes(op)
        loose = tuple(map(self.is_loose, op.inputs))
        deferred = op in self.prepared.deferred
        key = (rule, specs, loose, self.mesh, self.confined, whole, deferred)
        decision = self.prepared.memo.get(key)
        if decision is None:
            decision = self.expanded(op, self.chosen(op))
            self.prepared.memo[key] = decision
        if rule.generates:
            decision = split_generated(self, op, decision)
        return split_opened(self, op, decision) if FREE in specs else decision

    def whole_axes(self, op: Op) -> tuple[int, ...]:
        return tuple(sorted(a for o, a in self.whole if o is op)) if self.whole else ()

    def propagate_body(
        self, body: PreparedGraph, anchors: Anchors, zeros: frozenset[Tensor]
    ) -> PartitionedGraph:
        """Propagate through the body of a region."""
        return propagate(body, self.mesh, anchors, confined=True, zeros=zeros)

    def spec(self, tensor: Tensor) -> Spec:
        """The spec in which `tensor`, which is not open, is kept."""
        spec = self.specs[tensor]
        assert spec is not None
        return spec

    def is_loose(self, tensor: Tensor) -> bool:
        """Whether `tensor` is zero everywhere, or a list that can be made in another spec."""
        if tensor in self.zeros:
            return True
        if tensor.dtype != "variant":
            return False
        op = tensor.op
        return makes_list(op, self.prepared.rules[op]) and all(map(self.is_loose, sources(op)))

    def check_pinned(self, tensor: Tensor, need: Spec) -> None:
        """Raise CannotHold if `tensor` is a variable or a list that lies otherwise."""
        have = self.spec(tensor)
        if have != need and tensor.dtype in PINNED_DTYPES and not self.is_loose(tensor):
            raise CannotHold(*(a for a, p in enumerate(have) if p != need[a]))

    def check_local(self, tensor: Tensor, need: Spec) -> None:
        """Raise CannotHold if `tensor` cannot come as `need` without crossing ranks."""
        self.check_pinned(tensor, need)
        steps = lower_reshard(tuple(tensor.shape or ()), self.spec(tensor), need, self.mesh)
        axes = {a for step in steps if step.is_collective for a in step.axes}
        if axes:
            raise CannotHold(*sorted(axes))

    def chosen(self, op: Op, planned: Choice | None = None) -> Choice:
        """How `op` runs, given how its inputs come; see `decide.choose`."""
        rule = self.prepared.rules[op]
        operands = [Operand.of(t, self.is_loose(t), self.confined) for t in op.inputs]
        specs = tuple(self.specs[t] for t in op.inputs)
        out_bytes = sum(t.num_bytes for t in op.outputs)
        return choose(
            rule, operands, specs, out_bytes, self.mesh, self.whole_axes(op), planned=planned,
            sparse=rule.sparse and not self._is_added_up(op),
            deferred=op in self.prepared.deferred,
        )  # fmt: skip

    def expanded(self, op: Op, choice: Choice) -> Decision:
        """`choice` as a decision: of the op's decomposition if it splits what asks for that."""
        rule = self.prepared.rules[op]
        for factor in rule.expand:
            axes = tuple(a for a, s in enumerate(choice.splits) if s[0] == factor)
            parts = self.mesh.group_size(axes)
            if parts > 1:
                key = (rule, "expanded", choice, self.mesh, self.confined)
                if key not in self.prepared.memo:
                    self.prepared.memo[key] = self._expand(op, choice, factor, parts)
                return self.prepared.memo[key]
        return Decision(choice)

    def _expand(self, op: Op, choice: Choice, factor: int, parts: int) -> Decision:
        """Run the op's decomposition instead, propagated from what the op would read.

        What the op would leave Partial its decomposition leaves so too: who reads it says where
        it is reduced.
        """
        rule = self.prepared.rules[op]
        partial = [
            spec if any(isinstance(p, Partial) for p in spec) else None for spec in choice.out_specs
        ]
        key = (rule, "expansion", factor, parts, any(partial))
        if key not in self.prepared.bodies:
            graph = rule.expand[factor](op, parts)
            self.prepared.bodies[key] = prepare(graph, reduces=not any(partial))
        anchors = Anchors(inputs=choice.in_specs, outputs=partial)
        inner = propagate(self.prepared.bodies[key], self.mesh, anchors, confined=self.confined)
        made = dataclasses.replace(choice, out_specs=tuple(inner.output_specs))
        return Decision(made, expansion=inner)

    def _cannot_hold(self, op: Op, error: CannotHold) -> Exception:
        if self.confined:
            return error
        axis = error.axes[0]
        held = {(maker, a) for maker in _makers_of_lists(op) for a in error.axes} - self.whole
        if held:
            return HoldWhole(frozenset(held))
        specs = [self.specs[t] for t in op.inputs]
        names = {v.handle: v.name for v in self.graph.variables}
        pinned = ", ".join(
            f"{names.get(t, t.name)} as {format_spec(s)}"
            for t, s in zip(op.inputs, specs, strict=True)
            if s is not None and (t in names or t.dtype in ("resource", "variant"))
        )
        return SpecError(
            f"{op.type} {op.name!r} cannot run with {pinned}: along mesh axis "
            f"{self.mesh.axis_names[axis]!r} they exclude each other. Give these variables "
            f"the same sharding, or leave one of them to propagation."
        )

    def _is_added_up(self, op: Op) -> bool:
        """Whether what it gives is added to something else, and reduced with that in any case."""
        readers = (r for t in op.outputs for r in self.prepared.consumers.get(t, ()))
        return any(r.type in ("AddN", "AddV2", "Add") for r in readers)

    def _settle_all(self, op: Op) -> None:
        for tensor in op.inputs:
            if self.specs.get(tensor, 0) is FREE:
                self._settle(tensor, self.replicated)

    def record(self, op: Op, decision: Decision, planned: Sequence[Spec] | None = None) -> None:
        """Settle how `op` runs; its outputs are kept as `planned`, if a plan says so."""
        for tensor, need in zip(op.inputs, decision.choice.in_specs, strict=True):
            if self.specs[tensor] is FREE:
                self._settle(tensor, need)
            self._reshard(tensor, need)
        self.result.decisions[op] = decision
        if op in self.prepared.once and not self.confined and self.mesh.size > 1:
            self.result.shared.add(op)
        for i, (tensor, made) in enumerate(zip(op.outputs, decision.choice.out_specs, strict=True)):
            kept = self._kept(tensor, made) if planned is None else planned[i]
            if kept != made:
                resolution = Reshard(tensor, made, kept)
                self.result.resolutions[tensor] = resolution
                self.result.reshards.append(resolution)
            self.specs[tensor] = kept

    def _reshard(self, tensor: Tensor, need: Spec) -> None:
        have = self.specs[tensor]
        if have == need or (tensor, need) in self.done:
            return
        assert have is not None
        self.done.add((tensor, need))
        if tensor.dtype == "variant":
            op = tensor.op
            if op.type not in (*NEW_LIST_TYPES, "Placeholder"):
                choice = remaking(op, self.prepared.rules[op], need, self.mesh)
                for source, spec in zip(op.inputs, choice.in_specs, strict=True):
                    self._reshard(source, spec)
            return
        self.result.reshards.append(Reshard(tensor, have, need))

    def anchor_of(self, tensor: Tensor) -> Spec | None:
        return self.anchors.tensors.get(tensor.name) if self.anchors.tensors else None

    def _kept(self, tensor: Tensor, made: Spec) -> Spec:
        """The spec to keep a fresh tensor in: anchored, or with its Partials resolved, splits that
        propagation started ended, and narrow gradients moved to where they update."""
        anchor = self.anchor_of(tensor)
        if anchor is None:
            return self.resolved(tensor, made)
        left_open = self.mesh.num_axes - len(anchor)
        if left_open:
            anchor = (*anchor, *self.resolved(tensor, made)[-left_open:])
            anchor = fitted(tensor.shape or (), anchor, self.mesh)
        return self.canonical(anchor, tensor.shape)

    def resolved(self, tensor: Tensor, made: Spec) -> Spec:
        """The spec of a tensor made as `made` that nothing anchors."""
        kept = self._resolved(tensor, made)
        # Where it is not as made along one axis, the strides along later ones may not fit.
        return kept if kept == made else fitted(tensor.shape or (), kept, self.mesh)

    def _resolved(self, tensor: Tensor, made: Spec) -> Spec:
        if self.confined or tensor.dtype in PINNED_DTYPES:
            return made
        if tensor in self.prepared.narrow and not any(isinstance(p, Partial) for p in made):
            return self._as_updated(tensor, made)
        kept = list(made)
        for axis, placement in enumerate(made):
            if isinstance(placement, Partial):
                if not self._carries(tensor, axis, made):
                    kept[axis] = wish(self, tensor, axis, made) or Replicate()
            elif isinstance(placement, Shard) and ends_at_weight(self, tensor, axis, made):
                kept[axis] = Replicate()
        return tuple(kept)

    def _carries(self, tensor: Tensor, axis: int, made: Spec) -> bool:
        """Whether `tensor`, made Partial along `axis`, is better carried on than reduced."""
        carry = self.prepared.carried.get(tensor)
        if carry is None or made[axis] is not Partial("sum"):
            return False
        return carry.holds(axis, made, self.mesh, lambda t: known_spec(self, t))

    def _as_updated(self, tensor: Tensor, made: Spec) -> Spec:
        """`made`, split as the variables that `tensor` updates are split."""
        kept = list(made)
        for axis, placement in enumerate(made):
            if isinstance(placement, Shard):
                wanted = wish(self, tensor, axis, made)
                kept[axis] = wanted if isinstance(wanted, Shard) else placement
        return tuple(kept)

    def finish_outputs(self) -> None:
        outputs = self.anchors.outputs or [None] * len(self.graph.outputs)
        for tensor, want in zip(self.graph.outputs, outputs, strict=True):
            have = self.specs[tensor]
            assert have is not None
            if want is None:
                gathers = not self.confined
                want = tuple(Replicate() if gathers and isinstance(p, Partial) else p for p in have)
            want = self.canonical(want, tensor.shape)
            if self.confined:
                self.check_local(tensor, want)
            self._reshard(tensor, want)
            self.result.output_specs.append(want)


def _renumbered(spec: Spec, dims: Mapping[int | None, int | None]) -> Spec:
    """`spec` for a tensor that has dim `dims[d]` in place of dim d, and nothing of others."""
    found: list[Placement] = []
    for placement in spec:
        dim = dims.get(placement.dim) if isinstance(placement, Shard) else None
        if isinstance(placement, Shard) and dim is not None:
            found.append(Shard(dim, placement.stride, placement.unit))
        else:
            found.append(Replicate())
    return tuple(found)


def _makers_of_lists(op: Op) -> set[Op]:
    """The ops that `op`'s tensor lists went through."""
    found: set[Op] = set()
    stack = [op]
    while stack:
        for tensor in stack.pop().inputs:
            if tensor.dtype == "variant" and tensor.op not in found:
                found.add(tensor.op)
                stack.append(tensor.op)
    return found
