"""Programs written for Explicit axes, which name the sharding of results: traced with Auto axes, JAX rejects them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ShardingError


@contextmanager
def explicit_mode_errors(function: str) -> Iterator[None]:
    """Says what to write instead where JAX rejects part of a program because it needs Explicit axes."""
    try:
        yield
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        if "Explicit" in reason and "should match the aval mesh" in reason:
            raise ShardingError(
                f"{function}(...)",
                found=["the function closes over, or places, an array on a mesh with Explicit axes", reason],
                required="arrays on that mesh as arguments: the function is traced with Auto axes",
                fix=[
                    "pass the array as an argument, or create it inside the function",
                    "sharding.annotate(x, P(...)), and jax.device_put(x, jax.memory.Space.Host) for another memory,"
                    " instead of jax.device_put(x, NamedSharding(mesh, P(...)))",
                ],
            ) from error
        if "cannot contain axis names that are of type Auto" in reason or "of type `Explicit`" in reason:
            raise ShardingError(
                f"{function}(...)",
                found=reason,
                required="a program with Auto axes, where sharding.jit infers what Explicit axes need spelled out",
                fix=[
                    "sharding.annotate(x, P(...)) instead of out_sharding=P(...) or jax.sharding.reshard(x, P(...))",
                    "jax.sharding.explicit_axes around the part that needs them",
                ],
            ) from error
        raise
