"""A train step with argument shapes and specs, and the meshes and styles to build it for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sharding import P

MESHES = ({"tensor": 8}, {"fsdp": 8}, {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2})
STYLES = ("batch", "weights")
"""Shard only the batch, over all axes; or the weights too, as is usual for the model."""

Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A train step for one mesh; it may contain annotations."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    """Pytrees of ShapeDtypeStructs."""
    specs: tuple[Any, ...]
    """Per argument a pytree of specs, one spec for all leaves, or None."""


MakeStep = Callable[[str, Sizes], Step]
"""(style, axis sizes) -> step."""


def over_all_axes(sizes: Sizes) -> P:
    """The first dim sharded over every axis."""
    return P(tuple(sizes))


def on_mesh(spec: P, sizes: Sizes) -> P:
    """The spec without axes absent from the mesh."""

    def entry(e: Any) -> Any:
        if isinstance(e, tuple):
            return tuple(a for a in e if a in sizes) or None
        return e if e in sizes else None

    return P(*map(entry, spec))
