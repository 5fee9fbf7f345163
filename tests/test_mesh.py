"""Meshes over real and described devices: the current mesh, links, errors."""

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
from sharding.mesh import current, described, mesh


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
