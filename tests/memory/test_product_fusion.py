"""What XLA:GPU computes in the kernels of matrix products, on programs that its compiler was seen to fuse so."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.liveness import lifetimes
from sharding.memory.usage import ORDERS, usage

N = 4096
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
HALF = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
ROW = jax.ShapeDtypeStruct((1, N), jnp.float32)


def assignment_of(f, *args):
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        return sharding.jit(f).complete(*args).assignment


def num_kernels(f, *args):
    """How many kernels a program is, as XLA:GPU compiles it."""
    program = lower(assignment_of(f, *args), TRAITS["gpu"])
    found = lifetimes(program.body, [], {*program.outputs}, ORDERS["latency hiding"])
    roots = [one.root for step in found.steps for one in step.kernels]
    return sum(one.role not in ("argument", "bitcast") for one in roots)


@pytest.mark.parametrize(
    ("f", "args", "count"),
    [
        (lambda x, w: jax.nn.relu(x @ w), (SQUARE, SQUARE), 1),
        (lambda x, w, b: jnp.tanh(x @ w + b), (SQUARE, SQUARE, ROW), 1),
        (lambda x, w, y: x @ w + y, (SQUARE,) * 3, 1),
        (lambda x, w, y: x @ w + jnp.tanh(y), (SQUARE,) * 3, 2),
        (lambda x, w, y, v: (x @ w) + (y @ v), (SQUARE,) * 4, 2),
        (lambda x, w: jax.nn.silu(x @ w), (SQUARE, SQUARE), 2),
        (lambda x, w: (jax.nn.relu(x @ w), jnp.tanh(x @ w)), (SQUARE, SQUARE), 3),
        (lambda x, w: (x @ w).sum(1), (SQUARE, SQUARE), 2),
    ],
)
def test_what_follows_a_product_runs_in_its_kernel_while_nothing_else_reads_it(f, args, count):
    assert num_kernels(f, *args) == count


@pytest.mark.parametrize(
    ("f", "args", "count"),
    [
        (lambda x, w, v: (jax.nn.relu(x) @ w, jax.nn.relu(x) @ v), (SQUARE,) * 3, 2),
        (lambda x, w, b: jnp.tanh(x + b) @ w, (SQUARE, SQUARE, ROW), 1),
        (lambda x, w, y: (x * y) @ w, (SQUARE,) * 3, 2),
        (lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), (SQUARE, SQUARE), 1),
        (lambda x, w: (x @ w.astype(jnp.bfloat16), w), (HALF, SQUARE), 2),
    ],
)
def test_an_operand_is_computed_in_each_product_if_that_reads_no_more(f, args, count):
    assert num_kernels(f, *args) == count


def test_a_sum_is_written_where_its_other_operand_was():
    def added(x, w):
        y = jnp.sort(x) @ w
        return jnp.sort(jnp.sort(x * 2) @ w + y)

    peak = usage(assignment_of(added, SQUARE, SQUARE), platform="gpu").temporary_bytes
    assert peak <= 3 * N * N * 4
