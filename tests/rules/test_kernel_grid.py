"""Which factors split a kernel's grid: as far as the blocks of all arrays move with one axis of it."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from support import pallas_kernels

from sharding.rules import Kind, notation
from sharding.rules.kernel_grid import grid_splits, on_grid


def splits(f, *shapes, rule, **options):
    """Factor -> (axis of the grid, most parts), by name."""
    return splits_of(f, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], rule=rule, **options)


def splits_of(f, args, *, rule, **options):
    (eqn,) = (e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive.name == "pallas_call")
    parsed = notation.parse(rule, **options)
    found = parsed.rule([v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars])
    names = list(dict.fromkeys(n for a in (*parsed.operands, *parsed.results) for dim in a.dims for n in dim))
    return {names[f]: (s.grid_axis, s.parts) for f, s in grid_splits(found, eqn.params).items()}


def test_a_product():
    rule = pallas_kernels.RULES["matmul"][0]
    expected = {"m": (0, 4), "n": (1, 2), "k": (2, 8)}
    assert splits(pallas_kernels.matmul, (16, 32), (32, 8), rule=rule) == expected


def test_grouped_heads_split_as_their_groups():
    rule, options = pallas_kernels.RULES["attention"]
    shapes = (2, 6, 8, 4), (2, 3, 8, 4), (2, 3, 8, 4)
    expected = {"b": (0, 2), "k": (1, 3), "t": (2, 2)}
    assert splits(pallas_kernels.attention, *shapes, rule=rule, **options) == expected


def test_what_prefetched_scalars_have_is_needed_whole():
    rule, options = pallas_kernels.RULES["lookup"]
    args = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert splits_of(pallas_kernels.lookup, args, rule=rule, **options) == {"n": (1, 4)}


def test_an_axis_of_the_grid_whose_length_is_data():
    def f(rows, x):
        spec = pl.BlockSpec((2, 4), lambda i, j: (i, j))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas_kernels.call(
            lambda x, out: out.__setitem__(..., x[...]),
            grid=(rows, 4), in_specs=[spec], out_specs=spec, out_shape=shape,
        )(x)  # fmt: skip

    args = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert splits_of(f, args, rule=", m n -> m n") == {"n": (1, 4)}


def test_an_index_that_mixes_axes_with_one_whose_length_is_data():
    def f(rows, x):
        spec = pl.BlockSpec((2, 4), lambda i, j: (i + j, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas_kernels.call(
            lambda x, out: out.__setitem__(..., x[...]),
            grid=(rows, 4), in_specs=[spec], out_specs=spec, out_shape=shape,
        )(x)  # fmt: skip

    args = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert splits_of(f, args, rule=", m n -> m n") == {}


ROWS = "m n -> m n"


@pytest.mark.parametrize(
    "f, expected",
    [
        (pallas_kernels.scaled, {"m": (0, 8)}),
        (lambda x: pallas_kernels.scaled(x, block=16), {}),  # one block
        (lambda x: pallas_kernels.scaled(x, block=3), {}),  # the last block is cut
        (lambda x: pallas_kernels.scaled(x, lambda i: (7 - i, 0)), {}),  # backwards
        (lambda x: pallas_kernels.scaled(x, lambda i: ((i + 4) % 8, 0)), {}),  # from the middle on
        (lambda x: pallas_kernels.scaled(x, lambda i: (i // 2 * 2 + 1 - i % 2, 0)), {"m": (0, 4)}),  # swapped in pairs
        (lambda x: pallas_kernels.scaled(x, input_output_aliases={0: 0}), {"m": (0, 8)}),
    ],
    ids=["in order", "one block", "cut", "backwards", "turned", "in pairs", "in place"],
)
def test_orders_of_visits(f, expected):
    assert splits(f, (16, 4), rule=ROWS) == expected


def summed(body):
    def f(x):
        return pl.pallas_call(
            body,
            grid=(4,),
            in_specs=[pl.BlockSpec((2, 4), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((4,), lambda i: (0,)),
            out_shape=jax.ShapeDtypeStruct((4,), x.dtype),
            interpret=True,
        )(x)

    return f


def started_at(first, weight):
    def body(x, out):
        step = pl.program_id(0)

        @pl.when(step == first)
        def _():
            out[...] = jnp.zeros_like(out)

        out[...] += weight(step) * x[...].sum(0)

    return body


@pytest.mark.parametrize(
    "body, expected",
    [
        (started_at(0, lambda i: 1), {"m": (0, 4)}),
        (started_at(1, lambda i: 1), {}),
        (started_at(0, lambda i: i), {}),  # the summands depend on their place
    ],
    ids=["first", "second", "weighted"],
)
def test_sums_whose_programs_only_tell_the_ends(body, expected):
    assert splits(summed(body), (8, 4), rule="m n -> n", need_replication=["n"]) == expected


def test_what_does_not_split_is_needed_whole():
    args = [jax.ShapeDtypeStruct((16, 4), jnp.float32)]
    (eqn,) = jax.make_jaxpr(pallas_kernels.scaled)(*args).eqns
    found = on_grid(notation.parse(ROWS).rule([(16, 4)], [(16, 4)]), eqn.params)
    assert str(found) == "ik j -> ik j"
    assert found.sizes == (8, 4, 2) and found.blocked == {1, 2}
    assert found.kinds == (Kind.PASS, Kind.REPLICATE, Kind.REPLICATE)
    assert on_grid(found, eqn.params) == found
