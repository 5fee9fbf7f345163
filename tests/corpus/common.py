"""What adapters share: batch shapes, specs from path patterns, and a train step over a loss and an optimizer."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step, on_mesh

from sharding import P, paths

BATCH = P(("data", "fsdp"))
"""Rows sharded over the data axes."""

Rules = Sequence[tuple[str, P]]
"""Glob over an array's path -> spec, aligned with its last dims; the first match counts."""


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The shape of an array of floats."""
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an array of int32."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


KEY = jax.eval_shape(lambda: jax.random.key(0))
"""The shape of a random key."""


def bfloat16(tree: Any) -> Any:
    """The tree with its float32 arrays in bfloat16."""

    def cast(leaf: Any) -> Any:
        return leaf.astype(jnp.bfloat16) if getattr(leaf, "dtype", None) == jnp.float32 else leaf

    return jax.tree.map(cast, tree)


def batch_specs(tree: Any, sizes: Sizes, spec: P = BATCH) -> Any:
    """One spec for every array of a batch, without the axes that its dims don't divide over."""
    return jax.tree.map(lambda leaf: _divided(_fitted(leaf.ndim, spec, leading=True), leaf.shape, sizes), tree)


def specs(tree: Any, rules: Rules, sizes: Sizes) -> Any:
    """A pytree of specs like `tree`; `fsdp` is `data` on a mesh without that axis, None where no rule matches."""

    def spec_of(key_path: tuple[Any, ...], leaf: Any) -> P | None:
        path = paths.text(key_path)
        matches = (spec for pattern, spec in rules if fnmatch.fnmatchcase(path, pattern) and len(spec) <= leaf.ndim)
        spec = next(matches, None)
        return None if spec is None else _divided(_fitted(leaf.ndim, _over_data(spec, sizes)), leaf.shape, sizes)

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def specs_by(rules: Rules, arrays: Any, sizes: Sizes) -> Any:
    """Specs by the paths of the arrays."""
    return specs(arrays, rules, sizes)


def renamed(spec_tree: Any, tree: Any, sizes: Sizes, axes: Mapping[str, str] | None = None) -> Any:
    """A package's own specs of `tree` on our mesh.

    Args:
        spec_tree: PartitionSpecs over the package's axes, or None, for the leaves of `tree`.
        tree: shapes.
        sizes: the mesh.
        axes: the package's name of an axis -> ours; others keep theirs, and those not on the mesh are dropped.
    """
    names = axes or {}

    def entry_of(entry: Any) -> Any:
        return tuple(names.get(a, a) for a in entry) if isinstance(entry, tuple) else names.get(entry, entry)

    def spec_of(leaf: Any, spec: P | None) -> P | None:
        if spec is None:
            return None
        ours = _over_data(P(*map(entry_of, spec)), sizes)
        return _divided(_fitted(leaf.ndim, ours, leading=True), leaf.shape, sizes)

    return jax.tree.map(spec_of, tree, spec_tree)


def replicated(tree: Any, sizes: Sizes) -> Any:
    """A pytree of specs like `tree` for data parallelism."""
    return jax.tree.map(lambda _: P(), tree)


def largest_dim(tree: Any, sizes: Sizes, axis: str = "fsdp", *, at_least: int = 2**16) -> Any:
    """A pytree of specs like `tree`: the largest dim that divides over `axis`, of arrays with enough elements."""
    (axis,) = _over_data(P(axis), sizes)

    def spec_of(leaf: Any) -> P:
        dims = [d for d, n in enumerate(leaf.shape) if n % sizes[axis] == 0 and math.prod(leaf.shape) >= at_least]
        best = max(dims, key=lambda d: leaf.shape[d], default=None)
        return P(*(axis if d == best else None for d in range(leaf.ndim)))

    return jax.tree.map(spec_of, tree)


def train_step(loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """((params, optimizer state), *batch) -> the new ones, and the loss of (params, *batch)."""

    def update(state: Any, *batch: Any) -> Any:
        params, optimizer_state = state
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    return update


def training(
    loss: Callable[..., jax.Array],
    params: Any,
    batch: tuple[Any, ...],
    sizes: Sizes,
    *,
    weights: Any = None,
    rows: P = BATCH,
    optimizer: optax.GradientTransformation | None = None,
) -> Step:
    """The train step of a loss with AdamW or another optimizer.

    Args:
        loss: (params, *batch) -> mean loss.
        params: shapes.
        batch: shapes of further arguments.
        sizes: the mesh.
        weights: specs of the parameters, or None.
        rows: the spec of every array of the batch.
        optimizer: its state is left open.
    """
    optimizer = optimizer or optax.adamw(1e-3)
    state = params, jax.eval_shape(optimizer.init, params)
    batch_spec = tuple(batch_specs(b, sizes, rows) for b in batch)
    return Step(run=train_step(loss, optimizer), args=(state, *batch), specs=((weights, None), *batch_spec))


def _over_data(spec: P, sizes: Sizes) -> P:
    return spec if "fsdp" in sizes else P(*("data" if entry == "fsdp" else entry for entry in spec))


def _fitted(ndim: int, spec: P, *, leading: bool = False) -> P:
    free = (None,) * (ndim - len(spec))
    return P(*(*spec, *free)[:ndim] if leading else (*free, *spec))


def _divided(spec: P, shape: Sequence[int], sizes: Sizes) -> P:
    """The spec without absent axes and without entries that don't divide their dim."""

    def parts(entry: Any) -> int:
        return math.prod(sizes[axis] for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis)

    return P(*(e if n % parts(e) == 0 else None for e, n in zip(on_mesh(spec, sizes), shape, strict=True)))
