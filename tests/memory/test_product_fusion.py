"""What XLA:GPU computes in the kernels of matrix products, on programs that its compiler was seen to fuse so."""

import re

import jax
import jax.numpy as jnp
import pytest
from support import compilers

import sharding
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.kernel_order import ORDERS
from sharding.memory.liveness import lifetimes
from sharding.memory.usage import usage

N = 4096
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
HALF = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
VECTOR, ROW = jax.ShapeDtypeStruct((N,), jnp.float32), jax.ShapeDtypeStruct((1, N), jnp.float32)

FOLLOWED = [
    (lambda x, w: jax.nn.relu(x @ w), (SQUARE, SQUARE), 1),
    (lambda x, w, b: jnp.tanh(x @ w + b), (SQUARE, SQUARE, ROW), 1),
    (lambda x, w, y: x @ w + y, (SQUARE,) * 3, 1),
    (lambda x, w, y: x @ w + jnp.tanh(y), (SQUARE,) * 3, 2),
    (lambda x, w, y, v: (x @ w) + (y @ v), (SQUARE,) * 4, 2),
    (lambda x, w: jax.nn.silu(x @ w), (SQUARE, SQUARE), 2),
    (lambda x, w: (jax.nn.relu(x @ w), jnp.tanh(x @ w)), (SQUARE, SQUARE), 3),
    (lambda x, w: (x @ w).sum(1), (SQUARE, SQUARE), 2),
]
"""A program, its arguments, and how many kernels it is."""

COMPUTED = [
    (lambda x, w, v: (jax.nn.relu(x) @ w, jax.nn.relu(x) @ v), (SQUARE,) * 3, 2),
    (lambda x, w, b: jnp.tanh(x + b[None]) @ w, (SQUARE, SQUARE, VECTOR), 1),
    (lambda x, w, b: jnp.tanh(x + b) @ w, (SQUARE, SQUARE, ROW), 2),
    (lambda x, w, y: (x * y) @ w, (SQUARE,) * 3, 2),
    (lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), (SQUARE, SQUARE), 1),
    (lambda x, w: (x @ w.astype(jnp.bfloat16), w), (HALF, SQUARE), 2),
]


def assignment_of(f, *args):
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        return sharding.jit(f).complete(*args).assignment


def num_kernels(f, *args):
    """How many kernels a program is, as XLA:GPU compiles it."""
    program = lower(assignment_of(f, *args), TRAITS["gpu"])
    found = lifetimes(program.body, [], {*program.outputs}, ORDERS["latency hiding"])
    roots = [one.root for step in found.steps for one in step.kernels]
    return sum(one.role not in ("argument", "bitcast") for one in roots)


@pytest.mark.parametrize(("f", "args", "count"), FOLLOWED)
def test_what_follows_a_product_runs_in_its_kernel_while_nothing_else_reads_it(f, args, count):
    assert num_kernels(f, *args) == count


@pytest.mark.parametrize(("f", "args", "count"), COMPUTED)
def test_an_operand_is_computed_in_each_product_if_that_reads_no_more(f, args, count):
    assert num_kernels(f, *args) == count


def test_a_sum_is_written_where_its_other_operand_was():
    def added(x, w):
        y = jnp.sort(x) @ w
        return jnp.sort(jnp.sort(x * 2) @ w + y)

    peak = usage(assignment_of(added, SQUARE, SQUARE), platform="gpu").temporary_bytes
    assert peak <= 3 * N * N * 4


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize(("f", "args", "count"), FOLLOWED + COMPUTED)
def test_the_compiler_for_h100_makes_as_many_kernels(f, args, count):
    text = compilers.compiled_for_one(f, args, "h100:1x8").as_text()
    entry = text[text.index("\nENTRY") :]
    assert len(re.findall(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*? (?:fusion|custom-call)\(", entry, re.M)) == count
