"""Indices that count along a batch dim become batch dims: the same numbers, and nothing moves for a sharded batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P
from sharding.jit.constant_folding import fold_constants

BATCH, ROWS, CLASSES = 8, 4, 16
X = np.random.default_rng(0).normal(size=(BATCH, ROWS, CLASSES)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(-CLASSES, CLASSES, size=(BATCH, ROWS)).astype(np.int32)
EACH = jnp.arange


def of_each(x, labels):
    return x[EACH(BATCH)[:, None], EACH(ROWS)[None], labels]


def written(mode, x, labels):
    at = jnp.zeros_like(x).at[EACH(BATCH)[:, None], EACH(ROWS), labels]
    return getattr(at, mode)(x[:, :, 0], unique_indices=mode == "set")


def in_a_loop(x, labels):
    def body(total, row):
        values, chosen = row
        picked = jnp.sin(values)[EACH(BATCH), chosen]
        return total + picked, picked

    return jax.lax.scan(body, jnp.zeros(BATCH), (x.swapaxes(0, 1), labels.T))[0]


def gradient(f):
    return lambda x, labels: jax.grad(lambda x: jnp.sum(jnp.sin(f(x, labels))))(x)


PROGRAMS = {
    "both dims": of_each,
    "one dim": lambda x, labels: x[EACH(BATCH), labels[:, 0]],
    "behind the other": lambda x, labels: x.swapaxes(0, 2)[labels[:, 0], 0, EACH(BATCH)],
    "an array of NumPy": lambda x, labels: x[np.arange(BATCH), 0, labels[:, 0]],
    "out of bounds, filled": lambda x, labels: x.at[EACH(BATCH), 0, 2 * labels[:, 0]].get(mode="fill", fill_value=7),
    "out of bounds, clipped": lambda x, labels: x.at[EACH(BATCH), 0, 2 * labels[:, 0]].get(mode="clip"),
    "set": lambda x, labels: written("set", x, labels),
    "add": lambda x, labels: written("add", x, labels),
    "max": lambda x, labels: written("max", x, labels),
    "cache": lambda x, labels: x.at[EACH(BATCH), labels[:, 0] % ROWS].set(x[:, 0] * 2),
    "in a loop": in_a_loop,
}
WIDE = jnp.arange(6 * 5 * BATCH * 7, dtype=jnp.float32).reshape(6, 5, BATCH, 7)
COLUMNS = {
    "the outer indices": lambda x, labels: WIDE.at[labels[:, 0] % 6, :, EACH(BATCH), labels[:, 1] % 7].max(9.0),
    "the last indices": lambda x, labels: WIDE[:, 2].swapaxes(0, 1)[EACH(BATCH), labels[:, 0] % 6, labels[:, 1] % 7],
}
"""Programs whose other columns of indices lie in equal steps."""
PROGRAMS |= COLUMNS
PROGRAMS |= {f"gradient, {name}": gradient(f) for name, f in PROGRAMS.items()}
PROGRAMS["checkpoint"] = gradient(jax.checkpoint(of_each))
PROGRAMS["gradient of a checkpoint in a loop"] = gradient(jax.checkpoint(in_a_loop))
OTHERS = {
    "part of the dim": lambda x, labels: x[EACH(BATCH // 2), labels[: BATCH // 2, 0] % ROWS],
    "other indices in unequal steps": lambda x, labels: WIDE[
        labels[:, 0] % 6, labels[:, 1] % 5, EACH(BATCH), labels[:, 2] % 7
    ],
    "shifted": lambda x, labels: x[EACH(BATCH) - 1, labels[:, 0] % ROWS],
    "backwards": lambda x, labels: x[EACH(BATCH)[::-1], labels[:, 0] % ROWS],
    "windows": lambda x, labels: jax.vmap(
        lambda i, k: jax.lax.dynamic_slice(jnp.asarray(x), (i, k, 0), (2, 1, 1)), (0, 0)
    )(EACH(BATCH), labels[:, 0]),
}


def batch_dims(jaxpr):
    """For each gather and scatter, whether it has batch dims."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if (numbers := eqn.params.get("dimension_numbers")) is not None and hasattr(numbers, "operand_batching_dims"):
            yield bool(numbers.operand_batching_dims)
        for p in eqn.params.values():
            for body in p if isinstance(p, tuple) else (p,):
                if hasattr(body, "eqns"):
                    yield from batch_dims(body)


@pytest.mark.parametrize("name", PROGRAMS | OTHERS)
def test_the_same_numbers(name):
    f = (PROGRAMS | OTHERS)[name]
    with sharding.mesh({"data": 8}):
        ours = sharding.jit(f, in_shardings=(P("data"), P("data")))
        np.testing.assert_allclose(ours(X, LABELS), jax.jit(f)(X, LABELS), rtol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_batches_are_found(name):
    found = [*batch_dims(fold_constants(jax.make_jaxpr(PROGRAMS[name])(X, LABELS)))]
    assert found
    assert all(found)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    jaxpr = jax.make_jaxpr(OTHERS[name])(X, LABELS)
    assert not any(batch_dims(fold_constants(jaxpr)))


def cross_entropy(w, x, labels):
    def loss(w):
        return -jax.nn.log_softmax(x @ w)[jnp.arange(x.shape[0]), labels].mean()

    return jax.value_and_grad(loss)(w)


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_a_loss_sends_its_sums(backend, described):
    args = (
        jax.ShapeDtypeStruct((512, 8192), "float32"),
        jax.ShapeDtypeStruct((4096, 512), "float32"),
        jax.ShapeDtypeStruct((4096,), "int32"),
    )
    specs = (P(None, "model"), P("data"), P("data"))
    predicted, compiled = predicted_and_compiled(
        cross_entropy, args, backend, described, {"data": 2, "model": 4}, in_shardings=specs
    )
    assert predicted == compiled
    assert {str(kind) for kind in compiled} == {"all-reduce"}
