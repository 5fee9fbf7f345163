"""Which operands XLA:GPU transposes for a matrix product, on programs whose compiled memory is known."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import compiled_temporary_bytes

import sharding
from sharding.memory.usage import usage

B, S, N, D, T, G = 4, 512, 8, 128, 256, 3
"""Batch, keys, heads, features, queries, and queries per head."""


def arrays(*shapes):
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)


QUERIES, KEYS, GROUPED = arrays((B, T, N, D), (B, S, N, D), (B, N, G, D))
NEW, PLACE = jax.ShapeDtypeStruct((B, 1, N, D), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)
QUERY_BYTES, KEY_BYTES = (2 * x.size for x in (QUERIES, KEYS))
LAYERS = 4
INPUT, WEIGHT = arrays((B, S, 1024), (1024, N * D))


def scores(q, k):
    return jnp.einsum("btnd,bsnd->bnts", q, k)


def projected(x, w, v):
    return scores(*((x @ y).reshape(B, S, N, D) for y in (w, v)))


def scanned(q, stack):
    return jax.lax.scan(lambda total, k: (total + scores(q, k).sum(), None), jnp.bfloat16(0), stack)[0]


def looped_twice(q, stack):
    return jax.lax.scan(lambda total, ks: (total + scanned(q, ks), None), jnp.bfloat16(0), stack)[0]


def branched(q, k, which):
    return jax.lax.cond(which > 0, scores, lambda q, k: 2 * scores(q, k), q, k)


def decoded_layers(caches, q, new, place):
    found = []
    for cache in caches:
        cache = jax.lax.dynamic_update_slice(cache, new, (0, place, 0, 0))
        weights = jax.nn.softmax(jnp.einsum("bngd,bsnd->bngs", q, cache))
        q = jnp.einsum("bngs,bsnd->bngd", weights, cache)
        found.append(cache)
    return found, q


def summed(cache, q, new, place):
    cache = jax.lax.dynamic_update_slice(cache, new, (0, place, 0, 0))
    return cache.sum(), jnp.einsum("bngd,bsnd->bngs", q, cache)


RESULT_BYTES = 2 * B * N * T * S
PROGRAMS = {
    "both": (scores, (QUERIES, KEYS), QUERY_BYTES + KEY_BYTES),
    "one of them leads": (lambda q, k: jnp.einsum("bntd,bsnd->bnts", q, k), (arrays((B, N, T, D))[0], KEYS), KEY_BYTES),
    "batch dims side by side": (
        lambda q, k: jnp.einsum("bntd,sbnd->bnts", q, k), arrays((B, N, T, D), (S, B, N, D)), 0,
    ),
    "side by side, in another order": (
        lambda q, k: jnp.einsum("nbtd,bnsd->bnts", q, k), arrays((N, B, T, D), (B, N, S, D)), 0,
    ),
    "one head": (lambda q, k: jnp.einsum("bngd,bsnd->bngs", q, k), arrays((B, 1, G, D), (B, S, 1, D)), 0),
    "one query is a sum": (lambda q, k: jnp.einsum("bnd,bsnd->bns", q, k), arrays((B, N, D), (B, S, N, D)), 0),
    "converted": (
        lambda q, k: scores(q.astype("bfloat16"), k.astype("bfloat16")),
        (jax.ShapeDtypeStruct((B, T, N, D), jnp.float32), jax.ShapeDtypeStruct((B, S, N, D), jnp.float32)),
        QUERY_BYTES + KEY_BYTES,
    ),
    "slice": (lambda q, k: scores(q, k[:B]), (QUERIES, *arrays((2 * B, S, N, D))), QUERY_BYTES + KEY_BYTES),
    "products write any layout": (projected, (INPUT, WEIGHT, WEIGHT), 2 * KEY_BYTES),
    "stack of a loop": (
        scanned, (QUERIES, *arrays((8, B, S, N, D))), QUERY_BYTES + (8 + 1) * KEY_BYTES + RESULT_BYTES,
    ),
    "loop in a loop": (
        looped_twice, (QUERIES, *arrays((2, 4, B, S, N, D))), QUERY_BYTES + (8 + 4 + 1) * KEY_BYTES + RESULT_BYTES,
    ),
    "branches": (branched, (QUERIES, KEYS, PLACE), QUERY_BYTES + KEY_BYTES),
    "cache that is no result": (summed, (KEYS, GROUPED, NEW, PLACE), KEY_BYTES),
}  # fmt: skip
"""A program, its arguments, and its temporary bytes but small arrays."""


def predicted(f, args, donated=()):
    with sharding.mesh({"data": 1}, devices=jax.devices()[:1]):
        assignment = sharding.jit(f).complete(*args).assignment
    return usage(assignment, donated, platform="gpu")


@pytest.mark.parametrize("name", PROGRAMS)
def test_arguments_whose_batch_dims_lie_apart_are_copied(name):
    f, args, num_bytes = PROGRAMS[name]
    assert predicted(f, args).temporary_bytes == pytest.approx(num_bytes, rel=0.02, abs=KEY_BYTES // 20)


def test_a_donated_cache_is_copied_before_its_update_and_back():
    args = [KEYS] * LAYERS, GROUPED, NEW, PLACE
    found = predicted(decoded_layers, args, range(LAYERS)).temporary_bytes
    assert LAYERS * KEY_BYTES <= found <= (LAYERS + 0.1) * KEY_BYTES


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_h100_copies_as_much(name):
    f, args, _ = PROGRAMS[name]
    assert predicted(f, args).temporary_bytes == pytest.approx(
        compiled_temporary_bytes(f, args, "h100:1x8"), rel=0.02, abs=KEY_BYTES // 20
    )


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
def test_the_compiler_for_h100_copies_donated_caches_as_much():
    args = [KEYS] * LAYERS, GROUPED, NEW, PLACE
    found = predicted(decoded_layers, args, range(LAYERS)).temporary_bytes
    assert found == pytest.approx(
        compiled_temporary_bytes(decoded_layers, args, "h100:1x8", donate_argnums=0), rel=0.02
    )
