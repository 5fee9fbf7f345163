"""Specs: conversion from and to `PartitionSpec`, and divisibility."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.errors import ShardingError
from sharding.spec import (
    CLOSED,
    OPEN,
    Dim,
    MeshSizes,
    Spec,
    axis_name,
    axis_size,
    byte_cost,
    closed_spec,
    cuts,
    divisible,
    from_partition_spec,
    indivisible,
    indivisible_error,
    limited_to,
    local_shape,
    occupied,
    open_spec,
    partition_spec_of,
    to_partition_spec,
)

SIZES = {"data": 2, "tensor": 4, "one": 1, "odd": 3}
U = P.UNCONSTRAINED


def spec_of(pspec, ndim=2):
    return from_partition_spec(pspec, (24,) * ndim, SIZES, asked="test")


def dims(*axes):
    return Spec(dims=tuple(Dim(axes=a) for a in axes))


@st.composite
def specs(draw):
    """Specs of 0 to 4 dims, closed or open, over full axes, each at most once."""
    axes = draw(st.permutations(["data", "tensor", "odd"]))
    ndim = draw(st.integers(0, 4))
    cuts = sorted(draw(st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim)))
    parts = [tuple(axes[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    return Spec(dims=tuple(Dim(axes=p, open=draw(st.booleans())) for p in parts))


@pytest.mark.parametrize(
    "pspec, text",
    [
        (P(), "[-, -]"),
        (P(None), "[-, -]"),
        (P("data"), "[data, -]"),
        (P(None, "data"), "[-, data]"),
        (P(("data", "tensor")), "[(data,tensor), -]"),
        (P(("tensor", "data"), None), "[(tensor,data), -]"),
        (P(U), "[?, -]"),
        (P(U, U), "[?, ?]"),
        (P(("data", ...)), "[(data,?), -]"),
        (P(("data", U)), "[(data,?), -]"),
        (P(("data", "tensor", ...), U), "[(data,tensor,?), ?]"),
        (P((), (...,)), "[-, ?]"),
        (P("one", ("data",)), "[-, data]"),
    ],
)
def test_forms_of_a_partition_spec(pspec, text):
    assert str(spec_of(pspec)) == text


def test_missing_trailing_dims_are_closed():
    assert spec_of(P("data"), ndim=3) == Spec(dims=(Dim(axes=("data",)), CLOSED, CLOSED))


def test_priority_applies_to_every_dim():
    spec = from_partition_spec(P("data"), (4, 4), SIZES, asked="test", priority=3)
    assert [d.priority for d in spec.dims] == [3, 3]


@settings(derandomize=True, deadline=None)
@given(specs())
def test_closed_specs_round_trip_through_a_partition_spec(spec):
    closed = dims(*spec.axes)
    assert spec_of(to_partition_spec(closed), len(spec.dims)) == closed


@settings(derandomize=True, deadline=None)
@given(specs())
def test_keep_open_leaves_free_dims_to_xla(spec):
    pspec = to_partition_spec(spec, keep_open=True)
    back = spec_of(pspec, len(spec.dims))
    assert back.axes == spec.axes
    assert [d.open for d in back.dims] == [d.open and not d.axes for d in spec.dims]


def test_trailing_replicated_dims_are_dropped():
    assert to_partition_spec(dims((), ("data",), (), ())) == P(None, "data")
    assert to_partition_spec(dims((), ())) == P()
    assert to_partition_spec(open_spec(2), keep_open=True) == P(U, U)


def test_sub_axes_are_dropped_in_a_partition_spec():
    spec = dims(("data", ("tensor", 1, 2)), (("tensor", 2, 2),))
    assert spec.has_sub_axes
    assert to_partition_spec(spec) == P("data")
    assert to_partition_spec(spec, keep_open=True) == P(U, U)
    assert spec.num_shards(SIZES) == 2 * 2 * 2
    assert str(spec) == "[(data,tensor:(1)2), tensor:(2)2]"


def test_name_and_size_of_axes_and_sub_axes():
    assert (axis_name("data"), axis_size("data", SIZES)) == ("data", 2)
    assert (axis_name(("tensor", 2, 2)), axis_size(("tensor", 2, 2), SIZES)) == ("tensor:(2)2", 2)


def test_is_open_means_unconstrained():
    assert open_spec(2).is_open
    assert open_spec(0).is_open
    assert not Spec(dims=(OPEN, CLOSED)).is_open
    assert not Spec(dims=(Dim(axes=("data",), open=True),)).is_open


shapes = st.lists(st.integers(0, 30), min_size=4, max_size=4).map(tuple)


@settings(derandomize=True, deadline=None)
@given(specs(), shapes)
def test_divisible_keeps_the_longest_prefix_that_divides(spec, shape):
    shape = shape[: len(spec.dims)]
    cut = divisible(spec, shape, SIZES)
    assert indivisible(cut, shape, SIZES) == []
    for kept, asked, size in zip(cut.dims, spec.dims, shape, strict=True):
        assert kept.axes == asked.axes[: len(kept.axes)]
        if kept.axes != asked.axes:
            longer = asked.axes[: len(kept.axes) + 1]
            assert size % math.prod(SIZES[a] for a in longer)


@settings(derandomize=True, deadline=None)
@given(specs(), shapes)
def test_indivisible_reports_each_uneven_dim(spec, shape):
    shape = shape[: len(spec.dims)]
    pairs = zip(spec.dims, shape, strict=True)
    bad = [i for i, (d, size) in enumerate(pairs) if size % math.prod(SIZES[a] for a in d.axes)]
    assert [int(line.split()[1]) for line in indivisible(spec, shape, SIZES)] == bad


def test_indivisible_writes_the_arithmetic_out():
    (line,) = indivisible(dims(("data", "tensor"), ()), (20, 3), SIZES)
    assert line == "dim 0 of size 20 over data=2 x tensor=4 = 8: 20 = 2 x 8 + 4"


def test_one_error_lists_all_faults_of_a_spec():
    with pytest.raises(ShardingError, match=r"(?s)3 entries for 2 dims.*names 'tensr'.*axis 'data' is used twice") as e:
        spec_of(P("data", "tensr", "data"))
    assert "'tensor' instead of 'tensr'" in e.value.fix


def test_unknown_axis_without_a_near_one_lists_all_axes():
    with pytest.raises(ShardingError, match=r"add the axis to sharding.mesh.*'data', 'tensor', 'one', 'odd'"):
        spec_of(P("zzzzzz"))


@settings(derandomize=True, deadline=None)
@given(specs(), st.data())
def test_axis_used_twice_is_always_an_error(spec, data):
    used = [a for d in spec.dims for a in d.axes]
    if used:
        again = data.draw(st.sampled_from(used))
        with pytest.raises(ShardingError, match="used twice"):
            spec_of(P(*to_partition_spec(spec), again), 5)


def test_order_of_axes_in_a_dim_matters():
    assert spec_of(P(("data", "tensor"))) != spec_of(P(("tensor", "data")))


def sub_specs():
    """Specs of one dim over up to three axes and sub-axes."""
    for count in range(4):
        for axes in itertools.permutations(["data", "odd", "one", ("tensor", 1, 2), ("tensor", 2, 2)], count):
            yield dims(axes)


def size_of(axes):
    return math.prod(SIZES[a] if isinstance(a, str) else a[2] for a in axes)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 24])
def test_limits_of_one_dim_are_the_longest_prefixes_that_hold(size):
    for spec in sub_specs():
        asked = spec.dims[0].axes
        prefixes = [asked[:k] for k in range(len(asked) + 1)]
        fits = [one for one in prefixes if size_of(one) <= size] or [()]
        assert occupied(spec, (size,), SIZES).dims[0].axes == fits[-1]
        even = itertools.takewhile(
            lambda one: size % size_of(one) == 0 and all(isinstance(a, str) for a in one), prefixes
        )
        assert divisible(spec, (size,), SIZES).dims[0].axes == [*even][-1]


def test_limits_keep_what_else_a_spec_says():
    spec = Spec(dims=(Dim(axes=("data", "tensor"), open=True, priority=2), Dim(axes=("odd",))), unreduced=("one",))
    for limited, kept in ((divisible(spec, (6, 3), SIZES), "data"), (occupied(spec, (7, 3), SIZES), "data")):
        assert limited == Spec(dims=(Dim(axes=(kept,), open=True, priority=2), Dim(axes=("odd",))), unreduced=("one",))
    assert occupied(spec, (8, 3), SIZES) is spec is divisible(spec, (8, 3), SIZES)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(specs(), shapes)
def test_a_local_shape_is_that_of_the_largest_shard(spec, shape):
    shape = shape[: len(spec.dims)]
    found = local_shape(spec.axes, shape, SIZES)
    for size, n, axes in zip(found, shape, spec.axes, strict=True):
        parts = size_of(axes)
        assert size * parts >= n and (size == 0 or (size - 1) * parts < n)
    even = tuple(size * size_of(axes) for size, axes in zip(shape, spec.axes, strict=True))
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
    shard = NamedSharding(mesh, to_partition_spec(dims(*spec.axes))).shard_shape(even)
    assert local_shape(spec.axes, even, SIZES) == shard
    assert spec.num_shards(SIZES) == math.prod(size_of(axes) for axes in spec.axes)


def test_the_row_of_a_stacked_array_has_no_first_dim():
    assert dims(("data",), ("tensor",), ()).row == dims(("tensor",), ())
    assert closed_spec(2) == dims((), ()) and not closed_spec(2).is_open


def test_boundaries_of_sub_axes():
    assert cuts(["data", ("tensor", 2, 2)], SIZES) == {"tensor": [1, 2, 4]}
    assert cuts([("tensor", 1, 2), ("tensor", 2, 2), ("eight", 2, 2)], SIZES | {"eight": 8}) == {
        "tensor": [1, 2, 4],
        "eight": [1, 2, 4, 8],
    }
    assert cuts(["data", "tensor"], SIZES) == {}


def test_limited_to_some_axes():
    spec = P(("data", "tensor"), None, "odd", U)
    assert limited_to(spec, ["tensor", "odd"]) == P(("tensor",), None, ("odd",), None)
    assert limited_to(spec, []) == P(None, None, None, None)
    assert limited_to(P(("tensor", "data")), SIZES) == P(("tensor", "data"))


def test_the_partition_spec_of_an_array():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("x")))
    assert partition_spec_of(placed) == P("x")
    assert partition_spec_of(jnp.ones(8)) == partition_spec_of(np.ones(8)) == P()


def counted_byte_cost(axes, sizes, costs):
    """The time of a byte of a group over fast and slow axes: its own fast step, and its share of the slow one."""
    slowest = max([costs.get(a if isinstance(a, str) else a[0], 1.0) for a in axes], default=1.0)
    fast = [a for a in axes if costs.get(a if isinstance(a, str) else a[0], 1.0) < slowest]
    group = math.prod(sizes[a] if isinstance(a, str) else a[2] for a in fast)
    return slowest if group == 1 else 1 + (slowest - 1) / group


def test_a_byte_over_slow_axes_is_shared_by_the_fast_ones():
    costs = {"data": 9.0, "odd": 3.0}
    sizes = MeshSizes(SIZES, costs)
    axes = ["data", "odd", "one", "tensor", ("tensor", 2, 2), ("data", 1, 2)]
    for count in range(4):
        for chosen in itertools.permutations(axes, count):
            assert byte_cost(chosen, sizes) == pytest.approx(counted_byte_cost(chosen, sizes, costs))
    assert byte_cost(["data", "tensor"], sizes) == 1 + 8 / 4
    assert byte_cost(["data"], SIZES) == byte_cost(["data"], MeshSizes(SIZES)) == 1.0
    assert MeshSizes(sizes).byte_costs == costs and MeshSizes(sizes, {}).byte_costs == {}


def test_an_indivisible_dim_names_the_nearest_sizes_that_divide():
    spec = dims(("data", "tensor"), ("odd",), ())
    assert indivisible_error(spec, (16, 6, 5), SIZES, asked="the spec", given=P("x")) is None
    found = indivisible_error(spec, (20, 2, 5), SIZES, asked="the spec", given=P("x"))
    assert found is not None and "the spec" in str(found)
    assert [*found.fix][:2] == ["size 16 or 24 in dim 0", "size 3 in dim 1"]


FIXED = [
    (P("data", None, "odd"), 2, P("data", None)),
    (P(None, "data", "odd"), 2, P(None, "data")),
    (P("data", "tensor", "odd"), 1, P("data")),
    (P("data", "data"), 2, P("data", None)),
    (P(("tensor", "data"), ("data", "odd")), 2, P(("tensor", "data"), "odd")),
    (P("data", ("data", ...)), 2, P("data", (...,))),
]


@pytest.mark.parametrize("spec, ndim, fixed", FIXED, ids=map(str, FIXED))
def test_the_suggested_spec_is_valid(spec, ndim, fixed):
    with pytest.raises(ShardingError, match="fix:") as caught:
        spec_of(spec, ndim)
    (text,) = caught.value.fix
    assert spec_of(eval(text, {"P": P, "PartitionSpec": P, "UnconstrainedSingleton": U}), ndim) == spec_of(fixed, ndim)


def test_axes_used_twice_say_where():
    with pytest.raises(ShardingError, match="axis 'data' is used twice: in entry 0") as caught:
        spec_of(P(("data", "data")))
    assert "entries" not in str(caught.value.found)
    with pytest.raises(ShardingError, match="axis 'data' is used twice: in entries 0 and 2"):
        spec_of(P("data", None, "data"), 3)
    with pytest.raises(ShardingError, match="of type list(.|\n)*a PartitionSpec"):
        from_partition_spec(["data"], (4,), SIZES, asked="test")
