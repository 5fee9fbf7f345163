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

from .lockstep import OPS, THINGS, Lockstep, Thing, lockstep
from .model import Ends, Model
from .schedule import Schedule
from .stage import Arrays, Flow, Stage, traced


class Carry(NamedTuple):
    """What a device holds between ticks."""

    slots: dict[Thing, Any]
    stages: Any
    """The gradients of its stages' parameters so far, [chunks, ...]."""
    ends: Ends
    loss: jax.Array


class Sent(NamedTuple):
    """What a task has for other devices."""

    input: Flow
    gradient: Arrays


def one_program(
    model: Model, schedule: Schedule, *, axis: str, rows: Sequence[int]
) -> Callable[[Any, Any, Any], tuple[jax.Array, Any]]:
    """The loss and its gradients as a function that can be traced.

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

    def run(params: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
        stages, ends = model.parts(params)
        placed = stages if took is None else jax.tree.map(lambda leaf: leaf[took], stages)
        body = jax.shard_map(
            lambda *args: _Device(model, schedule, tables, axis, *args).run(),
            in_specs=(P(axis), P(), P(), P()),
            out_specs=(P(), P(axis), P()),
            axis_names={axis},
            check_vma=False,
        )
        loss, gradients, end_gradients = body(placed, ends, inputs, targets)
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
    ):
        self.model, self.schedule, self.tables, self.axis = model, schedule, tables, axis
        self.stages, self.ends, self.inputs, self.targets = stages, ends, inputs, targets
        x = jax.eval_shape(lambda: model.enter(ends, _at(inputs, 0)))
        weights = jax.eval_shape(lambda: _at(stages, 0))
        self.stage: Stage = traced(model.stage, weights, x)
        self.nothing = Sent(*jax.tree.map(_zeros, (self.stage.flow_shapes, self.stage.flow_shapes.floats)))

    def run(self) -> tuple[jax.Array, Any, Ends]:
        me = lax.axis_index(self.axis)
        tables = self.tables
        mine: dict[str, Any] = {
            "op": tables.op,
            "chunk": tables.chunk,
            "microbatch": tables.microbatch,
            "is_first": tables.is_first,
            "is_last": tables.is_last,
            "slot": dict(tables.slot),
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
        }
        used = self.tables.num_slots
        slots: dict[Thing, Any] = {
            thing: jax.tree.map(lambda s, n=used[thing]: jnp.zeros((n + 1, *s.shape), s.dtype), shapes[thing])
            for thing in THINGS
            if used[thing]
        }
        return Carry(slots, *jax.tree.map(jnp.zeros_like, (self.stages, self.ends)), loss=jnp.zeros((), jnp.float32))

    def tick(self, carry: Carry, row: dict[str, Any]) -> tuple[Carry, None]:
        """One task, or none, and then what all exchange."""
        tasks = {
            None: lambda carry, row: (carry, self.nothing),
            "forward": self.forward,
            "backward": self.backward,
            "backward-input": self.backward_input,
            "backward-weight": self.backward_weight,
        }
        ops = self.tables.ops
        number = jnp.asarray([ops.index(op) if op in ops else 0 for op in range(len(OPS))])
        carry, sent = lax.switch(number[row["op"]], [tasks[OPS[op]] for op in ops], carry, row)
        num = self.schedule.devices
        slots = dict(carry.slots)
        for k, (thing, shift) in enumerate(self.tables.lanes):
            goes = sent.input if thing == "input" else sent.gradient
            if shift:
                pairs = [(i, (i + shift) % num) for i in range(num)]
                goes = jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, self.axis, pairs), goes)
            slots[thing] = _put(slots[thing], row["arrivals"][k], goes)
        return carry._replace(slots=slots), None

    def forward(self, carry: Carry, row: dict[str, Any]) -> tuple[Carry, Sent]:
        """A stage's output; on the last stage also the loss and its gradients."""

        def first() -> Flow:
            return self.stage.passing.flow(self.model.enter(self.ends, _at(self.inputs, row["microbatch"])))

        def later() -> Flow:
            return _at(carry.slots["input"], row["slot"]["input"])

        x = lax.cond(row["is_first"], first, later) if "input" in carry.slots else first()
        y, residuals = self.stage.forward(_at(self.stages, row["chunk"]), x)
        slots = carry.slots | {"residual": _put(carry.slots["residual"], row["slot"]["residual"], residuals)}
        held = slots["gradient"], carry.ends, carry.loss

        def last(y: Flow, held: Any) -> Any:
            gradients, ends, loss = held
            target = _at(self.targets, row["microbatch"])
            share = self.model.share(self.stage.passing, self.ends, y, target, self.schedule.microbatches)
            value, (dends, dy) = share
            gradients = _put(gradients, row["slot"]["gradient"], dy)
            return gradients, jax.tree.map(jnp.add, ends, dends), loss + value.astype(loss.dtype)

        slots["gradient"], ends, loss = lax.cond(row["is_last"], last, lambda y, held: held, y, held)
        return carry._replace(slots=slots, ends=ends, loss=loss), self.nothing._replace(input=y)

    def backward(self, carry: Carry, row: dict[str, Any]) -> tuple[Carry, Sent]:
        """Both gradients of a stage."""
        weights, residuals, gradient = self.held(carry, row)
        dw, dx = self.stage.backward(weights, residuals, gradient)
        return self.entered(self.added(carry, row, dw), row, dx), self.nothing._replace(gradient=dx)

    def backward_input(self, carry: Carry, row: dict[str, Any]) -> tuple[Carry, Sent]:
        """The gradient of a stage's input; what its weights' needs is kept."""
        weights, residuals, gradient = self.held(carry, row)
        dx, saved = self.stage.backward_input(weights, residuals, gradient)
        slots = carry.slots | {"saved": _put(carry.slots["saved"], row["slot"]["saved"], saved)}
        return self.entered(carry._replace(slots=slots), row, dx), self.nothing._replace(gradient=dx)

    def backward_weight(self, carry: Carry, row: dict[str, Any]) -> tuple[Carry, Sent]:
        """The gradient of a stage's weights."""
        saved = _at(carry.slots["saved"], row["slot"]["saved"])
        dw = self.stage.backward_weight(_at(self.stages, row["chunk"]), saved)
        return self.added(carry, row, dw), self.nothing

    def held(self, carry: Carry, row: dict[str, Any]) -> tuple[Any, Arrays, Arrays]:
        """What a backward needs."""
        return (
            _at(self.stages, row["chunk"]),
            _at(carry.slots["residual"], row["slot"]["residual"]),
            _at(carry.slots["gradient"], row["slot"]["gradient"]),
        )

    def added(self, carry: Carry, row: dict[str, Any], dw: Any) -> Carry:
        """With the gradient of one stage's weights more."""
        return carry._replace(stages=jax.tree.map(lambda sum_, d: sum_.at[row["chunk"]].add(d), carry.stages, dw))

    def entered(self, carry: Carry, row: dict[str, Any], dx: Arrays) -> Carry:
        """With the gradients of what comes before the first stage, which is run again for them."""
        if self.model.first_fn is None:
            return carry

        def back(sums: Ends, dx: Arrays) -> Ends:
            inputs = _at(self.inputs, row["microbatch"])
            return jax.tree.map(jnp.add, sums, self.model.entered(self.stage.passing, self.ends, inputs, dx))

        return carry._replace(ends=lax.cond(row["is_first"], back, lambda sums, dx: sums, carry.ends, dx))


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
