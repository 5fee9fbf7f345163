"""Cross entropy of integer labels of logits in 16 bits: XLA:TPU gathers the labels' from an array in 32 bits."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries


def arguments(tokens, features, vocabulary, dtype, *, tied=False):
    weights = (vocabulary, features) if tied else (features, vocabulary)
    shapes = (tokens, features), weights
    return *(jax.ShapeDtypeStruct(s, dtype) for s in shapes), jax.ShapeDtypeStruct((tokens,), "int32")


def labels_of(x, w, labels):
    logits = (x @ w).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def tied(x, table, labels):
    return labels_of(x, table.T, labels)


def one_hot(x, w, labels):
    logits = (x @ w).astype(jnp.float32)
    return -(jax.nn.one_hot(labels, w.shape[1]) * jax.nn.log_softmax(logits)).sum(-1).mean()


SIZES = (4096, 1024, 8192)
FEW = (2048, 512, 32000)
LOSSES = {
    "16 bits": (labels_of, arguments(*SIZES, "bfloat16"), 1.5),
    "16 bits, a large vocabulary": (labels_of, arguments(*FEW, "bfloat16"), 1.5),
    "16 bits, tied": (tied, arguments(*SIZES, "bfloat16", tied=True), 1.5),
    "16 bits, one-hot labels": (one_hot, arguments(*SIZES, "bfloat16"), 1),
    "32 bits": (labels_of, arguments(*SIZES, "float32"), 1),
}
"""A loss, its arguments, and how many float32 arrays of logits its value and gradient store."""


def program(name):
    loss, args, count = LOSSES[name]
    return jax.value_and_grad(loss, argnums=(0, 1)), args, count


def whole(name):
    x, w, _ = LOSSES[name][1]
    return 4 * x.shape[0] * w.size // x.shape[1]


@pytest.mark.parametrize("name", LOSSES)
def test_logits_are_stored_as_each_reader_takes_them(name):
    check_temporaries(program(name), whole(name))


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", LOSSES)
def test_the_compiler_for_tpus_stores_as_many(name):
    check_compiled_temporaries(program(name), whole(name))
