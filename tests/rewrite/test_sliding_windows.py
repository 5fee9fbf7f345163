"""Windows and rotations against what ops compute: which rows of a result change with each row of the operand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sharding
from sharding.rewrite.rotation import rotation, rotation_gradient
from sharding.rewrite.sliding_windows import WINDOWS

ROWS = 9


def conv(step, padding, spacing, gap, size=3):
    def fn(x):
        w = jnp.ones((1, 1, size))
        return lax.conv_general_dilated(x[None, None], w, (step,), [padding], (gap,), (spacing,))[0, 0]

    return fn


def pooled(step, padding, spacing, gap, size=3):
    def fn(x):
        return lax.reduce_window(x, 0.0, lax.add, (size,), (step,), [padding], (gap,), (spacing,))

    return fn


SLIDING = {
    f"{make.__name__} {step} {padding} {spacing} {gap}": make(step, padding, spacing, gap)
    for make in (conv, pooled)
    for step, padding, spacing, gap in [
        (1, (0, 0), 1, 1), (2, (1, 0), 1, 1), (1, (0, 2), 2, 1), (3, (2, 1), 1, 2), (1, (1, 1), 2, 3),
    ]
}  # fmt: skip
CUT = {
    "slice": lambda x: x[2:7],
    "slice with steps": lambda x: x[1:8:3],
    "slice of all": lambda x: lax.slice(x, (0,), (ROWS,)),
    "pad": lambda x: lax.pad(x, 0.0, [(1, 2, 0)]),
    "pad inside": lambda x: lax.pad(x, 0.0, [(2, 0, 1)]),
    "negative pad": lambda x: lax.pad(x, 0.0, [(-1, -2, 0)]),
}


def last_window(fn):
    """The window of the last dim of the only op in `WINDOWS`, and the lengths of that dim."""
    eqns = [e for e in jax.make_jaxpr(fn)(jnp.ones(ROWS)).eqns if e.primitive.name in WINDOWS]
    (eqn,) = [e for e in eqns if e.primitive.name != "slice"] or eqns
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    window = [*WINDOWS[eqn.primitive.name](eqn.params, shapes)][-1]
    return window, shapes[0][window.dim], shapes[-1][window.result_dim]


@pytest.mark.parametrize("name", [*SLIDING, *CUT])
def test_a_window_reads_the_rows_that_its_result_depends_on(name):
    fn = {**SLIDING, **CUT}[name]
    window, length, count = last_window(fn)
    jacobian = np.asarray(jax.jacobian(fn)(jnp.ones(ROWS)))
    assert (length, jacobian.shape) == (ROWS, (count, ROWS))
    for i, r in itertools.product(range(count), range(length)):
        reads = any(i * window.step - window.low + k * window.spacing == r * window.gap for k in range(window.size))
        assert reads == bool(jacobian[i, r]), (i, r)
    full = 1 + (length - 1) * window.gap + window.low + window.high
    assert count == (full - (1 + (window.size - 1) * window.spacing)) // window.step + 1
    is_identity = count == length and (jacobian == np.eye(length)).all()
    assert window.is_trivial == is_identity


def ops_of(fn, *args):
    with sharding.mesh(a=2, devices=jax.devices()[:2]):
        graph = sharding.jit(fn).complete(*args).assignment.graph
    return graph.ops, graph.makers


@pytest.mark.parametrize("rows", [(a, b, c) for a in (0, 1, 3) for b in (4, 6) for c in (2, 3, 6)], ids=str)
def test_a_rotation_is_two_slices_that_roll_an_array(rows):
    first, end, cut = rows

    def fn(x):
        return lax.concatenate([lax.slice(x, (first, 0), (end, 2)), lax.slice(x, (0, 0), (cut, 2))], 0)

    ops, makers = ops_of(fn, jax.ShapeDtypeStruct((6, 2), jnp.float32))
    x = jnp.arange(12.0).reshape(6, 2)
    y = fn(x)
    shifts = [n for n in range(6) if y.shape == x[:end].shape and (jnp.roll(x[:end], n, 0) == y).all()]
    (found,) = [rotation(op, makers) for op in ops if op.name == "concatenate"]
    assert found == (shifts[0] % end if shifts and cut == first else None)


@pytest.mark.parametrize("shift", [1, 2, 5])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradient_of_a_rotation_rotates_back(shift, dim):
    def fn(x):
        return jax.grad(lambda x: (jnp.roll(x, shift, dim) ** 2).sum())(x)

    ops, makers = ops_of(fn, jax.ShapeDtypeStruct((6, 6), jnp.float32))
    found = [r for op in ops if (r := rotation_gradient(op, makers)) is not None]
    assert found == [(dim, 6 - shift)]


@pytest.mark.parametrize("widths", [((1, 0), (0, 1)), ((2, 0), (0, 4)), ((2, 0), (0, 3)), ((1, 1), (0, 4))], ids=str)
def test_a_sum_of_padded_slices_that_is_no_rotation(widths):
    """Unless the one slice begins where the other ends."""
    (low, high), (other_low, other_high) = widths

    def fn(x):
        one = lax.pad(x[: 6 - low - high], 0.0, [(low, high, 0)])
        return one + lax.pad(x[: 6 - other_low - other_high], 0.0, [(other_low, other_high, 0)])

    ops, makers = ops_of(fn, jax.ShapeDtypeStruct((6,), jnp.float32))
    (found,) = [rotation_gradient(op, makers) for op in ops if op.name == "add"]
    is_rotation = high == other_low == 0 and low + other_high == 6
    assert found == ((0, low) if is_rotation else None)
