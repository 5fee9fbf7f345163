"""Meshes over real and described devices: the current mesh, links, errors."""

import asyncio
import itertools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.errors import ShardingError
from sharding.hardware import parse
from sharding.mesh import abstract, current, described, in_force, mesh, tracing_context, with_auto_axes, without_mesh


def in_jax() -> dict[str, int]:
    """The axis sizes of JAX's current mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def test_real_mesh_is_current_with_auto_axes():
    with mesh(data=2, tensor=4) as m:
        assert isinstance(m, Mesh)
        assert dict(m.shape) == {"data": 2, "tensor": 4}
        assert m.axis_types == (AxisType.Auto, AxisType.Auto)
        assert jax.sharding.get_mesh() == m
        assert current() is m
    assert current() is None
    assert in_jax() == {}


def test_bare_spec_works_inside():
    with mesh(data=2, tensor=4):
        y = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("data", "tensor")))(jnp.ones((8, 8)))
    assert y.sharding.shard_shape(y.shape) == (4, 2)


def test_described_mesh_is_abstract():
    with mesh(data=32, tensor=8, devices="v5p:4x8x8") as m:
        assert isinstance(m, AbstractMesh)
        assert m.axis_types == (AxisType.Auto, AxisType.Auto)
        assert current() is m
        assert in_jax() == {"data": 32, "tensor": 8}
        assert str(described()) == "v5p:4x8x8"
    assert current() is None
    assert described() is None


def test_program_lowers_for_described_devices():
    with mesh(data=256, devices="v5p:4x8x8") as m:
        x = jax.ShapeDtypeStruct((512, 4), jnp.float32, sharding=NamedSharding(m, P("data")))
        lowered = jax.jit(lambda x: x * 2).trace(x).lower(lowering_platforms=("cpu",))
    assert "256" in lowered.as_text()


def test_number_of_unspecified_devices():
    with mesh(data=-1, tensor=4, devices=96) as m:
        assert dict(m.shape) == {"data": 24, "tensor": 4}
        assert described() is None


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.permutations([1, 2, 4]), st.integers(0, 2), st.sampled_from([None, 8, "h100:2x4", parse("v5e:2x4")]))
def test_minus_one_is_inferred(sizes, free, devices):
    given_sizes = dict(zip("abc", sizes, strict=True)) | {"abc"[free]: -1}
    resolved = dict(mesh(devices=devices, **given_sizes).mesh.shape)
    assert resolved == dict(zip("abc", sizes, strict=True))


def test_size_one_axes_are_kept():
    assert dict(mesh(data=8, tensor=1).mesh.shape) == {"data": 8, "tensor": 1}


def test_first_axis_is_major():
    ids = [[device.id for device in row] for row in mesh(data=2, tensor=4).mesh.devices]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_given_devices_keep_their_order():
    some = jax.devices()[::-1][:4]
    with mesh(data=2, tensor=2, devices=some) as m:
        assert list(m.devices.flat) == some


def test_names_that_are_not_identifiers():
    m = mesh({"stage 0": 2, "devices": 2}, data=2).mesh
    assert m.axis_names == ("stage 0", "devices", "data")


def test_numpy_sizes_are_sizes():
    assert dict(mesh(data=np.int64(8)).mesh.shape) == {"data": 8}


def test_nests_and_restores():
    with mesh(data=8) as outer:
        with mesh(data=2, tensor=2, devices=jax.devices()[:4]) as inner:
            assert current() is inner
            assert in_jax() == {"data": 2, "tensor": 2}
        assert current() is outer
        assert in_jax() == {"data": 8}


def test_described_nests_in_real_and_real_in_described():
    with mesh(data=8) as outer:
        with mesh(data=16, tensor=8, devices="h100:16x8") as larger:
            assert current() is larger
            with mesh(tensor=8) as innermost:
                assert current() is innermost
                assert jax.jit(lambda x: x + 1)(1) == 2
            assert current() is larger
            assert in_jax() == {"data": 16, "tensor": 8}
        assert current() is outer
        assert jax.sharding.get_mesh() == outer


def test_is_reusable_and_reentrant():
    context = mesh(data=8)
    for _ in range(2):
        with context as m, mesh(tensor=8), context as again:
            assert again is m
            assert current() is m
    assert current() is None


def test_restores_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), mesh(data=8):
        raise RuntimeError("inside")
    assert current() is None
    assert in_jax() == {}


def test_threads_do_not_see_each_others_mesh():
    seen = []
    with mesh(data=8):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_mesh_set_by_jax_is_current():
    m = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(m):
        assert current() == m
        with mesh(data=8) as inner:
            assert current() is inner
    with mesh(data=8), jax.set_mesh(m):
        assert current() == m
        assert described() is None


def test_abstract_mesh_set_by_jax_is_current():
    abstract = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(abstract):
        assert current() == abstract


def test_current_inside_traced_code():
    seen = []

    def traced(x):
        seen.append(current())
        return x

    with mesh(data=2, tensor=4) as m:
        jax.jit(traced)(1.0)
        jax.grad(traced)(1.0)
        jax.jit(jax.shard_map(traced, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))(jnp.ones(4))
    with jax.set_mesh(m):
        jax.eval_shape(lambda x: traced(x), 1.0)  # a new function: JAX caches the trace of the other
    assert seen[0] is seen[1] is seen[2] is m
    assert seen[3] == m.abstract_mesh


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_rejected_inside_traced_code(transform):
    outside = mesh(data=8)

    def creates(x):
        mesh(data=8)
        return x

    def enters(x):
        with outside:
            return x

    for traced in (creates, enters):
        with pytest.raises(ShardingError, match="required: a mesh context outside of traced code"):
            transform(traced)(jnp.ones(3) if transform is jax.vmap else 1.0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"data": 3, "tensor": 4},
            r"3 x 4 = 12(.|\n)*fix: +sharding.mesh\(data=2, tensor=4\)\n +sharding.mesh\(data=4, t",
        ),
        ({"data": 2}, r"fix: +sharding.mesh\(data=8\)\n +sharding.mesh\(data=2, devices=jax.devices\(\)\[:2\]\)"),
        ({"data": 16}, r"a product of 8(.|\n)*jax_num_cpu_devices\", 16(.|\n)*sharding.mesh\(data=16, devices=16\)"),
        ({"data": -1, "tensor": 3}, r"a product that divides 8(.|\n)*fix: +sharding.mesh\(data=-1, tensor=4\)"),
        ({"data": 3, "b c": 4}, r"fix: +sharding.mesh\(\{'data': 2, 'b c': 4\}\)"),
        ({"data": 0}, r"axis 'data' of size 0"),
        ({"data": -2, "tensor": 2.0}, r"2 failures\n +1. axis 'data' of size -2\n +2. axis 'tensor' of size 2.0"),
        ({"data": True}, r"axis 'data' of size True"),
        ({"data": -1, "tensor": -1}, r"axes 'data', 'tensor' of size -1\n +required: at most one size of -1"),
        ({"": 8}, r"a non-empty string as axis name"),
        ({}, r"at least one axis"),
    ],
)
def test_errors(sizes, message):
    with pytest.raises(ShardingError, match=message):
        mesh(sizes)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("h100:16x8", r"128(.|\n)*fix: +sharding.mesh\(data=16, tensor=8, devices='h100:16x8'\)"),
        (96, r"a product of 96"),
        (0, r"no devices"),
        ([], r"no devices"),
        ("h10:16x8", r"fix: +\"h100:16x8\""),
    ],
)
def test_errors_over_given_devices(devices, message):
    with pytest.raises(ShardingError, match=message):
        mesh(data=15, tensor=8, devices=devices)


def test_axis_given_twice():
    with pytest.raises(ShardingError, match="axis 'data' twice"):
        mesh({"data": 2}, data=4)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 360), st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_suggested_sizes_fit(num_devices, sizes):
    if math.prod(sizes) == num_devices:
        return
    with pytest.raises(ShardingError, match="a product of") as caught:
        mesh({f"a{i}": size for i, size in enumerate(sizes)}, devices=num_devices)
    for line in caught.value.fix:
        assert eval(line, {"sharding": type("face", (), {"mesh": staticmethod(mesh)})}).mesh.size == num_devices


@pytest.mark.parametrize("error", [AssertionError, NotImplementedError, ValueError])
def test_devices_that_fit_no_torus_are_taken_in_order(monkeypatch, error):
    """JAX asserts that the devices of a TPU mesh are a whole torus: six of a 2x2x2 slice are not."""

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(jax, "make_mesh", refuse)
    with mesh(a=2, b=3, devices=jax.devices()[:6]) as m:
        assert m.devices.flatten().tolist() == jax.devices()[:6]


# The mesh that JAX sees


def test_a_mesh_is_in_force_where_jax_has_another_or_none():
    m, other = mesh(data=2, tensor=4).mesh, mesh(x=8)
    with in_force(m):
        assert in_jax() == {"data": 2, "tensor": 4} and jax.sharding.get_mesh() == m
    assert in_jax() == {}
    with other, in_force(m):
        assert in_jax() == {"data": 2, "tensor": 4}
    described_mesh = mesh(data=4, devices=4).mesh
    with in_force(described_mesh):
        assert in_jax() == {"data": 4}
    with jax.set_mesh(m), in_force(m):
        assert jax.sharding.get_mesh() is m
    assert in_jax() == {}


def test_a_mesh_is_in_force_in_traced_code_without_one():
    m, seen = mesh(data=2, tensor=4).mesh, []

    def traced(x):
        with in_force(m):
            seen.append(in_jax())
        return x

    jax.jit(traced)(1.0)
    assert seen == [{"data": 2, "tensor": 4}]


def test_explicit_axes_become_auto_alone():
    kinds = (AxisType.Explicit, AxisType.Auto, AxisType.Manual)
    plain = AbstractMesh((2, 2, 2), ("a", "b", "c"), axis_types=kinds)
    assert with_auto_axes(plain).axis_types == (AxisType.Auto, AxisType.Auto, AxisType.Manual)
    assert with_auto_axes(plain).shape_tuple == plain.shape_tuple
    real = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
    auto = with_auto_axes(real)
    assert isinstance(auto, Mesh) and auto.axis_types == (AxisType.Auto,) * 2 and auto.axis_names == ("a", "b")
    assert auto.devices.tolist() == real.devices.tolist()
    assert with_auto_axes(auto) is auto and abstract(auto) is auto.abstract_mesh and abstract(plain) is plain


def test_tracing_sees_auto_axes():
    real = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(real), tracing_context():
        assert jax.sharding.get_abstract_mesh().axis_types == (AxisType.Auto,)
    with mesh(a=8) as m, tracing_context():
        assert jax.sharding.get_mesh() is m
    with tracing_context():
        assert in_jax() == {}


def test_without_a_mesh_there_is_none():
    with mesh(data=8):
        with without_mesh():
            assert in_jax() == {}
        assert in_jax() == {"data": 8}


@pytest.mark.parametrize("last", [0, 1, 2])
def test_tasks_of_a_thread_have_meshes_of_their_own(last):
    """Also if they leave them in another order than they entered them."""
    sizes = [{"a": 8}, {"b": 2, "c": 4}, {"d": 4, "e": 2}]
    seen, gates = [], [asyncio.Event() for _ in sizes]

    async def task(k):
        with mesh(sizes[k]) as m:
            await asyncio.sleep(0)
            seen.append((current() is m, dict(current().shape) == sizes[k]))
            await gates[k].wait()
            seen.append((current() is m, True))
        seen.append((current() is None, True))

    async def everything():
        tasks = [asyncio.create_task(task(k)) for k in range(3)]
        for _ in range(4):
            await asyncio.sleep(0)
        for k in [k for k in range(3) if k != last] + [last]:
            gates[k].set()
            await tasks[k]
        assert current() is None

    asyncio.run(everything())
    assert len(seen) == 9 and all(all(one) for one in seen)
    assert in_jax() == {} and current() is None


def halvings(sizes, asked):
    """How many doublings or halvings lead from the sizes that were asked for to others, and how many are doublings."""
    steps = [math.log2(new / old) for new, old in zip(sizes, asked, strict=True)]
    return round(sum(map(abs, steps)), 6), sum(step > 0 for step in steps)


@pytest.mark.parametrize("asked", [(3, 4), (5,), (2, 2, 3), (1, 1), (16, 2), (7, 9)])
@pytest.mark.parametrize("num_devices", [8, 12, 64])
def test_the_suggested_sizes_are_the_nearest(asked, num_devices):
    if math.prod(asked) == num_devices:
        return
    names = "abc"[: len(asked)]
    with pytest.raises(ShardingError, match="a product of") as caught:
        mesh(dict(zip(names, asked, strict=True)), devices=num_devices)
    every = [s for s in itertools.product(range(1, num_devices + 1), repeat=len(asked)) if math.prod(s) == num_devices]
    nearest = sorted(halvings(sizes, asked) for sizes in every)[:4]
    suggested = [eval(line, {"sharding": type("face", (), {"mesh": staticmethod(mesh)})}) for line in caught.value.fix]
    assert [halvings(tuple(one.mesh.shape.values()), asked) for one in suggested] == nearest


def test_an_axis_to_be_inferred_stays_so_in_suggestions():
    with pytest.raises(ShardingError, match="a product that divides 12") as caught:
        mesh({"a": -1, "b": 5, "c": 2}, devices=12)
    assert [*caught.value.fix] == [
        "sharding.mesh(a=-1, b=6, c=2, devices=12)",  # 0.26 doublings away
        "sharding.mesh(a=-1, b=3, c=2, devices=12)",  # 0.74
        "sharding.mesh(a=-1, b=4, c=3, devices=12)",  # 0.91
        "sharding.mesh(a=-1, b=6, c=1, devices=12)",  # 1.26
    ]
