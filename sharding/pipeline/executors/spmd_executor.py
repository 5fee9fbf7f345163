"""A pipeline as one XLA program: a scan over the ticks of a schedule, of the same size for any number of microbatches.

In every tick each device reads its row of the tables and runs one task or none; then all exchange their results. The
exchange is the only collective over the pipeline axis: devices run different tasks, so none may occur inside a task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ...annotations.divergent_control_flow import declare_trip_count, divergent_over
from ..schedule import Schedule
from .activations import Activation, ActivationTree, Arrays
from .pipelined_model import Ends, Model
from .stage_programs import StagePrograms, trace_stage
from .tick_tables import BUFFERS, OPS, Buffer, TickTables, tick_tables

Row = dict[str, Any]
"""A device's row of the tables in one tick."""


class Carry(NamedTuple):
    """A device's state between ticks."""

    slots: dict[Buffer, Any]
    output: Activation
    """Output of its last forward, and ..."""
    input_gradient: Arrays
    """... of its last backward: sent in every tick, and discarded by devices that do not need it."""
    stages: Any
    """Accumulated gradients of its stages' parameters, [chunks, ...]."""
    ends: Ends
    loss: jax.Array


def one_program(
    model: Model, schedule: Schedule, *, axis: str, rows: Sequence[int]
) -> Callable[[Any, Sequence[Any], Sequence[Any]], tuple[jax.Array, Any]]:
    """A traceable function: parameters, and inputs and targets of each slice, -> the loss and its gradients.

    Args:
        model: the stage functions.
        schedule: a valid one.
        axis: mesh axis, of the size of the schedule's number of devices.
        rows: the stage of each row of the stages' parameters.
    """
    tables = tick_tables(schedule)
    device_rows = [stage for own in tables.stages for stage in own]
    gather_rows = None if device_rows == list(rows) else np.array([list(rows).index(stage) for stage in device_rows])
    is_copied = len(set(device_rows)) < len(device_rows)

    def run(params: Any, inputs: Sequence[Any], targets: Sequence[Any]) -> tuple[jax.Array, Any]:
        stages, ends = model.partition(params)
        placed = stages if gather_rows is None else jax.tree.map(lambda leaf: leaf[gather_rows], stages)
        data = jax.tree.map(_units, *inputs), jax.tree.map(_units, *targets)

        def per_device(*args: Any) -> tuple[jax.Array, Any, Ends]:
            with divergent_over(axis):
                return _DeviceProgram(model, schedule, tables, axis, *args).run()

        body = jax.shard_map(
            per_device,
            in_specs=(P(axis), P(), P(), P(), P()),
            out_specs=(P(), P(axis), P()),
            axis_names={axis},
            check_vma=False,
        )
        loss, gradients, end_gradients = body(placed, ends, *data, model.context)
        if gather_rows is not None or is_copied:
            gradients = jax.tree.map(
                lambda leaf: _by_stage(leaf, device_rows, schedule.stages)[np.array(rows)], gradients
            )
            gradients = jax.tree.map(lambda leaf: _sharded_over(axis, leaf), gradients)
        return loss, model.combine(gradients, end_gradients, params)

    return run


class _DeviceProgram:
    """The program of a device: the body of a shard_map over the pipeline axis."""

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        tables: TickTables,
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
        self.stage: StagePrograms = trace_stage(model.stage, weights, x, context)
        self.context = ActivationTree.of(context).flatten(context)

    def run(self) -> tuple[jax.Array, Any, Ends]:
        position = lax.axis_index(self.axis)
        tables = self.tables
        columns: dict[str, Any] = {
            "op": tables.op,
            "chunk": tables.chunk,
            "unit": tables.unit,
            "is_first": tables.is_first,
            "is_last": tables.is_last,
            "is_first_slice": tables.is_first_slice,
            "is_last_slice": tables.is_last_slice,
            "slot": dict(tables.slot),
            "neighbour_slot": dict(tables.neighbour_slot),
            "arrivals": tables.arrivals,
        }
        rows = jax.tree.map(lambda table: jnp.asarray(table)[:, position], columns)
        end, _ = lax.scan(self.tick, self.start(), rows)
        return lax.psum(end.loss, self.axis), end.stages, lax.psum(end.ends, self.axis)

    def start(self) -> Carry:
        """Empty slots and zero gradients."""
        shapes: dict[Buffer, Any] = {
            "input": self.stage.activation_shapes,
            "gradient": self.stage.activation_shapes.floats,
            "residual": self.stage.residual_shapes,
            "saved": self.stage.saved_shapes,
            "context": self.stage.context_shapes,
            "context gradient": self.stage.context_shapes.floats,
        }
        used = self.tables.num_slots
        slots: dict[Buffer, Any] = {
            buffer: jax.tree.map(lambda s, n=used[buffer]: jnp.zeros((n + 1, *s.shape), s.dtype), shapes[buffer])
            for buffer in BUFFERS
            if used[buffer]
        }
        output, input_gradient = jax.tree.map(
            _zeros, (self.stage.activation_shapes, self.stage.activation_shapes.floats)
        )
        stages, ends = jax.tree.map(jnp.zeros_like, (self.stages, self.ends))
        return Carry(slots, output, input_gradient, stages, ends, jnp.zeros((), jnp.float32))

    def tick(self, carry: Carry, row: Row) -> tuple[Carry, None]:
        """One task or none, then the exchange."""
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
                carry = _run_if(is_op[kind], task, carry, row, tables.max_runs(kind))
        with_loss = is_op["forward"] & row["is_last"]
        carry = _run_if(with_loss, self.loss, carry, row, tables.max_runs("forward", at=tables.is_last))
        if self.model.first_fn is not None:
            is_backward = is_op.get("backward", never) | is_op.get("backward-input", never)
            most = tables.max_runs("backward", "backward-input", at=tables.is_first)
            carry = _run_if(is_backward & row["is_first"], self.enter_backward, carry, row, most)
        return self.exchange(carry, row), None

    def exchange(self, carry: Carry, row: Row) -> Carry:
        """Stores the results from other devices."""
        num = self.schedule.devices
        slots = dict(carry.slots)
        for k, (buffer, shift) in enumerate(self.tables.exchanges):
            payload = carry.output if buffer == "input" else carry.input_gradient
            if shift:
                pairs = [(i, (i + shift) % num) for i in range(num)]
                payload = jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, self.axis, pairs), payload)
            slots[buffer] = _put(slots[buffer], row["arrivals"][k], payload)
        return carry._replace(slots=slots)

    def forward(self, carry: Carry, row: Row) -> Carry:
        """A stage's forward."""

        def first() -> Activation:
            return self.stage.activation_tree.flatten(self.model.enter(self.ends, _at(self.inputs, row["unit"])))

        def later() -> Activation:
            return _at(carry.slots["input"], row["slot"]["input"])

        x = lax.cond(row["is_first"], first, later) if "input" in carry.slots else first()
        context = self.from_neighbour(carry, row, "context", row["is_first_slice"], self.context)
        y, after, residuals = self.stage.forward(_at(self.stages, row["chunk"]), x, context)
        carry = self.store(carry, row, "residual", residuals)
        return self.to_neighbour(carry, row, "context", after)._replace(output=y)

    def loss(self, carry: Carry, row: Row) -> Carry:
        """The loss and its gradients, directly after the last stage's forward."""
        target, num = _at(self.targets, row["unit"]), self.schedule.microbatches
        value, (more, dy) = self.model.loss_and_gradients(
            self.stage.activation_tree, self.ends, carry.output, target, num
        )
        carry = self.store(carry, row, "gradient", dy)
        # The last stage's output is unused; overwriting it stops XLA from hoisting it as a loop invariant.
        overwritten = carry.output._replace(floats=dy)
        return carry._replace(
            output=overwritten, ends=_sum(carry.ends, more), loss=carry.loss + value.astype(jnp.float32)
        )

    def backward(self, carry: Carry, row: Row) -> Carry:
        """A stage's full backward."""
        dw, dx, before = self.stage.backward(*self.backward_operands(carry, row))
        carry = self.to_neighbour(carry, row, "context gradient", before)
        return self.accumulate(carry, row, dw)._replace(input_gradient=dx)

    def backward_input(self, carry: Carry, row: Row) -> Carry:
        """The gradient of a stage's input; saves what backward-weight needs."""
        dx, before, saved = self.stage.backward_input(*self.backward_operands(carry, row))
        carry = self.to_neighbour(carry, row, "context gradient", before)
        return self.store(carry, row, "saved", saved)._replace(input_gradient=dx)

    def backward_weight(self, carry: Carry, row: Row) -> Carry:
        """The gradient of a stage's weights."""
        saved = _at(carry.slots["saved"], row["slot"]["saved"])
        return self.accumulate(carry, row, self.stage.backward_weight(_at(self.stages, row["chunk"]), saved))

    def enter_backward(self, carry: Carry, row: Row) -> Carry:
        """Adds the gradients of `first_fn`, which is rematerialized."""
        inputs = _at(self.inputs, row["unit"])
        more = self.model.enter_backward(self.stage.activation_tree, self.ends, inputs, carry.input_gradient)
        overwritten = jax.tree.map(jnp.zeros_like, carry.input_gradient)  # as in `loss`
        return carry._replace(input_gradient=overwritten, ends=_sum(carry.ends, more))

    def backward_operands(self, carry: Carry, row: Row) -> tuple[Any, Arrays, Arrays, Arrays]:
        """The operands of a backward."""
        zeros = jax.tree.map(_zeros, self.stage.after_shapes)
        return (
            _at(self.stages, row["chunk"]),
            _at(carry.slots["residual"], row["slot"]["residual"]),
            _at(carry.slots["gradient"], row["slot"]["gradient"]),
            self.from_neighbour(carry, row, "context gradient", row["is_last_slice"], zeros),
        )

    def from_neighbour(self, carry: Carry, row: Row, buffer: Buffer, is_end: jax.Array, at_end: Any) -> Any:
        """The value passed by the neighbouring slice, or the boundary value at that end of the sequence."""
        if buffer not in carry.slots:
            return at_end
        found = _at(carry.slots[buffer], row["slot"][buffer])
        return jax.tree.map(lambda end, leaf: jnp.where(is_end, end, leaf), at_end, found)

    def to_neighbour(self, carry: Carry, row: Row, buffer: Buffer, values: Any) -> Carry:
        """Stores a value for the neighbouring slice."""
        if buffer not in carry.slots:
            return carry
        return carry._replace(
            slots=carry.slots | {buffer: _put(carry.slots[buffer], row["neighbour_slot"][buffer], values)}
        )

    def store(self, carry: Carry, row: Row, buffer: Buffer, values: Any) -> Carry:
        """Stores values in a slot."""
        return carry._replace(slots=carry.slots | {buffer: _put(carry.slots[buffer], row["slot"][buffer], values)})

    def accumulate(self, carry: Carry, row: Row, dw: Any) -> Carry:
        """Accumulates the gradient of one stage's weights."""
        return carry._replace(stages=jax.tree.map(lambda sum_, d: sum_.at[row["chunk"]].add(d), carry.stages, dw))


def _run_if(
    is_active: jax.Array, task: Callable[[Carry, Row], Carry], carry: Carry, row: Row, most: tuple[int, int]
) -> Carry:
    """Runs a task if `is_active`; `most` is (ticks with this task on the busiest device, all ticks).

    A loop of zero or one iterations: it updates its carry in place, whereas XLA's conditionals copy their operands,
    which are most of a device's memory. All that a task reads is indexed by numbers of its row; adding the loop's
    counter, which is 0, to them makes everything depend on the loop: otherwise XLA would hoist and always compute it.
    """

    def body(i: jax.Array, carry: Carry) -> Carry:
        numbers = {name: row[name] for name in ("chunk", "unit", "slot", "neighbour_slot")}
        return task(carry, row | jax.tree.map(lambda number: number + i, numbers))

    with declare_trip_count(*most):
        return lax.fori_loop(0, is_active.astype(jnp.int32), body, carry)


def _units(*slices: jax.Array) -> jax.Array:
    """[microbatches, ...] of each slice as [microbatches x slices, ...]."""
    return slices[0] if len(slices) == 1 else jnp.stack(slices, axis=1).reshape(-1, *slices[0].shape[1:])


def _sum(tree: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, tree, other)


def _by_stage(leaf: jax.Array, device_rows: Sequence[int], stages: int) -> jax.Array:
    """[rows, ...] in device order as [stages, ...], with the copies of a stage summed."""
    return jnp.zeros((stages, *leaf.shape[1:]), leaf.dtype).at[np.array(device_rows)].add(leaf)


def _sharded_over(axis: str, leaf: jax.Array) -> jax.Array:
    """Constrains rows to an axis, leaving other dims unconstrained."""
    return lax.with_sharding_constraint(leaf, P(axis, *[P.UNCONSTRAINED] * (leaf.ndim - 1)))


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), tree)


def _put(tree: Any, index: Any, values: Any) -> Any:
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, index, 0), tree, values)


def _zeros(shape: Any) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype)
