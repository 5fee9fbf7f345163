"""Ops that XLA partitions incorrectly in plain `jax.jit`: in `sharding.jit` they give the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sharding
from sharding import P, compat
from sharding.rewrite import xla_workarounds
from sharding.spec import Dim, Spec


def conv(x, w, *, dims, strides=1, padding="VALID", **options):
    strides = (strides,) * (x.ndim - 2)
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=dims, **options)


def pad(*widths):
    return lambda x: lax.pad(x, jnp.float32(0), (widths, (0, 0, 0)))


def gradient(f):
    return lambda *args: jax.grad(lambda *a: jnp.sum(f(*a) * jnp.cos(f(*a))), argnums=(0, 1))(*args)


def xor(x):
    return lax.reduce(x.astype(jnp.int32), jnp.int32(0), lax.bitwise_xor, (0,))


def max_and_sum(x):
    pair = (x.astype(jnp.int32), (3 * x).astype(jnp.int32))
    return lax.reduce(pair, (jnp.int32(0),) * 2, lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]), (0,))


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "VALID")


def looked_up(table, x):
    """Looks up rows at indices sharded over another axis than the table, with a third axis manual."""

    def body(table, x):
        indices = jnp.abs(5 * x).astype(jnp.int32) % table.shape[0]
        return jnp.take(table, indices, axis=0, mode="clip")

    return jax.shard_map(body, in_specs=(P(), P()), out_specs=P(), axis_names={"a"}, check_vma=False)(table, x)


def elements(table, x):
    """Picks elements by a row and a column, of which only one may be sharded."""

    def body(table, x):
        row, column = (jnp.abs(k * x).astype(jnp.int32) % n for k, n in zip((5, 3), table.shape, strict=True))
        return table[row, column]

    return jax.shard_map(body, in_specs=(P(), P()), out_specs=P(), axis_names={"a"}, check_vma=False)(table, x)


NHC = ("NHC", "HIO", "NHC")
CASES = {
    "a strided slice of one element": (lambda x: x[1:2:3], [(2, 8)], [P("a")], {"a": 2}),
    "a strided slice": (lambda x: x[10:11:3], [(12, 2)], [P("b")], {"a": 2, "b": 4}),
    "a negative pad": (pad(-1, -1, 0), [(8, 4)], [P(None, "a")], {"a": 4}),
    "an interior pad": (pad(3, 2, 1), [(8, 2)], [P("a")], {"a": 4}),
    "a negative and interior pad": (pad(-1, 0, 1), [(12, 4)], [P(None, "a")], {"a": 2, "b": 4}),
    "an update beyond the end": (
        lambda x, y: lax.dynamic_update_slice(x, y, (0, 5 + x[0, 0].astype(jnp.int32) * 0)), [(8, 4), (1, 1)],
        [P(None, "a"), None], {"a": 2},
    ),
    "a slice beyond the end": (
        lambda x: lax.dynamic_slice(x, (1, 6 + x[0, 0].astype(jnp.int32) * 0), (5, 2)), [(5, 4)], [P(None, "a")],
        {"a": 2},
    ),
    "a slice beyond the end that is sharded later": (
        lambda x, y: y * jnp.sin(lax.dynamic_slice(x, (3 + jnp.abs(x[0, 0]).astype(jnp.int32), 0), (4, 2))),
        [(5, 2), (4, 2)], [P(), P("a")], {"a": 2},
    ),
    "a gathered slice beyond the end that is sharded later": (
        lambda x, y: y * jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, i), (4, 2)))(x, 4 + 0 * x[:, 0, 0].astype(int)),
        [(1, 7, 3), (1, 4, 2)], [P(), P(None, "a")], {"a": 2},
    ),
    "rows of a sharded table in a shard_map": (
        looked_up, [(8, 4), (4, 6)], [P("b"), P("c")], {"a": 2, "b": 2, "c": 2},
    ),
    "elements of a table that is sharded in rows, in a shard_map": (
        elements, [(8, 4), (4, 6)], [P("b"), P("c")], {"a": 2, "b": 2, "c": 2},
    ),
    "elements of a table that is sharded in columns, in a shard_map": (
        elements, [(8, 4), (4, 6)], [P(None, "b"), P("c")], {"a": 2, "b": 2, "c": 2},
    ),
    "a bitwise reduction": (xor, [(4, 8)], [P("a")], {"a": 4}),
    "a reduction of two arrays": (max_and_sum, [(4, 8)], [P("a")], {"a": 4}),
    "a convolution sharded in height and output features": (
        lambda x, w: conv(x, w, dims=NHC), [(4, 4, 2), (1, 2, 4)], [P(None, "b"), P(None, None, "a")],
        {"a": 2, "b": 2},
    ),
    "a depthwise convolution over part of the mesh": (
        lambda x, w: conv(x, w, dims=NHC, padding="SAME", feature_group_count=4), [(2, 16, 4), (1, 1, 4)],
        [P(None, None, "b"), P(None, None, "b")], {"a": 2, "b": 4},
    ),
    "a grouped convolution": (
        lambda x, w: conv(x, w, dims=NHC, feature_group_count=2), [(4, 8, 2), (1, 1, 8)], [None, P(None, None, "b")],
        {"b": 8},
    ),
    "a convolution with batch groups": (
        lambda x, w: conv(x, w, dims=NHC, strides=2, batch_group_count=2), [(2, 8, 2), (2, 2, 8)],
        [P(None, None, "b"), P(None, "b")], {"a": 2, "b": 2},
    ),
    "the tangent of pooling": (
        lambda x: jax.jvp(lambda x: pooled(x), (x,), (jnp.sin(x),)), [(16, 4)], [P("a")], {"a": 4},
    ),
    "an FFT and a gather": (
        lambda x, y: jax.grad(lambda x: jnp.sum(jnp.sqrt(1 + jnp.fft.fft(x, axis=2).real ** 2 + y * y)))(x),
        [(8, 5, 8), (8, 5, 8)], [None, P(None, None, "a")], {"a": 2, "b": 2},
    ),
    "an FFT after a scatter": (
        lambda x, i: jax.grad(
            lambda x: jnp.sum(jnp.sin(jnp.fft.ifft(x.at[i.astype(jnp.int32) % 4].add(x, mode="drop"), axis=1).imag))
        )(x),
        [(4, 4, 3), (4,)], [P(None, "b"), P("a")], {"a": 2, "b": 2},
    ),
    "the gradient of pooling with overlapping windows": (
        lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(pooled(x))))(x), [(8, 4)], [P("a")], {"a": 4},
    ),
    "the gradients of a strided convolution": (
        gradient(lambda x, w: conv(x, w, dims=("HNC", "HIO", "CHN"), strides=2, padding="SAME", batch_group_count=2)),
        [(4, 6, 5), (1, 5, 2)], [P("b"), None], {"a": 2, "b": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_one_device(name):
    fn, shapes, specs, sizes = CASES[name]
    args = [np.random.default_rng(i).integers(-8, 9, shape).astype(np.float32) for i, shape in enumerate(shapes)]
    with sharding.mesh(dict.fromkeys(sizes, 1), devices=jax.devices()[:1]):
        alone = jax.jit(fn)(*args)
    with sharding.mesh(sizes, devices=jax.devices()[: np.prod(list(sizes.values()))]):
        ours = sharding.jit(fn, in_shardings=tuple(specs))(*args)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.linalg.norm(b))


def test_inside_a_loop():
    def fn(x):
        return lax.scan(lambda c, _: (lax.pad(c[1:6:2], jnp.float32(1), ((2, 3, 0), (0, 0, 0))), c[0]), x, length=3)

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    with sharding.mesh(a=4, devices=jax.devices()[:4]):
        ours = sharding.jit(fn, in_shardings=(P("a"),))(x)
    jax.tree.map(np.testing.assert_array_equal, ours, jax.jit(fn)(x))


@pytest.mark.parametrize("method, start", [("add", 0.0), ("min", 9.0), ("max", -9.0), ("multiply", 2.0)])
def test_a_scatter_of_unevenly_sharded_rows(method, start):
    def fn(rows, at, annotate):
        rows, at = annotate(rows, P("a")) + 3.5, annotate(at, P("a")) % 2
        return getattr(jnp.full((2, 8), start).at[at], method)(rows)

    rows = np.random.default_rng(0).integers(-8, 9, (4, 8)).astype(np.float32)
    at = np.arange(4, dtype=np.int32)
    with sharding.mesh(a=3, b=2, devices=jax.devices()[:6]), pytest.warns(UserWarning, match="XLA pads it"):
        ours = sharding.jit(lambda *args: fn(*args, sharding.annotate))(rows, at)
    np.testing.assert_allclose(ours, fn(rows, at, lambda x, _: x), rtol=1e-5)


SIZES = {"a": 3, "b": 2, "c": 2}


@pytest.mark.parametrize("length", [1, 3])
def test_a_gather_with_operand_and_result_sharded_over_other_axes(length):
    rng = np.random.default_rng(0)
    x, rows = rng.normal(size=(4, 4, length)).astype("float32"), rng.integers(0, length, (4,)).astype("int32")

    def f(x, rows):
        return jnp.take(x, rows, 2, mode="clip")

    with sharding.mesh(a=2, b=2, c=2):
        step = sharding.jit(f, in_shardings=(P("c"), None), out_shardings=P(None, "b", "a"))
        np.testing.assert_array_equal(step(x, rows), f(x, rows))


def spec(*dims):
    return Spec(dims=tuple(Dim(axes=(d,) if d else ()) for d in dims))


def test_start_indices_along_sharded_dims_are_clamped():
    columns, scalar = Spec(dims=(Dim(), Dim(axes=("a",)))), Spec(dims=())
    whole, part, found = (8, 4), (5, 3), [columns, scalar, scalar]
    clamped = [(2, 1)] if compat.CLAMPS_MERGED_SLICES else [(1, 3), (2, 1)]
    assert xla_workarounds.starts("dynamic_slice", {}, [whole, (), (), part], [*found, columns]) == clamped
    update = [whole, part, (), (), whole]
    assert xla_workarounds.starts("dynamic_update_slice", {}, update, [columns, *found, columns]) == [(3, 1)]
    assert xla_workarounds.starts("dynamic_update_slice", {}, update, [None, None, scalar, scalar, None]) == []


def test_only_the_affected_dims_are_replicated():
    found = [spec("a", "b"), spec("a", "b")]
    params = {"strides": (1, 2), "start_indices": (0, 0), "limit_indices": (8, 8)}
    assert xla_workarounds.specs("slice", params, [(8, 8), (8, 4)], found, SIZES) == [spec("a", None)] * 2
    half = {"strides": None, "start_indices": (0, 0), "limit_indices": (8, 4)}
    assert xla_workarounds.specs("slice", half, [(8, 8), (8, 4)], found, SIZES) == found


@pytest.mark.parametrize(
    "window, step, padding, rows, kept",
    [
        (2, 2, (0, 0), 12, True),
        (3, 2, (0, 0), 12, False),  # they overlap
        (2, 2, (0, 2), 10, False),  # the last ones are padding
        (2, 2, (0, 0), 6, False),  # one crosses the boundary of shards
        (1, 1, (0, 0), 7, True),
    ],
)
def test_a_pooling_gradient_stays_sharded_where_windows_lie_in_shards(window, step, padding, rows, kept):
    windows = (rows + sum(padding) - window) // step + 1
    params = {"window_dimensions": (window, 1), "window_strides": (step, 1), "padding": (padding, (0, 0))}
    found, shapes = [spec("b", "a")] * 3, [(windows, 6), (rows, 6), (rows, 6)]
    expected = found if kept else [spec(None, "a")] * 3
    assert xla_workarounds.specs("select_and_scatter_add", params, shapes, found, SIZES) == expected


def test_a_convolution_stays_sharded_in_batch_and_height():
    program = jax.make_jaxpr(lambda x, w: conv(x, w, dims=NHC, padding="SAME"))(
        jnp.ones((8, 8, 4)), jnp.ones((3, 4, 4))
    )
    eqn = program.eqns[-1]
    found = [spec("a", "b", None), spec(None, None, None), spec("a", "b", None)]
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    assert xla_workarounds.specs(eqn.primitive.name, eqn.params, shapes, found, SIZES) == found


def multiplied(x, y):
    return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))  # b i k, b k j -> b i j


@pytest.mark.parametrize(
    "left, right, result",
    [
        (P(None, "a", "b"), P(None, "b"), P(("c", "a"), None, "b")),
        (P(None, None, "b"), P(None, "c", "b"), P(None, "b", ("c", "a"))),
        (P("a", "c", "b"), P("a", "b", "c"), P(None, "b", ("c", "a"))),
    ],
)
def test_a_sum_over_an_axis_that_shards_a_resharded_result(left, right, result):
    x, y = (np.random.default_rng(i).integers(-8, 9, (8, 8, 8)).astype(np.float32) for i in range(2))
    step = sharding.jit(lambda x, y: sharding.annotate(multiplied(x, y), result), in_shardings=(left, right))
    with sharding.mesh(a=2, b=2, c=2):
        np.testing.assert_array_equal(step(x, y), jax.jit(multiplied)(x, y))


@pytest.mark.parametrize(
    "result, needed",
    [
        (("a", "b", None), ("a", "b", None)),  # a reduce-scatter
        (("a", None, None), ("a", None, None)),
        ((None, "b", "a"), (None, None, "a")),
        ((None, "a", None), (None, "a", None)),
    ],
)
def test_a_plain_reduce_scatter_is_kept(result, needed):
    params = {"dimension_numbers": (((2,), (1,)), ((0,), (0,)))}
    found = [spec("a", None, "b"), spec("a", "b", None), spec(*result)]
    assert xla_workarounds.specs("dot_general", params, [(8, 8, 8)] * 3, found, SIZES) == [*found[:2], spec(*needed)]
