"""GPJax: gradient steps on the marginal likelihood of a Gaussian process and on variational bounds.

Shape suffixes: N points, D dims.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, specs
from .equinox_models import is_shape

PACKAGE = "gpjax"
DIMS = 16


def model(likelihood: Any) -> Any:
    """A Gaussian process with a Matern kernel that has a length scale of each dim."""
    kernel = gpx.kernels.Matern32(lengthscale=jnp.ones(DIMS))
    return gpx.gps.Prior(mean_function=gpx.mean_functions.Constant(), kernel=kernel) * likelihood


def exact(_: jax.Array) -> Any:
    """A regression."""
    return model(gpx.likelihoods.Gaussian())


def variational(key: jax.Array, *, inducing: int, likelihood: Callable[[], Any], family: Any) -> Any:
    """A distribution over the values at inducing points."""
    return family(model=model(likelihood()), inducing_inputs=jax.random.normal(key, (inducing, DIMS)))


def fitted(sizes: Sizes, *, make: Any, objective: Any, points: int, weights: Rules = ()) -> Step:
    """A step of `gpx.fit` with Adam: the negative objective of a minibatch."""
    arrays, static = eqx.partition(eqx.filter_eval_shape(make, KEY), is_shape)
    optimizer = optax.adam(1e-2)

    def loss(model: Any, data: Any) -> jax.Array:
        return -objective(model, data)

    def run(state: Any, x_ND: jax.Array, y_N1: jax.Array) -> Any:
        arrays, optimizer_state = state
        model = eqx.combine(arrays, static)
        value, gradient = eqx.filter_value_and_grad(loss)(model, gpx.Dataset(X=x_ND, y=y_N1))
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, eqx.filter(model, eqx.is_array))
        return (eqx.filter(eqx.apply_updates(model, updates), eqx.is_array), optimizer_state), value

    state = arrays, jax.eval_shape(optimizer.init, arrays)
    batch = floats(points, DIMS), floats(points, 1)
    batch_spec = (batch_specs(b, sizes) for b in batch)
    return Step(run=run, args=(state, *batch), specs=((specs(arrays, weights, sizes), None), *batch_spec))


INDUCING: Rules = (
    ("*inducing_inputs*", P("model", None)),
    ("*variational_mean*", P("model", None)),
    ("*variational_root_covariance*", P("model", None)),
)

PROGRAMS: dict[str, MakeProgram] = {
    "exact": partial(fitted, make=exact, objective=gpx.objectives.conjugate_mll, points=8192),
    "sparse, classification": partial(
        fitted,
        make=partial(
            variational,
            inducing=2048,
            likelihood=gpx.likelihoods.Bernoulli,
            family=gpx.variational_families.WhitenedVariationalGaussian,
        ),
        objective=gpx.objectives.elbo,
        points=65_536,
        weights=INDUCING,
    ),
}
