"""`sequence`: runs a list of functions with the recomputation of a schedule, as nested `jax.checkpoint`s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..errors import ShardingError
from .actions import Snapshot
from .blocks import Block, nested
from .checkpoint_schedule import Schedule

Function = Callable[[Any], Any]


def sequence(functions: Sequence[Function], *, schedule: Schedule) -> Function:
    """The composition of functions, whose derivative stores and recomputes what a schedule says.

    Each block that the schedule runs again is a `jax.checkpoint`, blocks in blocks; single steps keep their residuals
    until their backward. The functions may close over parameters and differ in all ways.

    Args:
        functions: the steps of the chain, each from one pytree to the next.
        schedule: with as many steps. Its snapshots must be on the device.

    Raises:
        ShardingError: a schedule for another number of steps; one that can't run, or whose snapshots are not each kept
            until the backward of the step after it.

    Example:
        >>> import jax
        >>> from jax import numpy as jnp
        >>> from sharding import remat
        >>> f = remat.sequence([jnp.sin, jnp.cos, jnp.tanh], schedule=remat.revolve(3, snapshots=1))
        >>> bool(jax.grad(f)(1.0) == jax.grad(lambda x: jnp.tanh(jnp.cos(jnp.sin(x))))(1.0))
        True
    """
    check_executable("remat.sequence(schedule)", schedule, len(functions))
    whole = nested(schedule.name, schedule.steps, schedule.actions)
    return lambda x: _run(whole, functions, x)


def _run(block: Block, functions: Sequence[Function], x: Any) -> Any:
    for part in block.parts:
        if isinstance(part, Block):
            x = jax.checkpoint(lambda x, part=part: _run(part, functions, x))(x)
        else:
            x = functions[part](x)
    return x


def check_executable(asked: str, schedule: Schedule, steps: int) -> None:
    """Raises unless a schedule is for this number of steps, with all snapshots on the device."""
    if schedule.steps != steps:
        raise ShardingError(
            asked,
            found=f"{schedule.name} for {schedule.steps} steps, and {steps} steps to run",
            required="a schedule for as many steps as there are",
            fix=f"remat.sqrt({steps})",
        )
    elsewhere = [action for action in schedule.actions if isinstance(action, Snapshot) and action.place != "device"]
    if elsewhere:
        raise ShardingError(
            asked,
            found=f"{len(elsewhere)} snapshots elsewhere, the first: {elsewhere[0]}",
            required="all snapshots on the device",
            fix=f"remat.revolve({steps}, {schedule.snapshots})",
        )
