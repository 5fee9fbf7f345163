"""Vocab-parallel cross entropy equals the dense loss and communicates a few numbers per position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, ShardingError, tensor
from sharding.cost import read_compiled

BATCH, LENGTH, VOCAB = 4, 8, 64
MESHES = {
    "data": ({"data": 2, "tensor": 4}, P("data")),
    "length": ({"data": 2, "seq": 2, "tensor": 2}, P("data", "seq")),
    "one": ({"tensor": 1}, P()),
    "two": ({"tensor": 2}, P()),
    "eight": ({"tensor": 8}, P()),
}


def logits(vocab=VOCAB, dtype=jnp.float32):
    # Some are so large that exp overflows.
    return jnp.asarray(30 * np.random.default_rng(0).normal(size=(BATCH, LENGTH, vocab)), dtype)


def targets(vocab=VOCAB):
    return jnp.asarray(np.random.default_rng(1).integers(0, vocab, (BATCH, LENGTH)), jnp.int32)


def dense(logits, targets, weights=None, z_loss=0.0):
    z = logits.astype(jnp.float32)
    log_sum = jax.nn.logsumexp(z, axis=-1)
    each = log_sum - jnp.take_along_axis(z, targets[..., None], axis=-1)[..., 0] + z_loss * log_sum**2
    return jnp.mean(each) if weights is None else jnp.sum(each * weights) / jnp.sum(weights)


def check(found, expected, rtol=1e-5):
    for a, b in zip(*map(jax.device_get, (found, expected)), strict=True):
        assert np.linalg.norm(np.float32(a) - np.float32(b)) <= rtol * np.linalg.norm(np.float32(b))


@pytest.mark.parametrize("jit", [sharding.jit, jax.jit], ids=["sharding", "jax"])
@pytest.mark.parametrize(
    "layout", ["data", "length", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one", "two", "eight"))]
)
def test_equal_to_the_dense_loss(layout, jit):
    sizes, spec = MESHES[layout]
    expected = jax.value_and_grad(dense)(logits(), targets())
    with sharding.mesh(sizes, devices=jax.devices()[: np.prod([*sizes.values()])]) as mesh:
        args = sharding.put(logits(), P(*spec, *[None] * (2 - len(spec)), "tensor")), sharding.put(targets(), spec)
        step = jit(jax.value_and_grad(tensor.cross_entropy))
        facts = read_compiled(step.lower(*args).compile(), mesh=mesh)
        found = step(*args)
    assert found[1].addressable_shards[0].data.shape[-1] == VOCAB // sizes["tensor"]
    check(found, expected)
    local = BATCH * LENGTH / np.prod([size for name, size in sizes.items() if name != "tensor"])
    if sizes["tensor"] > 1:
        assert sum(c.result_bytes == 4 * local and c.axes == ("tensor",) for c in facts.collectives) == 3
    assert all(c.result_bytes <= 4 * local for c in facts.collectives)


def test_predicted_collectives_are_the_compiled_ones():
    with sharding.mesh(data=2, tensor=4) as mesh:
        step = sharding.jit(jax.value_and_grad(tensor.cross_entropy), in_shardings=(P("data"), P("data")))
        ledger = step.complete(logits(), targets()).communication()
        facts = read_compiled(step.lower(logits(), targets()).compile(), mesh=mesh)
    assert ledger.lowered("cpu").by_kind() == facts.by_kind()
    assert [c.axes for c in ledger if c.bytes > 4 * BATCH * LENGTH] == []


def test_ignored_targets_and_a_z_loss():
    weights = jnp.asarray(np.random.default_rng(2).integers(0, 2, (BATCH, LENGTH)), jnp.float32)
    expected = jax.value_and_grad(dense)(logits(), targets(), weights, 1e-3)
    ignored = jnp.where(weights > 0, targets(), -100)
    with sharding.mesh(data=2, tensor=4):
        run = jax.value_and_grad(lambda z, t, w: tensor.cross_entropy(z, t, weights=w, z_loss=1e-3))
        check(sharding.jit(run)(logits(), ignored, weights), expected)
        nothing = sharding.jit(run)(logits(), ignored, jnp.zeros_like(weights))
    assert nothing[0] == 0
    assert not np.any(nothing[1])


def test_per_target_losses():
    with sharding.mesh(tensor=8):
        found = sharding.jit(tensor.losses)(logits()[0], targets()[0])
    assert found.shape == (LENGTH,)
    np.testing.assert_allclose(found.mean(), dense(logits()[0], targets()[0]), rtol=1e-5)


def test_bfloat16_logits_accumulate_in_float32():
    z = logits(dtype=jnp.bfloat16)
    with sharding.mesh(tensor=8):
        found = sharding.jit(jax.value_and_grad(tensor.cross_entropy))(z, targets())
    assert (found[0].dtype, found[1].dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(found[0], dense(z, targets()), rtol=1e-5)


def test_padded_vocabularies():
    """The loss over a padded vocabulary equals that over the true vocabulary."""
    vocab = 61
    expected = jax.value_and_grad(dense)(logits(VOCAB)[..., :vocab], targets(vocab))
    with sharding.mesh(tensor=8):
        run = sharding.jit(jax.value_and_grad(lambda z, t: tensor.cross_entropy(z, t, vocab=vocab)))
        value, gradient = run(logits(VOCAB), targets(vocab))
        with pytest.warns(UserWarning, match="XLA pads it"):
            odd = sharding.jit(jax.value_and_grad(tensor.cross_entropy))(logits(VOCAB)[..., :vocab], targets(vocab))
    check((value, gradient[..., :vocab]), expected)
    assert not np.any(gradient[..., vocab:])
    check(odd, expected)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda z, t: tensor.cross_entropy(z, t, axis="model"), r"tensor\.losses[\s\S]*a mesh axis 'model'"),
        (lambda z, t: tensor.cross_entropy(z, t[0]), r"logits \(4, 8, 64\), targets \(8,\)"),
        (lambda z, t: tensor.cross_entropy(z, z[..., 0]), "targets of dtype float32"),
        (lambda z, t: tensor.cross_entropy(t, t[..., 0]), "logits of dtype int32"),
        (lambda z, t: tensor.cross_entropy(z, t, weights=jnp.ones(8)), r"weights \(8,\)"),
        (lambda z, t: tensor.cross_entropy(z, t, vocab=65), "vocab=65"),
    ],
)
def test_errors(call, match):
    with sharding.mesh(tensor=8), pytest.raises(ShardingError, match=match):
        call(logits(), targets())
