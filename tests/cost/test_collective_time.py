"""Collective times against rings, lines and trees simulated step by step, and against worked examples."""

import itertools
import math

import pytest

from sharding import hardware, mesh
from sharding.cost import KINDS, collective_seconds, topology, wire_bytes
from sharding.cost.collective_time import _model_seconds
from sharding.cost.topology import Way
from sharding.hardware import MeasuredCollective

HOP, RATE = 1e-6, 1e9


def way(shape, size, rate=RATE, hop=0.0):
    return Way(shape=shape, size=size, bytes_per_second=rate, latency_seconds=hop, link="ici")


def neighbours(shape, n):
    """The directed links of a ring or a line."""
    steps = [(i, (i + 1) % n) for i in range(n if shape == "ring" else n - 1)]
    return steps + [(b, a) for a, b in steps]


def walked_gather(shape, n):
    """Steps of an all-gather, each link carrying half a chunk per step; on a ring the halves go opposite directions."""
    have = {i: {(i, 0), (i, 1)} for i in range(n)}
    steps = 0
    while any(len(one) < 2 * n for one in have.values()):
        sent = []
        for a, b in neighbours(shape, n):
            new = [half for half in have[a] - have[b] if goes_over(shape, n, (a, b), half)]
            if new:
                sent.append((b, min(new, key=lambda half: abs(half[0] - a))))
        assert sent
        for b, half in sent:
            have[b].add(half)
        steps += 1
    return steps


def goes_over(shape, n, link, half):
    """Whether a half chunk uses a link: on a ring one half per direction, on a line both away from the source."""
    (a, b), (source, side) = link, half
    if shape == "line":
        return source <= a if b > a else source >= a
    return ((a + 1) % n == b) == (side == 0) and b != source


@pytest.mark.parametrize("shape", ["ring", "line"])
@pytest.mark.parametrize("n", [3, 4, 5, 8, 16])
def test_gather_takes_as_many_steps_as_simulated(shape, n):
    half = 512
    seconds = walked_gather(shape, n) * half / RATE
    assert math.isclose(_model_seconds("all-gather", 2 * half * n, (way(shape, n),)), seconds)
    assert math.isclose(_model_seconds("reduce-scatter", 2 * half * n, (way(shape, n),)), seconds)
    assert math.isclose(_model_seconds("all-reduce", 2 * half * n, (way(shape, n),)), 2 * seconds)


def busiest_link(shape, n):
    """Half chunks over the busiest link when each device sends one chunk to each other along shortest paths."""
    load = dict.fromkeys(neighbours(shape, n), 0.0)
    for i, j in itertools.permutations(range(n), 2):
        routes = [range(i, j, 1 if j > i else -1)]
        if shape == "ring":
            there, back = (j - i) % n, (i - j) % n
            routes = [[(i + s) % n for s in range(there)]] if there <= back else []
            routes += [[(i - s) % n for s in range(back)]] if back <= there else []
        for route in routes:
            stops = [*route, j]
            for link in zip(stops[:-1], stops[1:], strict=True):
                load[link] += 2 / len(routes)
    return max(load.values())


@pytest.mark.parametrize("shape", ["ring", "line"])
@pytest.mark.parametrize("n", [3, 4, 5, 8, 16])
def test_all_to_all_is_bound_by_the_busiest_link(shape, n):
    half = 512
    seconds = busiest_link(shape, n) * half / RATE
    assert math.isclose(_model_seconds("all-to-all", 2 * half * n, (way(shape, n),)), seconds)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16])
def test_latency_is_that_of_the_farthest_device(n):
    farthest = {"line": n - 1, "ring": max(min(j, n - j) for j in range(n))}
    for shape, hops in farthest.items():
        for kind in ("all-gather", "reduce-scatter", "all-to-all"):
            assert math.isclose(_model_seconds(kind, 0, (way(shape, n, hop=HOP),)), hops * HOP)


def walked_bruck(n):
    """Steps of recursive doubling and chunks per device: each sends the one `2^s` before it all that it lacks."""
    have, steps, sent = {i: {i} for i in range(n)}, 0, 0
    while any(len(one) < n for one in have.values()):
        moved = {i: sorted((c - i) % n for c in have[i]) for i in range(n)}
        step = {i: {(i + c) % n for c in moved[i]} - have[(i - 2**steps) % n] for i in range(n)}
        sent += max(map(len, step.values()))
        for i in range(n):
            have[(i - 2**steps) % n] |= step[i]
        steps += 1
    return steps, sent


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 16, 24])
def test_switch(n):
    steps, sent = walked_bruck(n)
    hop = way("switch", n, hop=HOP)
    chunk = 1000
    expected = steps * HOP + sent * chunk / RATE
    assert math.isclose(_model_seconds("all-gather", chunk * n, (hop,)), expected)
    assert math.isclose(_model_seconds("reduce-scatter", chunk * n, (hop,)), expected)


@pytest.mark.parametrize("n", [4, 8, 16])
def test_small_messages_take_trees_and_large_ones_rings(n):
    hop = way("switch", n, hop=HOP)
    assert math.isclose(_model_seconds("all-reduce", 0, (hop,)), 2 * math.log2(n) * HOP)
    large = 1e12
    assert math.isclose(_model_seconds("all-reduce", large, (hop,)), 2 * (n - 1) * (HOP + large / n / RATE))
    assert math.isclose(_model_seconds("all-to-all", 0, (hop,)), math.log2(n) * HOP)
    assert math.isclose(_model_seconds("all-to-all", large, (hop,)), (n - 1) * (HOP + large / n / RATE))


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
def test_a_large_message_costs_its_bytes_on_the_wire(kind):
    large, hop = 10**12, way("switch", 8, hop=HOP)
    seconds = _model_seconds(kind, large, (hop,))
    assert math.isclose(seconds, wire_bytes(kind, large, 8) / RATE, rel_tol=1e-4)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 4, 4), (8, 8)])
def test_all_dims_of_a_torus_are_used_at_once(sizes):
    ways, n, num_bytes = tuple(way("ring", size) for size in sizes), math.prod(sizes), 1e9
    both_ways_everywhere = 2 * RATE * len(sizes)
    assert math.isclose(_model_seconds("all-gather", num_bytes, ways), num_bytes * (n - 1) / n / both_ways_everywhere)


def walked_torus(sizes, num_bytes):
    """An all-gather in parts that go through the dims in turn, one part per dim in each phase."""
    seconds = 0.0
    have = [num_bytes / len(sizes) / math.prod(sizes) for _ in sizes]  # of each part, on each device
    for phase in range(len(sizes)):
        took = []
        for part in range(len(sizes)):
            n = sizes[(part + phase) % len(sizes)]
            took.append(sum(have[part] / 2 / RATE for _ in range(n - 1)))  # half in each direction, n - 1 steps
            have[part] *= n
        seconds += max(took)
    assert all(math.isclose(one * len(sizes), num_bytes) for one in have)
    return seconds


@pytest.mark.parametrize("sizes", [(4,), (4, 8), (4, 8, 16), (16, 4)])
def test_uneven_torus(sizes):
    ways = tuple(way("ring", size) for size in sizes)
    assert math.isclose(_model_seconds("all-gather", 1e9, ways), walked_torus(sizes, 1e9))


def test_worked_examples_of_tpus():
    """How to Scale Your Model, part 3, problem 2 (whose answers omit (n - 1) / n and hops), v4 4x4x4."""
    m = mesh(x=4, y=4, z=4, devices="v4:4x4x4").mesh
    on = topology(m, "v4:4x4x4")
    whole = 2 * 1024 * 4096
    overhead = 1e-6 + 2e-6
    assert math.isclose(collective_seconds("all-gather", whole / 4, "x", on) - overhead, 3 / 4 * 23.3e-6, rel_tol=2e-3)
    both = collective_seconds("all-gather", whole, ("x", "y"), on)
    assert math.isclose(both - 1e-6 - 4e-6, 15 / 16 * 46.6e-6, rel_tol=2e-3)
    assert math.isclose(collective_seconds("all-gather", 256, "x", on), 3e-6, rel_tol=1e-2)  # problem 3: two hops


def test_worked_example_of_gpus():
    """Ibid., part 12, quiz 2, question 3: 512 MiB over 8 H100s in 1.04 ms."""
    on = topology(mesh(x=8, devices="h100:1x8").mesh, "h100:1x8")
    assert math.isclose(collective_seconds("all-gather", 4096 * 65536 * 2, "x", on), 1.04e-3, rel_tol=2e-2)


def test_all_reduce_is_hierarchical():
    """An all-reduce over all devices sends 1 / 8 of the bytes over the network."""
    on = topology(mesh(data=16, tensor=8, devices="h100:16x8").mesh, "h100:16x8")
    num_bytes = 10**9
    everywhere = collective_seconds("all-reduce", num_bytes, ("data", "tensor"), on)
    inside = 2 * num_bytes * 7 / 8 / 450e9
    across = 2 * num_bytes / 8 * 15 / 16 / 50e9
    assert math.isclose(everywhere, inside + across, rel_tol=2e-2)
    assert math.isclose(collective_seconds("all-reduce", num_bytes, "data", on), 8 * across, rel_tol=2e-2)
    assert math.isclose(
        collective_seconds("all-gather", num_bytes, ("data", "tensor"), on), everywhere / 2, rel_tol=2e-2
    )


def test_permute():
    gpus = topology(mesh(data=16, tensor=8, devices="h100:16x8").mesh, "h100:16x8")
    assert math.isclose(collective_seconds("collective-permute", 450e9, "tensor", gpus), 1, rel_tol=1e-4)
    assert math.isclose(collective_seconds("collective-permute", 50e9, ("data", "tensor"), gpus), 1, rel_tol=1e-4)
    torus = topology(mesh(data=4, tensor=16, devices="v5p:4x4x4").mesh, "v5p:4x4x4")
    assert math.isclose(collective_seconds("collective-permute", 100e9, "data", torus), 1, rel_tol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", ["v5p:2x4x4", "v5e:2x16", "tpu7x:2x2x4", "h100:4x8", "cpu:1x32"])
def test_time_grows_with_bytes_and_is_zero_for_one_device(kind, devices):
    on = topology(mesh(a=4, b=8, c=1, devices=devices).mesh, devices)
    for axes in ("a", "b", ("a", "b"), (("b", 2, 4),)):
        seconds = [collective_seconds(kind, num_bytes, axes, on) for num_bytes in (0, 1e3, 1e6, 1e9)]
        assert 0 < seconds[0] < seconds[1] < seconds[2] < seconds[3]
    assert collective_seconds(kind, 1e9, "c", on) == 0
    assert collective_seconds(kind, 1e9, (), on) == 0


def test_measured_collectives_take_precedence():
    import dataclasses

    m = mesh(a=2, b=4, devices="cpu:1x8").mesh
    model = topology(m, "cpu")
    measured = tuple(
        MeasuredCollective(kind=kind, link="shared memory", num_devices=n, start_seconds=n * 1e-4, bytes_per_second=1e9)
        for kind in ("all-reduce", "collective-permute")
        for n in (2, 8)
    )
    on = topology(m, dataclasses.replace(model.chip, collectives=measured))
    assert math.isclose(collective_seconds("all-reduce", 10**6, "a", on), 2e-4 + 1e-3)
    assert math.isclose(collective_seconds("all-reduce", 10**6, ("a", "b"), on), 8e-4 + 1.75e-3)
    assert math.isclose(collective_seconds("all-reduce", 10**6, "b", on), 2e-4 + 1.5e-3)
    assert math.isclose(collective_seconds("collective-permute", 10**6, "a", on), 2e-4 + 1e-3)
    assert collective_seconds("all-gather", 10**6, "a", on) == collective_seconds("all-gather", 10**6, "a", model)


@pytest.mark.parametrize(
    ("devices", "kind", "factor"),
    [
        ("v5p:4x4x4", "all-gather", 2),
        ("v5p:2x4x4", "all-gather", 1),
        ("v5e:8x8", "all-gather", 1),
        ("v5e:8x8", "reduce-scatter", 2),
        ("v5p:4x4x4", "reduce-scatter", 2),
        ("h100:8x8", "all-gather", 1),
    ],
)
def test_what_a_tpu_all_reduces_takes_twice_the_time(devices, kind, factor):
    """Over all devices, but not over half of them."""
    count = hardware.parse(devices).num_devices
    for sizes, times in (({"x": count}, factor), ({"x": count // 2, "y": 2}, 1)):
        with mesh(sizes, devices=devices) as m:
            on = topology(m)
        whole = collective_seconds("all-reduce", 1e9, "x", on)
        if on.chip.platform == "tpu":
            assert collective_seconds(kind, 1e9, "x", on) == pytest.approx(whole * times / 2, rel=1e-3)
        else:
            assert collective_seconds(kind, 1e9, "x", on) < whole
