"""BERT attends in both directions, predicts at the masked positions only, and its variants agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharding.models import bert, gpt, transformer_layers

SMALL = bert.Config(vocab=32, context=12, layers=2, features=16, heads=4, mlp_features=32)


@functools.partial(jax.jit, static_argnums=0)
def _init(config):
    return bert.BERT(config, rngs=nnx.Rngs(0))


def _model(**changes):
    return _init(dataclasses.replace(SMALL, **changes))


def _batch():
    tokens, targets = jax.random.randint(jax.random.key(7), (2, 3, 12), 0, SMALL.vocab)
    return bert.Masked(tokens, jnp.array([[0, 5], [3, 11], [7, 8]]), targets[:, :2])


@jax.jit
def _logits(model, batch):
    return model(batch.tokens, batch.positions)


@jax.jit
def _value_and_grad(model, key=None):
    return jax.value_and_grad(bert.masked_loss)(model, _batch(), key)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"order": "pre"}, marks=pytest.mark.slow),
        {"dtype": "bfloat16", "scan": True},
    ],
)
def test_shapes(changes):
    model = _model(**changes)
    logits = _logits(model, _batch())
    assert logits.shape == (3, 2, 32)
    assert logits.dtype == model.config.dtype
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    assert jnp.isfinite(logits).all()


def test_which_end_of_the_stream_has_a_norm():
    assert _model().final_norm is None and _model().embed_norm is not None
    assert _model(order="pre").embed_norm is None and _model(order="pre").final_norm is not None


# Published: 110 and 340 million, with segment embeddings and the next-sentence layer, which are omitted here.
@pytest.mark.parametrize("name, params", [("bert-tiny", 0.86e6), ("bert-base", 110e6), ("bert-large", 336e6)])
def test_preset_sizes(name, params):
    model = jax.eval_shape(lambda: bert.BERT(bert.PRESETS[name], rngs=nnx.Rngs(0)))
    assert gpt.num_params(model) == pytest.approx(params, rel=0.01)


def test_axis_sizes_divide_the_vocabulary_of_each_preset():
    assert not any(config.vocab % 32 for config in bert.PRESETS.values())


def test_every_position_attends_to_every_other():
    model, tokens = _model(), _batch().tokens
    before = model.encode(tokens)
    for place in (0, 6, 11):
        after = model.encode(tokens.at[:, place].set((tokens[:, place] + 1) % SMALL.vocab))
        assert (jnp.abs(before - after).max(axis=(0, 2)) > 0).all()


def _norm(x, norm):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * norm.scale[...] + norm.bias[...]


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _block(x_SM, block, order):
    """One layer of one sequence, head by head."""
    qkv, qkv_bias, out = block.attention.qkv[...], block.attention.qkv_bias[...], block.attention.out[...]

    def attention(x):
        total = np.zeros_like(x) + block.attention.out_bias[...]
        for head in range(qkv.shape[1]):
            q, k, v = (x @ qkv[:, head, n] + qkv_bias[head, n] for n in range(3))
            weight = np.exp(q @ k.T / np.sqrt(q.shape[1]))
            total = total + weight / weight.sum(axis=1, keepdims=True) @ v @ out[head]
        return total

    def mlp(x):
        hidden = _gelu(x @ block.mlp.w1[...] + block.mlp.bias1[...])
        return hidden @ block.mlp.w2[...] + block.mlp.bias2[...]

    if order == "post":
        x_SM = _norm(x_SM + attention(x_SM), block.norm1)
        return _norm(x_SM + mlp(x_SM), block.norm2)
    x_SM = x_SM + attention(_norm(x_SM, block.norm1))
    return x_SM + mlp(_norm(x_SM, block.norm2))


@pytest.mark.parametrize("order", ["pre", "post"])
def test_equals_a_numpy_reference(order):
    # Biases and scales start at zero and one; perturb them, so that omitting one changes the result.
    model = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), _model(order=order))
    batch = _batch()
    logits = _logits(model, batch)
    model = jax.tree.map(lambda x: np.asarray(x, np.float64), model)
    for row in range(3):
        x = model.embed.table[...][batch.tokens[row]] + model.embed.positions[...]
        x = _norm(x, model.embed_norm) if order == "post" else x
        for block in model.blocks:
            x = _block(x, block, order)
        x = _norm(x, model.final_norm) if order == "pre" else x
        hidden = _gelu(x @ model.output.w[...] + model.output.bias[...])
        every = _norm(hidden, model.output.norm) @ model.embed.table[...].T + model.logit_bias[...]
        np.testing.assert_allclose(logits[row], every[batch.positions[row]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"scan": True}, marks=pytest.mark.slow),
        pytest.param({"remat": True}, marks=pytest.mark.slow),
        pytest.param({"scan": True, "remat": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_forms_agree(changes):
    key = jax.random.key(3)
    value, grads = _value_and_grad(_model(dropout=0.2), key)
    other, other_grads = _value_and_grad(_model(dropout=0.2, **changes), key)
    np.testing.assert_allclose(value, other, rtol=1e-6)
    norms = [jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))) for tree in (grads, other_grads)]
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_dropout_depends_on_the_key():
    model = _model(dropout=0.5)
    loss = jax.jit(bert.masked_loss)
    values = [float(loss(model, _batch(), key)) for key in (None, jax.random.key(1), jax.random.key(1))]
    assert values[1] == values[2] != values[0]
    assert values[0] == float(loss(_model(), _batch()))


def test_branches_can_be_replaced():
    causal = functools.partial(transformer_layers.Attention, attend=transformer_layers.causal_attention)
    model = bert.BERT(SMALL, rngs=nnx.Rngs(0), attention=causal)
    tokens = _batch().tokens
    before, after = model.encode(tokens), model.encode(tokens.at[:, 11].set(0))
    np.testing.assert_array_equal(before[:, :11], after[:, :11])


def test_a_sequence_beyond_the_context_is_an_error():
    with pytest.raises(ValueError, match="13 tokens in a sequence exceed the context of 12"):
        _model().encode(jnp.zeros((1, 13), int))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"heads": 5}, "features=16 must be a multiple of heads=5"),
        ({"order": "middle", "dtype": "float16"}, "dtype='float16' must be .*; order='middle' must be"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
