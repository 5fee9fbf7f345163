"""Annotations as sets of specs: what satisfies two of them, by enumerating all specs of a small mesh."""

import itertools

import pytest

from sharding import graph
from sharding.graph import Annotation, Graph, Group, group_annotations, joined
from sharding.graph.sharding_groups import combined, value_annotations
from sharding.spec import Dim, Spec

AXES = ("a", "b")


def axes_of_dims(ndim):
    """Every way to shard some dims over the axes, each used once at most."""
    found = {}
    for order in itertools.permutations(AXES):
        for places in itertools.product(range(-1, ndim), repeat=len(order)):
            dims = (tuple(x for x, p in zip(order, places, strict=True) if p == d) for d in range(ndim))
            found[tuple(dims)] = None
    return [*found]


SHARDINGS = axes_of_dims(2)
ANNOTATIONS = [
    Spec(dims=tuple(Dim(axes=axes, open=is_open) for axes, is_open in zip(dims, opened, strict=True)))
    for dims in SHARDINGS
    for opened in itertools.product([False, True], repeat=2)
]


def allowed(spec):
    """The shardings that satisfy an annotation: an open dim may have more axes."""
    return {
        dims
        for dims in SHARDINGS
        if all(
            own[: len(asked.axes)] == asked.axes and (asked.open or own == asked.axes)
            for own, asked in zip(dims, spec.dims, strict=True)
        )
    }


def test_members_of_a_group_allow_what_both_annotations_allow():
    known = {spec: allowed(spec) for spec in ANNOTATIONS}
    for a, b in itertools.product(ANNOTATIONS, repeat=2):
        both, common = combined(a, b), known[a] & known[b]
        assert (known[both] if both is not None else set()) == common, (str(a), str(b))


def test_annotations_of_one_value_merge_where_each_dim_is_given_by_one_of_them():
    for a, b in itertools.product(ANNOTATIONS, repeat=2):
        both = graph.merged(a, b)
        dims = []
        for x, y in zip(a.dims, b.dims, strict=True):
            free = [one for one in (y, x) if one.open and not one.axes]
            dims.append(x if x == y or y in free else y if free else None)
        used = [axis for dim in dims if dim is not None for axis in dim.axes]
        expected = None if None in dims or len(set(used)) < len(used) else tuple(dims)
        assert (None if both is None else both.dims) == expected, (str(a), str(b))
        if both is not None:
            assert graph.merged(both, b) == both == graph.merged(a, both)
            assert allowed(both) <= allowed(a) & allowed(b)


def test_the_combined_dim_has_the_earlier_priority():
    early, late = Dim(axes=("a",), open=True, priority=1), Dim(axes=("a", "b"), open=True, priority=3)
    for x, y in ((early, late), (late, early)):
        found = combined(Spec(dims=(x,)), Spec(dims=(y,)))
        assert found is not None and found.dims == (Dim(axes=("a", "b"), open=True, priority=1),)


def annotation(origin, *dims):
    return Annotation(spec=Spec(dims=dims), origin=origin)


A, B, FREE = Dim(axes=("a",)), Dim(axes=("b",)), Dim(open=True)


def test_a_joined_annotation_names_each_origin_once():
    one, other = annotation("one", A, FREE), annotation("other", FREE, B)
    both = joined(one, other)
    assert both == annotation("one; other", A, B)
    assert joined(both, other) == both == joined(both, one)
    assert joined(one, annotation("same", A, FREE)) == one  # which adds nothing
    assert joined(one, annotation("closed", B, FREE)) is None
    ruled = annotation("ruled", Dim(axes=("a",), via="x -> a"), FREE)
    assert joined(one, ruled).origin == "one; ruled" and joined(one, ruled).spec.dims[0].via == "x -> a"
    assert joined(ruled, one) == ruled


def group_graph(groups, annotations=None):
    shapes = [(4, 4)] * 7
    return Graph(
        shapes=shapes,
        sites=[()] * 7,
        groups=[Group(members, (k,)) for k, members in enumerate(groups)],
        annotations=annotations or {},
    )


@pytest.mark.parametrize(
    "groups", [[(1, 2)], [(2, 1)], [(5, 3), (3, 1)], [(4, 2), (6, 5), (5, 4)], [(0, 6, 3), (2, 3)], [(1, 2), (3, 4)]]
)
def test_groups_that_overlap_are_one(groups):
    g = group_graph(groups)
    for v in range(7):
        tied = {v}
        for _ in groups:  # as often as a chain can be long
            tied |= {w for members in groups if tied & {*members} for w in members}
        assert g.representatives[v] == min(tied)
        assert g.members(v) == [v, *sorted(tied - {v})]


def test_the_site_of_a_pair_is_that_of_the_group_with_both():
    g = group_graph([(5, 3), (3, 1), (1, 3)])
    assert g.group_site(3, 1) == (1,) and g.group_site(3, 5) == g.group_site(5, 3) == (0,)
    assert g.group_site(5, 1) == (0,)  # no group has both: the first with 5
    assert g.group_site(6, 1) == ()


def test_annotations_of_members_are_those_of_the_group():
    g = group_graph([(2, 4)], {4: annotation("four", A, FREE), 2: annotation("two", FREE, B), 6: annotation("six", A)})
    both = group_annotations(g)
    assert both.keys() == {2, 6} and both[2].spec.dims == (A, B) and both[2].origin == "four"
    of_values = value_annotations(g)
    assert of_values[2] == of_values[4] == both[2] and of_values[6].origin == "six" and len(of_values) == 3
    free = group_graph([], {6: annotation("six", A)})
    assert value_annotations(free) is group_annotations(free) is free.annotations
