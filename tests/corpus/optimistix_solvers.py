"""Optimistix: solvers run to the end: least squares, minimisation and implicit differentiation."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import Rules, batch_specs, floats, specs

PACKAGE = "optimistix"
EVERY = P(("data", "fsdp", "model"))


def peaks(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A sum of Gaussians over a background."""
    z = (x[:, None] - params["centre"]) / params["width"]
    return params["background"] + (params["height"] * jnp.exp(-0.5 * z**2)).sum(-1)


def spectra(solver: Any, sizes: Sizes) -> Step:
    """Peaks fitted to each of many spectra by least squares."""

    def residual(params: Any, data: Any) -> jax.Array:
        x, y = data
        return peaks(params, x) - y

    def run(guess: Any, x: jax.Array, y: jax.Array) -> Any:
        def fit(guess: Any, y: jax.Array) -> Any:
            return optx.least_squares(residual, solver, guess, (x, y), max_steps=32, throw=False).value

        return jax.vmap(fit)(guess, y)

    spectra, channels, lines = 65_536, 1024, 4
    guess = {name: floats(spectra, lines) for name in ("centre", "width", "height")} | {"background": floats(spectra)}
    args = guess, floats(channels), floats(spectra, channels)
    return Step(run=run, args=args, specs=(batch_specs(guess, sizes, EVERY), None, batch_specs(args[2], sizes, EVERY)))


def net_loss(params: Any, data: Any) -> jax.Array:
    """The mean squared error of a net."""
    h, y = data
    for w in params[:-1]:
        h = jnp.tanh(h @ w)
    return jnp.mean((h @ params[-1] - y) ** 2)


NET = [floats(1024, 8192), floats(8192, 1024)]
NET_SPECS: Rules = (("0", P(None, "model")), ("1", P("model", None)))
BATCHES = floats(32_768, 1024), floats(32_768, 1024)


def minimised(solver: Any, sizes: Sizes) -> Step:
    """A net fitted to its whole data set."""

    def run(params: Any, *data: Any) -> Any:
        solved = optx.minimise(net_loss, solver, params, data, max_steps=50, throw=False)
        return solved.value, solved.stats["num_steps"]

    return Step(run=run, args=(NET, *BATCHES), specs=(specs(NET, NET_SPECS, sizes), *batch_specs(BATCHES, sizes)))


def equilibrium(sizes: Sizes) -> Step:
    """The gradient step of a deep equilibrium layer, differentiated implicitly."""
    features = 4096

    def layer(z: jax.Array, args: Any) -> jax.Array:
        params, x = args
        return jnp.tanh(0.1 * z @ params["inner"] + x @ params["outer"])

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        solver, adjoint = optx.FixedPointIteration(1e-4, 1e-4), optx.ImplicitAdjoint(lx.GMRES(1e-4, 1e-4))
        solved = optx.fixed_point(
            layer, solver, jnp.zeros_like(x), (params, x), adjoint=adjoint, max_steps=64, throw=False
        )
        z = solved.value
        return jnp.mean((z - y) ** 2)

    def run(params: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    params = {name: floats(features, features) for name in ("inner", "outer")}
    batch = floats(2048, features), floats(2048, features)
    weights: Rules = (("*", P("fsdp", "model")),)
    return Step(run=run, args=(params, *batch), specs=(specs(params, weights, sizes), *batch_specs(batch, sizes)))


PROGRAMS: dict[str, MakeProgram] = {
    "levenberg-marquardt": partial(spectra, optx.LevenbergMarquardt(rtol=1e-4, atol=1e-4)),
    "dogleg": partial(spectra, optx.Dogleg(rtol=1e-4, atol=1e-4)),
    "nonlinear conjugate gradients": partial(minimised, optx.NonlinearCG(rtol=1e-4, atol=1e-4)),
    "l-bfgs": partial(minimised, optx.LBFGS(rtol=1e-4, atol=1e-4)),
    "deep equilibrium": equilibrium,
}
