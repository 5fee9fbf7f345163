"""What transformers have in common: presets that fit, and the loss."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharding.models import bert, gpt, gpt_moe, remat_policy, transformer, transformer_layers, vit

FAMILIES = ((gpt, gpt.GPT), (bert, bert.BERT), (vit, vit.ViT), (gpt_moe, gpt_moe.GPTMoE))
PRESETS = {name: (config, model) for family, model in FAMILIES for name, config in family.PRESETS.items()}


@pytest.mark.parametrize("name", PRESETS)
def test_large_presets_are_scanned_and_recomputed_and_tiny_ones_exact(name):
    config, model = PRESETS[name]
    params = gpt.num_params(jax.eval_shape(lambda: model(config, rngs=nnx.Rngs(0))))
    assert config.scan == config.remat == (params > 2e8)
    assert config.dtype == ("float32" if params < 2e7 else "bfloat16")
    assert config.features % config.heads == config.heads % config.kv_heads == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_losses_are_minus_the_log_of_the_targets_probability(dtype):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)) * 4, dtype)
    targets = jnp.asarray([[0, 4, 2], [1, 1, 3]])
    found = transformer.losses(logits, targets)
    expected = [[-jax.nn.log_softmax(row.astype(jnp.float32))[t] for row, t in zip(*one, strict=True)]
                for one in zip(logits, targets, strict=True)]  # fmt: skip
    assert found.shape == (2, 3) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.asarray(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(transformer.loss(logits, targets), found.mean(), rtol=1e-6)


@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_layers_in_groups_give_what_they_give_one_by_one(num_calls):
    """The last call of each group is another one, as where not all layers are rematerialised."""

    def call(carry, layer):
        return jnp.sin(carry) @ layer, carry[:, None] * layer[0, 0]

    carry, layers = jnp.ones((3, 4)), jax.random.normal(jax.random.key(0), (6, 4, 4))
    found, outputs = remat_policy.scan_layers([call] * (num_calls - 1) + [jax.checkpoint(call)], carry, layers)
    expected, each = carry, []
    for layer in layers:
        expected, output = call(expected, layer)
        each.append(output)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs, jnp.stack(each), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate, kept", [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0)])
def test_dropout_keeps_a_share_and_the_mean(rate, kept):
    x = jnp.full((64, 64), 3.0)
    found = transformer_layers.dropout(x, rate, jax.random.key(0))
    assert abs(jnp.mean(found != 0) - kept) < 0.03
    np.testing.assert_allclose(found[found != 0], 3 / max(kept, 1e-9), rtol=1e-6)
    assert transformer_layers.dropout(x, rate, None) is x
    if rate == 0:
        assert transformer_layers.dropout(x, rate, jax.random.key(0)) is x


def test_large_logits_do_not_overflow():
    logits = jnp.asarray([[1e4, -1e4, 0.0]])
    np.testing.assert_allclose(transformer.losses(logits, jnp.asarray([0])), [0.0], atol=1e-6)
    np.testing.assert_allclose(transformer.losses(logits, jnp.asarray([1])), [2e4], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"features": 6, "heads": 2}, ["features / heads = 3 must be even for rotary positions"]),
        ({"features": 6, "heads": 2, "positions": "learned"}, []),
        ({"features": 10, "heads": 4}, ["features=10 must be a multiple of heads=4"]),
        ({"kv_heads": 3}, ["heads=4 must be a multiple of kv_heads=3"]),
        ({"dropout": 1.0}, ["dropout=1.0 must be at least 0 and less than 1"]),
        ({"dropout": 0.5, "layers": 0}, ["layers=0 must be at least 1"]),
        ({"scan": True, "layers": 3, "remat": ("full", "none")}, ["layers=3 must be a multiple of the 2 policies"]),
        ({"scan": True, "layers": 4, "remat": ("full", "none")}, []),
    ],
)
def test_faults_of_a_config(changes, faults):
    given = dict.fromkeys(("features", "layers"), 16) | {"heads": 4, "kv_heads": 2, "positions": "rotary"}
    given |= {"dtype": "float32", "kernels": "auto", "dropout": 0.0, "remat": False, "scan": False} | changes
    config = SimpleNamespace(**{**given, "kv_heads": given["kv_heads"] if given["heads"] > 2 else 1})
    config.head_features = config.features // config.heads
    found = transformer.config_errors(config, ("features", "layers"))
    assert len(found) == len(faults) and all(map(str.startswith, found, faults))


@pytest.mark.parametrize("layers", [1, 8])
def test_branches_leave_the_variance_of_the_stream_to_the_depth(layers):
    """Two branches per layer add to it, each of inputs of variance one, 1 / (2 x layers)."""
    config = gpt.Config(vocab=8, context=8, layers=layers, features=128, heads=4, kv_heads=4, mlp_features=512)
    attention = transformer_layers.Attention(config, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(128 * np.var(attention.out[...]), 1 / (2 * layers), rtol=0.05)
    np.testing.assert_allclose(128 * np.var(attention.qkv[...]), 1, rtol=0.05)
