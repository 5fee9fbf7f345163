"""Switch Transformer's top-1 router."""

import jax
import numpy as np
import pytest
from flax import nnx

from sharding import ShardingError, expert


def test_top_1_weighted_by_its_gate():
    router = expert.Switch(6, 8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 50, 6))
    gates = np.asarray(jax.nn.softmax(x @ router.gate[...]))
    for key in (None, jax.random.key(1)):
        routing = router(x, key)
        np.testing.assert_array_equal(routing.experts_GSK[..., 0], gates.argmax(-1))
        np.testing.assert_allclose(routing.weights_GSK[..., 0], gates.max(-1), rtol=1e-5)
        assert np.asarray(routing.wanted_GSK).all()
    share = np.stack([(gates.argmax(-1) == e).mean(1) for e in range(8)], -1)
    expected = 8 * (share * gates.mean(1)).sum(-1).mean()  # equation 4
    assert routing.auxiliary_loss == pytest.approx(0.01 * expected, rel=1e-5)


def test_top_k_must_be_1():
    with pytest.raises(ShardingError, match=r"Switch\(top_k=2\)"):
        expert.Switch(6, 8, 2, rngs=nnx.Rngs(0))
