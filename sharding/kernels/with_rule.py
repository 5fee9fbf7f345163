"""`with_rule`: a function that runs on each device's shards, by a factor rule.

Under plain `jax.jit`, or where nothing is sharded, it is the function itself. Its gradient is computed in the same way,
from the operands: the derivative of the function runs on the same shards, and gradients of operands that lack a
sharded factor are added up. So a kernel with a derivative of its own (`jax.custom_vjp`) is wrapped as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from ..errors import ShardingError
from ..mesh import platform
from ..rules import Kind, notation
from .kernel_call import KernelCall, kernel_call_p, varying_axes

MOST_SHAPES = 256
"""Of operands, that a function with a rule is kept traced for."""


def with_rule(
    f: Callable[..., Any],
    rule: str,
    *,
    reduction: Iterable[str] = (),
    need_replication: Iterable[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> Callable[..., Any]:
    """Returns `f` as an op with a factor rule, which each device runs on its own shards.

    Args:
        f: a function of arrays that returns an array or a tuple of arrays, and computes with shards of its operands
            what the rule says: a kernel, such as a call of `pallas_call`, or what calls it.
        rule: the rule of its operands and results, such as `"b q d, b k d -> b q d"` (see `sharding.rules`). A factor
            that no result has is summed: the results of the shards are added.
        reduction: factors whose partial sums are added, in results that don't have them; by default those that no
            result has.
        need_replication: factors along which `f` needs whole arrays. So are factors that only some results have,
            unless they are reductions.
        sizes: sizes of factors that occur in products only.

    Returns:
        A function of the same operands, all of them positional. It can be differentiated, also twice, and mapped by
        `jax.vmap`; gradients compute `f` again. As under `jax.jit`, `f` is traced once for operands of equal shapes.

    Raises:
        ShardingError: malformed rule; when called, operands or results that don't fit it, or results of shards that
            have other shapes than the rule says.

    Example:
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> matmul = kernels.with_rule(jnp.matmul, "m k, k n -> m n")
        >>> matmul(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
        (2, 4)
    """
    if not callable(f):
        raise ShardingError(f"kernels.with_rule({f!r}, ...)", required="a function of arrays")
    parsed = notation.parse(rule, reduction=reduction, need_replication=need_replication, sizes=sizes)
    name = getattr(f, "__name__", type(f).__name__)

    @functools.lru_cache(maxsize=MOST_SHAPES)
    def call_at(shapes: Sequence[jax.ShapeDtypeStruct], context: Any) -> tuple[KernelCall, Any]:
        """The call for operands of these shapes, and the tree of its results."""
        del context  # the rest of JAX's own key, and the platform, by which kernels are interpreted
        trees: list[Any] = []

        def leaves(*xs: Any) -> list[Any]:
            flat, tree = jax.tree.flatten(f(*xs))
            trees.append(tree)
            return flat

        call = KernelCall(name=name, function=leaves, rule=parsed)
        results = call.results(shapes)
        rule = _with_kinds(parsed.at([x.shape for x in shapes], [x.shape for x in results]))
        return replace(call, rule=rule), trees[0]

    @functools.wraps(f)
    def called(*operands: Any) -> Any:
        arrays = _varying_alike([jnp.asarray(x) for x in operands])
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        call, tree = call_at(shapes, (compat.trace_context(), platform()))
        return jax.tree.unflatten(tree, kernel_call_p.bind(*arrays, call=call))

    return called


def _varying_alike(arrays: list[jax.Array]) -> list[jax.Array]:
    """In manual code: arrays that differ along the manual axes that any does; gradients are summed over the others."""
    axes = [varying_axes(jax.typeof(x)) for x in arrays]
    every = frozenset().union(*axes)
    pairs = zip(arrays, axes, strict=True)
    return [x if own == every else jax.lax.pcast(x, tuple(sorted(every - own)), to="varying") for x, own in pairs]


def _with_kinds(rule: notation.Notation) -> notation.Notation:
    """A rule that states the kind of each factor that is no pass-through."""
    results = [{n for names in array.dims for n in names} for array in rule.results]
    kinds = dict(rule.kinds)
    for n in {n for array in (*rule.operands, *rule.results) for names in array.dims for n in names} - kinds.keys():
        if not any(n in own for own in results):
            kinds[n] = Kind.REDUCE
        elif not all(n in own for own in results):
            kinds[n] = Kind.REPLICATE
    return replace(rule, kinds=kinds)
