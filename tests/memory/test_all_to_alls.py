"""What TPUs and GPUs store of arrays that an all-to-all moves: parts that follow each other."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import compiled_bytes, floats

import sharding
from sharding import P, annotate
from sharding.memory import usage

SHAPES = {"rows": (16384, 32768), "tokens": (64, 4096, 2048), "heads": (16, 32, 1024, 1024)}
NUM_DEVICES = 8


MOVES = [
    pytest.param(shape, before, after, id=f"{name} {before} to {after}")
    for name, shape in SHAPES.items()
    for before, after in itertools.permutations(range(len(shape)), 2)
]
"""The shape of an array, the dim that is sharded, and the one that is sharded then."""


def count(platform, shape, before, after):
    """How many arrays as large as a device's are stored besides its argument and its result."""
    if platform == "gpu":  # layouts in which parts follow each other
        return 1
    joins_rows = before == len(shape) - 1  # in another order of dims, then it copies the result
    return 1 if after == 0 and not joins_rows else 2


def moved(shape, before, after, then=jnp.sin):
    """A jitted function that moves an array, and the array."""
    specs = [P(*("x" if d == k else None for d in range(len(shape)))) for k in (before, after)]
    return sharding.jit(lambda x: then(annotate(jnp.sin(x), specs[1])), in_shardings=specs[:1]), floats(*shape)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(("shape", "before", "after"), MOVES)
def test_parts_are_stored_in_the_order_in_which_they_are_sent_and_received(shape, before, after, platform):
    with sharding.mesh({"x": NUM_DEVICES}):
        f, x = moved(shape, before, after)
        found = usage(f.complete(x).assignment, platform=platform).temporary_bytes
    unit = 4 * x.size // NUM_DEVICES
    assert found == pytest.approx(count(platform, shape, before, after) * unit, abs=unit // 50)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "described"), [compilers.COMPILERS["tpu"], compilers.COMPILERS["gpu"]])
@pytest.mark.parametrize(("shape", "before", "after"), MOVES)
def test_so_do_the_compilers(shape, before, after, platform, described):
    with sharding.mesh({"x": NUM_DEVICES}, devices=compilers.devices(described)):
        f, x = moved(shape, before, after)
        found = compiled_bytes(f.lower(x))
    unit = 4 * x.size // NUM_DEVICES
    assert found == pytest.approx((2 + count(platform, shape, before, after)) * unit, abs=unit // 50)


def layer_norm(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)


READERS = {"one kernel": (lambda x: jnp.sin(x).sum(0), 1), "several kernels": (layer_norm, 2)}
"""What reads rows that an all-to-all receives in parts, and how many arrays a TPU stores then."""


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "described"), [compilers.COMPILERS["tpu"]])
@pytest.mark.parametrize("shape", [SHAPES["rows"], SHAPES["tokens"]], ids=["rows", "tokens"])
@pytest.mark.parametrize("name", READERS)
def test_a_tpu_joins_parts_of_rows_once_for_several_readers(name, shape, platform, described):
    then, arrays = READERS[name]
    with sharding.mesh({"x": NUM_DEVICES}, devices=compilers.devices(described)):
        f, x = moved(shape, len(shape) - 1, 0, then)
        unit = 4 * x.size // NUM_DEVICES
        assert usage(f.complete(x).assignment, platform=platform).temporary_bytes / unit == pytest.approx(arrays, 0.02)
        assert f.lower(x).compile().memory_analysis().temp_size_in_bytes / unit == pytest.approx(arrays, 0.02)
