"""NumPyro: steps of stochastic variational inference and of Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.contrib.control_flow import scan
from numpyro.infer import HMC, NUTS, SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import optax_to_numpyro
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, ints, specs

PACKAGE = "numpyro"


def svi_step(model: Any, guide: Any, elbo: Any, batch: tuple[Any, ...], sizes: Sizes, weights: Rules) -> Step:
    """`SVI.update` with Adam; latent variables and their guide's parameters are sharded by their paths."""
    svi = SVI(model, guide, optax_to_numpyro(optax.adam(1e-3)), elbo)
    state = jax.eval_shape(svi.init, KEY, *batch)
    return Step(run=svi.update, args=(state, *batch), specs=(specs(state, weights, sizes), *batch_specs(batch, sizes)))


# A Bayesian neural net with a mean-field guide

WIDTHS = (2048, 8192, 8192, 1)
LAYERS = tuple(zip(WIDTHS, WIDTHS[1:], strict=False))


def bayesian_net(x: jax.Array, y: jax.Array) -> None:
    """A net whose weights have normal priors."""
    h = x
    for n, (inputs, outputs) in enumerate(LAYERS):
        w = numpyro.sample(f"w{n}", dist.Normal(jnp.zeros((inputs, outputs)), 1.0).to_event(2))
        h = h @ w / inputs**0.5
        h = jnp.tanh(h) if outputs > 1 else h
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(h[:, 0], precision**-0.5), obs=y)


def mean_field(x: jax.Array, y: jax.Array) -> None:
    """Independent normals for all weights, a log-normal for the precision."""
    for n, shape in enumerate(LAYERS):
        location = numpyro.param(f"w{n}_location", jnp.zeros(shape))
        scale = numpyro.param(f"w{n}_scale", jnp.full(shape, 0.01), constraint=dist.constraints.positive)
        numpyro.sample(f"w{n}", dist.Normal(location, scale).to_event(2))
    numpyro.sample("precision", dist.LogNormal(numpyro.param("precision_location", 0.0), 0.1))


# A variational autoencoder


def dense(name: str, x: jax.Array, outputs: int) -> jax.Array:
    """A linear layer of parameters."""
    w = numpyro.param(f"{name}_w", lambda key: 0.01 * jax.random.normal(key, (x.shape[-1], outputs)))
    return x @ w + numpyro.param(f"{name}_b", jnp.zeros(outputs))


def decoder(images: jax.Array) -> None:
    """Pixels given a normal code."""
    with numpyro.plate("batch", images.shape[0]):
        code = numpyro.sample("code", dist.Normal(jnp.zeros(256), 1.0).to_event(1))
        logits = dense("decoder_out", jax.nn.softplus(dense("decoder_in", code, 16384)), images.shape[-1])
        numpyro.sample("pixels", dist.Bernoulli(logits=logits).to_event(1), obs=images)


def encoder(images: jax.Array) -> None:
    """The code given pixels."""
    h = jax.nn.softplus(dense("encoder_in", images, 16384))
    with numpyro.plate("batch", images.shape[0]):
        scale = jnp.exp(dense("encoder_scale", h, 256))
        numpyro.sample("code", dist.Normal(dense("encoder_location", h, 256), scale).to_event(1))


# Regressions


def logistic_regression(x: jax.Array, y: jax.Array) -> None:
    """A horseshoe prior over the coefficients."""
    features = x.shape[1]
    overall = numpyro.sample("overall", dist.HalfCauchy(1.0))
    local = numpyro.sample("local", dist.HalfCauchy(jnp.ones(features)).to_event(1))
    w = numpyro.sample("w", dist.Normal(jnp.zeros(features), 1.0).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ (w * local * overall)), obs=y)


def many_groups(group: jax.Array, x: jax.Array, y: jax.Array) -> None:
    """A regression whose coefficients vary by group around a common mean."""
    groups, features = 100_000, x.shape[1]
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(features), 1.0).to_event(1))
    with numpyro.plate("groups", groups):
        w = numpyro.sample("w", dist.Normal(mean, 0.5).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, (w[group] * x).sum(-1), 1.0), obs=y)


def auto_normal(model: Callable[..., None], batch: tuple[Any, ...], sizes: Sizes, weights: Rules) -> Step:
    """`SVI.update` with an automatic guide, which looks at the model anew in each trace."""

    def fresh() -> SVI:
        guide = AutoNormal(model, init_loc_fn=numpyro.infer.init_to_feasible)
        return SVI(model, guide, optax_to_numpyro(optax.adam(1e-3)), Trace_ELBO(num_particles=4))

    def run(state: Any, *batch: Any) -> Any:
        svi = fresh()
        svi.init(jax.random.key(0), *batch)
        return svi.update(state, *batch)

    state = jax.eval_shape(lambda *batch: fresh().init(jax.random.key(0), *batch), *batch)
    return Step(run=run, args=(state, *batch), specs=(specs(state, weights, sizes), *batch_specs(batch, sizes)))


def hmc_step(make: Callable[..., HMC], model: Callable[..., None], batch: tuple[Any, ...], sizes: Sizes) -> Step:
    """A sample of each of eight vectorized chains, without adaptation; each trace starts a kernel anew."""

    def started(*batch: Any) -> tuple[HMC, Any]:
        kernel = make(model, adapt_step_size=False, adapt_mass_matrix=False)
        keys = jax.random.split(jax.random.key(0), 8)
        return kernel, kernel.init(keys, 0, None, batch, {})

    def run(state: Any, *batch: Any) -> Any:
        kernel, _ = started(*batch)
        return kernel.sample(state, batch, {})

    state = jax.eval_shape(lambda *batch: started(*batch)[1], *batch)
    return Step(run=run, args=(state, *batch), specs=(None, *batch_specs(batch, sizes)))


# A hidden Markov model


def hidden_markov(words: jax.Array) -> None:
    """Topics of consecutive words: the forward algorithm in a scan."""
    topics, vocab = 512, 32768
    transition = numpyro.param(
        "transition", jnp.full((topics, topics), 1 / topics), constraint=dist.constraints.simplex
    )
    emission = numpyro.param("emission", lambda key: jax.random.normal(key, (topics, vocab)))
    log_emission = jax.nn.log_softmax(emission)

    def step(belief: jax.Array, word: jax.Array) -> Any:
        predicted = belief @ transition
        evidence = predicted * jnp.exp(log_emission[:, word].T)
        total = evidence.sum(-1, keepdims=True)
        numpyro.factor("word", jnp.log(total).sum())
        return evidence / total, None

    scan(step, jnp.full((words.shape[0], topics), 1 / topics), words.T)


DATA = floats(1_048_576, 512), floats(1_048_576)
COLUMNS: Rules = (("*w0_*", P(None, "model")), ("*w1_*", P("model", None)), ("*w2_*", P(None, None)))
CODES: Rules = (("*coder_in_w", P(None, "model")), ("*coder_in_b", P("model")), ("*coder_*_w", P("model", None)))
GROUPS: Rules = (("*w_auto_*", P("model", None)),)
PROGRAMS: dict[str, MakeProgram] = {
    "bayesian net": lambda sizes: svi_step(
        bayesian_net, mean_field, TraceMeanField_ELBO(), (floats(4096, 2048), floats(4096)), sizes, COLUMNS
    ),
    "vae": lambda sizes: svi_step(decoder, encoder, TraceMeanField_ELBO(), (floats(4096, 12288),), sizes, CODES),
    "hierarchical regression": lambda sizes: auto_normal(
        many_groups, (ints(262_144), floats(262_144, 512), floats(262_144)), sizes, GROUPS
    ),
    "logistic regression, automatic guide": lambda sizes: auto_normal(logistic_regression, DATA, sizes, ()),
    "logistic regression, hmc": partial(hmc_step, partial(HMC, num_steps=10), logistic_regression, DATA),
    "logistic regression, nuts": partial(hmc_step, partial(NUTS, max_tree_depth=6), logistic_regression, DATA),
    "hidden markov": lambda sizes: svi_step(
        hidden_markov, lambda words: None, Trace_ELBO(), (ints(1024, 128),), sizes, (("*emission", P("model", None)),)
    ),
}
