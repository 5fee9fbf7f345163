"""Facts of programs compiled here, against numbers counted by hand."""

import inspect
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sharding
from sharding import P, ShardingError
from sharding.cost import read_compiled, read_hlo

SIZES = {"data": 2, "tensor": 4}


@pytest.fixture
def mesh():
    with sharding.mesh(SIZES) as m:
        yield m


def compiled(f, *shapes):
    """A `shard_map` of f over the mesh, its arguments replicated, compiled."""
    args = [jax.ShapeDtypeStruct(s, jnp.float32) if isinstance(s, tuple) else s for s in shapes]
    return jax.jit(jax.shard_map(f, in_specs=P(), out_specs=P(), check_vma=False)).lower(*args).compile()


def facts(f, *shapes):
    return read_compiled(compiled(f, *shapes), mesh=SIZES)


RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
# kind, axes, devices in a group, shape, bytes, bytes sent by hand
ONE = {
    "sum": (lambda x: lax.psum(x, "data"), ("all-reduce", ("data",), 2, (8, 4), 128, 2 * 64)),
    "sum over all": (
        lambda x: lax.psum(x, ("data", "tensor")),
        ("all-reduce", ("data", "tensor"), 8, (8, 4), 128, 224),
    ),
    "maximum": (lambda x: lax.pmax(x, "tensor"), ("all-reduce", ("tensor",), 4, (8, 4), 128, 2 * 96)),
    "gather": (lambda x: lax.all_gather(x, "tensor"), ("all-gather", ("tensor",), 4, (4, 8, 4), 512, 3 * 128)),
    "scatter": (
        lambda x: lax.psum_scatter(x, "tensor", tiled=True),
        ("reduce-scatter", ("tensor",), 4, (8, 4), 128, 3 * 32),
    ),
    "scatter the last dim": (
        lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
        ("reduce-scatter", ("data",), 2, (8, 4), 128, 64),
    ),
    "all to all": (
        lambda x: lax.all_to_all(x, "tensor", 0, 1, tiled=True),
        ("all-to-all", ("tensor",), 4, (4, 2, 4), 128, 3 * 32),
    ),
    "ring": (lambda x: lax.ppermute(x, "tensor", RING), ("collective-permute", ("tensor",), 2, (8, 4), 128, 128)),
}


@pytest.mark.parametrize("name", ONE)
def test_one_collective(name, mesh):
    f, expected = ONE[name]
    (c,) = facts(f, (8, 4)).collectives
    assert (c.kind, c.axes, c.num_devices, c.shape, c.bytes, c.wire_bytes) == expected
    assert (c.dtype, c.count, c.result_bytes, c.is_counted, c.is_conditional) == ("float32", 1, c.bytes, True, False)


def nested(x):
    def inner(c, _):
        return lax.psum(c, "tensor") / 4, None

    def outer(c, _):
        c = lax.scan(inner, lax.ppermute(c, "data", [(0, 1), (1, 0)]), None, length=3)[0]
        return c + lax.psum_scatter(jnp.sin(lax.all_gather(c, "tensor", tiled=True)), "tensor", tiled=True), None

    return lax.scan(outer, x, None, length=5)[0]


def test_collectives_in_loops_count_every_iteration(mesh):
    found = facts(nested, (8, 4))
    assert found.by_kind() == {
        "all-gather": (5, 5 * 512),
        "all-reduce": (15, 15 * 128),
        "reduce-scatter": (5, 5 * 512),
        "collective-permute": (5, 5 * 128),
    }
    assert found.by_axes()["all-reduce", ("tensor",)] == (15, 15 * 128)
    assert found.by_axes()["collective-permute", ("data",)] == (5, 5 * 128)
    assert found.total_bytes == (5 * 4 + 15 + 5 * 4 + 5) * 128
    assert found.sent_bytes == 15 * 192 + 5 * (384 + 384 + 128)
    assert all(c.is_counted and not c.is_conditional for c in found.collectives)


def test_an_unknown_trip_count_is_one_and_flagged(mesh):
    def f(x):
        return lax.while_loop(lambda s: jnp.sum(s) < 3, lambda s: lax.scan(inner, s, None, length=7)[0], x)

    def inner(s, _):
        return lax.pmax(s, "data") + 1, None

    (c,) = facts(f, (8, 4)).collectives
    assert (c.count, c.is_counted) == (7, False)


def test_a_condition_runs_once_more_than_the_body(mesh):
    def f(x):
        return lax.while_loop(lambda s: lax.pmax(jnp.sum(s), "tensor") < 3, lambda s: s + 1, x)

    (c,) = facts(f, (8, 4)).collectives
    assert (c.kind, c.shape, c.count, c.is_counted) == ("all-reduce", (), 2, False)


def test_branches_are_flagged(mesh):
    def f(x, n):
        def gathered(x):
            return jnp.sum(lax.all_gather(x, "tensor"), 0)

        x = lax.switch(n[0], [lambda x: lax.psum(x, "data"), gathered, lambda x: x + 1], x)
        return lax.psum(jnp.sin(x), "tensor")

    found = facts(f, (8, 4), jax.ShapeDtypeStruct((1,), jnp.int32))
    assert Counter((c.kind, c.axes, c.is_conditional, c.count) for c in found.collectives) == {
        ("all-reduce", ("data",), True, 1): 1,
        ("all-gather", ("tensor",), True, 1): 1,
        ("all-reduce", ("tensor",), False, 1): 1,
    }


def test_combined_collectives_are_listed_per_array(mesh):
    f = compiled(lambda x, y, z: lax.psum((x, y, z), "data"), (8, 4), (3,), ())
    found = read_compiled(f, mesh=mesh)
    assert sorted(c.shape for c in found.collectives) == [(), (3,), (8, 4)]
    assert found.by_kind() == {"all-reduce": (3, 128 + 12 + 4)}
    assert len([line for line in f.as_text().splitlines() if " all-reduce(" in line]) == 1


def test_names_and_lines(mesh):
    def f(x):
        return lax.psum(x, "data")

    (c,) = facts(f, (8, 4)).collectives
    line = inspect.getsourcelines(f)[1] + 1
    assert c.op_name.endswith("/psum")
    assert c.source.startswith(f"test_compiled_facts.py:{line} (") and c.source.endswith("f)")


def test_source_lines_are_the_users_under_sharding_jit(mesh):
    def f(x, w):
        return jnp.tanh(sharding.annotate(x, P("data", "tensor")) @ w)

    step = sharding.jit(f, in_shardings=(None, P("tensor")))
    args = [jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32)]
    (c,) = read_compiled(step.lower(*args).compile(), mesh=mesh).collectives
    assert (c.kind, c.axes, c.shape) == ("all-reduce", ("tensor",), (4, 32))
    assert c.source.startswith(f"test_compiled_facts.py:{inspect.getsourcelines(f)[1] + 1} (")


def test_without_a_mesh_the_axes_are_unknown(mesh):
    found = read_compiled(compiled(lambda x: lax.psum(x, "data"), (8, 4)))
    assert found.by_axes() == {("all-reduce", None): (1, 128)}
    assert found.collectives[0].num_devices == 2


def test_another_mesh_is_an_error(mesh):
    f = compiled(lambda x: lax.psum(x, "data"), (8, 4))
    with pytest.raises(ShardingError, match=r"(?s)mesh\(x=16\).*a program for 8 devices; the mesh has 16"):
        read_compiled(f, mesh={"x": 16})


def test_an_uncompiled_program_is_an_error(mesh):
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with pytest.raises(ShardingError, match=r"(?s)none an ENTRY.*compile\(\)"):
        read_compiled(lowered)


def test_peak_is_the_sum_of_its_parts():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    size = 256 * 256 * 4
    kept = read_compiled(jax.jit(lambda x: x + 1).lower(x).compile())
    donated = read_compiled(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile())
    assert (kept.memory.argument_bytes, kept.memory.output_bytes, kept.memory.alias_bytes) == (size, size, 0)
    assert donated.memory.alias_bytes == size
    assert (kept.peak_bytes, donated.peak_bytes) == (2 * size, size)


def test_temporaries_are_part_of_the_peak():
    def f(x):  # its gradient saves the carry of each of 8 steps
        return jnp.sum(lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=8)[0])

    size = 256 * 256 * 4
    found = read_compiled(jax.jit(jax.grad(f)).lower(jax.ShapeDtypeStruct((256, 256), jnp.float32)).compile())
    assert 8 * size <= found.memory.temp_bytes <= 11 * size
    assert found.peak_bytes == 2 * size + found.memory.temp_bytes


def test_hlo_text_has_no_memory(mesh):
    found = read_hlo(compiled(lambda x: lax.psum(x, "data"), (8, 4)).as_text())
    assert found.memory is None
    with pytest.raises(ShardingError, match="peak_bytes of a compiled program"):
        found.peak_bytes  # noqa: B018
