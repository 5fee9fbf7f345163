"""tinygp: gradient steps on the marginal likelihoods of Gaussian processes.

Shape suffixes: B data sets, N points, D dims.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step
from tinygp import GaussianProcess, kernels, transforms

from . import MakeProgram
from .common import floats, training

PACKAGE = "tinygp"


def matern(params: Any, x_ND: jax.Array) -> GaussianProcess:
    """A Matern kernel with a length scale of each dim, and noise."""
    kernel = jnp.exp(params["amplitude"]) * transforms.Linear(jnp.exp(-params["scale"]), kernels.Matern52())
    return GaussianProcess(kernel, x_ND, diag=jnp.exp(params["noise"]), mean=params["mean"])


def embedded(params: Any, x_ND: jax.Array) -> GaussianProcess:
    """A kernel over the features that a network makes of the points."""
    network = params["network"]

    def features(x_D: jax.Array) -> jax.Array:
        return jnp.tanh(jax.nn.relu(x_D @ network["w1"]) @ network["w2"])

    kernel = jnp.exp(params["amplitude"]) * transforms.Transform(features, kernels.ExpSquared())
    return GaussianProcess(kernel, x_ND, diag=jnp.exp(params["noise"]), mean=params["mean"])


def oscillations(params: Any, t_N: jax.Array) -> GaussianProcess:
    """Quasiseparable kernels of a time series, whose points are sorted: linear time and memory."""
    slow = kernels.quasisep.Matern52(scale=jnp.exp(params["scale"]), sigma=jnp.exp(params["amplitude"]))
    fast = kernels.quasisep.SHO(
        omega=jnp.exp(params["frequency"]), quality=jnp.exp(params["quality"]), sigma=jnp.exp(params["sigma"])
    )
    noise = jnp.exp(params["noise"])  # `assume_sorted`: a check's callback doesn't lower for compile-only devices
    return GaussianProcess(slow + fast, t_N, diag=noise, mean=params["mean"], assume_sorted=True)


def fitted(sizes: Sizes, *, process: Callable[..., GaussianProcess], params: Any, x: Any, y: Any) -> Step:
    """A step of Adam on the negative log-likelihood; each data set has its parameters, or there is one of both."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return -process(params, x).log_probability(y) / y.size

    def mean(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.vmap(partial(loss, params))(x, y).mean()

    return training(mean if y.ndim == 2 else loss, params, (x, y), sizes, optimizer=optax.adam(1e-2))


SCALARS = {name: floats() for name in ("amplitude", "noise", "mean")}
LAYERS = {"w1": floats(256, 4096), "w2": floats(4096, 32)}

PROGRAMS: dict[str, MakeProgram] = {
    "exact, many data sets": partial(
        fitted, process=matern, params=SCALARS | {"scale": floats(8)}, x=floats(64, 2048, 8), y=floats(64, 2048)
    ),
    "exact, deep kernel": partial(
        fitted, process=embedded, params=SCALARS | {"network": LAYERS}, x=floats(8192, 256), y=floats(8192)
    ),
    "quasiseparable": partial(
        fitted,
        process=oscillations,
        params=SCALARS | {name: floats() for name in ("scale", "frequency", "quality", "sigma")},
        x=floats(512, 8192),
        y=floats(512, 8192),
    ),
}
