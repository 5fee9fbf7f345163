"""`scan` over layers whose parameters are sharded over a data axis (FSDP): gathered some layers at once, and ahead.

The gathered parameters of the next units are in the loop's carry, so that the all-gather of a later unit does not
depend on the compute of the current one, and compilers with asynchronous collectives run it meanwhile. The derivative
is a loop of its own that gathers again, in reverse: JAX's own would keep the carries of all iterations, which are the
gathered parameters of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from ..annotations.annotate import annotate
from ..errors import ShardingError
from ..graph.step_residuals import Arrays, Derivative, Step, cast, flat_step, is_float, merge, pick
from .sharded_optimizer import PRIORITY
from .state_specs import axes_of, is_spec, mesh_sizes, with_axis


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    *,
    axis: str = "data",
    like: Any = None,
    prefetch: int = 1,
    unit: int = 1,
) -> tuple[Any, Any]:
    """As `jax.lax.scan` over stacked layers that are sharded over an axis, which are gathered in units, and ahead.

    At most `(1 + prefetch) * unit` layers are gathered at once, forward and backward; gradients are reduce-scattered
    layer by layer. All-gathers are one per array and unit, forward and again backward, but that the `prefetch` units
    which the backward pass begins with stay gathered. At its end, and at that of a forward pass without one, as many
    units are gathered in vain. Compilers with asynchronous all-gathers run those of later units beside compute: XLA for
    tpu7x does so in both passes, for H100s in the forward pass; for v5p its all-gathers are synchronous.

    Residuals of the forward pass are kept as `body` says: under `jax.checkpoint` only its input. What it derives from
    the parameters before it uses them, such as a cast, is kept unless it is recomputed. Reverse mode only.

    Args:
        body: (carry, one layer of ``xs``) -> (carry, y).
        init: the first carry.
        xs: a pytree of arrays [layers, ...].
        axis: mesh axis that shards the layers; the batch is sharded over it, too.
        like: a pytree of specs of one layer over other axes, which it keeps when gathered. Default: over none.
        prefetch: units that are gathered ahead of the one in use; 0 gathers a unit when it is used.
        unit: layers that are gathered at once.

    Raises:
        ShardingError: no mesh in context or no such axis; units that don't divide the layers, or more ahead than there
            are; specs in ``like`` for another number of arrays.

    Example:
        >>> import jax
        >>> from jax import numpy as jnp
        >>> import sharding
        >>> from sharding import P, zero
        >>> layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        >>> def loss(ws, x):
        ...     return zero.scan(layer, x, ws, prefetch=1, unit=2)[0].sum()
        >>> with sharding.mesh(data=8):
        ...     step = sharding.jit(jax.grad(loss), in_shardings=(P(None, "data"), P("data")))
        ...     c = step.complete(jnp.ones((12, 64, 64)), jnp.ones((512, 64)))
        >>> [(one.count, one.result_bytes) for one in c.communication() if one.kind == "all-gather"]
        [(1, 32768), (6, 32768), (6, 32768)]

    References:
        Zhao et al., PyTorch FSDP, VLDB 2023 (2304.11277), sections 3.3.2 (prefetching) and 3.4 (rate limiter).
    """
    asked = f"zero.scan(prefetch={prefetch}, unit={unit})"
    sizes = mesh_sizes(asked, axis)
    leaves, tree = jax.tree.flatten(xs)
    units = _checked_units(asked, leaves, prefetch, unit)
    specs = [P()] * len(leaves) if like is None else jax.tree.leaves(like, is_leaf=is_spec)
    if len(specs) != len(leaves):
        found = f"{len(specs)} specs for {len(leaves)} arrays"
        raise ShardingError(f"{asked}: like", found=found, required="a PartitionSpec for each array of a layer")
    own = [with_axis(jnp.shape(leaf)[1:], spec, axis, sizes) for leaf, spec in zip(leaves, specs, strict=True)]
    placed = Placement(
        unit=unit,
        gathered=tuple(P(None, *spec) for spec in specs),
        sharded=tuple(P(None, *(spec if one is None else one)) for one, spec in zip(own, specs, strict=True)),
    )
    ends = jax.eval_shape(lambda init, xs: lax.scan(body, init, xs), init, xs)
    trees = jax.tree.structure(ends[0]), tree, jax.tree.structure(ends[1])
    carry = cast(jax.tree.leaves(init), jax.tree.leaves(ends[0]))
    step, constants = flat_step(body, trees, carry, [leaf[0] for leaf in leaves])
    carry, ys = _differentiable(step, placed, units, prefetch)(constants, carry, leaves)
    ys = [leaf.reshape(units * unit, *leaf.shape[2:]) for leaf in ys]
    return jax.tree.unflatten(trees[0], carry), jax.tree.unflatten(trees[2], ys)


def _checked_units(asked: str, leaves: Sequence[Any], prefetch: int, unit: int) -> int:
    layers = jnp.shape(leaves[0])[0] if leaves else 0
    are_counts = all(isinstance(count, int) for count in (prefetch, unit))
    if are_counts and unit >= 1 and layers and layers % unit == 0 and 0 <= prefetch <= layers // unit:
        return layers // unit
    raise ShardingError(
        asked,
        found=f"{layers} layers",
        required="a unit that divides the layers, and from 0 to as many units ahead as there are",
        fix="zero.scan(prefetch=1, unit=1)",
    )


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How the arrays of a unit [unit, ...] are sharded."""

    unit: int
    gathered: tuple[P, ...]
    sharded: tuple[P, ...]

    def fetch(self, xs: Arrays, number: Any) -> Arrays:
        """The gathered arrays of one unit."""
        parts = [lax.dynamic_slice_in_dim(leaf, number * self.unit, self.unit) for leaf in xs]
        parts = [_at_least(leaf, spec) for leaf, spec in zip(parts, self.sharded, strict=True)]
        return [annotate(leaf, spec) for leaf, spec in zip(parts, self.gathered, strict=True)]

    def layers(self, gathered: Arrays) -> list[Arrays]:
        """The arrays of each layer of a unit, which its uses must not shard again."""
        specs = [P(*spec[1:]) for spec in self.gathered]
        return [
            [annotate(leaf[number], spec) for leaf, spec in zip(gathered, specs, strict=True)]
            for number in range(self.unit)
        ]

    def scattered(self, mask: Sequence[bool], gradients: Sequence[Arrays]) -> Arrays:
        """The gradients of a unit's layers, stacked and sharded as the unit is stored."""
        stacked = [jnp.stack(each) for each in zip(*gradients, strict=True)]
        return [_at_least(leaf, spec) for leaf, spec in zip(stacked, pick(mask, self.sharded), strict=True)]


def _at_least(leaf: Any, spec: P) -> Any:
    """The array sharded as it is stored, where that leaves the batch its axis."""
    opened = P(*((*names, ...) if names else P.UNCONSTRAINED for names in axes_of(spec, leaf.ndim)))
    return annotate(leaf, opened, priority=PRIORITY)


def _differentiable(step: Step, placed: Placement, units: int, prefetch: int) -> Callable[..., tuple[Arrays, Arrays]]:
    """A function (constants, carry, xs) -> (carry, ys) of flat arrays; ys are [units, unit, ...]."""

    def plain(constants: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays, None]:
        return *step(constants, carry, x), None

    @jax.custom_vjp
    def run(constants: Arrays, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return _forward(plain, placed, units, prefetch, constants, carry, xs)[:2]

    def forward(constants: Arrays, carry: Arrays, xs: Arrays) -> Any:
        derivative = Derivative(step, _with_gradient(constants), _with_gradient(xs))
        constants, carry, xs = ([leaf.value for leaf in leaves] for leaves in (constants, carry, xs))
        carry, ys, residuals, queue = _forward(derivative.record, placed, units, prefetch, constants, carry, xs)
        return (carry, ys), (derivative, constants, xs, residuals, queue)

    def backward(kept: Any, ct: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays, Arrays]:
        derivative, constants, xs, residuals, queue = kept
        return _backward(placed, units, prefetch, derivative, constants, xs, residuals, queue, *ct)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _forward(
    record: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Any]],
    placed: Placement,
    units: int,
    prefetch: int,
    constants: Arrays,
    carry: Arrays,
    xs: Arrays,
) -> tuple[Arrays, Arrays, Any, list[Arrays]]:
    """(carry, ys, residuals, the gathered units that the backward pass begins with)."""

    def turn(held: tuple[list[Arrays], Arrays], number: Any) -> tuple[tuple[list[Arrays], Arrays], Any]:
        queue, carry = held
        later = number + prefetch
        # Behind the last unit come those that the backward pass begins with.
        window = [*queue, placed.fetch(xs, jnp.where(later < units, later, 2 * units - 1 - later))]
        ys, residuals = [], []
        for x in placed.layers(window[0]):
            carry, y, kept = record(constants, carry, x)
            ys.append(y)
            residuals.append(kept)
        return (window[1:], carry), ([jnp.stack(each) for each in zip(*ys, strict=True)], residuals)

    queue = [placed.fetch(xs, number) for number in range(prefetch)]
    (queue, carry), (ys, residuals) = lax.scan(turn, (queue, carry), jnp.arange(units))
    return carry, ys, residuals, queue


def _backward(
    placed: Placement,
    units: int,
    prefetch: int,
    derivative: Derivative,
    constants: Arrays,
    xs: Arrays,
    residuals: Any,
    queue: list[Arrays],
    ct_carry: Arrays,
    ct_ys: Arrays,
) -> tuple[Arrays, Arrays, Arrays]:
    """The gradients of constants, carry and xs; None for those without one."""
    floats, num = [is_float(leaf) for leaf in ct_carry], placed.unit

    def turn(held: Any, of_unit: Any) -> tuple[Any, Arrays]:
        queue, total, ct = held
        number, residuals, ct_y = of_unit
        window = [*queue, placed.fetch(xs, jnp.maximum(number - prefetch, 0))]
        gradients = []
        for x, kept, at in reversed(list(zip(placed.layers(window[0]), residuals, range(num), strict=True))):
            one, ct, of_x = derivative.backward(kept, constants, x, (ct, [leaf[at] for leaf in ct_y]))
            total = [old + new for old, new in zip(total, one, strict=True)]
            gradients.append(of_x)
        return (window[1:], total, ct), placed.scattered(derivative.inputs, gradients[::-1])

    zeros = [jnp.zeros_like(leaf) for leaf in pick(derivative.constants, constants)]
    ct = [_array(leaf) for leaf in pick(floats, ct_carry)]
    ct_y = [_array(leaf) for leaf in ct_ys if is_float(leaf)]
    every = jnp.arange(units), residuals, ct_y
    (_, of_constants, ct), of_xs = lax.scan(turn, (queue, zeros, ct), every, reverse=True)
    of_xs = [leaf.reshape(units * num, *leaf.shape[2:]) for leaf in of_xs]
    picked = (derivative.constants, of_constants), (floats, ct), (derivative.inputs, of_xs)
    of_constants, ct, of_xs = (merge(mask, leaves, [None] * len(mask)) for mask, leaves in picked)
    return of_constants, ct, of_xs


def _with_gradient(leaves: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(bool(leaf.perturbed) and is_float(leaf.value) for leaf in leaves)


def _array(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if _is_zero(leaf) else leaf


def _is_zero(leaf: Any) -> bool:
    return isinstance(leaf, SymbolicZero)
