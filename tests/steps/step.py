"""A train step, its arguments' shapes and what is asked of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sharding import P

MESHES = ({"tensor": 8}, {"fsdp": 8}, {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2})
STYLES = ("batch", "weights")
"""Only the batch is split, over all axes; or the weights too, as is usual for the program."""

Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A train step on one mesh; it may hold annotations of its own."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    """Pytrees of ShapeDtypeStructs."""
    specs: tuple[Any, ...]
    """Per argument a pytree like it of specs, one spec for all of it, or None."""


Make = Callable[[str, Sizes], Step]
"""style, axis sizes -> the step."""


def whole_mesh(sizes: Sizes) -> P:
    """Rows over every axis."""
    return P(tuple(sizes))


def on_mesh(spec: P, sizes: Sizes) -> P:
    """A spec without the axes that the mesh lacks."""

    def entry(e: Any) -> Any:
        if isinstance(e, tuple):
            return tuple(a for a in e if a in sizes) or None
        return e if e in sizes else None

    return P(*map(entry, spec))
