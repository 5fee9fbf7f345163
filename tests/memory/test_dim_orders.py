"""Order in which XLA:GPU stores the dims of arrays."""

import jax
import jax.numpy as jnp
from support.device_ops import op, reduction

from sharding.memory.dim_orders import is_transposing, settle_layouts, transposed
from sharding.memory.instruction import Body
from sharding.memory.kernel_cost import KernelCost, stored_dims


def made(name, *operands, **facts):
    return op(name, *operands, elementwise=name == "add", **facts)


def transpose(x, *order):
    eqn = jax.make_jaxpr(lambda y: jnp.transpose(y, order))(jnp.zeros(x.shape)).eqns[0]
    return made("transpose", x, shape=tuple(x.shape[d] for d in order), eqn=eqn)


def settled(*instructions, results=()):
    settle_layouts(Body(list(instructions), results=list(results)))
    return [one.layout for one in instructions]


def test_what_follows_a_transpose_is_stored_as_it_was():
    x = made("argument", shape=(8, 4, 32), role="argument")
    y = transpose(x, 2, 0, 1)
    z = made("add", y, y, shape=y.shape)
    columns, rows = reduction(z, 0), reduction(z, 1, 2)
    back = transpose(z, 1, 2, 0)
    whole = made("squeeze", made("expand_dims", z, shape=(1, 32, 8, 4), role="bitcast"), shape=z.shape, role="bitcast")
    found = settled(x, y, z, columns, rows, back, whole.operands[0], whole)
    assert found == [(), (1, 2, 0), (1, 2, 0), (), (), (), (0, 2, 3, 1), (1, 2, 0)]
    assert not any(map(is_transposing, (y, z, back)))
    assert stored_dims(columns) == [(8, False), (4, False), (32, True)]
    assert stored_dims(rows) == [(8, True), (4, True), (32, False)]


def test_sums_of_the_last_stored_dim_run_in_more_blocks():
    x = made("argument", shape=(4096, 2048), role="argument")
    y = transpose(x, 1, 0)
    rows, columns = reduction(y, 0), reduction(y, 1)
    settled(x, y, rows, columns)
    assert KernelCost.of(rows).blocks == KernelCost.of(reduction(x, 1)).blocks
    assert KernelCost.of(columns).blocks == KernelCost.of(reduction(x, 0)).blocks < KernelCost.of(rows).blocks


def test_results_and_operands_of_loops_are_in_the_order_of_their_dims():
    x = made("argument", shape=(8, 32), role="argument")
    y, carried = transpose(x, 1, 0), transpose(x, 1, 0)
    z = made("add", y, y, shape=y.shape)
    loop = made("while", carried, shape=(0,), role="unfusible", bodies=(Body(),))
    assert settled(x, y, carried, z, loop, results=[z]) == [(), (1, 0), (), (), ()]
    assert is_transposing(z) and is_transposing(carried)
    assert transposed(carried) == (8, 32, 1, 0)
    assert transposed(y) == () == transposed(z)


def test_operands_in_two_orders_are_read_across():
    x = made("argument", shape=(32, 32), role="argument")
    y = transpose(x, 1, 0)
    z = made("add", x, y, shape=x.shape)
    assert settled(x, y, z) == [(), (1, 0), ()]
    assert is_transposing(z) and not is_transposing(y)


def test_collectives_keep_the_order():
    x = made("argument", shape=(8, 32), role="argument")
    y = transpose(x, 1, 0)
    total = made("all-reduce", y, shape=y.shape, role="unfusible", num_devices=4)
    product = made("dot_general", y, shape=(32, 32), role="unfusible")
    assert settled(x, y, total, product) == [(), (1, 0), (1, 0), ()]
