"""Load-balancing losses at their extremes, and load statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import expert
from sharding.expert.load_balancing import balance_loss, cv_squared


def test_loss_of_uniform_gates():
    gates = jnp.full((3, 16, 8), 1 / 8)
    assert balance_loss(gates, jnp.zeros((3, 16), jnp.int32)) == pytest.approx(1 / 8**2, rel=1e-6)  # .015625
    spread = jnp.tile(jnp.arange(8), (3, 2))
    assert balance_loss(jnp.eye(8)[spread], spread) == pytest.approx(0.015625, rel=1e-6)


def test_loss_of_collapsed_routing():
    first = jnp.full((3, 16), 5)
    assert balance_loss(jax.nn.one_hot(first, 8), first) == pytest.approx(0.125, rel=1e-6)  # 1 / 8


def test_loss_equals_the_formula():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(2, 7, 5))
    gates = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    first = gates.argmax(-1)
    expected = np.mean([sum((first[g] == e).mean() * gates[g, :, e].mean() for e in range(5)) / 5 for g in range(2)])
    assert balance_loss(jnp.asarray(gates), jnp.asarray(first)) == pytest.approx(expected, rel=1e-5)


def test_cv_squared():
    assert cv_squared(jnp.full(6, 2.5)) == 0
    assert cv_squared(jnp.eye(6)[2]) == pytest.approx(5)  # n - 1


def test_load_statistics():
    load, dropped = jnp.array([[3, 1, 0, 0], [1, 1, 1, 1]]), jnp.array([1, 0])
    balance = expert.Balance(auxiliary_loss=jnp.zeros(()), losses={}, load=load, dropped=dropped)
    np.testing.assert_allclose(balance.peak_load, [3, 1])
    assert balance.dropped_share == pytest.approx(1 / 8)
