"""Sums that a loop only adds up or stacks are reduced once, behind the loop, in the dtype that the compiler leaves."""

import jax
import jax.numpy as jnp
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P

SIZES = {"data": 2, "model": 4}


def of_vectors(x, y):
    return jnp.einsum("bsk,bsk->k", x, y)


def of_terms(x, y):
    return (x * y).sum((0, 1))


def transposed(x, y):
    return jnp.einsum("bsk,bsm->mk", x[..., :32], y[..., :16])


def stacked(f, dtype):
    def program(xs, ys):
        return jax.lax.scan(lambda c, xy: (c * 2, f(xy[0] + c, xy[1]).astype(dtype)), jnp.ones((), xs.dtype), (xs, ys))

    return program


def added(f, dtype):
    def program(xs, ys):
        start = jnp.zeros(jax.eval_shape(f, xs[0], ys[0]).shape, dtype)
        return jax.lax.scan(lambda c, xy: (c + f(*xy).astype(dtype), None), start, (xs, ys))[0]

    return program


def added_to_both(after):
    """Adds to two carries, as gradients of two biases that are added are; something follows in the second."""

    def keep(f, dtype):
        def program(xs, ys):
            start = jnp.zeros(jax.eval_shape(f, xs[0], ys[0]).shape, dtype)

            def add(carry, xy):
                term = f(*xy).astype(dtype)
                return (carry[0] + term, after(carry[1] + term)), None

            return jax.lax.scan(add, (start, start + 1), (xs, ys))[0]

        return program

    return keep


added_twice, added_and_read = added_to_both(lambda carry: carry), added_to_both(jnp.sin)


def of_all(x, y):
    return (x * y).sum(keepdims=True).reshape(1)


PROGRAMS = [
    (stacked, of_vectors, "bfloat16", "float32", 512, (1, 2 * 512 * 2)),
    (stacked, of_vectors, "float32", "bfloat16", 512, (1, 2 * 512 * 2)),
    (stacked, of_vectors, "float32", "bfloat16", 2048, (2, 2 * 2048 * 2)),  # 16 KiB when the compiler looks
    (stacked, of_terms, "bfloat16", "bfloat16", 2048, (1, 2 * 2048 * 2)),
    (stacked, of_terms, "float32", "float32", 512, (1, 2 * 512 * 4)),
    (stacked, transposed, "float32", "float32", 64, (1, 2 * 16 * 32 * 4)),
    (added, of_vectors, "bfloat16", "float32", 2048, (1, 2048 * 4)),
    (added, of_vectors, "float32", "bfloat16", 2048, (1, 2048 * 2)),
    (added, of_terms, "bfloat16", "bfloat16", 512, (1, 512 * 2)),
    (added, transposed, "float32", "float32", 64, (1, 16 * 32 * 4)),
    (added, of_all, "float32", "float32", 64, (1, 4)),
    (added_twice, of_terms, "float32", "float32", 512, (2, 2 * 512 * 4)),
    (added_twice, of_vectors, "float32", "float32", 512, (2, 2 * 512 * 4)),
    (added_and_read, of_terms, "float32", "float32", 512, (2, 2 * 512 * 4)),
]
"""How a loop of two iterations keeps the sums, the sums, the dtypes of the terms and the result, the size, and what is
reduced on a TPU."""


@pytest.mark.parametrize(("keep", "f", "dtype", "kept", "n", "expected"), PROGRAMS)
def test_reductions_on_tpu(keep, f, dtype, kept, n, expected):
    terms = [jax.ShapeDtypeStruct((2, 16, 8, n), dtype)] * 2
    with sharding.mesh(SIZES):
        ledger = sharding.jit(keep(f, kept), in_shardings=P(None, "data")).complete(*terms).communication()
    assert ledger.lowered("tpu").by_kind() == {"all-reduce": expected}


@pytest.mark.parametrize(("backend", "described"), [COMPILERS["tpu"], COMPILERS["gpu"]])
@pytest.mark.parametrize(("keep", "f", "dtype", "kept", "n", "_"), PROGRAMS)
def test_reductions_as_compiled(keep, f, dtype, kept, n, _, backend, described):
    terms = [jax.ShapeDtypeStruct((2, 16, 8, n), dtype)] * 2
    program, specs = keep(f, kept), P(None, "data")
    predicted, compiled = predicted_and_compiled(program, terms, backend, described, SIZES, in_shardings=specs)
    assert predicted == compiled


def two_axes(w, x):
    def layer(x, w):
        return jnp.tanh(jnp.einsum("bsm,mn->bsn", x, w)), None

    return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)


def sliced(xs, ys):
    """A norm's gradients, of which each device keeps a slice."""

    def body(c, xy):
        return c * 2, sharding.annotate(jnp.einsum("bshk,bshk->k", xy[0] + c, xy[1]), P("model"))

    return jax.lax.scan(body, jnp.ones(()), (xs, ys))[1]


def scattered_over_one_axis(xs, ys):
    def body(c, xy):
        return c * 2, sharding.annotate(jnp.einsum("bsm,bsk->mk", xy[0] + c, xy[1]), P("data"))

    return jax.lax.scan(body, jnp.ones(()), (xs, ys))[1]


X = [jax.ShapeDtypeStruct((2, 16, 8, 8, 32), "float32")] * 2
ROWS = [jax.ShapeDtypeStruct((2, 64, 128, 32), "float32")] * 2
WEIGHTS = jax.ShapeDtypeStruct((2, 512, 512), "float32"), jax.ShapeDtypeStruct((64, 64, 512), "float32")
OTHERS = {
    "over two axes": (two_axes, WEIGHTS, (P(None, "fsdp"), P(("data", "fsdp"))), {"data": 2, "fsdp": 2, "model": 2}),
    "scattered over one axis": (scattered_over_one_axis, ROWS, P(None, "data", "model"), SIZES),
    "sliced": (sliced, X, (P(None, "data", None, "model"),) * 2, SIZES),
}


@pytest.mark.parametrize(("backend", "described"), [COMPILERS["tpu"]])
@pytest.mark.parametrize("name", OTHERS)
def test_sums_that_are_scattered_or_sliced(name, backend, described):
    f, args, specs, sizes = OTHERS[name]
    predicted, compiled = predicted_and_compiled(f, args, backend, described, sizes, in_shardings=specs)
    assert predicted == compiled


def test_a_slice_keeps_its_sum_in_the_loop():
    with sharding.mesh(SIZES):
        ledger = sharding.jit(sliced, in_shardings=P(None, "data", None, "model")).complete(*X).communication()
    assert ledger.lowered("tpu").by_kind()["all-reduce"][0] == 2


def test_a_sum_is_scattered_in_the_loop_and_reduced_over_the_other_axis_behind_it():
    with sharding.mesh(SIZES):
        completion = sharding.jit(scattered_over_one_axis, in_shardings=P(None, "data", "model")).complete(*ROWS)
    found = completion.communication().lowered("tpu").by_kind()
    assert found == {"reduce-scatter": (2, 2 * 32 * 32 * 4), "all-reduce": (1, 2 * 16 * 32 * 4)}
