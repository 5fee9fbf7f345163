"""`sequence`: runs a list of functions with the recomputation of a schedule, as nested `jax.checkpoint`s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..errors import ShardingError
from .actions import Snapshot
from .blocks import Block, nested
from .checkpoint_schedule import Schedule

Function = Callable[[Any], Any]


def sequence(functions: Sequence[Function], *, schedule: Schedule) -> Function:
    """The composition of functions, whose derivative stores and recomputes what a schedule says.

    Each block that the schedule runs again is a `jax.checkpoint`, blocks in blocks; single steps keep their residuals
    until their backward. The functions may close over parameters and differ in all ways.

    Snapshots on the host are offloaded residuals. One that is read several times, as in `remat.disk_revolve`, is
    written again after each read but the last. Compilers start copies early: while steps are faster than the link to
    the host, more states are on the device than the schedule says. Scalars of a state stay there.

    Args:
        functions: the steps of the chain, each from one pytree to the next.
        schedule: with as many steps. Its snapshots must be on the device or on the host.

    Raises:
        ShardingError: a schedule for another number of steps; one that can't run, or whose snapshots are not each kept
            until the backward of the step after it; snapshots on disk.

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
            x = _run_again(part, functions, x)
        else:
            x = functions[part](x)
    return x


def _run_again(block: Block, functions: Sequence[Function], x: Any) -> Any:
    """The block, whose backward runs it again from the state before it."""
    if block.place == "device":
        return jax.checkpoint(lambda x: _run(block, functions, x))(x)
    return jax.checkpoint(lambda x: _run(block, functions, jax.tree.map(_waiting, x)), policy=_policy())(x)


ARRAY, SCALAR = "remat.snapshot on the host", "remat.snapshot of a scalar"
"""Names of what a block on the host runs again from."""


def _waiting(leaf: Any) -> Any:
    return checkpoint_name(leaf, ARRAY if jnp.ndim(leaf) else SCALAR)


def _policy() -> Callable[..., Any]:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[SCALAR],
        names_which_can_be_offloaded=[ARRAY],
        offload_src="device",
        offload_dst="pinned_host",
    )


def check_executable(asked: str, schedule: Schedule, steps: int) -> None:
    """Raises unless a schedule is for this number of steps, with no snapshots on disk."""
    if not isinstance(schedule, Schedule):
        raise ShardingError(
            asked,
            found=repr(schedule),
            required="a remat.Schedule",
            fix=[f"remat.sqrt({steps})", "remat.auto, in a scan"],
        )
    if schedule.steps != steps:
        raise ShardingError(
            asked,
            found=f"{schedule.name} for {schedule.steps} steps, and {steps} steps to run",
            required="a schedule for as many steps as there are",
            fix=f"remat.sqrt({steps})",
        )
    on_disk = [action for action in schedule.actions if isinstance(action, Snapshot) and action.place == "disk"]
    if on_disk:
        raise ShardingError(
            asked,
            found=f"{len(on_disk)} snapshots on disk, the first: {on_disk[0]}",
            required="all snapshots on the device or on the host: a compiled program does not reach the disk",
            fix=[
                'remat.disk_revolve(..., place="host")',
                f"remat.revolve({steps}, {schedule.snapshots})",
                "remat.auto, in a scan: remat.fit(..., memory_bytes=) chooses the snapshots on the device",
            ],
        )
