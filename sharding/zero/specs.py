"""Which dim of each array an axis splits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .. import paths
from ..errors import ShardingError
from ..mesh import current
from ..spec import partition_spec_of, sizes_text
from .formula import check_stage


@dataclass(frozen=True, kw_only=True)
class Specs:
    """How the states of a model are split, as pytrees of specs like its parameters."""

    params: Any
    """As they are given, or with the axis from stage 3 on."""
    gradients: Any
    """With the axis from stage 2 on."""
    state: Any
    """Of what an optimizer keeps for each parameter: always with the axis."""
    whole: Mapping[str, int]
    """Path -> bytes of the parameters that the axis can't split: no dim divides."""


def specs(params: Any, axis: str = "data", stage: int = 3, *, like: Any = None, replicas: str | None = None) -> Specs:
    """The specs of parameters, gradients and optimizer state where an axis splits them.

    Of each array the axis splits the longest dim that it divides and no other axis splits, or else a part of one that
    is split. Nothing depends on values: shapes do.

    Args:
        params: a pytree of arrays or of their shapes.
        axis: of the mesh; the batch is split over it, too.
        stage: 1 splits the optimizer's state, 2 gradients too, 3 parameters too (fully sharded data parallel).
        like: a pytree of specs, how other axes split the parameters. Default: as the arrays lie.
        replicas: for hybrid sharding an axis over which the batch is split and whole groups are copies of each other.

    Raises:
        ShardingError: no mesh in force, no such axis or stage.

    References:
        Rajbhandari et al., ZeRO, SC 2020 (1910.02054), section 5; Zhao et al., PyTorch FSDP, VLDB 2023 (2304.11277),
        section 3.2 for hybrid sharding.
    """
    asked = f"zero.specs(axis={axis!r})"
    check_stage("zero.specs", stage)
    sizes = mesh_sizes(asked, axis, replicas)
    own = jax.tree.map(partition_spec_of, params) if like is None else like
    named = jax.tree_util.tree_leaves_with_path(params)
    split, whole = [], {}
    for (path, leaf), spec in zip(named, jax.tree.leaves(own, is_leaf=is_spec), strict=True):
        found = with_axis(jnp.shape(leaf), spec, axis, sizes)
        if found is None:
            whole[paths.text(path)] = math.prod(jnp.shape(leaf)) * jnp.result_type(leaf).itemsize
        split.append(spec if found is None else found)
    split = jax.tree.unflatten(jax.tree.structure(params), split)
    return Specs(params=split if stage == 3 else own, gradients=split if stage >= 2 else own, state=split, whole=whole)


def with_axis(shape: tuple[int, ...], spec: P, axis: str, sizes: Mapping[str, int]) -> P | None:
    """A spec with an axis more, or None where no dim divides."""
    names = axes_of(spec, len(shape))
    if any(axis in own for own in names):
        return spec
    parts = [math.prod(sizes[name] for name in own) for own in names]
    fits = [d for d, length in enumerate(shape) if length and length % (parts[d] * sizes[axis]) == 0]
    if not fits:
        return None
    best = max(fits, key=lambda d: (parts[d] == 1, shape[d]))
    dims = [*spec, *[None] * (len(shape) - len(spec))]
    dims[best] = (*names[best], axis) if names[best] else axis
    return P(*dims)


def axes_of(spec: P, ndim: int) -> list[tuple[str, ...]]:
    """Per dim the axes that split it at least."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    names = [tuple(name for name in entry if isinstance(name, str)) for entry in entries]
    return names + [()] * (ndim - len(names))


def mesh_sizes(asked: str, axis: str, replicas: str | None = None) -> dict[str, int]:
    """The axes of the mesh in force, these among them."""
    mesh = current()
    if mesh is None:
        raise ShardingError(asked, there="no mesh", must="a mesh with this axis is in force", fix="sharding.mesh(...)")
    sizes = dict(mesh.shape)
    for name in (axis, *([] if replicas is None else [replicas])):
        if name not in sizes:
            must = f"the mesh has an axis {name!r}"
            raise ShardingError(asked, there=f"the mesh {sizes_text(sizes)}", must=must)
    if axis == replicas:
        raise ShardingError(asked, there=f"replicas={replicas!r}", must="copies lie along another axis")
    return sizes


def report(asked: str, whole: Mapping[str, int], stacklevel: int) -> None:
    """Says which parameters stay whole."""
    if whole:
        most = sorted(whole, key=lambda path: -whole[path])
        names = ", ".join(f"{path} ({whole[path]:,} bytes)" for path in most[:4])
        more = f" and {len(most) - 4} more" if len(most) > 4 else ""
        text = f"{asked}: no dim of {names}{more} divides: {sum(whole.values()):,} bytes are whole on each device"
        warnings.warn(text, stacklevel=stacklevel + 1)


def is_spec(x: Any) -> bool:
    """Whether it is a leaf of a tree of specs."""
    return isinstance(x, P)
