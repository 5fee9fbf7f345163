"""`scan`: `jax.lax.scan` whose derivative stores and recomputes what a schedule says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..graph.step_residuals import Arrays, Step, cast, flat_step
from .auto_policy import Auto
from .checkpoint_schedule import Schedule
from .loop_tables import loop_tables
from .replay_loops import replayed_scan
from .sequential import check_executable, sequence


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    schedule: Schedule | Auto,
) -> tuple[Any, Any]:
    """As `jax.lax.scan`; its reverse-mode derivative holds and computes exactly what the schedule says.

    One loop over the groups of steps that run backward together, whatever the number of steps and snapshots: it
    restores a snapshot, runs forward, writes snapshots on the way, then runs the group backward. The last group keeps
    its residuals from the forward pass. A schedule with snapshots on the host is unrolled, as `remat.sequence` runs it.
    ``body`` may close over arrays, which have gradients as with `jax.lax.scan`.
    Gradients are bit-equal to those of `jax.lax.scan` where compilers round a step alike with and without residuals.
    Forward-mode derivatives of the gradient (``jax.hessian``) work, reverse-mode ones of it don't.

    Args:
        body: (carry, x) -> (carry, y).
        init: the first carry.
        xs: arrays with one entry per step.
        length: steps, where ``xs`` has no arrays.
        schedule: for as many steps; or `remat.auto`, for which `remat.fit` chooses the number of snapshots.

    Raises:
        ShardingError: a schedule for another number of steps, or one that can't run.

    Example:
        >>> import jax
        >>> from jax import numpy as jnp
        >>> from sharding import remat
        >>> def loss(ws, x):
        ...     y, _ = remat.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws, schedule=remat.revolve(50, snapshots=3))
        ...     return y.sum()
        >>> jax.grad(loss)(jnp.ones((50, 2, 2)), jnp.ones((1, 2))).shape
        (50, 2, 2)
    """
    ends = jax.eval_shape(lambda init, xs: lax.scan(body, init, xs, length), init, xs)
    leaves, xs_tree = jax.tree.flatten(xs)
    steps = leaves[0].shape[0] if leaves else length
    assert steps is not None, "lax.scan has checked it"
    if isinstance(schedule, Auto):
        chosen = schedule.schedule(steps)
        if chosen is None:
            return lax.scan(body, init, xs, length)
        schedule = chosen
    check_executable("remat.scan(schedule)", schedule, steps)
    schedule.check()
    carry = cast(jax.tree.leaves(init), jax.tree.leaves(ends[0]))
    trees = jax.tree.structure(ends[0]), xs_tree, jax.tree.structure(ends[1])
    step, constants = flat_step(body, trees, carry, [leaf[0] for leaf in leaves])
    tables = loop_tables(schedule)
    run = _unrolled(step, schedule) if tables is None else replayed_scan(step, steps, tables)
    carry, ys = run(constants, carry, leaves)
    return jax.tree.unflatten(trees[0], carry), jax.tree.unflatten(trees[2], ys)


def _unrolled(step: Step, schedule: Schedule) -> Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]:
    """The same with a copy of the body for each run of a step, for schedules that no loops replay."""

    def run(constants: Arrays, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        def function(number: int) -> Callable[[Any], Any]:
            def apply(held: tuple[Arrays, list[Arrays]]) -> tuple[Arrays, list[Arrays]]:
                carry, y = step(constants, held[0], [leaf[number] for leaf in xs])
                return carry, [*held[1], y]

            return apply

        functions = [function(number) for number in range(schedule.steps)]
        carry, ys = sequence(functions, schedule=schedule)((carry, []))
        return carry, [jnp.stack(leaves) for leaves in zip(*ys, strict=True)]

    return run
