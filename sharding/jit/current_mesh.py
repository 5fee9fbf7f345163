"""The mesh that a call of a jitted function runs over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jax.sharding import AbstractMesh, Mesh

from ..errors import ShardingError
from ..mesh import current, in_force

AnyMesh = Mesh | AbstractMesh


@contextmanager
def entered(function: str) -> Iterator[AnyMesh]:
    """The current mesh, which JAX has as its own within the block, too.

    Raises:
        ShardingError: there is no mesh.
    """
    mesh = current()
    if mesh is None:
        raise ShardingError(
            f"{function}(...)",
            found="no mesh",
            required="a mesh context around the call",
            fix="with sharding.mesh(data=-1): ...",
        )
    with in_force(mesh):
        yield mesh
