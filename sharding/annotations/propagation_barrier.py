"""`barrier`: a value through which shardings propagate in one direction only, or not at all.

Shardy's `propagation_barrier` (openxla/shardy, `docs/compiler_api.md` and the op's description): an identity except for
propagation. Under plain `jax.jit` it lowers to that op.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.extend.core as jex
from jax.experimental import jet

from .. import compat
from ..errors import ShardingError

Direction = Literal["forward", "backward", "none"]
DIRECTIONS = ("forward", "backward", "none")
FLIPPED = {"forward": "backward", "backward": "forward", "none": "none"}

barrier_p = jex.Primitive("barrier")


def barrier(x: Any, allowed: Direction = "none") -> Any:
    """Returns `x` behind a barrier through which shardings propagate in the allowed direction only.

    Args:
        x: an array, or a pytree of arrays that each get a barrier.
        allowed: `"forward"`: from the producer of `x` to its uses; `"backward"`: from its uses to its producer;
            `"none"`: neither. Both directions would be no barrier.

    Raises:
        ShardingError: another direction.

    If the two sides end up sharded differently, `x` is resharded at the barrier. Annotations on either side apply as
    usual. A tangent gets the same barrier. A cotangent, which runs from the uses of `x` back to its producer, gets the
    flipped one, so that the gradient is isolated in the same way: a forward barrier keeps shardings of the uses away
    from the producer of `x` and from the producer's gradient.

    Example:
        >>> import jax
        >>> import sharding
        >>> from sharding import P
        >>> def square(x):
        ...     return sharding.barrier(x, "none") ** 2
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> with sharding.mesh(data=8):
        ...     print(sharding.jit(square, in_shardings=P("data")).complete(x).out_shardings)
        P()
    """
    if allowed not in DIRECTIONS:
        raise ShardingError(
            f"sharding.barrier(x, {allowed!r})",
            found="shardings propagate both ways without a barrier" if allowed == "both" else (),
            required="'forward', 'backward' or 'none'",
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
    # Once decided, both sides are constrained.
    return [x if decided else compat.lower_barrier(x, allowed)]


barrier_p.def_impl(lambda x, **_: jax.numpy.asarray(x))
barrier_p.def_abstract_eval(lambda x, **_: x)
jet.deflinear(barrier_p)
compat.ad.primitive_jvps[barrier_p] = _jvp
compat.ad.primitive_transposes[barrier_p] = _transpose
compat.batching.primitive_batchers[barrier_p] = _batch
compat.mlir.register_lowering(barrier_p, _lower)
