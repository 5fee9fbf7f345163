"""Halo exchanges, as predicted and as compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sharding
from sharding import P, cost

SPATIAL = ("NHWC", "HWIO", "NHWC")
SAME = "SAME"


def images(rows=32, columns=8):
    return jax.ShapeDtypeStruct((2, rows, columns, 4), "float32")


def conv(length, step=1, padding=SAME, rhs_dilation=1, lhs_dilation=1, width=3):
    def fn(x):
        w = jnp.ones((length, width, 4, 4))
        return lax.conv_general_dilated(
            x, w, (step, 1), padding, (lhs_dilation, 1), (rhs_dilation, 1), dimension_numbers=SPATIAL
        )  # fmt: skip

    return fn


def pooled(length, step, padding):
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, length, 1, 1), (1, step, 1, 1), padding)


def rotated_sum(front, back):
    """What the gradient of a rotation is, if both are slices of one array."""
    rows = front.shape[1], back.shape[1]
    pad = lambda x, low, high: lax.pad(x, 0.0, ((0, 0, 0), (low, high, 0), (0, 0, 0), (0, 0, 0)))  # noqa: E731
    return pad(front, rows[1], 0) + pad(back, 0, rows[0])


PROGRAMS = {
    "windows of 3": conv(3),
    "windows of 5": conv(5),
    "windows of 2": conv(2),
    "windows of 1": conv(1),
    "steps of 2": conv(4, 2),
    "steps of 2, one side": conv(3, 2),
    "steps of 2, more on one side": conv(7, 2),
    "no gap between windows": conv(2, 2),
    "no padding": conv(3, padding="VALID"),
    "padding on one side": conv(3, padding=((2, 0), (1, 1))),
    "windows with gaps": conv(3, rhs_dilation=2),
    "rows with gaps": conv(3, padding=((1, 1), (1, 1)), lhs_dilation=2),
    "pooling": pooled(3, 1, SAME),
    "pooling without overlap": pooled(2, 2, "VALID"),
    "slice of all but the first": lambda x: x[:, 1:],
    "slice of the first half": lambda x: x[:, :16],
    "slice of the middle": lambda x: x[:, 5:21],
    "slice of a quarter": lambda x: x[:, 13:21],
    "slice of one row": lambda x: x[:, 13:14],
    "slice of the last row": lambda x: x[:, -1],
    "slice of a few rows": lambda x: x[:, 6:8],
    "slice with steps": lambda x: x[:, ::2],
    "more padding": lambda x: jnp.pad(x, ((0, 0), (7, 9), (0, 0), (0, 0))),
    "difference of neighbours": lambda x: x[:, 1:] - x[:, :-1],
    "padding": lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0))),
    "reversed": lambda x: x[:, ::-1],
    "rotated": lambda x: jnp.roll(x, 3, 1),
    "rotated back": lambda x: jnp.roll(x, -3, 1),
    "rotated by full shards": lambda x: jnp.roll(x, 16, 1),
    "rotated by more than a shard": lambda x: jnp.roll(x, 13, 1),
    "a rotation's gradient, of two arrays": lambda x: rotated_sum(x[:, :29], jnp.sin(x)[:, :3]),
    "two layers": lambda x: conv(3)(jax.nn.relu(conv(5)(x))),
}


def check(fn, spec, arg=None):
    arg = arg or images()
    with sharding.mesh(a=4, b=2):
        jitted = sharding.jit(fn, in_shardings=spec)
        ledger, compiled = jitted.complete(arg).communication(), jitted.lower(arg).compile()
    assert ledger.lowered("cpu").by_kind() == cost.read_compiled(compiled).by_kind()
    return ledger


@pytest.mark.parametrize("name", PROGRAMS)
def test_along_one_dim(name):
    check(PROGRAMS[name], P(None, "a"))


@pytest.mark.parametrize("low, high", [(4, 7), (5, 6), (5, 8), (7, 16), (6, 9), (7, 12)])
def test_slices_whose_rows_come_from_twice_as_far_as_they_are_many(low, high):
    check(lambda x: x[:, low:high], P(None, "a"), images(rows=16))


@pytest.mark.parametrize("columns", [None, "b"])
@pytest.mark.parametrize("low, high", [(0, 8), (8, 16), (4, 12), (2, 14), (3, 11)])
def test_a_slice_of_replicated_rows_is_taken_before_it_is_sharded(low, high, columns):
    after = P(None, "a", columns)
    assert not check(lambda x: sharding.annotate(x[:, low:high], after), P(None, None, columns), images(rows=16))


@pytest.mark.parametrize("before, after", [(0, 13), (0, 16), (2, 15), (2, 18), (16, 0), (0, 19), (24, 0)])
def test_paddings_that_move_rows_twice_as_far_as_a_new_shard_is_long(before, after):
    check(lambda x: jnp.pad(x, ((0, 0), (before, after), (0, 0), (0, 0))), P(None, "a"), images(rows=16))


def test_along_two_dims():
    ledger = check(conv(5), P(None, "a", "b"))
    assert [c.axes for c in ledger] == [("a",), ("a",), ("b",), ("b",)]
    assert [c.result_bytes for c in ledger] == [4 * 2 * 4 * 4 * n for n in (2 * 4 / 4, 2 * 4 / 4, 12 / 4, 12 / 4)]


@pytest.mark.parametrize("rows", [(0, 26), (2, 28), (7, 33), (13, 14)], ids=str)
def test_over_two_axes(rows):
    check(lambda x: x[:, rows[0] : rows[1]], P(None, ("a", "b")), images(rows=40))


def test_uneven_rows():
    check(conv(3), P(None, "b"), images(rows=30))


@pytest.mark.parametrize(("before", "after"), [(P(("a", "b")), P("a")), (P("a"), P(("a", "b")))], ids=["fewer", "more"])
def test_uneven_rows_over_fewer_or_more_axes_are_exchanged_along_those_that_they_have(before, after):
    def fn(x):
        return jnp.sin(sharding.annotate(jnp.cos(sharding.annotate(x, before)), after))

    x = jax.ShapeDtypeStruct((26, 8), "float32")
    with sharding.mesh(a=4, b=2) as mesh, pytest.warns(UserWarning, match="XLA pads it"):
        jitted = sharding.jit(fn)
        ledger, compiled = jitted.complete(x).communication(), jitted.lower(x).compile()
    found = {(c.kind, c.axes): (1, c.result_bytes) for c in ledger.lowered("cpu")}
    assert found == cost.read_compiled(compiled, mesh=mesh).by_axes()
    (permute,) = (c for c in ledger if c.kind == "collective-permute")
    assert permute.axes == (("a", "b") if after == P("a") else ("a",))


def test_no_rows():
    assert not check(lambda x: jnp.pad(x, ((0, 0), (2, 2), (0, 0), (0, 0))), P(None, "a"), images(rows=0))


def test_cause_names_the_dim():
    (one, _) = check(conv(3), P(None, "a"))
    assert "exchanges halos along dim 1, sharded over a" in one.cause and "test_halo_exchange.py" in one.source


def test_the_gradient_of_a_convolution():
    def fn(x):
        return jax.grad(lambda x: (conv(3)(x) ** 2).sum())(x)

    check(fn, P(None, "a"))


def gradient_of_rotation(shift):
    return jax.grad(lambda x: (jnp.roll(x, shift, 1) ** 3).sum())


@pytest.mark.parametrize("shift", [1, 3, -2, 8, 11])
def test_the_gradient_of_a_rotation_is_a_rotation(shift):
    ledger = check(gradient_of_rotation(shift), P(None, "a"))
    assert {c.kind for c in ledger} == {"collective-permute"}


@pytest.mark.filterwarnings("ignore:.*XLA pads it")
@pytest.mark.parametrize("rows", [32, 30])
def test_numbers_of_the_gradient_of_a_rotation(rows):
    x = jnp.arange(2.0 * rows * 8 * 4).reshape(2, rows, 8, 4)
    fn = gradient_of_rotation(5)
    with sharding.mesh(a=4, b=2):
        ours = jax.block_until_ready(sharding.jit(lambda x: fn(sharding.annotate(x, P(None, "a"))))(x))
    assert (ours == fn(x)).all()
