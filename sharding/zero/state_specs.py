"""PartitionSpecs of model states under ZeRO: the dim of each array that an axis shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .. import paths
from ..errors import ShardingError, raise_together, warn
from ..mesh import current
from ..spec import from_partition_spec, partition_spec_of, sizes_text
from .memory_formula import check_stage


@dataclass(frozen=True, kw_only=True)
class Specs:
    """Specs of a model's states, as pytrees like its parameters."""

    params: Any
    """As given, with the axis added in stage 3."""
    gradients: Any
    """Like the parameters, with the axis added from stage 2 on."""
    state: Any
    """Of the per-parameter optimizer state, always with the axis added."""
    whole: Mapping[str, int]
    """Path -> bytes of the parameters that stay replicated over the axis: it divides none of their dims."""


def specs(
    params: Any,
    axis: str = "data",
    stage: int = 3,
    *,
    like: Any = None,
    replicas: str | None = None,
    strict: bool = False,
) -> Specs:
    """The specs of parameters, gradients and optimizer state sharded over an axis.

    The axis shards the longest dim that it divides and that is not sharded yet, else it further shards a sharded dim.
    Only shapes matter, not values.

    Args:
        params: a pytree of arrays or ShapeDtypeStructs.
        axis: mesh axis that the batch is sharded over, too.
        stage: 1 shards optimizer state, 2 gradients too, 3 parameters too (fully sharded data parallel).
        like: a pytree of specs of the parameters over other axes. Default: the arrays' own shardings.
        replicas: for hybrid sharding, a second data axis over which model states are replicated.
        strict: whether a parameter that stays replicated is an error, not a warning.

    Warns of parameters that stay replicated, as the axis divides none of their dims (`.whole`).

    Raises:
        ShardingError: no mesh in context, no such axis or stage; specs in `like` that do not fit the parameters; under
            `strict`, parameters that stay replicated.

    References:
        Rajbhandari et al., ZeRO, SC 2020 (1910.02054), section 5; Zhao et al., PyTorch FSDP, VLDB 2023 (2304.11277),
        section 3.2 for hybrid sharding.
    """
    asked = f"zero.specs(axis={axis!r})"
    check_stage("zero.specs", stage)
    found = found_specs(params, axis, stage, like, mesh_sizes(asked, axis, replicas), asked=asked)
    report_replicated(asked, found.whole, strict=strict)
    return found


def found_specs(params: Any, axis: str, stage: int, like: Any, sizes: Mapping[str, int], *, asked: str) -> Specs:
    """As `specs`, on a mesh with these axis sizes, without warnings."""
    own = jax.tree.map(partition_spec_of, params) if like is None else like
    named, given = jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(own, is_leaf=is_spec)
    _check_fits(asked, [(paths.text(path), jnp.shape(leaf)) for path, leaf in named], given, sizes)
    sharded, replicated = [], {}
    for (path, leaf), spec in zip(named, given, strict=True):
        found = with_axis(jnp.shape(leaf), spec, axis, sizes)
        if found is None:
            replicated[paths.text(path)] = math.prod(jnp.shape(leaf)) * jnp.result_type(leaf).itemsize
        sharded.append(spec if found is None else found)
    sharded = jax.tree.unflatten(jax.tree.structure(params), sharded)
    return Specs(
        params=sharded if stage == 3 else own,
        gradients=sharded if stage >= 2 else own,
        state=sharded,
        whole=replicated,
    )


def _check_fits(
    asked: str, named: Sequence[tuple[str, tuple[int, ...]]], given: Sequence[Any], sizes: Mapping[str, int]
) -> None:
    """Raises one error for all specs that do not fit the array of that name and shape on a mesh of these sizes."""
    if len(named) != len(given):
        found = f"{len(given)} specs for {len(named)} parameters"
        raise ShardingError(f"{asked}: like", found=found, required="a PartitionSpec for each parameter")
    failures = []
    for (path, shape), spec in zip(named, given, strict=True):
        try:
            from_partition_spec(spec, shape, sizes, asked=f"{asked}: spec of {path}")
        except ShardingError as failure:
            failures.append(failure)
    raise_together(asked, failures)


def leaf_specs(state: Any, params: Any, param_specs: Any, axis: str, sizes: Mapping[str, int]) -> list[P | None]:
    """The spec of each leaf of an optimizer's state; None if replicated.

    Leaves with a parameter's name and shape get its spec, others one by their own shape.
    """
    shapes = dict(zip(paths.of_tree(params), map(jnp.shape, jax.tree.leaves(params)), strict=True))
    by_name = dict(zip(shapes, jax.tree.leaves(param_specs, is_leaf=is_spec), strict=True))

    def spec(path: Any, leaf: Any) -> P | None:
        parts, shape = paths.text(path).split("/"), jnp.shape(leaf)
        name = next((end for i in range(len(parts)) if (end := "/".join(parts[i:])) in shapes), None)
        if name is not None and shapes[name] == shape:
            return by_name[name]
        return with_axis(shape, P(), axis, sizes)

    return [spec(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]


def with_axis(shape: tuple[int, ...], spec: P, axis: str, sizes: Mapping[str, int]) -> P | None:
    """The spec with the axis added, or None if the axis divides no dim."""
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
    """The axes of each dim, without unconstrained entries."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    names = [tuple(name for name in entry if isinstance(name, str)) for entry in entries]
    return names + [()] * (ndim - len(names))


def mesh_sizes(asked: str, axis: str, replicas: str | None = None) -> dict[str, int]:
    """Axis sizes of the mesh in context, which must have these axes."""
    mesh = current()
    if mesh is None:
        raise ShardingError(asked, found="no mesh", required=f"a mesh with an axis {axis!r}", fix="sharding.mesh(...)")
    sizes = dict(mesh.shape)
    for name in (axis, *([] if replicas is None else [replicas])):
        if name not in sizes:
            raise ShardingError(asked, found=f"mesh axes {sizes_text(sizes)}", required=f"a mesh axis {name!r}")
    if axis == replicas:
        raise ShardingError(asked, found=f"replicas={replicas!r}", required="a replicas axis other than axis")
    return sizes


def report_replicated(asked: str, replicated: Mapping[str, int], *, strict: bool) -> None:
    """Warns of the parameters that stay replicated; under strict, raises for them."""
    if replicated and strict:
        raise ShardingError(
            asked,
            found=[
                f"{path}: the axis divides no dim; {num:,} bytes on each device" for path, num in replicated.items()
            ],
            required="a dim of each parameter that the axis divides, under strict=True",
            fix="a divisible size, a smaller axis, or strict=False",
        )
    if replicated:
        largest = sorted(replicated, key=lambda path: -replicated[path])
        names = ", ".join(f"{path} ({replicated[path]:,} bytes)" for path in largest[:4])
        more = f" and {len(largest) - 4} more" if len(largest) > 4 else ""
        total = f"{sum(replicated.values()):,} bytes"
        warn(f"{asked}: the axis divides no dim of {names}{more}; {total} stay replicated on each device")


def is_spec(x: Any) -> bool:
    """Whether `x` is a PartitionSpec, the leaf type of a tree of specs."""
    return isinstance(x, P)
