"""Ops without a rule: what is gathered for them is decided, listed, and refused under a limit."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.interpreters import mlir
from support import partitioned_ops

import sharding
from sharding import P, annotate
from sharding.cost import read_compiled

X = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)

doubled_p = jex.Primitive("host_doubled")
doubled_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(doubled_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))


def kernel(x):
    def double(source, target):
        target[...] = 2 * source[...]

    block = pl.BlockSpec((4, 8), lambda i: (i, 0))
    return pl.pallas_call(double, out_shape=SHAPE, grid=(4,), in_specs=[block], out_specs=block, interpret=True)(x)


def printed(x):
    jax.debug.callback(lambda a: None, x)
    return x + 1


def discarded(x):
    io_callback(lambda a: 2 * np.asarray(a), SHAPE, x)
    return x + 1


PROGRAMS = {
    "pallas_call": kernel,
    "pure_callback": lambda x: jax.pure_callback(lambda a: 2 * np.asarray(a), SHAPE, x) + 1,
    "io_callback": lambda x: io_callback(lambda a: 2 * np.asarray(a), SHAPE, x),
    "debug_callback": printed,
    "host_doubled": lambda x: doubled_p.bind(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_an_unknown_op_gathers_is_listed_refused_and_as_compiled(name):
    f = PROGRAMS[name]
    with sharding.mesh(data=8):
        step = sharding.jit(f, in_shardings=P("data"))
        completion = step.complete(X)
        found, compiled = np.asarray(step(X)), step.lower(X).compile()
        ledger = completion.communication()
        assert read_compiled(compiled).by_kind() == ledger.lowered("cpu").by_kind()
        with pytest.raises(sharding.ShardingError, match=f"(?s){name} at test_unknown_ops.py.*512 bytes") as error:
            sharding.jit(f, in_shardings=P("data"), max_implicit_bytes=511).complete(X)
        assert sharding.jit(f, in_shardings=P("data"), max_implicit_bytes=512).complete(X).unknown
    (unknown,) = completion.unknown
    assert (unknown.op, unknown.num_bytes, unknown.count, unknown.is_predicted) == (name, 512, 1, True)
    assert unknown.gathered == ("x [data, -]",)
    assert all(c.source == unknown.source and c.op == name for c in ledger)
    assert f"no rule for {name} (x1): 512 bytes" in str(completion) and "gathers" in str(completion.unknown)
    assert "shard_map" in str(error.value) or "partitioned=True" in str(error.value)
    if name != "host_doubled":
        np.testing.assert_array_equal(found, f(X))


def test_every_sharded_operand_is_counted_once():
    """Not those that are replicated already; in a loop once per iteration."""
    shapes = [SHAPE, jax.ShapeDtypeStruct((8,), "float32"), jax.ShapeDtypeStruct((4,), "float32")]

    def f(x, y, z):
        def body(c, _):
            scalar = jax.ShapeDtypeStruct((), "float32")
            return c + jax.pure_callback(lambda *arrays: np.float32(0), scalar, x, y, x, z, c), None

        return jax.lax.scan(body, jnp.float32(0), None, length=3)[0]

    with sharding.mesh(data=8):
        completion = sharding.jit(f, in_shardings=(P("data"), P("data"), P())).complete(*shapes)
    (unknown,) = completion.unknown
    assert unknown.gathered == ("float32[16, 8] [data, -]", "float32[8] [data]")
    assert (unknown.num_bytes, unknown.count) == (512 + 32, 3)
    assert "no rule for pure_callback (x1): 1.63 kB per device are gathered" in str(completion)


def test_effects_whose_result_is_discarded_gather_too():
    """But the result is not sent back to all devices."""
    with sharding.mesh(data=8):
        step = sharding.jit(discarded, in_shardings=P("data"))
        found = step.complete(X).communication().by_kind()
        assert read_compiled(step.lower(X).compile()).by_kind() == found == {"all-gather": (1, X.nbytes)}
        np.testing.assert_array_equal(step(X), X + 1)


def test_a_partitioned_callback_gathers_nothing():
    seen = []

    def f(x):
        jax.debug.callback(lambda a: seen.append(a.shape), x, partitioned=True)
        return x + 1

    with sharding.mesh(data=8):
        step = sharding.jit(f, in_shardings=P("data"), max_implicit_bytes=0)
        assert not step.complete(X).unknown and not step.complete(X).communication()
        step(X)
        jax.effects_barrier()
    assert set(seen) == {(2, 8)}


def test_an_unknown_op_in_a_loop_counts_its_runs():
    def f(x):
        return jax.lax.scan(lambda c, _: (doubled_p.bind(jnp.sin(c)), None), x, length=3)[0]

    with sharding.mesh(data=8):
        step = sharding.jit(f, in_shardings=P("data"), out_shardings=P("data"))
        completion = step.complete(X)
        assert read_compiled(step.lower(X).compile()).by_kind() == completion.communication().lowered("cpu").by_kind()
    assert completion.unknown[0].count == 3


own = partitioned_ops.elementwise(jnp.sin, lambda mesh, ins, outs: "i j -> i j" if mesh.devices.size > 1 else "...")


def test_an_op_that_partitions_itself_is_listed_and_refused():
    with sharding.mesh(data=8):
        step = sharding.jit(lambda x: own(x), in_shardings=P("data"))
        completion = step.complete(X)
        np.testing.assert_allclose(step(X), np.sin(X), rtol=1e-5)
        with pytest.raises(sharding.ShardingError, match="(?s)custom_partitioning at .*512 bytes"):
            sharding.jit(lambda x: own(x), in_shardings=P("data"), max_implicit_bytes=10**6).complete(X)
    assert not completion.unknown[0].is_predicted
    assert "not predicted: custom_partitioning at test_unknown_ops.py" in str(completion.communication())


def test_a_ragged_all_to_all_is_in_the_ledger():
    def exchange(x):
        sizes, starts = jnp.ones(8, jnp.int32), jnp.arange(8, dtype=jnp.int32)
        at = jnp.full(8, jax.lax.axis_index("data"), jnp.int32)
        return jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, at, sizes, axis_name="data")

    def f(x):
        specs = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}, "check_vma": False}
        return jax.shard_map(exchange, **specs)(x)

    rows = np.ones((64, 8), np.float32)
    for sizes in ({"data": 8}, {"data": 4, "tensor": 2}):
        with sharding.mesh(**sizes):
            (row,) = sharding.jit(f, in_shardings=P("data")).complete(rows).communication()
        assert (row.kind, row.op, row.axes) == ("all-to-all", "ragged_all_to_all", ("data",))
        assert row.source.startswith("test_unknown_ops.py") and row.result_bytes == rows.nbytes // sizes["data"]


def test_mutable_arrays_are_sharded_as_ordinary_ones():
    def f(x):
        ref = jax.new_ref(x)
        ref[...] += 1
        ref[0] = 2 * ref[1]
        jax.lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(..., 2 * ref[...]), None)
        return ref[...]

    with sharding.mesh(data=8):
        step = sharding.jit(f, in_shardings=P("data"))
        completion, found = step.complete(X), step(X)
        assert read_compiled(step.lower(X).compile()).by_kind() == completion.communication().lowered("cpu").by_kind()
    assert not completion.unknown and completion.spec("out") == P("data")
    np.testing.assert_array_equal(found, jax.jit(f)(X))


def test_a_mutable_array_from_outside_is_an_error():
    ref = jax.new_ref(jnp.ones(8))

    def f(x):
        ref[...] += x
        return x

    with sharding.mesh(data=8), pytest.raises(sharding.ShardingError, match="a mutable array"):
        sharding.jit(f)(jnp.ones(8))


def test_searches_of_known_sizes_are_ordinary_ops():
    def f(x):
        return jnp.where(x[:, 0] > 3, size=8)[0], jnp.unique(x, size=16), jnp.histogram(x, bins=4)[0]

    with sharding.mesh(data=8):
        step = sharding.jit(f, in_shardings=P("data"))
        assert not step.complete(X).unknown
        for mine, theirs in zip(step(X), f(X), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_what_a_callback_gathers_is_in_memory():
    def f(x):
        jax.debug.callback(lambda a: None, x)
        return x + 1

    with sharding.mesh(data=8):
        step = sharding.jit(f, in_shardings=P("data"))
        large = jax.ShapeDtypeStruct((256, 64), jnp.float32)
        report, compiled = step.complete(large).memory(), step.lower(large).compile()
    assert any(a.op == "all-gather" and a.num_bytes == 256 * 64 * 4 for a in report.arrays)
    assert report.peak_bytes == pytest.approx(read_compiled(compiled).peak_bytes, rel=0.05)


@pytest.mark.filterwarnings("ignore:.*XLA pads it")
def test_the_hint_of_a_gather_for_a_callback_without_results():
    def step(x):
        total = annotate(jnp.sum(x, axis=0, keepdims=True), P("data"))  # padded: no op reads it as it is
        io_callback(lambda a: None, None, jax.lax.stop_gradient(total))
        return total

    with sharding.mesh(data=8):
        *_, gather = sharding.jit(step, in_shardings=P("data")).complete(X).communication()
    assert "io_callback needs its dim 0 replicated" in gather.hint
