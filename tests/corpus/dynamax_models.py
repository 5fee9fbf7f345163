"""Dynamax: gradient steps, expectation maximization and smoothing of state-space models over batches of sequences.

Shape suffixes: B sequences, T time, M features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from dynamax.hidden_markov_model import CategoricalHMM, DiagonalGaussianHMM
from dynamax.linear_gaussian_ssm import LinearGaussianSSM
from dynamax.linear_gaussian_ssm.parallel_inference import lgssm_smoother
from dynamax.parameters import from_unconstrained, to_unconstrained
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, ints, specs, training

PACKAGE = "dynamax"


def initialized(model: Any) -> tuple[Any, Any]:
    """The shapes of a model's parameters, and their properties."""
    properties: list[Any] = []

    def init(key: jax.Array) -> Any:
        params, props = model.initialize(key)
        properties.append(props)
        return params

    params = jax.eval_shape(init, KEY)
    return params, properties[0]


def fitted(sizes: Sizes, *, model: Any, emissions: Any, weights: Rules = ()) -> Step:
    """A minibatch step of `fit_sgd`: Adam on the marginal likelihood of unconstrained parameters."""
    params, properties = initialized(model)
    unconstrained = jax.eval_shape(lambda params: to_unconstrained(params, properties), params)

    def loss(unconstrained: Any, emissions_BTM: jax.Array) -> jax.Array:
        params = from_unconstrained(unconstrained, properties)
        scores = jax.vmap(partial(model.marginal_log_prob, params))(emissions_BTM)
        return -(model.log_prior(params) + scores.sum()) / emissions_BTM.size

    weight_specs = specs(unconstrained, weights, sizes)
    return training(loss, unconstrained, (emissions,), sizes, weights=weight_specs, optimizer=optax.adam(1e-3))


def maximized(sizes: Sizes) -> Step:
    """An iteration of `fit_em` of a hidden Markov model of words."""
    model = CategoricalHMM(512, 1, 16384)
    params, properties = initialized(model)

    def run(params: Any, state: Any, words_BTM: jax.Array) -> Any:
        statistics, scores = jax.vmap(partial(model.e_step, params))(words_BTM)
        new, state = model.m_step(params, properties, statistics, state)
        return new, state, model.log_prior(params) + scores.sum()

    state = jax.eval_shape(lambda params: model.initialize_m_step_state(params, properties), params)
    words = ints(64, 256, 1)
    weights = specs(params, WORDS, sizes)
    return Step(run=run, args=(params, state, words), specs=(weights, None, batch_specs(words, sizes)))


def smoothed(sizes: Sizes) -> Step:
    """The Kalman smoother as an associative scan over time."""
    params, _ = initialized(LinearGaussianSSM(32, 16))
    emissions = floats(256, 1024, 16)

    def run(emissions_BTM: jax.Array, params: Any) -> Any:
        posterior = jax.vmap(partial(lgssm_smoother, params))(emissions_BTM)
        return posterior.smoothed_means, jnp.diagonal(posterior.smoothed_covariances, axis1=-2, axis2=-1)

    return Step(run=run, args=(emissions, params), specs=(batch_specs(emissions, sizes), None))


WORDS: Rules = (("*emissions/probs", P("model", None, None)),)
STATES: Rules = (("*emissions/means", P("model", None)), ("*emissions/scale_diags", P("model", None)))

PROGRAMS: dict[str, MakeProgram] = {
    "gaussian hmm, gradient": partial(
        fitted, model=DiagonalGaussianHMM(512, 64), emissions=floats(256, 512, 64), weights=STATES
    ),
    "categorical hmm, em": maximized,
    "kalman filter, gradient": partial(fitted, model=LinearGaussianSSM(64, 32), emissions=floats(1024, 512, 32)),
    "kalman smoother, parallel": smoothed,
}
