"""Reordered matmuls give the same results with fewer transposes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import peak_memory

import sharding
from sharding import P, cost
from sharding.graph.straight_line import trace_program
from sharding.rewrite import cpu_matmul_order

X, G = jnp.ones((2, 5, 3)), jnp.ones((2, 5, 7))
SCORES, Q = jnp.ones((2, 4, 16, 15)), jnp.ones((2, 4, 16, 3))


def dot(a, b, contracted, batch=((), ())):
    return jax.lax.dot_general(a, b, (contracted, batch))


def weights(x, g):
    """The weight gradient of x @ w, as differentiation produces it."""
    return jax.lax.transpose(dot(g, x, ((0, 1), (0, 1))), (1, 0))


def heads(x, g):
    """The same for weights with two output dims."""
    split = g.reshape(2, 5, 7, 1)
    return jax.lax.transpose(dot(split, x, ((0, 1), (0, 1))), (2, 0, 1))


def keys(scores, q):
    """The gradient of an attention's keys, as differentiation produces it."""
    return dot(scores, q, ((2,), (2,)), ((0, 1), (0, 1)))


def wide(h, g):
    """The gradient of weights [8, 2] with a large input."""
    return dot(h, g, ((0, 1), (0, 1)))


H, SMALL = jnp.ones((2, 9, 8)), jnp.ones((2, 9, 2))
CASES = {"weights": (weights, X, G), "heads": (heads, X, G), "keys": (keys, SCORES, Q), "wide": (wide, H, SMALL)}


def reorder_products(program):
    eqns = cpu_matmul_order.reordered(program.eqns, program.outputs)
    return program.subprogram(program.inputs, program.outputs, eqns)


def transposed(program):
    """Number of elements that a program transposes: in transposes, and in first operands of matmuls."""
    found = 0
    for eqn in program.eqns:
        (contracted, _), _ = eqn.params.get("dimension_numbers", (((), ()), ((), ())))
        first = eqn.invars[0].aval
        if eqn.primitive.name == "transpose" or (contracted and first.ndim - 1 not in contracted):
            found += math.prod(first.shape)
    return found


@pytest.mark.parametrize("case", CASES)
def test_fewer_elements_are_transposed(case):
    function, *args = CASES[case]
    before = trace_program(lambda *arrays: [function(*arrays)], *args)
    assert transposed(reorder_products(before)) < transposed(before)


def test_batched_matmuls_contract_last_dims():
    """In the program and in the compiled HLO: without a barrier XLA would fold the transpose into the product."""
    program = reorder_products(trace_program(lambda *arrays: [keys(*arrays)], SCORES, Q))
    (product,) = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert product.params["dimension_numbers"] == (((3,), (2,)), ((0, 1), (0, 1)))
    text = str(jax.jit(lambda *arrays: program(*arrays)).lower(SCORES, Q).compile().as_text())
    assert "lhs_contracting_dims={3}, rhs_batch_dims={0,1}, rhs_contracting_dims={2}" in text


@pytest.mark.parametrize("case", CASES)
def test_results_are_equal(case):
    function, *shapes = CASES[case]
    args = [jax.random.normal(jax.random.key(i), shape.shape) for i, shape in enumerate(shapes)]
    (found,) = reorder_products(trace_program(lambda *arrays: [function(*arrays)], *args))(*args)
    np.testing.assert_allclose(found, function(*args), rtol=1e-5, atol=1e-5)


def test_a_product_with_another_use_stays():
    def both(x, g):
        product = dot(g, x, ((0, 1), (0, 1)))
        return [product, jax.lax.transpose(product, (1, 0))]

    program = trace_program(both, X, X)
    assert reorder_products(program).eqns == program.eqns


def test_other_transposes_stay():
    program = trace_program(lambda x, g: [jax.lax.transpose(heads(x, g), (2, 0, 1))], X, G)
    names = [eqn.primitive.name for eqn in reorder_products(program).eqns]
    assert names.count("transpose") == 1


def test_precision_goes_with_its_operand():
    high, low = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT

    def product(x, g):
        turned = jax.lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ())), precision=(high, low))
        return [jax.lax.transpose(turned, (1, 0))]

    (eqn,) = reorder_products(trace_program(product, X, G)).eqns
    assert eqn.params["precision"] == (low, high)


def test_bodies_are_reordered_and_others_stay():
    def scanned(h, g):
        return jax.lax.scan(lambda total, _: (total + wide(h, g), None), jnp.zeros((8, 2)), length=2)[0]

    jaxpr = jax.make_jaxpr(scanned)(H, SMALL)
    found = cpu_matmul_order.reorder(jaxpr)
    assert "optimization_barrier" in str(found)
    np.testing.assert_array_equal(jax.core.eval_jaxpr(found.jaxpr, found.consts, H, SMALL)[0], scanned(H, SMALL))
    same = jax.make_jaxpr(lambda h, w: jax.jit(jnp.matmul)(h, w))(H, jnp.ones((8, 3)))
    assert cpu_matmul_order.reorder(same) is same


def test_sharded_programs_are_reordered_and_keep_their_collectives():
    """On CPUs alone: the gradient of a weight with a large input, summed over the batch and sharded."""
    h = jax.random.normal(jax.random.key(0), (8, 16, 32))
    g = jax.random.normal(jax.random.key(1), (8, 16, 4))
    expected = wide(h, g)
    with sharding.mesh(data=4, tensor=2):
        step = sharding.jit(wide, in_shardings=(P("data", None, "tensor"), P("data")))
        completion, compiled = step.complete(h, g), step.lower(h, g).compile()
        assert completion.out_shardings == P("tensor")
        completion.verify(compiled)
        found = step(h, g)
        assert "optimization_barrier" in step.lower(h, g).as_text()
    assert "f32[4,16]{1,0} all-reduce(" in compiled.as_text()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    with sharding.mesh(data=4, tensor=2, devices="v5p:2x2x2"):
        assert "optimization_barrier" not in step.lower(h, g).as_text()


@peak_memory.newest_jax_only
def test_memory_is_that_of_the_reordered_program():
    """The gradient of a weight, whose copy of the smaller operand is stored."""
    h, g = jnp.ones((64, 128, 512)), jnp.ones((64, 128, 64))
    with sharding.mesh(data=4, tensor=2):
        step = sharding.jit(wide, in_shardings=(P("data"), P("data")))
        predicted = step.complete(h, g).memory().peak_bytes
        compiled = cost.read_compiled(step.lower(h, g).compile()).peak_bytes
    assert predicted == pytest.approx(compiled, rel=0.1)
