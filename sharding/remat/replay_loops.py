"""A scan whose backward pass replays a schedule in loops over its tables, with a buffer of snapshots.

The size of the program does not depend on the numbers of steps and snapshots: one loop over the turns, in it one over
the snapshots that are written on the way, in it one over steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..graph.step_residuals import Arrays, Derivative, Step, is_float, merge, pick
from .loop_tables import LoopTables, Turn


def replayed_scan(step: Step, steps: int, tables: LoopTables) -> Callable[..., tuple[Arrays, Arrays]]:
    """A function (constants, carry, xs) -> (carry, ys) of flat arrays with this backward pass."""

    @jax.custom_vjp
    def run(constants: Arrays, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return lax.scan(lambda carry, x: step(constants, carry, x), carry, xs, steps)

    def forward(constants: Arrays, carry: Arrays, xs: Arrays) -> Any:
        loops = Loops(Derivative(step, _with_gradient(constants), _with_gradient(xs)), steps, tables)
        values = [[leaf.value for leaf in leaves] for leaves in (constants, carry, xs)]
        return loops.forward(*values)

    run.defvjp(forward, lambda kept, ct: kept[0].backward(*kept[1:], *ct), symbolic_zeros=True)
    return run


def _with_gradient(leaves: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(bool(leaf.perturbed) and is_float(leaf.value) for leaf in leaves)


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True, eq=False)
class Loops:
    """The forward and the backward pass."""

    derivative: Derivative
    steps: int
    tables: LoopTables

    def forward(self, constants: Arrays, carry: Arrays, xs: Arrays) -> Any:
        """The results, and what the backward pass needs: the snapshots and the last group's residuals."""
        first = self.tables.turns[0]
        run = Replay(self.derivative, constants, xs)
        y = jax.eval_shape(self.derivative.step, constants, carry, run.x(0))[1]
        ys = [jnp.zeros((self.steps, *one.shape), one.dtype) for one in y]
        buffer = [jnp.broadcast_to(leaf, (self.tables.slots, *jnp.shape(leaf))) for leaf in carry]
        buffer, carry, ys = run.reach([first], numbers([first]), buffer, ys)
        carry, ys, residuals = run.record(first.start, len(first.steps), carry, ys)
        return (carry, ys), (self, constants, xs, buffer, residuals)

    def backward(
        self, constants: Arrays, xs: Arrays, buffer: Arrays, residuals: Any, ct_carry: Arrays, ct_ys: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The gradients of constants, carry and xs; None for those without one."""
        floats, run = [is_float(leaf) for leaf in buffer], Replay(self.derivative, constants, xs)
        of_constants, of_xs = self.derivative.constants, self.derivative.inputs
        zeros = [
            [jnp.zeros_like(leaf) for leaf in leaves] for leaves in (pick(of_constants, constants), pick(of_xs, xs))
        ]
        ct = Cotangents(zeros[0], [_array(leaf) for leaf in pick(floats, ct_carry)], zeros[1])
        cts = [leaf for leaf in ct_ys if is_float(leaf)]
        first = self.tables.turns[0]
        ct = run.backward(first.start, len(first.steps), residuals, ct, cts)
        for turns in self.tables.runs():
            buffer, ct = self._turns(run, turns, buffer, ct, cts)
        picked = (of_constants, ct.constants), (floats, ct.carry), (of_xs, ct.xs)
        of_constants, of_carry, of_xs = (merge(mask, leaves, [None] * len(mask)) for mask, leaves in picked)
        return of_constants, of_carry, of_xs

    def _turns(
        self, run: Replay, turns: Sequence[Turn], buffer: Arrays, ct: Cotangents, cts: Sequence[Any]
    ) -> tuple[Arrays, Cotangents]:
        """The backward of consecutive groups of equal length."""
        own = numbers(turns)
        fixed = {name: value for name, value in own.items() if isinstance(value, int)}
        length = len(turns[0].steps)

        def turn(held: tuple[Arrays, Cotangents], varying: dict[str, Any]) -> tuple[tuple[Arrays, Cotangents], None]:
            # The barrier keeps compilers from moving the recomputation ahead of the backward of later steps.
            buffer, ct = lax.optimization_barrier(held)
            at = fixed | varying
            buffer, carry, _ = run.reach(turns, at, buffer, [])
            _, _, residuals = run.record(at["start"], length, carry, [])
            return (buffer, run.backward(at["start"], length, residuals, ct, cts)), None

        if len(turns) == 1:
            return turn((buffer, ct), {})[0]
        return lax.scan(turn, (buffer, ct), {name: value for name, value in own.items() if name not in fixed})[0]


class Cotangents(NamedTuple):
    """The gradients so far, of the floats only."""

    constants: Arrays
    carry: Arrays
    xs: Arrays


@dataclass(frozen=True, slots=True)
class Replay:
    """Runs of steps, forward and backward, by their numbers, which may be traced."""

    derivative: Derivative
    constants: Arrays
    xs: Arrays

    def x(self, step: Any) -> Arrays:
        """A step's slices of xs."""
        return [_at(leaf, step) for leaf in self.xs]

    def reach(
        self, turns: Sequence[Turn], at: dict[str, Any], buffer: Arrays, ys: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """(snapshots, carry, ys) with the carry before a turn's group, and the snapshots on the way to it."""
        lengths, slots = (_fixed([getattr(p, name) for t in turns for p in t.pushes]) for name in ("steps", "slot"))

        def push(number: Any, held: Any) -> Any:
            buffer, carry, ys, start = held
            length = _entry(lengths, number)
            carry, ys = self.advance(carry, start, length, ys)
            slot = _entry(slots, number)
            return [_put(old, new, slot) for old, new in zip(buffer, carry, strict=True)], carry, ys, start + length

        held = buffer, [_at(leaf, at["slot"]) for leaf in buffer], ys, jnp.asarray(at["state"], jnp.int32)
        if any(turn.pushes for turn in turns):
            held = lax.fori_loop(at["begin"], at["end"], push, held)
        buffer, carry, ys, start = held
        return buffer, *self.advance(carry, start, at["advance"], ys)

    def advance(self, carry: Arrays, start: Any, length: Any, ys: Arrays) -> tuple[Arrays, Arrays]:
        """Runs steps forward; their ys are dropped where none are given."""
        if isinstance(length, int) and length == 0:
            return carry, ys

        def run(number: Any, held: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            carry, ys = held
            carry, y = self.derivative.step(self.constants, carry, self.x(start + number))
            return carry, [_put(old, new, start + number) for old, new in zip(ys, y if ys else [], strict=True)]

        return lax.fori_loop(0, length, run, (carry, ys))

    def record(self, start: Any, length: int, carry: Arrays, ys: Arrays) -> tuple[Arrays, Arrays, Any]:
        """(carry, ys, residuals) after the steps of a group; its residuals are stacked if there are several."""

        def run(held: tuple[Arrays, Arrays], step: Any) -> tuple[tuple[Arrays, Arrays], Any]:
            carry, ys = held
            carry, y, residuals = self.derivative.record(self.constants, carry, self.x(step))
            return (carry, [_put(old, new, step) for old, new in zip(ys, y if ys else [], strict=True)]), residuals

        if length == 1:
            held, residuals = _once(lambda held: run(held, start), (carry, ys), start)
        else:
            held, residuals = lax.scan(run, (carry, ys), start + jnp.arange(length))
        carry, ys = held
        return carry, ys, residuals

    def backward(self, start: Any, length: int, residuals: Any, ct: Cotangents, cts: Sequence[Any]) -> Cotangents:
        """Adds the gradients of a group, last step first."""

        def run(ct: Cotangents, of_step: tuple[Any, Any]) -> tuple[Cotangents, None]:
            step, residuals = of_step
            of_y = [_array(leaf, 1) if _is_zero(leaf) else _at(leaf, step) for leaf in cts]
            new = self.derivative.backward(residuals, self.constants, self.x(step), (ct.carry, of_y))
            constants = [old + one for old, one in zip(ct.constants, new[0], strict=True)]
            return Cotangents(constants, new[1], [_put(*pair, step) for pair in zip(ct.xs, new[2], strict=True)]), None

        if length == 1:
            return run(ct, (start, residuals))[0]
        return lax.scan(run, ct, (start + jnp.arange(length), residuals), reverse=True)[0]


def _once(run: Callable[[Any], tuple[Any, Any]], held: Any, start: Any) -> tuple[Any, Any]:
    """`run(held)` in a loop of one iteration, which compilers take for one of several.

    They then compute residuals as in the forward pass: outside a loop, they would drop the step's result, fuse the rest
    differently, and round differently.
    """
    tree = None

    def body(_: Any, both: tuple[Any, Arrays]) -> tuple[Any, Arrays]:
        nonlocal tree
        held, results = run(both[0])
        leaves, tree = jax.tree.flatten(results)
        return held, leaves

    shapes = jax.eval_shape(lambda held: jax.tree.leaves(run(held)[1]), held)
    empty = [lax.full(one.shape, 0, one.dtype) for one in shapes]
    times = lax.optimization_barrier(jnp.asarray(start >= 0, jnp.int32))
    held, leaves = lax.fori_loop(0, times, body, (held, empty))
    assert tree is not None
    return held, jax.tree.unflatten(tree, leaves)


def numbers(turns: Sequence[Turn]) -> dict[str, Any]:
    """The numbers of turns: an integer where all are equal, an array with one per turn elsewhere."""
    ends = list(accumulate(len(turn.pushes) for turn in turns))
    return {
        "slot": _fixed([turn.slot for turn in turns]),
        "state": _fixed([turn.state for turn in turns]),
        "start": _fixed([turn.start for turn in turns]),
        "advance": _fixed([turn.advance for turn in turns]),
        "begin": _fixed([0, *ends[:-1]]),
        "end": _fixed(ends),
    }


def _fixed(values: Sequence[int]) -> Any:
    if not values:
        return 0
    return values[0] if len(set(values)) == 1 else np.asarray(values, np.int32)


def _entry(values: Any, number: Any) -> Any:
    return values if isinstance(values, int) else _at(jnp.asarray(values), number)


def _at(leaf: Any, number: Any) -> Any:
    return lax.dynamic_index_in_dim(leaf, number, keepdims=False)


def _put(leaf: Any, value: Any, number: Any) -> Any:
    return lax.dynamic_update_index_in_dim(leaf, value, number, 0)


def _is_zero(leaf: Any) -> bool:
    return isinstance(leaf, SymbolicZero)


def _array(leaf: Any, skipped: int = 0) -> Any:
    """Zeros for a symbolic zero, without some of its leading dims."""
    return jnp.zeros(leaf.shape[skipped:], leaf.dtype) if _is_zero(leaf) else leaf
