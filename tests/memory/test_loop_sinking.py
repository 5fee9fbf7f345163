"""Constants, and on TPUs masks and other broadcasts, are computed in loops that read them."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_temporaries, floats

import sharding

ROWS, COLUMNS = 8192, 4096
ARGUMENTS = floats(ROWS, COLUMNS), floats(COLUMNS)
UNIT = 4 * ROWS * COLUMNS


def repeated(make):
    """A loop that reads an array, made of its arguments, in each iteration."""

    def f(x, row):
        y = make(x, row)
        return jax.lax.scan(lambda c, _: (jnp.sin(c) * y + 1, None), x, None, length=5)[0]

    return f


def rows_of(row):
    return jnp.broadcast_to(row, (ROWS, COLUMNS))


def sliced(x, row):
    y = rows_of(row) + 1
    return jax.lax.scan(lambda c, k: (jnp.sin(c) * y[2 * k][None], None), x, jnp.arange(5))[0]


def nested(make):
    def f(x, row):
        y = make(x, row)

        def outer(c, _):
            return jax.lax.scan(lambda c, _: (jnp.sin(c) * y, None), c, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    return f


PROGRAMS = {
    "a constant": (repeated(lambda x, row: jnp.full(x.shape, 2.0)), 0),
    "a mask": (repeated(lambda x, row: jnp.tril(jnp.ones(x.shape))), 0),
    "a row": (repeated(lambda x, row: rows_of(row)), 0),
    "the sine of a row": (repeated(lambda x, row: jnp.sin(rows_of(row))), 0),
    "the product of two": (repeated(lambda x, row: rows_of(row) * rows_of(row.sum() + row)), 0),
    "a row, in a loop of a loop": (nested(lambda x, row: rows_of(row)), 0),
    "the sine of a row, in a loop of a loop": (nested(lambda x, row: jnp.sin(rows_of(row))), 1),
    "a constant, in a loop of a loop": (nested(lambda x, row: jnp.full(x.shape, 2.0)), 0),
    "what is computed of an array": (repeated(lambda x, row: x * 2), 1),
    "of which a part is read": (sliced, 1),
}
"""A program of an array and a row, and how many arrays it stores."""


def case(name):
    f, count = PROGRAMS[name]
    return f, ARGUMENTS, count


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_loops_compute_on_tpus(name):
    check_temporaries(case(name), UNIT)


OTHERS = [("a constant", 0), ("a row", 0), ("the sine of a row", 1), ("what is computed of an array", 1)]
"""What other compilers store."""


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("name", "count"), OTHERS)
def test_others_move_what_we_move(name, count, platform):
    check_temporaries((*case(name)[:2], count), UNIT, platform)


def check_compiled(name, count, described):
    """Compares what a program, compiled by `sharding.jit`, stores with what it says."""
    f, args, _ = case(name)
    with sharding.mesh({"data": 1}, devices=compilers.devices(described)[:1]):
        found = sharding.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert found == pytest.approx(count * UNIT, abs=UNIT / 50)


@pytest.mark.parametrize(("name", "count"), OTHERS)
def test_as_compiled_for_cpus(name, count):
    check_compiled(name, count, "")


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_computes_as_much(name):
    check_compiled(name, PROGRAMS[name][1], "v5p:2x2x2")


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize(("name", "count"), OTHERS)
def test_the_compiler_for_gpus_computes_as_much(name, count):
    check_compiled(name, count, "h100:1x8")
