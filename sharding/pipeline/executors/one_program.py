"""A pipeline as one XLA program: one scan over the ticks of a schedule, the same for any number of microbatches.

Each device reads its row of the tables and does one task or none; then all send on what they made. Sending is the only
thing that all devices do together: nothing inside a task waits for another stage, as they do different tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ...divergence import differing, rounds
from ..schedule import Schedule
from .flow import Arrays, Flow, Passing
from .lockstep import OPS, THINGS, Lockstep, Thing, lockstep
from .model import Ends, Model
from .stage import Stage, traced

Row = dict[str, Any]
"""A device's line of the tables for a tick."""


class Carry(NamedTuple):
    """What a device holds between ticks."""

    slots: dict[Thing, Any]
    output: Flow
    """What its last forward made, and ..."""
    input_gradient: Arrays
    """... its last backward: these it sends, in every tick; who doesn't wait for them throws them away."""
    stages: Any
    """The gradients of its stages' parameters so far, [chunks, ...]."""
    ends: Ends
    loss: jax.Array


def one_program(
    model: Model, schedule: Schedule, *, axis: str, rows: Sequence[int]
) -> Callable[[Any, Sequence[Any], Sequence[Any]], tuple[jax.Array, Any]]:
    """The loss and its gradients as a function of parameters, inputs and targets of each slice, that can be traced.

    Args:
        model: what to compute.
        schedule: a valid one.
        axis: of the mesh, as long as the schedule has devices.
        rows: the stage of each row of the stages' parameters.
    """
    tables = lockstep(schedule)
    here = [stage for own in tables.stages for stage in own]
    took = None if here == list(rows) else np.array([list(rows).index(stage) for stage in here])
    is_copied = len(set(here)) < len(here)

    def run(params: Any, inputs: Sequence[Any], targets: Sequence[Any]) -> tuple[jax.Array, Any]:
        stages, ends = model.parts(params)
        placed = stages if took is None else jax.tree.map(lambda leaf: leaf[took], stages)
        data = jax.tree.map(_units, *inputs), jax.tree.map(_units, *targets)

        def on_each(*args: Any) -> tuple[jax.Array, Any, Ends]:
            with differing(axis):
                return _Device(model, schedule, tables, axis, *args).run()

        body = jax.shard_map(
            on_each,
            in_specs=(P(axis), P(), P(), P(), P()),
            out_specs=(P(), P(axis), P()),
            axis_names={axis},
            check_vma=False,
        )
        loss, gradients, end_gradients = body(placed, ends, *data, model.context)
        if took is not None or is_copied:
            gradients = jax.tree.map(lambda leaf: _by_stage(leaf, here, schedule.stages)[np.array(rows)], gradients)
            gradients = jax.tree.map(lambda leaf: _along(axis, leaf), gradients)
        return loss, model.whole(gradients, end_gradients, params)

    return run


class _Device:
    """What each device does, as the body of a shard_map over the pipeline's axis."""

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        tables: Lockstep,
        axis: str,
        stages: Any,
        ends: Ends,
        inputs: Any,
        targets: Any,
        context: Any,
    ):
        self.model, self.schedule, self.tables, self.axis = model, schedule, tables, axis
        self.stages, self.ends, self.inputs, self.targets = stages, ends, inputs, targets
        x = jax.eval_shape(lambda: model.enter(ends, _at(inputs, 0)))
        weights = jax.eval_shape(lambda: _at(stages, 0))
        self.stage: Stage = traced(model.stage, weights, x, context)
        self.context = Passing.of(context).flow(context)

    def run(self) -> tuple[jax.Array, Any, Ends]:
        me = lax.axis_index(self.axis)
        tables = self.tables
        mine: dict[str, Any] = {
            "op": tables.op,
            "chunk": tables.chunk,
            "unit": tables.unit,
            "is_first": tables.is_first,
            "is_last": tables.is_last,
            "is_first_slice": tables.is_first_slice,
            "is_last_slice": tables.is_last_slice,
            "slot": dict(tables.slot),
            "passed": dict(tables.passed),
            "arrivals": tables.arrivals,
        }
        rows = jax.tree.map(lambda table: jnp.asarray(table)[:, me], mine)
        end, _ = lax.scan(self.tick, self.start(), rows)
        return lax.psum(end.loss, self.axis), end.stages, lax.psum(end.ends, self.axis)

    def start(self) -> Carry:
        """Empty slots and gradients of nothing."""
        shapes: dict[Thing, Any] = {
            "input": self.stage.flow_shapes,
            "gradient": self.stage.flow_shapes.floats,
            "residual": self.stage.residual_shapes,
            "saved": self.stage.saved_shapes,
            "context": self.stage.context_shapes,
            "context gradient": self.stage.context_shapes.floats,
        }
        used = self.tables.num_slots
        slots: dict[Thing, Any] = {
            thing: jax.tree.map(lambda s, n=used[thing]: jnp.zeros((n + 1, *s.shape), s.dtype), shapes[thing])
            for thing in THINGS
            if used[thing]
        }
        output, input_gradient = jax.tree.map(_zeros, (self.stage.flow_shapes, self.stage.flow_shapes.floats))
        stages, ends = jax.tree.map(jnp.zeros_like, (self.stages, self.ends))
        return Carry(slots, output, input_gradient, stages, ends, jnp.zeros((), jnp.float32))

    def tick(self, carry: Carry, row: Row) -> tuple[Carry, None]:
        """One task, or none, and then what all exchange."""
        tables = self.tables
        is_op = {OPS[op]: row["op"] == op for op in tables.ops}
        never = jnp.zeros((), bool)
        for kind, task in (
            ("forward", self.forward),
            ("backward", self.backward),
            ("backward-input", self.backward_input),
            ("backward-weight", self.backward_weight),
        ):
            if kind in is_op:
                carry = _when(is_op[kind], task, carry, row, tables.most(kind))
        with_loss = is_op["forward"] & row["is_last"]
        carry = _when(with_loss, self.loss, carry, row, tables.most("forward", at=tables.is_last))
        if self.model.first_fn is not None:
            goes_back = is_op.get("backward", never) | is_op.get("backward-input", never)
            most = tables.most("backward", "backward-input", at=tables.is_first)
            carry = _when(goes_back & row["is_first"], self.entered, carry, row, most)
        return self.exchanged(carry, row), None

    def exchanged(self, carry: Carry, row: Row) -> Carry:
        """With what the other devices have sent."""
        num = self.schedule.devices
        slots = dict(carry.slots)
        for k, (thing, shift) in enumerate(self.tables.lanes):
            goes = carry.output if thing == "input" else carry.input_gradient
            if shift:
                pairs = [(i, (i + shift) % num) for i in range(num)]
                goes = jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, self.axis, pairs), goes)
            slots[thing] = _put(slots[thing], row["arrivals"][k], goes)
        return carry._replace(slots=slots)

    def forward(self, carry: Carry, row: Row) -> Carry:
        """A stage's output."""

        def first() -> Flow:
            return self.stage.passing.flow(self.model.enter(self.ends, _at(self.inputs, row["unit"])))

        def later() -> Flow:
            return _at(carry.slots["input"], row["slot"]["input"])

        x = lax.cond(row["is_first"], first, later) if "input" in carry.slots else first()
        context = self.handed(carry, row, "context", row["is_first_slice"], self.context)
        y, after, residuals = self.stage.forward(_at(self.stages, row["chunk"]), x, context)
        carry = self.kept(carry, row, "residual", residuals)
        return self.hand(carry, row, "context", after)._replace(output=y)

    def loss(self, carry: Carry, row: Row) -> Carry:
        """The loss of what the last stage has made, and at once its gradients."""
        target, num = _at(self.targets, row["unit"]), self.schedule.microbatches
        value, (more, dy) = self.model.share(self.stage.passing, self.ends, carry.output, target, num)
        carry = self.kept(carry, row, "gradient", dy)
        # Nobody waits for the last stage's output; changed, it is no invariant that XLA takes out of the loop.
        spent = carry.output._replace(floats=dy)
        return carry._replace(output=spent, ends=_sum(carry.ends, more), loss=carry.loss + value.astype(jnp.float32))

    def backward(self, carry: Carry, row: Row) -> Carry:
        """Both gradients of a stage."""
        dw, dx, before = self.stage.backward(*self.needed(carry, row))
        carry = self.hand(carry, row, "context gradient", before)
        return self.added(carry, row, dw)._replace(input_gradient=dx)

    def backward_input(self, carry: Carry, row: Row) -> Carry:
        """The gradient of a stage's input; what its weights' needs is kept."""
        dx, before, saved = self.stage.backward_input(*self.needed(carry, row))
        carry = self.hand(carry, row, "context gradient", before)
        return self.kept(carry, row, "saved", saved)._replace(input_gradient=dx)

    def backward_weight(self, carry: Carry, row: Row) -> Carry:
        """The gradient of a stage's weights."""
        saved = _at(carry.slots["saved"], row["slot"]["saved"])
        return self.added(carry, row, self.stage.backward_weight(_at(self.stages, row["chunk"]), saved))

    def entered(self, carry: Carry, row: Row) -> Carry:
        """With the gradients of what comes before the first stage, which is run again for them."""
        inputs = _at(self.inputs, row["unit"])
        more = self.model.entered(self.stage.passing, self.ends, inputs, carry.input_gradient)
        spent = jax.tree.map(jnp.zeros_like, carry.input_gradient)  # as in `loss`
        return carry._replace(input_gradient=spent, ends=_sum(carry.ends, more))

    def needed(self, carry: Carry, row: Row) -> tuple[Any, Arrays, Arrays, Arrays]:
        """What a backward needs."""
        nothing = jax.tree.map(_zeros, self.stage.after_shapes)
        return (
            _at(self.stages, row["chunk"]),
            _at(carry.slots["residual"], row["slot"]["residual"]),
            _at(carry.slots["gradient"], row["slot"]["gradient"]),
            self.handed(carry, row, "context gradient", row["is_last_slice"], nothing),
        )

    def handed(self, carry: Carry, row: Row, thing: Thing, is_end: jax.Array, at_end: Any) -> Any:
        """What the neighbour slice has left for this one, or what there is at that end of the sequence."""
        if thing not in carry.slots:
            return at_end
        found = _at(carry.slots[thing], row["slot"][thing])
        return jax.tree.map(lambda end, leaf: jnp.where(is_end, end, leaf), at_end, found)

    def hand(self, carry: Carry, row: Row, thing: Thing, values: Any) -> Carry:
        """With what the neighbour slice is to find."""
        if thing not in carry.slots:
            return carry
        return carry._replace(slots=carry.slots | {thing: _put(carry.slots[thing], row["passed"][thing], values)})

    def kept(self, carry: Carry, row: Row, thing: Thing, values: Any) -> Carry:
        """With something more in a slot."""
        return carry._replace(slots=carry.slots | {thing: _put(carry.slots[thing], row["slot"][thing], values)})

    def added(self, carry: Carry, row: Row, dw: Any) -> Carry:
        """With the gradient of one stage's weights more."""
        return carry._replace(stages=jax.tree.map(lambda sum_, d: sum_.at[row["chunk"]].add(d), carry.stages, dw))


def _when(does: jax.Array, task: Callable[[Carry, Row], Carry], carry: Carry, row: Row, most: tuple[int, int]) -> Carry:
    """What a task makes of it, or it as it is; `most` says in how many of how many ticks it does so on one device.

    A loop of one round or none: what it carries it changes in place, where XLA's conditionals copy all that goes
    through them, which is most of a device's memory. All that a task reads it finds by numbers of its row; the loop's
    counter, which is 0, is added to them: what did not depend on it XLA would take out of the loop and do in any case.
    """

    def body(i: jax.Array, carry: Carry) -> Carry:
        numbers = {name: row[name] for name in ("chunk", "unit", "slot", "passed")}
        return task(carry, row | jax.tree.map(lambda number: number + i, numbers))

    with rounds(*most):
        return lax.fori_loop(0, does.astype(jnp.int32), body, carry)


def _units(*slices: jax.Array) -> jax.Array:
    """[microbatches, ...] of each slice as [microbatches x slices, ...]."""
    return slices[0] if len(slices) == 1 else jnp.stack(slices, axis=1).reshape(-1, *slices[0].shape[1:])


def _sum(tree: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, tree, other)


def _by_stage(leaf: jax.Array, here: Sequence[int], stages: int) -> jax.Array:
    """[rows, ...] in the order of devices as [stages, ...], copies of a stage added up."""
    return jnp.zeros((stages, *leaf.shape[1:]), leaf.dtype).at[np.array(here)].add(leaf)


def _along(axis: str, leaf: jax.Array) -> jax.Array:
    """Rows over an axis, other dims as they come."""
    return lax.with_sharding_constraint(leaf, P(axis, *[P.UNCONSTRAINED] * (leaf.ndim - 1)))


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), tree)


def _put(tree: Any, index: Any, values: Any) -> Any:
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, index, 0), tree, values)


def _zeros(shape: Any) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype)
