"""BlackJAX: steps of its samplers and variational methods over many chains or particles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import BATCH, KEY, Rules, batch_specs, floats, ints, specs

PACKAGE = "blackjax"
LogDensity = Callable[[Any], jax.Array]

WIDTHS = (784, 1024, 10)
NET = [floats(i, o) for i, o in zip(WIDTHS, WIDTHS[1:], strict=False)]
DIGITS = floats(4096, 784), ints(4096)


def net_log_density(params: Any, x: jax.Array, label: jax.Array, *, total: float = 60_000.0) -> jax.Array:
    """The posterior of a classifier with normal priors; a batch stands for all `total` rows."""
    *hidden, last = params
    for w in hidden:
        x = jnp.tanh(x @ w)
    fit = -optax.softmax_cross_entropy_with_integer_labels(x @ last, label).mean() * total
    return fit - sum(0.5 * jnp.sum(w**2) for w in params)


def regression_log_density(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The posterior of a logistic regression with a normal prior."""
    return -optax.sigmoid_binary_cross_entropy(x @ w, y).sum() - 0.5 * jnp.sum(w**2)


def chains_step(
    make: Callable[[LogDensity], Any], log_density: Callable[..., Any], position: Any, data: Any, sizes: Sizes
) -> Step:
    """One step of every chain; chains are sharded over the data axes, the rows of the data over `model`.

    Args:
        make: log density -> sampler.
        log_density: of (the position of a chain, *data).
        position: shapes of all chains.
        data: shapes of what all chains look at.
        sizes: the mesh.
    """

    def sampler(*data: Any) -> Any:
        return make(lambda position: log_density(position, *data))

    def init(positions: Any, *data: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), len(jax.tree.leaves(positions)[0]))
        return jax.vmap(sampler(*data).init)(positions, keys)

    def run(states: Any, key: jax.Array, *data: Any) -> Any:
        keys = jax.random.split(key, len(jax.tree.leaves(states)[0]))
        return jax.vmap(sampler(*data).step)(keys, states)

    states = jax.eval_shape(init, position, *data)
    rows = batch_specs(data, sizes, P("model"))
    return Step(run=run, args=(states, KEY, *data), specs=(batch_specs(states, sizes, BATCH), None, *rows))


def particles_step(sizes: Sizes) -> Step:
    """Stein variational gradient descent: each particle is moved by the gradients of all."""

    def sampler(*data: Any) -> Any:
        gradient = jax.grad(net_log_density)
        return blackjax.svgd(lambda p: gradient(p, *data), optax.adam(1e-3))

    particles = jax.tree.map(lambda p: floats(32, *p.shape), NET)
    state = jax.eval_shape(sampler(*DIGITS).init, particles, {"length_scale": floats()})

    def run(state: Any, *data: Any) -> Any:
        return sampler(*data).step(state)

    return Step(run=run, args=(state, *DIGITS), specs=(batch_specs(state, sizes, BATCH), None, None))


def stochastic_gradient(sizes: Sizes) -> Step:
    """Langevin dynamics of a large classifier over minibatches."""
    widths = 4096, 16384, 16384, 1024
    params = [floats(i, o) for i, o in zip(widths, widths[1:], strict=False)]
    gradient = jax.grad(partial(net_log_density, total=1e7))
    sampler = blackjax.sgld(lambda params, minibatch: gradient(params, *minibatch))

    def run(params: Any, key: jax.Array, *minibatch: Any) -> Any:
        return sampler.step(key, params, minibatch, 1e-5)

    batch = floats(2048, 4096), ints(2048)
    weights: Rules = (("[02]", P(None, "model")), ("1", P("model", None)))
    state_spec = specs(params, weights, sizes)
    return Step(run=run, args=(params, KEY, *batch), specs=(state_spec, None, *batch_specs(batch, sizes)))


def variational(sizes: Sizes) -> Step:
    """A mean-field approximation of a classifier's posterior by the gradient of sixteen samples."""

    def algorithm(*data: Any) -> Any:
        return blackjax.meanfield_vi(lambda p: net_log_density(p, *data), optax.adam(1e-3), 16)

    params = [floats(784, 8192), floats(8192, 10)]
    state = jax.eval_shape(algorithm(*DIGITS).init, params)

    def run(state: Any, key: jax.Array, *data: Any) -> Any:
        return algorithm(*data).step(key, state)

    weights: Rules = (("*/0", P(None, "model")), ("*/1", P("model", None)))
    return Step(
        run=run, args=(state, KEY, *DIGITS), specs=(specs(state, weights, sizes), None, *batch_specs(DIGITS, sizes))
    )


def tempered(sizes: Sizes) -> Step:
    """Sequential Monte Carlo whose particles are resampled and moved by ten Hamiltonian steps."""
    data = floats(16_384, 256), floats(16_384)

    def sampler(*data: Any) -> Any:
        parameters = {"step_size": 1e-3, "inverse_mass_matrix": jnp.ones(256), "num_integration_steps": 10}
        return blackjax.adaptive_tempered_smc(
            lambda w: -0.5 * jnp.sum(w**2),
            lambda w: -optax.sigmoid_binary_cross_entropy(data[0] @ w, data[1]).sum(),
            blackjax.hmc.build_kernel(),
            blackjax.hmc.init,
            blackjax.smc.extend_params(parameters),
            blackjax.smc.resampling.systematic,
            target_ess=0.5,
            num_mcmc_steps=4,
        )

    state = jax.eval_shape(sampler(*data).init, floats(8192, 256))

    def run(state: Any, key: jax.Array, *data: Any) -> Any:
        return sampler(*data).step(key, state)

    return Step(run=run, args=(state, KEY, *data), specs=(batch_specs(state, sizes, BATCH), None, None, None))


def hmc(log_density: LogDensity) -> Any:
    """Hamiltonian Monte Carlo with a diagonal mass."""
    return blackjax.hmc(log_density, 1e-3, jnp.ones(256), 16)


def nuts(log_density: LogDensity) -> Any:
    """The no-U-turn sampler with a dense mass."""
    return blackjax.nuts(log_density, 1e-3, jnp.eye(256), max_num_doublings=6)


def mclmc(log_density: LogDensity) -> Any:
    """Microcanonical Langevin Monte Carlo."""
    return blackjax.mclmc(log_density, 10.0, 0.1)


ROWS = floats(262_144, 256), floats(262_144)
NETS = [floats(32, *w.shape) for w in NET]

PROGRAMS: dict[str, MakeProgram] = {
    "hmc": partial(chains_step, hmc, regression_log_density, floats(256, 256), ROWS),
    "nuts": partial(chains_step, nuts, regression_log_density, floats(256, 256), ROWS),
    "microcanonical langevin": partial(chains_step, mclmc, net_log_density, NETS, DIGITS),
    "stein": particles_step,
    "stochastic gradient langevin": stochastic_gradient,
    "mean field": variational,
    "tempered smc": tempered,
}
