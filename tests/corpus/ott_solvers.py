"""OTT: entropic optimal transport between point clouds and images, and its gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import optax
from ott.geometry import grid, pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn, sinkhorn_lr
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, specs, training

PACKAGE = "ott-jax"


def transported(x: jax.Array, y: jax.Array, *, solver: Any, **options: Any) -> jax.Array:
    """The regularized cost of moving one cloud to another."""
    geometry = pointcloud.PointCloud(x, y, epsilon=0.05, **options)
    return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost


def move(sizes: Sizes, *, points: int, solver: Any, **options: Any) -> Step:
    """Points that flow down the gradient of their cost; rows of the cost are sharded over the data axes."""
    cost = partial(transported, solver=solver, **options)

    def run(x: jax.Array, y: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(cost)(x, y)
        return x - 0.1 * gradient, value

    clouds = floats(points, 128), floats(points, 128)
    rows = batch_specs(clouds[0], sizes)
    return Step(run=run, args=clouds, specs=(rows, batch_specs(clouds[1], sizes, P("model"))))


def fitted(sizes: Sizes) -> Step:
    """The train step of a generator whose samples are moved to the data at least cost."""
    widths = 512, 8192, 8192, 3072
    params = [floats(i, o) for i, o in zip(widths, widths[1:], strict=False)]

    def loss(params: Any, data: jax.Array, key: jax.Array) -> jax.Array:
        h = jax.random.normal(key, (len(data), widths[0]))
        for w in params[:-1]:
            h = jax.nn.gelu(h @ w)
        solver = sinkhorn.Sinkhorn(min_iterations=0, max_iterations=200)
        return transported(h @ params[-1], data, solver=solver)

    weights: Rules = (("[02]", P(None, "model")), ("1", P("model", None)))
    batch = floats(8192, 3072), KEY
    return training(loss, params, batch, sizes, weights=specs(params, weights, sizes), optimizer=optax.adam(1e-4))


def images(sizes: Sizes) -> Step:
    """Distances of many pairs of images, whose costs are separable over the grid."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        def distance(a: jax.Array, b: jax.Array) -> jax.Array:
            geometry = grid.Grid(grid_size=(256, 256), epsilon=0.01)
            problem = linear_problem.LinearProblem(geometry, a=a.ravel(), b=b.ravel())
            return sinkhorn.Sinkhorn(max_iterations=100)(problem).reg_ot_cost

        return jax.vmap(distance)(a, b)

    pairs = floats(128, 256, 256), floats(128, 256, 256)
    return Step(run=run, args=pairs, specs=batch_specs(pairs, sizes))


PROGRAMS: dict[str, MakeProgram] = {
    "sinkhorn": partial(move, points=16_384, solver=sinkhorn.Sinkhorn(max_iterations=200)),
    "sinkhorn, unrolled": partial(
        move, points=4096, solver=sinkhorn.Sinkhorn(min_iterations=20, max_iterations=20, implicit_diff=None)
    ),
    "low rank": partial(move, points=262_144, solver=sinkhorn_lr.LRSinkhorn(rank=128, max_iterations=50)),
    "generator": fitted,
    "images": images,
}
