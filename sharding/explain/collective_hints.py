"""Hints for avoiding a collective: which annotation to change, and to what.

A reshard has two causes, often several ops away: the annotation that the axis came from, and the one of the axis or
closed dim that it conflicts with. A hint names both with their source lines, so that either can be changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..graph import Op
from ..propagation import Assignment
from ..rewrite.op_kind import REDUCE_SCATTERED
from ..rewrite.op_strategy import OpStrategy
from ..rules import Kind
from ..spec import Axis, Spec, axis_name


class Hints:
    """Hints for the collectives of one program."""

    def __init__(self, assignment: Assignment):
        self.assignment, self.graph, self.specs = assignment, assignment.graph, assignment.specs
        self._origins: dict[tuple[int, int, Axis], str] = {}
        self._needing: dict[tuple[Op, int, int], tuple[Op, int]] = {}

    def operand(self, op: Op, v: int, want: Spec) -> str:
        """How to avoid resharding an operand to the spec that the op needs."""
        if op.is_unknown:
            return f"{unknown_op_fix(op)}, or annotate {self.label(v)} as {want} where it is small"
        have = self.specs[v]
        left, came = _minus(have, want), _minus(want, have)
        hint = f"annotate {self.label(v)} as {want}" + self.current_spec(v, have, left)
        conflicting = self.conflicting(op, v, [a for _, a in (*left, *came)], self.origins(v, left))
        if conflicting:
            return f"{hint}, or {conflicting}"
        if not left:
            return hint
        needing, dim = self.needing(op, v, left[0][0])
        blocks = ": smaller blocks along it, or `sharding.kernels.with_rule`, run it on shards"
        return f"{hint}; {needing.name} needs its dim {dim} replicated" + blocks * (needing.name == "pallas_call")

    def needing(self, op: Op, v: int, dim: int) -> tuple[Op, int]:
        """The op, and the dim of its operand, for which a dim is replicated: `op`, or one that only it passes it to."""
        passed: list[tuple[Op, int, int]] = []
        at = (op, v, dim)
        while at not in self._needing:
            passed.append(at)
            behind = self.passed_to(*at)
            if behind is None:
                self._needing[at] = (at[0], at[2])
            else:
                at = behind
        self._needing.update(dict.fromkeys(passed, self._needing[at]))
        return self._needing[at]

    def passed_to(self, op: Op, v: int, dim: int) -> tuple[Op, int, int] | None:
        """The only op that an op passes a dim of its operand to, with that operand and its dim."""
        assert op.rule is not None
        factors = op.rule.operands[op.operands.index(v)][dim]
        if len(factors) != 1 or len(op.results) != 1:  # none: a callback for its effect
            return None
        (factor,), (result,) = factors, op.results
        dims = [d for d, factors in enumerate(op.rule.results[0]) if factor in factors]
        if not dims or op.rule.kinds[factor] is not Kind.PASS or self.graph.num_uses[result] != 1:
            return None
        reader = next(iter(self.graph.users[result]), None)
        if reader is None or reader.rule is None or reader.name == "edge":
            return None
        return reader, result, dims[0]

    def conflicting(self, op: Op, v: int, axes: Sequence[Axis], own: Sequence[str]) -> str:
        """The operand or result that another annotation shards over one of the axes, which forces the reshard."""
        for u in (*op.operands, *op.results):
            for d, mine in enumerate(self.specs[u].axes if u != v else ()):
                found = [a for a in mine if a in axes and self.origin(u, d, a) not in own]
                if found:
                    text = f"remove {_names(found)} from dim {d} of {self.label(u)}"
                    return text + self.origin_text(u, [(d, found[0])])
        return ""

    def result(self, v: int, have: Spec) -> str:
        """How to avoid resharding a result from the spec that the op produces to its inferred spec."""
        want = self.specs[v]
        return f"annotate {self.label(v)} as {have}" + self.current_spec(v, want, _minus(want, have))

    def edge(self, v: int, target: int) -> str:
        """How to avoid resharding a value where it enters or leaves a loop, a branch or the program."""
        have, want = self.specs[v], self.specs[target]
        hint = f"annotate {self.label(target)} as {have}" + self.current_spec(target, want, _minus(want, have))
        return f"{hint}, or {self.label(v)} as {want}" + self.current_spec(v, have, _minus(have, want))

    def sum(self, op: Op, strategy: OpStrategy, axes: Sequence[Axis]) -> str:
        """How to avoid reducing the partial sums of a result over some axes."""
        assert op.rule is not None
        found = ""
        for v, need, dims in zip(op.operands, strategy.operand_specs, op.rule.operands, strict=True):
            for d, factors in enumerate(dims):
                mine = [a for a in axes if a in need.axes[d] and a in self.specs[v].axes[d]]
                if mine and any(op.rule.kinds[f] is Kind.REDUCE for f in factors):
                    text = f"remove {_names(mine)} from dim {d} of {self.label(v)}"
                    found = found or text + self.origin_text(v, [(d, mine[0])])
        if found and op.name == REDUCE_SCATTERED:
            return f"{found}; or shard the result over {_names(axes)}: a reduce-scatter moves half the bytes"
        return found

    def current_spec(self, v: int, spec: Spec, at: Sequence[tuple[int, Axis]]) -> str:
        """A value's current spec in brackets, with the annotations that the given axes came from."""
        origins = self.origins(v, at) if at else self.closed(v)
        return f" (now {spec}" + (f" from {', '.join(origins)})" if origins else ")")

    def origin_text(self, v: int, at: Sequence[tuple[int, Axis]]) -> str:
        """The annotations that the given axes came from, in brackets."""
        origins = self.origins(v, at)
        return f" ({', '.join(origins)})" if origins else ""

    def origins(self, v: int, at: Iterable[tuple[int, Axis]]) -> list[str]:
        """The annotations that the given axes of a value came from, each once."""
        found = (self.origin(v, d, a) for d, a in at)
        return list(dict.fromkeys(one for one in found if one))

    def origin(self, v: int, d: int, axis: Axis) -> str:
        """The annotation that an axis on a dim came from; empty if unknown."""
        passed = dict[tuple[int, int, Axis], None]()
        key, came = (v, d, axis), ""
        while key not in self._origins and key not in passed:
            passed[key] = None
            reason = self.assignment.reason(*key)
            if reason is None or reason.value is None or reason.dim is None:
                came = "" if reason is None or reason.value is not None else reason.source
                break
            key = (reason.value, reason.dim, axis)
        came = self._origins.get(key, came)
        self._origins.update(dict.fromkeys(passed, came))
        return came

    def closed(self, v: int) -> list[str]:
        """The annotation of a value, if it closes a dim."""
        annotations = self.graph.annotations
        found = [annotations[u] for u in self.graph.members(v) if u in annotations]
        return [one.origin for one in found if any(not dim.open for dim in one.spec.dims)][:1]

    def label(self, v: int) -> str:
        """A value's name; for an unnamed value its type, op and source line."""
        name, op = self.graph.first_names.get(v), self.graph.makers.get(v)
        if name or op is None or op.name == "edge" or not op.source:
            return self.graph.label(v)
        return f"{self.graph.label(v)} of {op.name} at {op.source}"


def unknown_op_fix(op: Op) -> str:
    """How to keep an op without a rule from running on replicated arrays."""
    if op.name == "custom_partitioning":
        return "pass sharding_rule= to def_partition, as a string or a function that needs no devices"
    if op.name.startswith("debug_"):
        return "call it with partitioned=True, or on a smaller array"
    return f"call {op.name} in a jax.shard_map, or register its rule (sharding.rules.register)"


def _minus(a: Spec, b: Spec) -> list[tuple[int, Axis]]:
    """(dim, axis) of the axes that `a` has on a dim and `b` does not."""
    return [(d, axis) for d, axes in enumerate(a.axes) for axis in axes if axis not in b.axes[d]]


def _names(axes: Iterable[Axis]) -> str:
    return ", ".join(map(axis_name, axes))
