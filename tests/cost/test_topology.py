"""Links of the groups along mesh axes."""

import itertools
import math

import jax
import numpy as np
import pytest

from sharding import hardware, mesh
from sharding.cost import topology
from sharding.cost.topology import _groups, byte_costs
from sharding.errors import ShardingError


def ways(devices, sizes, *axes):
    """(shape, size, GB/s, us) of each way, per level."""
    on = topology(mesh(sizes, devices=devices).mesh, devices)
    return [
        [(w.shape, w.size, round(w.bytes_per_second / 1e9, 3), round(w.latency_seconds * 1e6, 3)) for w in level]
        for level in on.levels(axes)
    ]


def test_axes_on_full_torus_dims():
    sizes = {"data": 4, "fsdp": 8, "tensor": 8}
    assert ways("v5p:4x8x8", sizes, "tensor") == [[("ring", 8, 100, 1)]]
    assert ways("v5p:4x8x8", sizes, "data") == [[("ring", 4, 100, 1)]]
    assert ways("v5p:4x8x8", sizes, "fsdp", "data") == [[("ring", 4, 100, 1), ("ring", 8, 100, 1)]]
    assert ways("v5p:4x8x8", {"data": 64, "tensor": 4}, "data") == [[("ring", 8, 100, 1)] * 2]
    assert ways("v5p:4x8x8", {"data": 1, "tensor": 256}, "tensor") == [
        [("ring", 4, 100, 1), ("ring", 8, 100, 1), ("ring", 8, 100, 1)]
    ]


def test_torus_dims_without_wraparound_are_lines():
    assert ways("v5p:2x2x4", {"data": 4, "tensor": 4}, "tensor") == [[("line", 2, 100, 1)] * 2]
    assert ways("v5p:2x2x4", {"data": 4, "tensor": 4}, "data") == [[("line", 4, 100, 1)]]
    assert ways("v5e:8x16", {"data": 8, "tensor": 16}, "data") == [[("line", 8, 50, 1)]]
    assert ways("v5e:8x16", {"data": 8, "tensor": 16}, "tensor") == [[("ring", 16, 50, 1)]]


def test_axes_on_one_dim_share_its_links():
    sizes = {"data": 4, "tensor": 4}  # over one dim of 16
    assert ways("v5e:1x16", sizes, "tensor") == [[("line", 4, 50, 1)]]  # neighbours
    assert ways("v5e:1x16", sizes, "data") == [[("ring", 4, 12.5, 4)]]  # four interleaved groups
    assert ways("v5e:1x16", sizes, "data", "tensor") == ways("v5e:1x16", {"x": 16}, "x") == [[("ring", 16, 50, 1)]]
    assert ways("v5e:1x16", {"x": 16}, ("x", 4, 4)) == ways("v5e:1x16", sizes, "tensor")
    assert ways("v5e:1x16", {"x": 16}, ("x", 1, 4)) == ways("v5e:1x16", sizes, "data")


def test_axes_that_do_not_match_dims_are_pessimistic():
    assert ways("v5e:4x6", {"a": 3, "b": 8}, "b") == [[("line", 2, 50, 1)], [("line", 4, 25, 2)]]
    assert ways("v5e:4x6", {"a": 3, "b": 8}, "a") == [[("line", 3, 25, 2)]]


def test_two_devices_on_a_chip():
    sizes = {"data": 8, "tensor": 2}
    assert ways("tpu7x:2x2x2", sizes, "tensor") == [[("switch", 2, 600, 1)]]
    assert ways("tpu7x:2x2x2", sizes, "data") == [[("line", 2, 50, 1)] * 3]
    assert ways("tpu7x:2x2x2", sizes, "data", "tensor") == [[("switch", 2, 600, 1)], [("line", 2, 50, 1)] * 3]


def test_hosts_of_gpus():
    sizes = {"data": 16, "tensor": 8}
    inside, across = ("switch", 8, 450, 1.9), ("switch", 16, 50, 4)
    assert ways("h100:16x8", sizes, "tensor") == [[inside]]
    assert ways("h100:16x8", sizes, "data") == [[across]]
    assert ways("h100:16x8", sizes, "data", "tensor") == [[inside], [across]]
    assert ways("h100:16x8", {"data": 32, "tensor": 4}, "data") == [[("switch", 2, 450, 1.9)], [across]]
    assert ways("h100:16x8", {"tensor": 8, "data": 16}, "data") == [[inside], [("switch", 2, 50, 4)]]
    assert ways("h100:16x8", {"tensor": 8, "data": 16}, ("data", 2, 8)) == [[inside]]
    assert ways("h100:16x8", {"pipe": 1, "data": 128}, "pipe") == []


@pytest.mark.parametrize("devices", ["v4:4x4x4", "v5p:4x6x2", "v6e:4x12", "tpu7x:2x3x4", "h100:6x8", "cpu:2x24"])
@pytest.mark.parametrize("sizes", [(48,), (2, 24), (6, 8), (3, 4, 4), (4, 4, 3), (16, 3)])
def test_levels_multiply_to_the_group_size(devices, sizes):
    described = hardware.parse(devices)
    factor = described.num_devices // 48 or 1
    if described.num_devices != 48 * factor or factor > 1:
        sizes = (described.num_devices,)
    named = {f"a{i}": size for i, size in enumerate(sizes)}
    on = topology(mesh(named, devices=devices).mesh, devices)
    for name, size in named.items():
        assert np.prod([way.size for level in on.levels((name,)) for way in level], initial=1) == size
    everything = [way.size for level in on.levels(tuple(named)) for way in level]
    assert np.prod(everything, initial=1) == on.group_size(tuple(named)) == described.num_devices


def test_real_devices():
    on = topology(mesh(data=2, tensor=4).mesh)
    assert str(on.devices) == "cpu:1x8"
    assert [[way.link for way in level] for level in on.levels(("data",))] == [["shared memory"]]


def test_the_current_mesh_knows_its_devices():
    with mesh(data=16, tensor=8, devices="h100:16x8") as m:
        assert str(topology(m).devices) == "h100:16x8"
    with (
        mesh(data=8, devices=8) as m,
        pytest.raises(ShardingError, match=r'devices of unknown hardware(.|\n)*hardware="h100"'),
    ):
        topology(m)


def test_hardware_by_name():
    m = mesh(data=16, devices=16).mesh
    assert str(topology(m, "h100").devices) == "h100:2x8"
    assert str(topology(m, "v5p").devices) == "v5p:2x2x4"
    assert str(topology(mesh(data=8).mesh, "v5e").devices) == "v5e:2x4"
    assert topology(m, hardware.chip("h200")).chip.name == "h200"
    with pytest.raises(ShardingError, match="h100:4x8 is 32 devices"):
        topology(m, "h100:4x8")


def test_unknown_axis():
    on = topology(mesh(data=8).mesh)
    with pytest.raises(ShardingError, match=r"the links along tensor(.|\n)*a mesh with axes data"):
        on.levels(("tensor",))


def test_a_topology_is_a_value():
    first, second = (topology(mesh(data=2, tensor=4, devices=jax.devices()).mesh) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


def test_links_of_real_cpus():
    assert topology(mesh(data=2, tensor=4).mesh).links == {"data": "shared memory", "tensor": "shared memory"}


@pytest.mark.parametrize(
    ("devices", "sizes", "links"),
    [
        ("h100:16x8", {"data": 16, "tensor": 8}, {"data": "network", "tensor": "nvlink"}),
        ("h100:16x8", {"data": 16, "tensor": 4, "seq": 2}, {"data": "network", "tensor": "nvlink", "seq": "nvlink"}),
        ("h100:16x8", {"tensor": 8, "data": 16}, {"tensor": "network", "data": "network"}),
        ("h100:16x8", {"pipe": 1, "data": 32, "tensor": 4}, {"pipe": "nvlink", "data": "network", "tensor": "nvlink"}),
        ("h100:1x8", {"data": 2, "tensor": 4}, {"data": "nvlink", "tensor": "nvlink"}),
        ("b200:6x4", {"a": 3, "b": 8}, {"a": "network", "b": "network"}),
        ("v5p:4x8x8", {"data": 32, "tensor": 8}, {"data": "ici", "tensor": "ici"}),
        ("cpu:2x4", {"data": 2, "tensor": 4}, {"data": "network", "tensor": "shared memory"}),
    ],
)
def test_links_depend_on_the_order_of_axes(devices, sizes, links):
    context = mesh(sizes, devices=devices)
    with context as m:
        assert topology(m).links == links
    assert topology(context.mesh, devices).links == links


# Groups and links by enumeration


def coordinates(sizes):
    return [dict(zip(sizes, at, strict=True)) for at in itertools.product(*map(range, sizes.values()))]


def rest_of(at, sizes, axes):
    """What devices of one group have in common: their place along all that is not in the group."""
    found = []
    for name, size in sizes.items():
        place = at[name]
        for axis in axes:
            if axis == name:
                place = None
        subs = sorted(axis[1:] for axis in axes if axis[0] == name and not isinstance(axis, str))
        digits, pre = [], 1  # the place in digits: before, within and behind each sub-axis
        for first, count in subs:
            digits.append(place // (size // first) % (first // pre))
            pre = first * count
        found.append((name, tuple(digits), place if not subs else place % (size // pre)))
    return tuple(found)


AXES = [("a",), ("b",), ("c",), ("a", "b"), ("b", "a"), ("c", "a"), (("c", 1, 2),), (("c", 2, 2),), (("c", 4, 2),),
        (("c", 2, 4),), ("a", ("c", 2, 2)), (("c", 1, 2), ("c", 4, 2)), ("a", "b", "c"), ("one",)]  # fmt: skip


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_groups_are_the_devices_that_differ_along_the_axes_alone(axes):
    sizes = {"a": 2, "b": 3, "one": 1, "c": 8}
    on = topology(mesh(sizes, devices="h100:6x8").mesh, "h100:6x8")
    places = coordinates(sizes)
    expected = {}
    for number, at in enumerate(places):
        expected.setdefault(rest_of(at, sizes, axes), set()).add(number)
    found = _groups(on, axes)
    assert {frozenset(group) for group in found.tolist()} == {frozenset(group) for group in expected.values()}
    assert found.shape == (48 // on.group_size(axes), on.group_size(axes))


HOSTS = [
    ({"data": 6, "tensor": 8}, "h100:6x8"),
    ({"data": 12, "tensor": 4}, "h100:6x8"),
    ({"data": 3, "tensor": 16}, "h100:6x8"),
    ({"tensor": 16, "data": 3}, "h100:6x8"),
    ({"a": 4, "b": 3, "c": 4}, "h100:6x8"),
    ({"a": 48, "b": 1}, "cpu:2x24"),
    ({"a": 2, "b": 24}, "cpu:2x24"),
]


@pytest.mark.parametrize(("sizes", "devices"), HOSTS, ids=str)
def test_links_and_levels_of_hosts_by_counting_devices(sizes, devices):
    on = topology(mesh(sizes, devices=devices).mesh, devices)
    per_host = on.devices.shape[1]
    for count in (1, 2):
        for axes in itertools.combinations(sizes, count):
            hosts = [[number // per_host for number in group] for group in _groups(on, axes).tolist()]
            counts = {tuple(sorted(group.count(host) for host in set(group))) for group in hosts}
            is_even = len(counts) == 1 and len(set(next(iter(counts)))) == 1
            inside = next(iter(counts))[0] if is_even else 1
            levels = [(way.size, way.link) for level in on.levels(axes) for way in level]
            expected = [(inside, on.chip.link), (math.prod(sizes[a] for a in axes) // inside, "network")]
            assert levels == [one for one in expected if one[0] > 1], axes
    for axis in sizes:
        crosses = any(len({number // per_host for number in group}) > 1 for group in _groups(on, (axis,)).tolist())
        assert on.links[axis] == ("network" if crosses else on.chip.link)


def test_a_byte_over_the_network_costs_as_much_as_its_links_are_slower():
    def costs(devices, **sizes):
        return byte_costs(topology(mesh(sizes, devices=devices).mesh, devices))

    ratio = 25 * 18 / 50  # NVLink of an H100, and its network
    assert costs("h100:2x8", node=2, gpu=8) == {"node": pytest.approx(ratio)}
    assert costs("h100:2x8", node=2, one=1, gpu=8) == {"node": pytest.approx(ratio)}
    assert costs("h100:2x8", data=4, gpu=4) == {"data": pytest.approx(ratio)}
    assert costs("h100:2x8", gpu=16) == costs("h100:1x8", gpu=8) == costs("h100:8x1", node=8, one=1) == {}
    assert costs("cpu:2x8", node=2, core=8) == costs("v5p:2x2x4", a=2, b=8) == byte_costs(None) == {}


@pytest.mark.parametrize("devices", ["v5p:4x4x8", "v5p:2x2x4", "v5e:4x8", "tpu7x:2x2x4", "v6e:2x16"])
def test_axes_that_take_whole_dims_fold(devices):
    """Each axis can be a product of dims of its own, however these are chosen."""
    described = hardware.parse(devices)
    dims = [size for size in (*described.shape, described.chip.devices_per_chip) if size > 1]
    for split in {(n, described.num_devices // n) for n in (1, 2, 4, 8, 16, 32) if described.num_devices % n == 0}:
        found = topology(mesh(a=split[0], b=split[1], devices=devices).mesh, devices)
        subsets = (c for k in range(len(dims) + 1) for c in itertools.combinations(dims, k))
        assert found.folds == any(math.prod(subset) == split[1] for subset in subsets), split
