"""What XLA:GPU computes again for each kernel that reads it, and what it stores."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.device_ops import op, reduction
from support.peak_memory import check_compiled_temporaries, check_temporaries, floats

from sharding.cost.gpu_arithmetic import CORES, arithmetic_us, cycles, kernel_us, read_us
from sharding.memory.kernel_cost import KernelCost
from sharding.memory.priority_fusion import PriorityFusion

ROWS, COLUMNS = 4096, 2048
X, Y = floats(ROWS, COLUMNS), floats(ROWS, COLUMNS)
WHOLE = 4 * ROWS * COLUMNS


def two_sums(f):
    """A column is summed by few blocks of threads."""
    return lambda x: (f(x).sum(0), (f(x) * x).sum(1))


def two_sums_of_rows(f):
    return lambda x: (f(x).sum(1), jnp.abs(f(x) - 3).sum(1))


def scaled(times):
    """Each constant is read for each element."""

    def f(x):
        for k in range(1, times + 1):
            x = jnp.abs(x) * (1 + k / 100)
        return x

    return f


def transposed_alike(x, y, w):
    """What reads a result of several transposed arrays runs in their order of dims, and may write over them."""
    z = x @ y.T
    return (jnp.log1p(jnp.abs(z.T)) * jnp.sin(z).T) @ w


def softmax_of_products(x, y):
    scores = x @ y.T
    return jax.nn.softmax(scores, -1) @ y


def summed(axis):
    """Sums of what takes long to compute: rows of a transposed array are columns of what is stored."""

    def f(x, w):
        y = (x @ w).T if axis == 1 else x @ w
        return jnp.sum(jnp.log1p(jnp.exp(y)) * jnp.sin(y), axis), jnp.max(jnp.log1p(jnp.exp(y)), axis)

    return f


LONG = floats(4 * ROWS, 64), floats(64, COLUMNS // 4)
PROGRAMS = {
    "an exponential": (two_sums(jnp.exp), (X,), 0),
    "of a scaled array": (two_sums(lambda x: jnp.exp(x * x)), (X,), 1),
    "a logarithm": (two_sums(lambda x: jnp.log(jnp.abs(x))), (X,), 1),
    "a square": (two_sums(lambda x: x * x + 1), (X,), 0),
    "one constant": (two_sums(scaled(1)), (X,), 0),
    "two constants": (two_sums(scaled(2)), (X,), 1),
    "a quotient": (two_sums(lambda x: x / (1 + x * x)), (X,), 0),
    "rows: an exponential": (two_sums_of_rows(lambda x: jnp.exp(x * x)), (X,), 0),
    "rows: a logarithm": (two_sums_of_rows(jnp.log), (X,), 1),
    "rows: two constants": (two_sums_of_rows(scaled(2)), (X,), 0),
    "two results": (lambda x, y: (jnp.log(x) * y, (jnp.log(x) - y) * 3), (X, Y), 0),
    "written over, beside a sum": (lambda x: (jnp.tanh(x).sum(), jnp.tanh(x) * 2), (X,), 0),
    "transposed alike": (transposed_alike, (floats(ROWS, 64), floats(COLUMNS, 64), X), 1),
    "columns of a product": (summed(0), LONG, 2),
    "rows of a transposed product": (summed(1), LONG, 2),
    "a softmax": (softmax_of_products, (floats(ROWS, 64), floats(COLUMNS, 64)), 2),
}
"""A program, its arguments, and how many arrays of `WHOLE` bytes it stores."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_stored(name):
    check_temporaries(PROGRAMS[name], WHOLE, "gpu")


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_h100_does_so(name):
    check_compiled_temporaries(PROGRAMS[name], WHOLE, "h100:1x8")


def made(name, *operands, elementwise=True, **facts):
    return op(name, *operands, elementwise=elementwise, **facts)


@pytest.mark.parametrize(
    ("shape", "axes", "blocks"),
    [
        ((4096, 2048), (0,), 32),  # two columns for each of 32 threads
        ((4096, 2047), (0,), 64),
        ((4096, 32), (0,), 1),
        ((8, 4096, 2048), (1,), 8 * 32),
        ((16384, 2048), (0,), 128 * 32),  # in two steps
        ((4096, 2048), (1,), 1024),  # four rows of 64 threads
        ((4096, 16384), (1,), 4096),
        ((128, 128), (0, 1), 1),
    ],
)
def test_blocks_of_threads_that_reduce(shape, axes, blocks):
    assert KernelCost.of(reduction(made("x", shape=shape), *axes)).blocks == blocks


def test_what_an_op_costs_with_its_producers():
    x = made("argument")
    a, b = made("exp", x), made("log", x)
    both = made("add", a, b)
    found = KernelCost.of(both).with_producer(KernelCost.of(a)).with_producer(KernelCost.of(b))
    assert found.cycles == sum(cycles(name, "float32") for name in ("exp", "log", "add")) * 2**20
    assert found.reads == {x: {both: 1.0}}  # read once for both
    spread = made("broadcast_in_dim", found.root, shape=(8, 2**20), elementwise=False)
    again = KernelCost.of(spread).with_producer(found)
    assert again.cycles == 8 * found.cycles
    assert sum(again.reads[x].values()) == 8


def test_times():
    assert arithmetic_us(1e9, CORES) == arithmetic_us(1e9, 10 * CORES) == arithmetic_us(1e9, CORES // 2) / 2
    assert read_us(2e6, 1e6, CORES) < 2 * read_us(1e6, 1e6, CORES) < read_us(2e6, 1e6, 1)
    assert 3 < kernel_us(1.0, 3.0) < 3.1
    assert cycles("exp", "bfloat16") == cycles("exp", "float32") > cycles("mul", "bfloat16")
    assert cycles("logistic", "float32") == sum(cycles(x, "float32") for x in ("neg", "exp", "add", "div"))


def test_a_producer_that_some_reader_cannot_compute_is_stored():
    x = made("argument")
    x.role = "argument"
    a = made("add", x, x)
    product = made("dot_general", a, elementwise=False)
    product.role = "unfusible"
    b, end = made("mul", a, a), made("sub", a, x)
    assert PriorityFusion([x, a, product, b, end], {b, end, product}).stored() == {x, a, product, b, end}
    assert PriorityFusion([x, a, b, end], {b, end}).stored() == {x, b, end}
