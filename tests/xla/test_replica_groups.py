"""The forms of XLA's replica groups, against groups listed by hand."""

import numpy as np
import pytest

from sharding import ShardingError
from sharding.xla.replica_groups import mesh_axes, mesh_subaxes, read_groups

TWO_BY_FOUR = {"data": 2, "tensor": 4}
ROWS, COLUMNS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", ROWS),
        ("replica_groups={{0,1,2},{3}}, to_apply=%add", [[0, 1, 2], [3]]),
        ("replica_groups={}, to_apply=%add", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("to_apply=%add", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[8], to_apply=%add", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", COLUMNS),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, dimensions={0}", ROWS),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'data'}, dimensions={0}", COLUMNS),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor','data'}", [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("replica_groups=mesh['x:0'=2,'x:1'=2,'y'=2] {'x:1'}, dimensions={0}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh[x=2,y=4] {y:(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2,'x'}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("replica_groups=mesh['x'=8] {'x':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['x'=1,'y'=4,'z'=2], device_ids=([2,4]T(1,0)) {'y'}, dimensions={0}", ROWS),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'x'}", [[0, 1], [2, 3]]),
        ("source_target_pairs={{0,4},{4,0}}, metadata={}", [[0, 4], [4, 0]]),
        ('frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}', [[0, 1], [1, 2]]),
    ],
)
def test_groups(text, expected):
    found = read_groups(f", channel_id=1, {text}", 8)
    assert sorted(found) == sorted(expected)


def brute_axes(groups, sizes):
    grid = np.arange(np.prod(list(sizes.values()))).reshape(*sizes.values())
    at = {int(d): i for i, d in np.ndenumerate(grid)}
    return tuple(a for k, a in enumerate(sizes) if any(at[g[0]][k] != at[d][k] for g in groups for d in g))


@pytest.mark.parametrize("sizes", [TWO_BY_FOUR, {"x": 8}, {"a": 2, "b": 2, "c": 2}, {"one": 1, "all": 8}], ids=str)
@pytest.mark.parametrize(
    "groups", [ROWS, COLUMNS, [[0, 0], [1, 3]], [[0], [1]], [[0, 7]], [list(range(8))], [[0], [1, 2, 4]]], ids=str
)
def test_axes_that_groups_span(groups, sizes):
    assert mesh_axes(groups, sizes) == brute_axes(groups, sizes)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[4,2]<=[8]", (("tensor", 2, 2),)),
        ("[4,2]<=[2,2,2]T(0,2,1)", (("tensor", 1, 2),)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", ("tensor", 2, 2))),
        ("[2,4]<=[8]", ("tensor",)),
        ("[1,8]<=[8]", ("data", "tensor")),
        ("{{0,1},{2,4}}", ("data", "tensor")),
        ("{{0,5},{1,4}}", ("data", "tensor")),
        ("{{1,2},{0,3}}", ("tensor",)),
        ("{{0,1,2},{4,5,6}}", ("tensor",)),
        ("{{0},{1}}", ()),
    ],
)
def test_subaxes(text, expected):
    assert mesh_subaxes(read_groups(f"replica_groups={text}, to_apply=%add", 8), TWO_BY_FOUR) == expected


def test_a_permute_spans_full_axes():
    assert mesh_axes([[0, 1], [1, 0]], TWO_BY_FOUR) == ("tensor",)


def test_a_device_outside_of_the_mesh_is_an_error():
    with pytest.raises(ShardingError, match=r"(?s)mesh\(x=4\).*a collective with device 7; the mesh has 4 devices"):
        mesh_axes(ROWS, {"x": 4})


def test_an_unknown_form_is_an_error():
    with pytest.raises(ShardingError, match=r"(?s)replica groups of a compiled.*replica_groups=torus<2x4>"):
        read_groups("replica_groups=torus<2x4>, to_apply=%add", 8)
