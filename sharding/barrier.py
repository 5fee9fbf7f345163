"""`barrier`: a value through which splits flow one way only, or not at all.

Shardy's `propagation_barrier` (openxla/shardy, `docs/compiler_api.md` and the op's description): an identity, except to
the pass. Under plain `jax.jit` it becomes that op.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.extend.core as jex

from . import compat
from .errors import ShardingError

Direction = Literal["forward", "backward", "none"]
DIRECTIONS = ("forward", "backward", "none")
FLIPPED = {"forward": "backward", "backward": "forward", "none": "none"}

barrier_p = jex.Primitive("barrier")


def barrier(x: Any, allowed: Direction = "none") -> Any:
    """`x` itself, behind a barrier that splits pass in the allowed direction only.

    Args:
        x: an array, or a pytree of arrays that each get a barrier.
        allowed: `"forward"`: from what makes `x` to what uses it; `"backward"`: from its uses to what makes it;
            `"none"`: neither. Both ways would be no barrier.

    Raises:
        ShardingError: another direction.

    Where the two sides end up split differently, data moves at the barrier. Annotations on either side are met as ever.
    A tangent gets the same barrier, a cotangent the flipped one: it runs from the uses of `x` back to what makes it, so
    that in the gradient too the sides are kept apart the same way: a forward barrier keeps what the uses ask away from
    what makes `x` and from that one's gradient.
    """
    if allowed not in DIRECTIONS:
        raise ShardingError(
            f"sharding.barrier(x, {allowed!r})",
            there="splits flow both ways without a barrier" if allowed == "both" else (),
            must="what a barrier lets through is 'forward', 'backward' or 'none'",
            fix="x itself" if allowed == "both" else [f"sharding.barrier(x, {d!r})" for d in DIRECTIONS],
        )
    return jax.tree.map(lambda leaf: barrier_p.bind(leaf, allowed=allowed, decided=False), x)


def _jvp(primals: Any, tangents: Any, **kw: Any) -> Any:
    (x,), (t,) = primals, tangents
    return barrier_p.bind(x, **kw), t if isinstance(t, compat.ad.Zero) else barrier_p.bind(t, **kw)


def _transpose(ct: Any, _: Any, *, allowed: str, **kw: Any) -> Any:
    return [ct if isinstance(ct, compat.ad.Zero) else barrier_p.bind(ct, allowed=FLIPPED[allowed], **kw)]


def _batch(args: Any, dims: Any, **kw: Any) -> Any:
    return barrier_p.bind(*args, **kw), *dims


def _lower(_: Any, x: Any, *, allowed: str, decided: bool) -> list[Any]:
    # Once decided, a spec stands on both sides.
    return [x if decided else compat.lower_barrier(x, allowed)]


barrier_p.def_impl(lambda x, **_: jax.numpy.asarray(x))
barrier_p.def_abstract_eval(lambda x, **_: x)
compat.ad.primitive_jvps[barrier_p] = _jvp
compat.ad.primitive_transposes[barrier_p] = _transpose
compat.batching.primitive_batchers[barrier_p] = _batch
compat.mlir.register_lowering(barrier_p, _lower)
