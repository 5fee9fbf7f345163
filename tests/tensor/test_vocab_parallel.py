"""Vocab-parallel embedding lookups and logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, ShardingError, tensor
from sharding.cost import read_compiled
from sharding.tensor.vocab_parallel import mask_padding

BATCH, LENGTH, FEATURES = 4, 8, 16


def table(vocab):
    return jnp.asarray(np.random.default_rng(0).normal(size=(vocab, FEATURES)), jnp.float32)


def tokens(vocab):
    return jnp.asarray(np.random.default_rng(1).integers(0, vocab, (BATCH, LENGTH)), jnp.int32)


def squares(look_up):
    return lambda table, tokens: jnp.sum(jnp.square(look_up(table, tokens)))


@pytest.mark.parametrize("jit", [sharding.jit, jax.jit], ids=["sharding", "jax"])
def test_one_all_reduce_of_activations_and_no_all_gather(jit):
    vocab = 4096  # a table far larger than the rows looked up
    expected = jax.value_and_grad(squares(lambda table, tokens: table[tokens]))(table(vocab), tokens(vocab))
    with sharding.mesh(data=2, tensor=4) as mesh:
        args = sharding.put(table(vocab), P("tensor")), sharding.put(tokens(vocab), P("data"))
        step = jit(jax.value_and_grad(squares(tensor.embed)))
        facts = read_compiled(step.lower(*args).compile(), mesh=mesh)
        found = step(*args)
    over_tensor = [c for c in facts.collectives if "tensor" in c.axes and c.shape]
    assert [(c.kind, c.axes, c.shape) for c in over_tensor] == [
        ("all-reduce", ("tensor",), (BATCH // 2, LENGTH, FEATURES))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_indivisible_rows_are_padded():
    vocab = 13
    expected = jax.grad(squares(lambda table, tokens: table[tokens]))(table(vocab), tokens(vocab))
    with sharding.mesh(tensor=8):
        with pytest.warns(UserWarning, match="XLA pads it"):
            found = sharding.jit(jax.grad(squares(tensor.embed)))(table(vocab), tokens(vocab))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_logits_of_a_padded_vocabulary():
    with sharding.mesh(tensor=8):
        rows = tensor.padded_vocabulary(13)
        assert rows == 16
        x = jnp.asarray(np.random.default_rng(2).normal(size=(BATCH, LENGTH, FEATURES)), jnp.float32)
        run = sharding.jit(lambda x, table: tensor.logits(x, table, vocab=13))
        found = run(x, table(rows))
        assert found.sharding.spec[-1] == "tensor"
    np.testing.assert_allclose(found[..., :13], x @ table(rows)[:13].T, rtol=1e-5, atol=1e-5)
    assert np.all(np.isneginf(found[..., 13:]))


@pytest.mark.parametrize("dims", [(), (3,), (5,), (8,), (5, 3), (3, 5), (2, 8, 5)])
def test_only_rows_of_padding_are_masked(dims):
    """Whatever the other dims are, also if one is as long as the vocabulary."""
    z = jnp.asarray(np.random.default_rng(0).normal(size=(*dims, 8)), jnp.float32)
    for vocab in (None, *range(1, 9)):
        found = mask_padding("f(z)", z, vocab)
        kept = 8 if vocab is None else vocab
        np.testing.assert_array_equal(found[..., :kept], z[..., :kept])
        assert found.shape == z.shape and np.isneginf(found[..., kept:]).all()
    for vocab in (-1, 0, 9):
        with pytest.raises(ShardingError, match="vocab from 1 to 8"):
            mask_padding("f(z)", z, vocab)


def test_padded_vocabularies():
    with sharding.mesh(data=2, tensor=4):
        assert tensor.padded_vocabulary(50_257) == 50_260
        assert tensor.padded_vocabulary(50_257, multiple_of=128) == 50_688
        assert tensor.padded_vocabulary(64, axis="data") == 64
        with pytest.raises(ShardingError, match="both at least 1"):
            tensor.padded_vocabulary(0)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda t: tensor.embed(t, jnp.zeros(3)), "tokens of dtype float32[\\s\\S]*integers"),
        (lambda t: tensor.embed(t[0], jnp.zeros(3, jnp.int32)), r"table of shape \(16,\)[\s\S]*2 dims"),
        (lambda t: tensor.embed(t, jnp.zeros(3, jnp.int32), axis="model"), "a mesh axis 'model'"),
        (lambda t: tensor.logits(jnp.zeros((3, 8)), t), r"x \(3, 8\), table \(24, 16\)"),
        (lambda t: tensor.logits(jnp.zeros((3, 16)), t, vocab=25), r"vocab=25[\s\S]*from 1 to 24"),
    ],
)
def test_errors(call, match):
    with sharding.mesh(tensor=8), pytest.raises(ShardingError, match=match):
        call(table(24))
