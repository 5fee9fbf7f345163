"""What XLA:TPU stores of rows gathered by index: a kernel gathers them alone, and no other result takes their place."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, compiled_bytes, floats

import sharding
from sharding import P, cost
from sharding.memory import usage

ROWS, COUNT, SIZE = 65536, 32768, 1024
TABLE, WEIGHTS, INDICES = floats(ROWS, SIZE), floats(SIZE, SIZE), jax.ShapeDtypeStruct((COUNT,), jnp.int32)
WHOLE = 4 * COUNT * SIZE
"""Bytes of the rows."""


PROGRAMS = {
    "the rows": (lambda t, i: t[i], (TABLE, INDICES), 0),
    "doubled": (lambda t, i: 2 * t[i], (TABLE, INDICES), 1),
    "with NaN out of bounds": (lambda t, i: jnp.take(t, i, axis=0), (TABLE, INDICES), 1),
    "summed": (lambda t, i: jnp.tanh(t[i]).sum(0), (TABLE, INDICES), 1),
    "multiplied": (lambda t, i, w: t[i] @ w, (TABLE, INDICES, WEIGHTS), 1),
    "masked, for a product": (lambda t, i, w: jnp.take(t, i, axis=0) @ w, (TABLE, INDICES, WEIGHTS), 1),
}
"""A program, its arguments, and how many arrays as large as the rows are stored besides them and the results."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_gathered_rows_are_stored(name):
    check_temporaries(PROGRAMS[name], WHOLE)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_them(name):
    check_compiled_temporaries(PROGRAMS[name], WHOLE)


SHARDED = {
    "the rows": (lambda t, i, w: t[i], 3),
    "doubled": (lambda t, i, w: 2 * t[i], 3),
    "summed": (lambda t, i, w: jnp.tanh(t[i]).sum(0), 2),
    "rounded for a product": (lambda t, i, w: t[i].astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), 2.5),
}
"""A program over a table with sharded rows: each device gathers and masks, which is stored twice before the sum. How
many arrays as large as the rows of a device its results and temporaries take."""


def lowered(name, devices):
    """The function, and its memory as predicted."""
    with sharding.mesh({"data": 2, "model": 4}, devices=devices):
        f = sharding.jit(SHARDED[name][0], in_shardings=(P("model"), P("data"), P()))
        return f, usage(f.complete(TABLE, INDICES, WEIGHTS).assignment, platform="tpu")


@pytest.mark.parametrize("name", SHARDED)
def test_rows_that_a_device_lacks_are_masked(name):
    _, found = lowered(name, 8)
    assert found.peak_bytes - found.argument_bytes == pytest.approx(SHARDED[name][1] * WHOLE / 2, abs=WHOLE // 50)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", SHARDED)
def test_the_compiler_for_tpus_masks_them(name):
    devices = cost.compile_only("v5p:2x2x2")
    f, found = lowered(name, devices)
    with sharding.mesh({"data": 2, "model": 4}, devices=devices):
        compiled = compiled_bytes(f.lower(TABLE, INDICES, WEIGHTS))
    assert compiled == pytest.approx(found.peak_bytes, rel=0.01)
