"""Steps over flax nnx modules: the state is a dict of arrays, as are its specs.

Specs come from the metadata of the Variables, which an optimizer's state inherits from the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import nnx
from support.train_steps.step import Sizes, Step

from .common import batch_specs, bfloat16, renamed

Make = Callable[[], Any]
"""Builds a graph node; called on shapes."""

Weights = Callable[[Any, Sizes], Any]
"""(shapes of the state, mesh) -> their specs."""


def without_mesh() -> AbstractContextManager[Any]:
    """The context to build models in: Flax resolves logical axis names for the current mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def shapes(make: Make) -> Any:
    """What `make` builds, of shapes."""
    with without_mesh():
        return nnx.eval_shape(make)


def abstract(make: Make) -> tuple[Any, Any, Any]:
    """The graph definition of what `make` builds, its arrays' shapes, and the specs in their metadata."""
    graph, state = nnx.split(shapes(make))
    return graph, nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.get_partition_spec(state))


def arrays(node: Any) -> Any:
    """The arrays of a graph node."""
    return nnx.to_pure_dict(nnx.state(node))


def half(make: Make) -> Make:
    """`make` with its float32 parameters in bfloat16."""

    def made() -> Any:
        model = make()
        nnx.update(model, bfloat16(nnx.state(model, nnx.Param)))
        return model

    return made


def stateful(
    make: Make,
    update: Callable[..., Any],
    batch: tuple[Any, ...],
    sizes: Sizes,
    *,
    axes: Mapping[str, str] | None = None,
    weights: Weights | None = None,
) -> Step:
    """A step that updates what `make` builds.

    Args:
        make: builds the model and its optimizer.
        update: (what `make` built, *batch) -> loss; changes its first argument.
        batch: shapes of further arguments, sharded over the data axes.
        sizes: the mesh.
        axes: the names of axes in the metadata -> ours.
        weights: in place of the specs in the metadata.
    """
    graph, state, own = abstract(make)

    def run(state: Any, *batch: Any) -> Any:
        node = nnx.merge(graph, state)
        loss = update(node, *batch)
        return arrays(node), loss

    placed = renamed(own, state, sizes, axes) if weights is None else weights(state, sizes)
    return Step(run=run, args=(state, *batch), specs=(placed, *(batch_specs(b, sizes) for b in batch)))


def forward(
    make: Make,
    apply: Callable[..., Any],
    cache: Any,
    batch: tuple[Any, ...],
    sizes: Sizes,
    *,
    axes: Mapping[str, str] | None = None,
    weights: Weights | None = None,
    cache_specs: Any = None,
) -> Step:
    """An inference step of the model that `make` builds.

    Args:
        make: builds the model.
        apply: (model, cache, *batch) -> new cache and outputs.
        cache: shapes, or None without a cache.
        batch: shapes of further arguments, sharded over the data axes.
        sizes: the mesh.
        axes: the names of axes in the metadata -> ours.
        weights: in place of the specs in the metadata.
        cache_specs: specs of the cache.
    """
    graph, params, own = abstract(make)

    def run(cache: Any, params: Any, *batch: Any) -> Any:
        return apply(nnx.merge(graph, params), cache, *batch)

    placed = renamed(own, params, sizes, axes) if weights is None else weights(params, sizes)
    rows = (batch_specs(b, sizes) for b in batch)
    return Step(run=run, args=(cache, params, *batch), specs=(cache_specs, placed, *rows))
