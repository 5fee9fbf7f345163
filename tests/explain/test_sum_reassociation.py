"""Sums of partial sums: one reduction on TPUs and GPUs, one each on CPUs."""

import jax
import jax.numpy as jnp
import pytest
from support.compilers import COMPILERS, devices, predicted_and_compiled

import sharding
from sharding import P, kernels
from sharding.cost import read_compiled

SIZES = {"data": 2, "model": 4}


def floats(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def three_products(x, a, b, c):
    return x @ a + x @ b + x @ c


def two_are_used_again(x, a, b, c):
    first = x @ a
    return first + x @ b + x @ c, first


def through_reshapes(x, a, b, c):
    parts = [(x @ w).reshape(64, 16, 32) for w in (a, b, c)]
    return parts[0] + parts[1] + parts[2]


def through_converts(x, a, b, c):
    narrow = [(x.astype("bfloat16") @ w.astype("bfloat16")).astype("float32") for w in (a, b, c)]
    return narrow[0] + narrow[1] + narrow[2]


def a_gradient(x, a, b, c):
    def loss(x):
        h = jnp.sin(x)
        return sum(jnp.sum(jnp.tanh(h @ w.T)) for w in (a, b, c))

    return jax.grad(loss)(x)


def other_axes(x, a, b, c):
    across = sharding.annotate(jnp.sin(x), P(None, "data")) @ sharding.annotate(jnp.cos(b), P("data"))
    return x @ a + sharding.annotate(across, P()) + x @ c


def maxima(x, a, b, c):
    return jnp.max(a, 0) + jnp.max(b, 0) + jnp.max(c, 0)


def negated(x, a, b, c):
    return jnp.sum(-jnp.sin(a), 0) + jnp.sum(-jnp.sin(b), 0) + jnp.sum(c, 0)


def weight_decay(x, a, b, c):
    return sum(-0.5 * jnp.sum(w**2, 0) for w in (a, b, c))


def other_weights(x, a, b, c):
    return sum(0.3 * jnp.sum(w**2, 0) for w in (a, b, c))


def a_norm(x, a, b, c):
    return jnp.sqrt(sum(jnp.sum(w * w) for w in (a, b, c)))


def a_loop(x, a, b, c):
    def body(total, row):
        return total + row @ a, None

    return jax.lax.scan(body, jnp.zeros((64, 512)), jnp.stack([x, jnp.sin(x), jnp.cos(x)]))[0]


def a_small_stack(x, a, b, c):
    rows = jnp.stack([a[:, :8], b[:, :8], c[:, :8]])
    return jax.lax.scan(lambda _, w: (None, (x @ w)[:64]), None, sharding.annotate(rows, P(None, "model")))[1]


def a_large_stack(x, a, b, c):
    rows = jnp.stack([a, b, c])
    return jax.lax.scan(lambda _, w: (None, x @ w), None, sharding.annotate(rows, P(None, "model")))[1]


PROGRAMS = {
    "three products": (three_products, 1),
    "two are used again": (two_are_used_again, 3),
    "through reshapes": (through_reshapes, 1),
    "through converts": (through_converts, 1),
    "a gradient": (a_gradient, 1),
    "other axes": (other_axes, 3),
    "maxima": (maxima, 3),
    "negated": (negated, 3),
    "weight decay": (weight_decay, 1),
    "other weights": (other_weights, 3),
    "a norm": (a_norm, 1),
    "a loop": (a_loop, 1),
    "a small stack": (a_small_stack, 1),
    "a large stack": (a_large_stack, 3),
}
"""Program -> the all-reduces that are left on GPUs, of three."""

ARGS = (floats(64, 1024), floats(1024, 512), floats(1024, 512), floats(1024, 512))
SPECS = (P(None, "model"), P("model"), P("model"), P("model"))
GRADIENT = (P(), P("model"), P("model"), P("model"))


def step(name):
    run, _ = PROGRAMS[name]
    args = (floats(64, 512), *ARGS[1:]) if run is a_gradient else ARGS
    jitted = sharding.jit(run, in_shardings=GRADIENT if run is a_gradient else SPECS, out_shardings=P())
    return jitted, args


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_reduction_is_left(name):
    with sharding.mesh(SIZES):
        jitted, args = step(name)
        ledger = jitted.complete(*args).communication()
    kept = [c for c in ledger.lowered("gpu") if c.kind == "all-reduce"]
    assert sum(c.count for c in kept) == PROGRAMS[name][1]
    assert sum(c.count for c in ledger.lowered("cpu") if c.kind == "all-reduce") == 3
    assert all(c.source for c in kept)


def test_complex_weights_stay_apart():
    def f(a, b):
        return 2j * jnp.sum(a, 0) + 2j * jnp.sum(b, 0)

    with sharding.mesh(SIZES):
        ledger = sharding.jit(f, in_shardings=P("model")).complete(floats(64, 32), floats(64, 32)).communication()
    assert ledger.lowered("gpu").by_kind() == {"all-reduce": (2, 2 * 32 * 4)}


def gradients_of_sharded_weights(params, tokens):
    def loss(params):
        x = params["table"][tokens]
        return jnp.mean(jnp.tanh(x @ params["w"]) @ params["w"].T)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_hybrid_sharded_data_parallelism(backend, described):
    """Sums over two data axes, of which each device keeps the slice along one."""
    params = {"table": floats(512, 256), "w": floats(256, 1024)}
    tokens = jax.ShapeDtypeStruct((16, 128), "int32")
    with sharding.mesh(data=2, fsdp=4, devices=devices(described)):
        specs = ({"table": P(None, "fsdp"), "w": P("fsdp")}, P(("data", "fsdp")))
        jitted = sharding.jit(gradients_of_sharded_weights, in_shardings=specs, donate_argnums=0)
        ledger = jitted.complete(params, tokens).communication()
        compiled = read_compiled(jitted.lower(params, tokens).compile())
    assert compiled.by_kind() == ledger.lowered(backend).by_kind()


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_compiled(name, backend, described):
    with sharding.mesh(SIZES, devices=devices(described)):
        jitted, args = step(name)
        predicted = jitted.complete(*args).communication().lowered(backend).by_kind()
        assert read_compiled(jitted.lower(*args).compile()).by_kind() == predicted


def both(x):
    rows = x.sum(1)
    return rows.sum(0), rows


ROWS, CUBE = floats(64, 64), floats(64, 64, 16)
SUMS_OF_SUMS = {
    "rows": (lambda x: x.sum(1).sum(0), CUBE, P("data", "model")),
    "of a local sum": (lambda x: x.sum(0).sum(0), CUBE, P(("data", "model"))),
    "before a local sum": (lambda x: x.sum(1).sum(0), CUBE, P(None, "model")),
    "three": (lambda x: x.sum(2).sum(1).sum(0), CUBE, P("data", None, "model")),
    "a scalar": (lambda x: x.sum(1).sum(0), ROWS, P("data", "model")),
    "kept dims": (lambda x: x.sum(1, keepdims=True).sum(0), CUBE, P("data", "model")),
    "turned": (lambda x: x.sum(1).T.sum(1), CUBE, P("data", "model")),
    "maxima": (lambda x: x.max(1).max(0), CUBE, P("data", "model")),
    "the rows are used": (both, CUBE, P("data", "model")),
    "a maximum of sums": (lambda x: x.sum(1).max(0), CUBE, P("data", "model")),
    "scaled": (lambda x: (x.sum(1) * 3).sum(0), CUBE, P("data", "model")),
    "regrouped": (lambda x: x.sum(1).reshape(8, 8, 16).sum(0), CUBE, P("data", "model")),
    "converted": (lambda x: x.sum(1).astype(jnp.bfloat16).sum(0), CUBE, P("data", "model")),
    "a converted product": (lambda x: jnp.sin((x.T @ x).astype(jnp.bfloat16)), ROWS, P("data")),
    "products": (lambda x: x.prod(1).prod(0), CUBE, P("data", "model")),
    "of a product": (lambda x: (x @ x.T).sum(0), ROWS, P("data", "model")),
}
"""Program -> the function, its argument and how that is sharded."""
REDUCED_ONCE = ("rows", "of a local sum", "before a local sum", "three", "a scalar", "kept dims", "turned", "maxima")


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("name", REDUCED_ONCE)
def test_a_sum_of_sums_is_reduced_once(name, platform):
    f, x, spec = SUMS_OF_SUMS[name]
    with sharding.mesh(SIZES):
        ledger = sharding.jit(f, in_shardings=spec, out_shardings=P()).complete(x).communication().lowered(platform)
    reductions = [c for c in ledger if c.kind == "all-reduce"]
    assert [c.count for c in reductions] == [1]
    assert reductions[0].result_bytes < 100


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("name", SUMS_OF_SUMS)
def test_a_sum_of_sums_as_compiled(name, backend, described):
    f, x, spec = SUMS_OF_SUMS[name]
    predicted, compiled = predicted_and_compiled(
        f, (x,), backend, described, SIZES, in_shardings=spec, out_shardings=P()
    )
    assert predicted == compiled


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("spec", [P("a", "b"), P("b", "c"), P("c", "a"), P(("a", "b"), "c")], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (64, 64, 4)], ids=["scalar", "vector"])
def test_a_sum_of_sums_over_some_axes(shape, spec, backend, described):
    predicted, compiled = predicted_and_compiled(
        lambda x: x.sum(1).sum(0), (floats(*shape),), backend, described, {"a": 2, "b": 2, "c": 2}, in_shardings=spec
    )
    assert predicted == compiled


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, lambda x: jnp.sqrt(jnp.square(x).mean(keepdims=True))])
@pytest.mark.parametrize("spec", [P("a", "b"), P("c", "a"), P(("a", "b")), P(("a", "b"), "c")], ids=str)
def test_a_scalar_over_some_axes(spec, reduce, backend, described):
    predicted, compiled = predicted_and_compiled(
        reduce, (floats(256, 256),), backend, described, {"a": 2, "b": 2, "c": 2}, in_shardings=spec
    )
    assert predicted == compiled


@pytest.mark.parametrize(("platform", "count"), [("tpu", 2), ("gpu", 1)])
def test_a_scalar_is_reduced_dim_by_dim_on_tpus(platform, count):
    with sharding.mesh({"a": 2, "b": 2, "c": 2}):
        ledger = sharding.jit(jnp.sum, in_shardings=P("a", "b")).complete(ROWS).communication().lowered(platform)
    assert ledger.by_kind() == {"all-reduce": (count, 4 * count)}


def rounded_integers(x, y):
    """The gradient of a quantised weight, of which each device keeps a part."""
    return jnp.einsum("bi,bo->io", x, y, preferred_element_type=jnp.int32).astype(jnp.bfloat16)


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("rows", [("data", "fsdp"), "fsdp"])
def test_products_of_integers_are_rounded_before_they_are_reduced_over_other_axes(rows, backend, described):
    x, y = (jax.ShapeDtypeStruct((1024, n), "int8") for n in (1024, 2048))
    predicted, compiled = predicted_and_compiled(
        rounded_integers,
        (x, y),
        backend,
        described,
        {"data": 2, "fsdp": 2, "model": 2},
        in_shardings=(P(rows), P(rows, "model")),
        out_shardings=P("fsdp", "model"),
    )
    assert predicted == compiled


def tied(dtype):
    """The gradient of a table that is used twice, each time converted."""

    def f(x, y, table):
        def loss(table):
            a, b = (v.astype(dtype) @ table.astype(dtype) for v in (x, y))
            return jnp.sum(jnp.sin(a)) + jnp.sum(jnp.cos(b))

        return jax.grad(loss)(table)

    args = (floats(2048, 256), floats(2048, 256), floats(256, 512))
    return f, args, {"in_shardings": (P("data"), P("data"), P("data", "model")), "out_shardings": P("data", "model")}


@pytest.mark.parametrize(("dtype", "left"), [("float32", 1), ("bfloat16", 2)])
def test_converted_reduce_scatters_are_not_added(dtype, left):
    f, args, options = tied(dtype)
    with sharding.mesh(SIZES):
        ledger = sharding.jit(f, **options).complete(*args).communication().lowered("gpu")
    assert ledger.by_kind()["reduce-scatter"][0] == left


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_table_as_compiled(dtype, backend, described):
    f, args, options = tied(dtype)
    predicted, compiled = predicted_and_compiled(f, args, backend, described, SIZES, **options)
    assert predicted == compiled


def summed_over_two_axes(x):
    return jnp.sum(x, (0, 2))


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize(
    "kept",
    [P("model"), P(None, "data"), P("data", "model"), P(None, ("data", "model")), P(None, ("model", "data"))],
    ids=str,
)
def test_a_slice_of_a_sum_over_two_axes(kept, backend, described):
    x, spec = floats(16, 64, 8, 256), P("data", None, "model")
    predicted, compiled = predicted_and_compiled(
        summed_over_two_axes, (x,), backend, described, SIZES, in_shardings=spec, out_shardings=kept
    )
    assert predicted == compiled


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_only_a_slice_in_the_order_of_the_devices_is_scattered(platform):
    def kinds(kept):
        with sharding.mesh(SIZES):
            step = sharding.jit(summed_over_two_axes, in_shardings=P("data", None, "model"), out_shardings=kept)
            ledger = step.complete(floats(16, 64, 8, 256)).communication().lowered(platform)
        return [str(c.kind) for c in ledger]

    assert kinds(P(None, ("model", "data"))) == ["all-reduce"]
    scattered = "reduce-scatter" if platform == "gpu" else "all-reduce"  # not over a whole slice of a TPU pod
    assert kinds(P(None, ("data", "model"))) == [scattered]


def squares(a, b):
    return (a * a).sum() + (b * b).sum(0).sum()


ORDERS = [P("data", "model"), P("model", "data"), P(("data", "model")), P(("model", "data"))]


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("specs", [(a, b) for a in ORDERS for b in ORDERS[:2]], ids=str)
def test_sums_over_devices_in_another_order_stay_apart(specs, backend, described):
    args = (floats(64, 64), floats(64, 64))
    predicted, compiled = predicted_and_compiled(squares, args, backend, described, SIZES, in_shardings=specs)
    assert predicted == compiled


matmul = kernels.with_rule(jnp.matmul, "m k, k n -> m n")


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_sums_of_kernels_and_products(backend, described):
    args = floats(64, 256), floats(256, 128), floats(256, 128)
    specs = P(None, "model"), P("model"), P("model")
    predicted, compiled = predicted_and_compiled(
        lambda x, a, b: matmul(x, a) + x @ b, args, backend, described, SIZES, in_shardings=specs, out_shardings=P()
    )
    assert predicted == compiled


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("is_in_loop", [False, True])
def test_a_sliced_sum_is_split_beside_a_sum_of_its_own_computation(is_in_loop, backend, described):
    """Beside a sum over the model axis, XLA:GPU scatters a sum over both over the data axis first."""

    def f(x, w, layers):
        def layer(h, w):
            return jnp.tanh(h + (jnp.sin(w) * h[None]).sum(0)), None

        h = jnp.ones(256)
        h = jax.lax.scan(layer, h, layers)[0] if is_in_loop else layer(h, layers[0])[0]
        return matmul(x, w), h

    args = floats(64, 256), floats(256, 128), floats(3, 256, 256)
    options = {
        "in_shardings": (P(None, ("data", "model")), P(("data", "model")), P(None, "model")),
        "out_shardings": (P("data"), P()),
    }
    predicted, compiled = predicted_and_compiled(f, args, backend, described, SIZES, **options)
    assert predicted == compiled
