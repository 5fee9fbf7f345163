"""What XLA:GPU computes in the kernels of scatters: what they add, and where."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import compiled_temporary_bytes, temporary_bytes

NODES, EDGES, FEATURES = 2**13, 2**16, 64
X, MESSAGES = (jax.ShapeDtypeStruct((n, FEATURES), jnp.float32) for n in (NODES, EDGES))
WEIGHT = jax.ShapeDtypeStruct((FEATURES, FEATURES), jnp.float32)
INDEX = jax.ShapeDtypeStruct((EDGES,), jnp.int32)
NODE_BYTES, EDGE_BYTES = 4 * NODES * FEATURES, 4 * EDGES * FEATURES


def summed(messages, receivers):
    return jax.ops.segment_sum(messages, receivers, NODES)


def two_layers(x, senders, receivers):
    return summed(jnp.tanh(summed(x[senders], receivers))[senders], receivers)


def three_layers(x, senders, receivers):
    """The zeros that each sum starts from are its own."""
    for _ in range(3):
        x = summed(jnp.tanh(x)[senders], receivers)
    return x


def softmax_weighted(x, senders, receivers):
    scores = x[senders].sum(1)
    most = jax.ops.segment_max(scores, receivers, NODES)
    return summed(x[senders] * jnp.exp(scores - most[receivers])[:, None], receivers)


PROGRAMS = {
    "stored messages": (summed, (MESSAGES, INDEX), 0),
    "an op on each": (lambda m, to: summed(jnp.exp(m), to), (MESSAGES, INDEX), 0),
    "gathered": (lambda x, src, to: summed(x[src], to), (X, INDEX, INDEX), 0),
    "both ends": (lambda x, src, to: summed(x[src] * x[to], to), (X, INDEX, INDEX), 0),
    "two layers": (two_layers, (X, INDEX, INDEX), NODE_BYTES),
    "three layers": (three_layers, (X, INDEX, INDEX), NODE_BYTES),
    "gathered for two": (
        lambda x, src, to: (summed(x[src], to), summed(2 * x[src], src)),
        (X, INDEX, INDEX),
        0,
    ),
    "weighted by a softmax": (softmax_weighted, (X, INDEX, INDEX), 4 * EDGES),
    "products are stored": (lambda m, to, w: summed(m @ w, to), (MESSAGES, INDEX, WEIGHT), EDGE_BYTES),
}
"""A program, its arguments, and its temporary bytes."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_scatter_computes_what_it_adds(name):
    f, args, num_bytes = PROGRAMS[name]
    assert temporary_bytes(f, args, "gpu") == pytest.approx(num_bytes, abs=EDGES * 8)


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_h100_does_so(name):
    f, args, num_bytes = PROGRAMS[name]
    assert compiled_temporary_bytes(f, args, "h100:1x8") == pytest.approx(num_bytes, abs=EDGES * 8)
