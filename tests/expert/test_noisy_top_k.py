"""Noisy top-k router: gates, load probabilities against sampling, losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharding import expert
from sharding.expert import noisy_top_k as router

noisy_top_k, load_probability = (
    jax.jit(router.noisy_top_k, static_argnums=2),
    jax.jit(router.load_probability, static_argnums=3),
)

K, EXPERTS = 3, 6
CLEAN = jax.random.normal(jax.random.key(0), (2, 40, EXPERTS))
STDDEV = jax.nn.softplus(jax.random.normal(jax.random.key(1), CLEAN.shape))


def dense(routing):
    """G(x), [G, S, E]."""
    hits = jax.nn.one_hot(routing.experts_GSK, EXPERTS)
    return np.asarray(jnp.einsum("gsk,gske->gse", routing.weights_GSK, hits))


def test_k_gates_that_sum_to_one():
    key = jax.random.key(2)
    gates = dense(noisy_top_k(CLEAN, STDDEV, K, key))
    assert (np.count_nonzero(gates, axis=-1) == K).all()
    np.testing.assert_allclose(gates.sum(-1), 1, rtol=1e-6)
    noisy = np.asarray(CLEAN + STDDEV * jax.random.normal(key, CLEAN.shape))
    top_k_logits = np.where(noisy >= np.sort(noisy, -1)[..., -K, None], noisy, -np.inf)
    np.testing.assert_allclose(gates, np.exp(top_k_logits) / np.exp(top_k_logits).sum(-1, keepdims=True), rtol=1e-5)


def noisy_samples(times):
    noise = jax.random.normal(jax.random.key(3), (times, *CLEAN.shape))
    return CLEAN[None, ...] + STDDEV[None, ...] * noise


def test_load_probabilities_sum_to_k_on_average():
    each = jax.vmap(lambda noisy: load_probability(CLEAN, STDDEV, noisy, K))(noisy_samples(400))
    sums = np.asarray(each.sum(-1)).mean(axis=(1, 2))
    assert abs(sums.mean() - K) < 3 * sums.std() / np.sqrt(len(sums))


def test_load_probabilities_equal_resampling():
    noisy = noisy_samples(1)[0]
    expected = np.asarray(load_probability(CLEAN, STDDEV, noisy, K))
    times, counts = 2000, np.zeros(CLEAN.shape)
    for i in range(EXPERTS):  # one expert's noise at a time
        others = np.delete(np.asarray(noisy), i, -1)
        kth = np.sort(others, -1)[..., -K]
        noise = np.random.default_rng(i).normal(size=(times, *CLEAN.shape[:2]))
        counts[..., i] = (np.asarray(CLEAN)[..., i] + np.asarray(STDDEV)[..., i] * noise > kth).mean(0)
    deviation = np.sqrt(expected * (1 - expected) / times)
    off = np.abs(counts - expected) / (deviation + 1 / times)
    assert (off < 3).mean() > 0.99 and off.max() < 5  # 3 sigma is 99.7 % of 480


def test_all_experts_chosen():
    routing = noisy_top_k(CLEAN, STDDEV, EXPERTS, jax.random.key(0))
    assert routing.losses["load"] == 0
    assert (np.sort(routing.experts_GSK, -1) == np.arange(EXPERTS)).all()


def test_losses_of_uniform_and_collapsed_gates():
    even = noisy_top_k(jnp.eye(EXPERTS)[None, ...], jnp.full((1, EXPERTS, EXPERTS), 1.0), 1, None)
    np.testing.assert_allclose([even.losses["importance"], even.losses["load"]], 0, atol=1e-6)
    one = 100 * jnp.tile(jnp.eye(EXPERTS)[2], (1, 10, 1))
    collapsed = noisy_top_k(one, jnp.ones_like(one), 1, jax.random.key(0))
    found = [collapsed.losses["importance"], collapsed.losses["load"]]
    np.testing.assert_allclose(found, EXPERTS - 1, rtol=1e-5)
    assert collapsed.auxiliary_loss == pytest.approx(0.1 * 2 * (EXPERTS - 1), rel=1e-5)


def test_gradients_of_the_losses():
    def load(clean, stddev):
        return noisy_top_k(clean, stddev, K, jax.random.key(4)).losses["load"]

    load = jax.jit(load)
    direction = jax.random.normal(jax.random.key(5), CLEAN.shape)
    both = jax.jit(jax.grad(load, argnums=(0, 1)))(CLEAN, STDDEV)
    for i, gradient in enumerate(both):
        arguments = [CLEAN, STDDEV]
        assert np.isfinite(gradient).all() and np.any(gradient)
        ends = []
        for step in (-1e-3, 1e-3):
            arguments[i] = (CLEAN, STDDEV)[i] + step * direction
            ends.append(load(*arguments))
        assert (ends[1] - ends[0]) / 2e-3 == pytest.approx(float(jnp.vdot(gradient, direction)), rel=0.05)


@pytest.mark.slow
def test_losses_prevent_collapse():
    """A toy task in which some experts are better: one gets nearly all tokens without the losses, but not with them."""
    x = jax.random.normal(jax.random.key(1), (4, 64, 4)).at[..., 0].set(1)
    skill = jnp.arange(8.0) / 32

    def trained(weight):
        module = expert.NoisyTopK(4, 8, 2, rngs=nnx.Rngs(0), importance_weight=weight, load_weight=weight)
        module.gate[...] = 0.1 * jax.random.normal(jax.random.key(0), module.gate.shape)

        def loss(module, key):
            routing = module(x, key)
            good = jnp.einsum("gsk,gske,e->gs", routing.weights_GSK, jax.nn.one_hot(routing.experts_GSK, 8), skill)
            return routing.auxiliary_loss - good.mean(), routing.losses["importance"]

        def step(module, key):
            gradient, variation = jax.grad(loss, has_aux=True)(module, key)
            return jax.tree.map(lambda p, g: p - 0.5 * g, module, gradient), variation

        keys = jax.random.split(jax.random.key(0), 1000)
        return jax.jit(lambda module: jax.lax.scan(step, module, keys)[1])(module)

    without, balanced = trained(0.0), trained(0.1)
    assert without[-1] > 5 and without[-1] > 10 * without[0]
    assert balanced[-1] < 0.1
