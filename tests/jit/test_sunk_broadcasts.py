"""Loops compute masks and other broadcasts that they read; the rest, and what is read otherwise, stays before them."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import compilers

import sharding
from sharding import P
from sharding.jit.sunk_broadcasts import sink_broadcasts

ROWS, COLUMNS = 256, 128
X = np.linspace(-1.0, 1.0, ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
ROW, NUMBER = X[7], np.float32(1.5)


def triangle():
    return jnp.tril(jnp.ones((ROWS, COLUMNS), bool))


MADE = {
    "constant": lambda x, row, s: jnp.full(x.shape, 2.0),
    "of a scalar": lambda x, row, s: jnp.broadcast_to(s, x.shape),
    "mask": lambda x, row, s: jnp.where(triangle(), 0.0, -1e9),
    "mask of a window": lambda x, row, s: (triangle() & ~jnp.tril(triangle(), -9)).astype(jnp.float32),
    "row": lambda x, row, s: jnp.broadcast_to(row, x.shape),
    "of a row and a scalar": lambda x, row, s: jnp.abs(jnp.broadcast_to(row, x.shape) * s),
    "in a call": lambda x, row, s: jax.jit(lambda row: jnp.broadcast_to(row, x.shape) + 1)(row),
    "in a call in a call": lambda x, row, s: jax.jit(jax.jit(lambda: jnp.where(triangle(), 1.0, 0.0)))(),
}
"""Name -> a large array that cheap equations make of smaller ones."""

STAYING = {
    "of an array": lambda x, row, s: x * 2,
    "costly": lambda x, row, s: jnp.sin(jnp.broadcast_to(row, x.shape)),
    "sum": lambda x, row, s: jnp.cumsum(jnp.broadcast_to(row, x.shape), 0),
}


def scanned(make):
    def f(x, row, s):
        y = make(x, row, s)
        return lax.scan(lambda c, _: (jnp.sin(c) * y, c.sum()), x, None, length=3)

    return f


def in_a_fori_loop(make):
    def f(x, row, s):
        y = make(x, row, s)
        return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * y + i, x)

    return f


def in_a_while(make):
    def f(x, row, s):
        y = make(x, row, s)
        return lax.while_loop(lambda c: jnp.abs(c).sum() > s, lambda c: 0.5 * c * jnp.tanh(y), x)

    return f


def nested(make):
    def f(x, row, s):
        y = make(x, row, s)

        def outer(c, _):
            return lax.scan(lambda c, _: (jnp.sin(c) + y, None), c * 2, None, length=2)

        return lax.scan(outer, x, None, length=3)

    return f


def recomputed(make):
    def f(x, row, s):
        y = make(x, row, s)
        body = jax.checkpoint(lambda c: jax.jit(lambda c, y: jnp.sin(c) * y)(c, y))
        return jax.grad(lambda x: lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0].sum())(x)

    return f


def multiplied(x, row, s):
    y = jnp.broadcast_to(row, (COLUMNS, COLUMNS))
    return lax.scan(lambda c, _: (c @ y, None), x, None, length=3)[0]


def sliced(x, row, s):
    y = jnp.broadcast_to(row, x.shape)
    return lax.scan(lambda c, k: (c + lax.dynamic_slice_in_dim(y, k, 1), None), x, jnp.arange(3))[0]


def returned(x, row, s):
    y = jnp.broadcast_to(row, x.shape)
    return lax.scan(lambda c, _: (y + c, y), x, None, length=3)


def carried(x, row, s):
    return lax.scan(lambda c, _: (jnp.sin(c), None), jnp.broadcast_to(row, x.shape), None, length=3)[0]


LOOPS = {
    "scan": scanned,
    "fori_loop": in_a_fori_loop,
    "while": in_a_while,
    "nested": nested,
    "recomputed": recomputed,
}


def sunk(f):
    """The jaxpr of a function, rewritten."""
    return sink_broadcasts(jax.make_jaxpr(f)(X, ROW, NUMBER))


def largest_constants(jaxpr):
    """The most elements of a constant that a loop in a jaxpr has."""
    most = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        for key in ("jaxpr", "body_jaxpr", "call_jaxpr"):
            if key in eqn.params:
                body = eqn.params[key]
                most = max(most, largest_constants(getattr(body, "jaxpr", body)))
        if name in ("scan", "while"):
            number = sharding.compat.scan_parts(eqn.params)[0] if name == "scan" else eqn.params["body_nconsts"]
            first = 0 if name == "scan" else eqn.params["cond_nconsts"]
            most = max([most, *(v.aval.size for v in eqn.invars[first : first + number])])
    return most


def check_values(f, jaxpr):
    expected = jax.tree.leaves(jax.jit(f)(X, ROW, NUMBER))
    found = jax.jit(jex.jaxpr_as_fun(jaxpr))(X, ROW, NUMBER)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", MADE)
def test_loops_compute_what_is_spread(name, loop):
    f = LOOPS[loop](MADE[name])
    jaxpr = sunk(f)
    assert largest_constants(jaxpr.jaxpr) <= COLUMNS
    check_values(f, jaxpr)


@pytest.mark.parametrize("name", STAYING)
def test_what_stays(name):
    f = scanned(STAYING[name])
    jaxpr = sunk(f)
    assert largest_constants(jaxpr.jaxpr) == X.size
    check_values(f, jaxpr)


@pytest.mark.parametrize("f", [multiplied, sliced, returned, carried])
def test_what_is_read_otherwise_stays(f):
    jaxpr = jax.make_jaxpr(f)(X, ROW, NUMBER)
    assert sink_broadcasts(jaxpr) is jaxpr


def test_small_arrays_stay():
    def f(x):
        y = jnp.full(x.shape, 2.0)
        return lax.scan(lambda c, _: (c * y, None), x, None, length=3)[0]

    jaxpr = jax.make_jaxpr(f)(X[:8])
    assert sink_broadcasts(jaxpr) is jaxpr


def test_a_broadcast_that_is_also_read_outside():
    def f(x, row, s):
        y = jnp.broadcast_to(row, x.shape)
        return lax.scan(lambda c, _: (c * y, None), x, None, length=3)[0] @ y.T

    jaxpr = sunk(f)
    assert largest_constants(jaxpr.jaxpr) <= COLUMNS
    check_values(f, jaxpr)


def masked_layers(x):
    """The gradient of recomputed layers that mask an array."""
    mask = jnp.tril(jnp.ones(x.shape[1:], bool))
    layer = jax.checkpoint(lambda c: jnp.sin(jnp.where(mask, c, -1.0)))
    return jax.grad(lambda x: lax.scan(lambda c, _: (layer(c), None), x, None, length=4)[0].sum())(x)


def test_values_are_those_of_one_device():
    x = np.linspace(-1.0, 1.0, 8 * 128 * 128, dtype=np.float32).reshape(8, 128, 128)
    expected = jax.jit(masked_layers)(x)
    with sharding.mesh(data=8):
        found = sharding.jit(masked_layers, in_shardings=P("data"))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("backend", "described"), [compilers.COMPILERS["cpu"], compilers.COMPILERS["gpu"]], ids=["cpu", "gpu"]
)
def test_nothing_is_stored_for_it(backend, described):
    """The compiled program stores less than that of `jax.jit`, by the mask and the number in its place."""
    x = jax.ShapeDtypeStruct((64, 512, 512), "float32")

    def temporary_bytes(jitted):
        return jitted.lower(x).compile().memory_analysis().temp_size_in_bytes

    devices = compilers.devices(described)
    with sharding.mesh(data=8, devices=devices) as mesh:
        ours = temporary_bytes(sharding.jit(masked_layers, in_shardings=P("data")))
        plain = temporary_bytes(jax.jit(masked_layers, in_shardings=jax.NamedSharding(mesh, P("data"))))
    array = 4 * 8 * 512 * 512
    assert plain - ours >= array / 4 - 4096
