"""`same`: sharding groups, arrays that must share one inferred spec.

A primitive with one result per operand carries the group through tracing, differentiation, batching, `scan` and remat
to `sharding.jit`. Under plain `jax.jit` it lowers to Shardy's `sdy.sharding_group`, with the same semantics
(openxla/shardy, `docs/sharding_representation.md`; formerly `shard_alike` in JAX).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .. import compat, paths
from ..errors import ShardingError, raise_together

same_p = jex.Primitive("same")
same_p.multiple_results = True


def same(*trees: Any) -> tuple[Any, ...]:
    """Returns the arrays as one sharding group: all members get the same inferred spec.

    Args:
        *trees: two or more arrays, or pytrees of the same structure with corresponding leaves grouped, as in
            `params, momentum = sharding.same(params, momentum)`. Members must have the same shape; dtypes may differ.

    Raises:
        ShardingError: fewer than two members, different structures or shapes. From `sharding.jit`: conflicting
            annotations of the members, with both source lines.

    A sharding that reaches one member reaches all at once, before any op priority; groups that share a member are
    merged. The tangents, and the cotangents, of the members form groups of their own. Outside traced code the other
    members are moved to the sharding of the first.

    Example:
        >>> import jax
        >>> import sharding
        >>> from sharding import P
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> with sharding.mesh(data=2, tensor=4):
        ...     print(sharding.jit(sharding.same, in_shardings=(P("data"), None)).complete(x, x).in_shardings)
        (P('data',), P('data',))
    """
    flat = [jax.tree.flatten(tree) for tree in trees]
    _refuse(trees, flat)
    groups = [same_p.bind(*xs, decided=False) for xs in zip(*(leaves for leaves, _ in flat), strict=True)]
    members = zip(*groups, strict=True) if groups else [()] * len(trees)
    return tuple(jax.tree.unflatten(tree, xs) for (_, tree), xs in zip(flat, members, strict=True))


def _refuse(trees: Sequence[Any], flat: Sequence[tuple[list[Any], Any]]) -> None:
    if len(trees) < 2:
        raise ShardingError(
            f"sharding.same(...) of {len(trees)} arrays",
            required="at least two members",
            fix="sharding.annotate(x, P(...)) for a single array",
        )
    (leaves, tree), *others = flat
    for n, (_, other) in enumerate(others, 1):
        if other != tree:
            raise ShardingError(
                "sharding.same(...)",
                found=[f"member 0 is {tree}"[:400], f"member {n} is {other}"[:400]],
                required="members of the same pytree structure",
                fix="jax.tree.leaves(...) of the parts that belong together",
            )
    names = paths.of_tree(trees[0])
    failures = [
        ShardingError(
            "sharding.same(...)" + (f": {name}" if name else ""),
            found=[f"member {n} has the shape {jnp.shape(xs[i])}" for n, (xs, _) in enumerate(flat)],
            required="members of the same shape",
            fix="remove the one that differs, or sharding.annotate each",
        )
        for i, name in enumerate(names)
        if len({jnp.shape(xs[i]) for xs, _ in flat}) > 1
    ]
    raise_together("sharding.same(...)", failures)


def _eager(*xs: Any, **_: Any) -> list[Any]:
    arrays = [jnp.asarray(x) for x in xs]
    first = arrays[0].sharding
    return [x if x.sharding.is_equivalent_to(first, x.ndim) else jax.device_put(x, first) for x in arrays]


def _grouped(xs: Sequence[Any], **kw: Any) -> list[Any]:
    """Groups the tangents or cotangents that are not symbolic zeros."""
    nonzero = [i for i, x in enumerate(xs) if not isinstance(x, compat.ad.Zero)]
    found = list(xs)
    if len(nonzero) > 1:
        for i, x in zip(nonzero, same_p.bind(*[xs[i] for i in nonzero], **kw), strict=True):
            found[i] = x
    return found


def _jvp(primals: Any, tangents: Any, **kw: Any) -> Any:
    return same_p.bind(*primals, **kw), _grouped(tangents, **kw)


def _transpose(cts: Any, *xs: Any, **kw: Any) -> list[Any]:
    return [ct if compat.ad.is_undefined_primal(x) else None for ct, x in zip(_grouped(cts, **kw), xs, strict=True)]


def _batch(args: Any, dims: Any, **kw: Any) -> Any:
    """Members without the batch dim are broadcast, since all members must have the same shape."""
    at, size = next((d, x.shape[d]) for x, d in zip(args, dims, strict=True) if d is not None)

    def batched(x: Any, d: Any) -> Any:
        if d is not None:
            return jnp.moveaxis(x, d, at)
        return jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))

    return same_p.bind(*map(batched, args, dims), **kw), [at] * len(args)


def _lower(ctx: Any, *xs: Any, decided: bool) -> Sequence[Any]:
    if not decided:  # otherwise every member is constrained
        compat.lower_sharding_group(ctx, xs)
    return xs


same_p.def_impl(_eager)
same_p.def_abstract_eval(lambda *xs, **_: list(xs))
compat.ad.primitive_jvps[same_p] = _jvp
compat.ad.primitive_transposes[same_p] = _transpose
compat.batching.primitive_batchers[same_p] = _batch
# Not cached: every group needs its own id.
compat.mlir.register_lowering(same_p, _lower, cacheable=False)
