"""`prioritized`: a spec of `in_shardings` or `out_shardings` that waits for others."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from ..errors import ShardingError


@dataclass(frozen=True, slots=True)
class Prioritized:
    """A spec with a priority."""

    spec: P
    priority: int


def prioritized(spec: P, priority: int) -> Prioritized:
    """A spec for `in_shardings` or `out_shardings` that is propagated after those of lower priority.

    Args:
        spec: a PartitionSpec.
        priority: 0, that of a plain spec, is propagated first; a higher number waits until all lower ones have
            converged, as in `sharding.annotate(..., priority=)`.

    Raises:
        ShardingError: a negative priority, or no PartitionSpec.

    Example:
        >>> import jax, sharding
        >>> from sharding import P
        >>> x, w = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")
        >>> specs = P("data"), sharding.prioritized(P(None, "data"), 1)
        >>> with sharding.mesh(data=8):
        ...     print(sharding.jit(lambda x, w: x @ w, in_shardings=specs).complete(x, w).out_shardings)
        P('data',)
    """
    if not isinstance(spec, P) or priority < 0:
        raise ShardingError(
            f"sharding.prioritized({spec!r}, {priority})",
            found=f"a {type(spec).__name__} and priority {priority}",
            required="a PartitionSpec and a priority of at least 0",
        )
    return Prioritized(spec, priority)
