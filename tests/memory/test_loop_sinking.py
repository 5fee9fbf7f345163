"""Constants, and on TPUs masks and other broadcasts, are computed in loops that read them."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, floats
from support.peak_memory import temporary_bytes as predicted_bytes

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
    "a row, in a loop of a loop": (nested(lambda x, row: rows_of(row)), 1),
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


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("name", "count"), [("a constant", 0), ("a row", 1), ("what is computed of an array", 1)])
def test_others_move_constants_only(name, count, platform):
    check_temporaries((*case(name)[:2], count), UNIT, platform)


def test_constants_of_the_compiled_program_on_cpus():
    f, args, _ = case("a constant")
    compiled = jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert compiled == pytest.approx(predicted_bytes(f, args, "cpu"), abs=UNIT / 50)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_computes_as_much(name):
    check_compiled_temporaries(case(name), UNIT)


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize(("name", "count"), [("a constant", 0), ("a row", 1), ("what is computed of an array", 1)])
def test_the_compiler_for_gpus_moves_constants_only(name, count):
    check_compiled_temporaries((*case(name)[:2], count), UNIT, "h100:1x8")
