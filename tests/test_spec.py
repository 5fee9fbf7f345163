"""Specs: conversion from and to `PartitionSpec`, and divisibility."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from sharding.errors import ShardingError
from sharding.spec import (
    CLOSED,
    OPEN,
    Dim,
    Spec,
    axis_name,
    axis_size,
    divisible,
    from_partition_spec,
    indivisible,
    open_spec,
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
