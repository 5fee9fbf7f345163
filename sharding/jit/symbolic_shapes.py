"""Shapes with symbolic dims, as of `jax.export`: completed for one size of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.export import is_symbolic_dim


def is_symbolic(avals: Sequence[Any]) -> bool:
    """Whether some dim of the arrays is symbolic."""
    return any(is_symbolic_dim(n) for aval in avals for n in aval.shape)


def example_sizes(avals: Sequence[Any], mesh_sizes: Mapping[str, int]) -> dict[str, int]:
    """A size for each symbol: one that all devices together divide."""
    names = {name for aval in avals for n in aval.shape for name in _symbols(n)}
    return dict.fromkeys(sorted(names), 2 * math.prod(mesh_sizes.values()))


def with_sizes(leaves: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """The leaves with symbols replaced by sizes: arrays and numbers as they are, the others as ShapeDtypeStructs."""
    return [_with_sizes(leaf, sizes) for leaf in leaves]


def _with_sizes(leaf: Any, sizes: Mapping[str, int]) -> Any:
    shape = getattr(leaf, "shape", ())
    if not any(is_symbolic_dim(n) for n in shape):
        return leaf
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    concrete = tuple(_evaluated(n, sizes) for n in shape)
    return jax.ShapeDtypeStruct(concrete, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def _symbols(dim: Any) -> frozenset[str]:
    return frozenset(dim._get_vars()) if is_symbolic_dim(dim) else frozenset()


def _evaluated(dim: Any, sizes: Mapping[str, int]) -> int:
    env: Any = dict(sizes)
    return int(dim._evaluate(env)) if is_symbolic_dim(dim) else dim
