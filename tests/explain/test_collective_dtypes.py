"""The dtypes in which XLA:TPU moves and sums what is only read in bfloat16, and the calls that it inlines."""

import jax
import jax.numpy as jnp
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P

SIZES = {"data": 2, "model": 4}


def floats(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def low_rank(spec):
    """A product of low rank, whose inner sum has a spec."""

    def program(x, a, b):
        return sharding.annotate(jnp.einsum("bsm,mr->bsr", x, a), spec) @ b

    return program


def largest(x):
    wide = x.astype(jnp.float32)
    return jnp.exp(wide - wide.max(-1, keepdims=True))


def smallest(x):
    return x.astype(jnp.float32).min(-1)


def of_scaled(x):
    return (x.astype(jnp.float32) * 2).max(-1)


def sums_of_sums(x):
    """A bias gradient that sums the batch, rounds, and sums the rest."""
    return jax.lax.reduce_sum(x.astype(jnp.float32).sum(0).astype(jnp.bfloat16), (1, 2))


def in_calls(x, w):
    @jax.jit
    def call(x, w):
        return sharding.annotate(x @ w, P("data"))

    x = jnp.exp(x)
    return call(x, w), sharding.annotate(jnp.tanh(x @ w), P("data"))


def convolved(x, w):
    return jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def sliced(x, w):
    y = jnp.sin(x)[:, 3:67]
    return y @ w


def sliced_and_kept(x, w):
    y = jnp.sin(x)[:, 3:67]
    return y @ w, y


LOW_RANK = floats(16, 256, 2048), floats(2048, 64), floats(64, 512)
SPECS = P(None, None, "data"), P("data"), P()
PROGRAMS = {
    "scattered": (low_rank(P("data")), LOW_RANK, SPECS, SIZES, {"reduce-scatter": (1, 16 * 256 * 64 * 4)}),
    "reduced": (low_rank(P()), LOW_RANK, SPECS, SIZES, {"all-reduce": (1, 16 * 256 * 64 * 2)}),
    "over the slice": (low_rank(P("data")), LOW_RANK, SPECS, {"data": 8}, {"all-reduce": (1, 16 * 256 * 64 * 2)}),
    "a maximum": (largest, [floats(64, 256, dtype="bfloat16")], P(None, "model"), SIZES, {"all-reduce": (1, 128)}),
    "a minimum": (smallest, [floats(64, 256, dtype="bfloat16")], P(None, "model"), SIZES, {"all-reduce": (1, 256)}),
    "scaled": (of_scaled, [floats(64, 256, dtype="bfloat16")], P(None, "model"), SIZES, {"all-reduce": (1, 256)}),
    "sums": (sums_of_sums, [floats(16, 128, 32, 32, dtype="bfloat16")], P("data"), SIZES, {"all-reduce": (1, 256)}),
    "sums of wide terms": (
        sums_of_sums,
        [floats(16, 128, 32, 32)],
        P("data"),
        SIZES,
        {"all-reduce": (1, 128 * 32 * 32 * 2)},
    ),
    "halos": (
        convolved,
        (floats(16, 256, 128), floats(5, 128, 128)),
        (P(None, "data"), P()),
        SIZES,
        {"collective-permute": (2, 2 * 16 * 2 * 128 * 2)},
    ),
    "a slice": (
        sliced,
        (floats(256, 128), floats(64, 128)),
        (P(None, "data"), P()),
        SIZES,
        {"all-gather": (1, 256 * 64 * 2), "collective-permute": (1, 256 * 29 * 2)},
    ),
    "a slice, kept": (
        sliced_and_kept,
        (floats(256, 128), floats(64, 128)),
        (P(None, "data"), P()),
        SIZES,
        {"all-gather": (1, 256 * 64 * 2), "collective-permute": (1, 256 * 29 * 4)},
    ),
    "calls": (
        in_calls,
        (floats(64, 128, 512), floats(512, 512)),
        (P(None, None, "data"), P()),
        SIZES,
        {"all-to-all": (1, 64 // 2 * 128 * 512 * 2)},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_dtypes_on_tpu(name):
    f, args, specs, sizes, expected = PROGRAMS[name]
    with sharding.mesh(sizes):
        ledger = sharding.jit(f, in_shardings=specs).complete(*args).communication()
    assert ledger.lowered("tpu").by_kind() == expected


@pytest.mark.parametrize(("backend", "described"), [COMPILERS["tpu"]])
@pytest.mark.parametrize("name", PROGRAMS)
def test_dtypes_as_compiled(name, backend, described):
    f, args, specs, sizes, _ = PROGRAMS[name]
    predicted, compiled = predicted_and_compiled(f, args, backend, described, sizes, in_shardings=specs)
    assert predicted == compiled


def ring(x, y):
    """Products of each device's rows with those of all others, in a `shard_map` over all axes."""

    def local(x, y):
        neighbours = [(i, (i + 1) % 8) for i in range(8)]
        found = 0.0
        for _ in range(8):
            found, y = found + jnp.einsum("sd,td->st", x, y), jax.lax.ppermute(y, "data", neighbours)
        return found

    return jax.shard_map(local, in_specs=P("data"), out_specs=P("data"))(x, y)


ROWS = [floats(1024, 256)] * 2


def test_a_ring_sends_what_is_multiplied_in_bfloat16():
    with sharding.mesh(data=8):
        ledger = sharding.jit(ring, in_shardings=P("data")).complete(*ROWS).communication()
    assert ledger.lowered("tpu").by_kind() == {"collective-permute": (7, 7 * 128 * 256 * 2)}  # the last one is dead
    assert ledger.lowered("gpu").by_kind() == {"collective-permute": (7, 7 * 128 * 256 * 4)}


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_a_ring_as_compiled(backend, described):
    predicted, compiled = predicted_and_compiled(ring, ROWS, backend, described, {"data": 8}, in_shardings=P("data"))
    assert predicted == compiled
