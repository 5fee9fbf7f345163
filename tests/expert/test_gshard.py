"""GShard's top-2 router with a random second expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharding import ShardingError, expert
from sharding.expert.gshard import top_2

GATES = jax.nn.softmax(2 * jax.random.normal(jax.random.key(0), (4, 500, 8)))


def test_top_2():
    routing = top_2(GATES, None)
    order = np.argsort(-np.asarray(GATES), axis=-1)[..., :2]
    np.testing.assert_array_equal(routing.experts_GSK, order)
    best = np.take_along_axis(np.asarray(GATES), order, -1)
    np.testing.assert_allclose(routing.weights_GSK, best / best.sum(-1, keepdims=True), rtol=1e-6)
    assert np.asarray(routing.wanted_GSK).all()  # deterministic without a key


def test_ties_go_to_the_first():
    routing = top_2(jnp.full((1, 3, 4), 0.25), None)
    np.testing.assert_array_equal(routing.experts_GSK, np.tile([0, 1], (1, 3, 1)))


def test_random_second_experts():
    routing = top_2(GATES, jax.random.key(3))
    twice = np.minimum(1, 2 * np.asarray(routing.weights_GSK[..., 1]))
    dispatched = np.asarray(routing.wanted_GSK)
    assert dispatched[..., 0].all()
    deviation = np.sqrt((twice * (1 - twice)).sum()) / twice.size
    assert abs(dispatched[..., 1].mean() - twice.mean()) < 3 * deviation
    assert 0.2 < twice.mean() < 0.9


def test_loss_of_uniform_gates():
    router = expert.GShard(6, 8, rngs=nnx.Rngs(0), loss_weight=0.5)
    router.gate[...] = jnp.zeros((6, 8))
    routing = router(jnp.ones((2, 5, 6)))
    assert routing.losses["balance"] == pytest.approx(1 / 64, rel=1e-6)
    assert routing.auxiliary_loss == pytest.approx(0.5, rel=1e-6)  # scaled to 1 for uniform gates


def test_top_k_must_be_2():
    with pytest.raises(ShardingError, match=r"GShard\(top_k=3\)"):
        expert.GShard(6, 8, 3, rngs=nnx.Rngs(0))
