"""A GPT with experts: stacked or not, rematerialised or not; its sizes match the literature."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharding.models import gpt, gpt_moe, layouts

SMALL = gpt_moe.Config(
    vocab=32, context=8, layers=4, features=16, heads=2, kv_heads=2, mlp_features=32, num_experts=4, capacity_factor=1.0
)
KEY = jax.random.key(3)


@functools.partial(jax.jit, static_argnums=0)
def init(config):
    return gpt_moe.GPTMoE(config, rngs=nnx.Rngs(0))


TOKENS = jax.random.randint(jax.random.key(7), (2, 9), 0, SMALL.vocab)


@pytest.mark.slow
def test_scanned_equals_unrolled():
    call = jax.jit(gpt_moe.next_token_loss)
    expected, balance = call(init(SMALL), TOKENS, KEY)
    found = call(init(dataclasses.replace(SMALL, scan=True)), TOKENS, KEY)
    assert balance.load.shape == (2, 4) and balance.dropped.sum() > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, (expected, balance))


@functools.cache
def gradient(**changes):
    """Loss and balance, and gradients with stacked layers for either form of the model."""

    @jax.jit
    def both(model):
        def loss(model):
            nats, balance = gpt_moe.next_token_loss(model, TOKENS, KEY)
            return nats + balance.auxiliary_loss.sum(), balance

        return jax.value_and_grad(loss, has_aux=True)(model)

    found, gradients = both(init(dataclasses.replace(SMALL, **changes)))
    blocks = gradients.blocks
    if not isinstance(blocks, gpt_moe.Pair):
        blocks = jax.tree.map(lambda *each: jnp.stack(each), *blocks)
    return jax.device_get((found, jax.tree.leaves(blocks), jax.tree.leaves(gradients.embed)))


@pytest.mark.slow
def test_gradients_scanned_and_rematerialised_are_the_same():
    expected, found = gradient(), gradient(scan=True, remat=True, dropout=0.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
    assert all(np.any(leaf) for leaf in expected[1])  # including routers


@pytest.mark.parametrize(("name", "billions"), [("gpt-moe-2b", 1.9), ("gpt-moe-140b", 142), ("gpt-moe-1t", 1134)])
def test_sizes(name, billions):
    shapes = nnx.eval_shape(lambda: gpt_moe.GPTMoE(gpt_moe.PRESETS[name], rngs=nnx.Rngs(0)))
    assert gpt.num_params(shapes) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("axes", [("expert",), ("data", "expert", "tensor"), ("fsdp", "expert"), ("data",)])
def test_every_rule_matches(axes):
    shapes = nnx.eval_shape(lambda: gpt_moe.GPTMoE(SMALL, rngs=nnx.Rngs(0)))
    specs = layouts.gpt_moe(axes)(shapes)
    used = {axis for spec in jax.tree.leaves(specs) for axis in spec if isinstance(axis, str)}
    assert used == set(axes) - {"data"}


def test_layers_come_in_pairs():
    with pytest.raises(ValueError, match="layers=3 must be even"):
        dataclasses.replace(SMALL, layers=3)
    with pytest.raises(ValueError, match="heads=0"):
        dataclasses.replace(SMALL, heads=0)


def test_each_branch_of_a_layer_has_a_dropout_mask_of_its_own(monkeypatch):
    seen = []
    monkeypatch.setattr(gpt_moe, "dropout", lambda x, rate, key: seen.append((rate, key)) or x)
    layer = gpt_moe.Sparse(dataclasses.replace(SMALL, dropout=0.25), rngs=nnx.Rngs(0))
    x = jax.random.normal(KEY, (2, 8, 16))
    layer(x, KEY)
    (_, first), (_, second) = seen
    assert not (jax.random.key_data(first) == jax.random.key_data(second)).all()
    layer(x)
    assert [rate for rate, _ in seen] == [0.25] * 4 and seen[2][1] is None and seen[3][1] is None


def test_a_key_turns_dropout_on():
    model = gpt_moe.GPTMoE(dataclasses.replace(SMALL, dropout=0.5), rngs=nnx.Rngs(0))
    tokens = TOKENS[:, :-1]
    plain, again = model(tokens), model(tokens)
    found = [model(tokens, key) for key in jax.random.split(jax.random.key(1), 2)]
    np.testing.assert_array_equal(plain, again)
    assert all(float(jnp.abs(one - other).max()) > 1e-3 for one, other in [(plain, found[0]), (found[0], found[1])])
