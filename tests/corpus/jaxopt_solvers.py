"""JAXopt: one iteration of its solvers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxopt
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import BATCH, Rules, batch_specs, floats, ints, specs

PACKAGE = "jaxopt"


def multinomial_loss(w: jax.Array, data: Any) -> jax.Array:
    """The regularized mean cross-entropy of a linear classifier."""
    x, label = data
    log_probabilities = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, label[:, None], 1)) + 1e-4 * jnp.sum(w**2)


def iteration(solver: Any, params: Any, weights: Rules, data: Any, sizes: Sizes) -> Step:
    """One `update` of a solver of JAXopt."""
    state = jax.eval_shape(solver.init_state, params, data=data)

    def run(carry: Any, data: Any) -> Any:
        params, state = carry
        return tuple(solver.update(params, state, data=data))

    return Step(
        run=run,
        args=((params, state), data),
        specs=((specs(params, weights, sizes), None), batch_specs(data, sizes, BATCH)),
    )


def multinomial(sizes: Sizes) -> Step:
    """An iteration of L-BFGS with its line search on a linear classifier."""
    data, columns = (floats(65_536, 8192), ints(65_536)), P(None, "model")
    return iteration(jaxopt.LBFGS(multinomial_loss), floats(8192, 4096), (("*", columns),), data, sizes)


def lasso(sizes: Sizes) -> Step:
    """An iteration of the accelerated proximal gradient of a sparse regression."""

    def loss(w: jax.Array, data: Any) -> jax.Array:
        x, y = data
        return 0.5 * jnp.mean((x @ w - y) ** 2)

    prox = jaxopt.prox.prox_lasso
    solver = jaxopt.ProximalGradient(loss, prox, stepsize=1e-3)
    w, data = floats(65_536), (floats(65_536, 65_536), floats(65_536))
    state = jax.eval_shape(partial(solver.init_state, hyperparams_prox=0.1, data=data), w)

    def run(carry: Any, *data: Any) -> Any:
        return tuple(solver.update(*carry, hyperparams_prox=0.1, data=data))

    rows = batch_specs(data[0], sizes, P(("data", "fsdp"), "model"))
    return Step(run=run, args=((w, state), *data), specs=(None, rows, batch_specs(data[1], sizes)))


def multiclass_svm(sizes: Sizes) -> Step:
    """An iteration of projected gradient descent on the dual of a support vector machine."""
    rows, features, classes = 262_144, 2048, 128
    data = floats(rows, features), ints(rows)

    def objective(beta: jax.Array, data: Any) -> jax.Array:
        x, label = data
        target = jax.nn.one_hot(label, classes)
        return 0.5 * jnp.sum((x.T @ (target - beta)) ** 2) + jnp.sum(beta * (1 - target))

    def projection(beta: jax.Array, _: Any) -> jax.Array:
        return jax.vmap(jaxopt.projection.projection_simplex)(beta)

    solver = jaxopt.ProjectedGradient(objective, projection, stepsize=1e-3)
    return iteration(solver, floats(rows, classes), (("*", P(("data", "fsdp"), None)),), data, sizes)


PROGRAMS: dict[str, MakeProgram] = {
    "l-bfgs": multinomial,
    "lasso": lasso,
    "support vector machine": multiclass_svm,
}
