"""Functions with a rule: values and derivatives of one device, with no collective but those of the rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import one_device, pallas_kernels
from support.one_device import SIZES

import sharding
from sharding import P, ShardingError, compat, kernels
from sharding.kernels.kernel_call import KernelCall

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


X, W = array(4, 8, 16), array(16, 8)
Q, K, V = array(4, 8, 6, 8), array(4, 4, 6, 8), array(4, 4, 6, 8)
SEGMENTS = np.sort(RNG.integers(0, 3, (4, 6))).astype(np.int32)


check = functools.partial(one_device.check, rtol=2e-4, atol=1e-4)
matmul = kernels.with_rule(jnp.matmul, "... k, k n -> ... n")


def of_segments(q, k, v, segments):
    """Attention within segments, of grouped queries; its VJP is its own, and it has no JVP."""

    @jax.custom_vjp
    def attend(q, k, v):
        return plain(q, k, v)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k)
        is_same = segments[:, None, :, None] == segments[:, None, None, :]
        return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(jnp.where(is_same, scores, -1e9), axis=-1), v)

    attend.defvjp(lambda *xs: (plain(*xs), xs), lambda xs, ct: jax.vjp(plain, *xs)[1](ct))
    return attend(q, k, v)


attention = kernels.with_rule(
    of_segments, "b (k g) t d, b k s d, b k s d, b s -> b (k g) t d", need_replication=["t", "s", "d", "g"]
)


def gradients(f, argnums):
    return jax.grad(lambda *args: (f(*args) ** 2).sum(), argnums=argnums)


@pytest.mark.parametrize(
    "specs, expected",
    [
        ((P("data"), P()), {"all-reduce": 2}),
        ((P("data"), P(None, "tensor")), {"all-reduce": 4}),
        ((P("data", "tensor"), P()), {"all-reduce": 2}),
    ],
    ids=str,
)
def test_gradients_of_operands_without_a_sharded_factor_are_added(specs, expected):
    check(gradients(lambda x, w: matmul(jnp.sin(matmul(x, w)), w.T), (0, 1)), (X, W), specs, expected)


@pytest.mark.parametrize("wrapped", [attention, jax.checkpoint(attention)], ids=["plain", "recomputed"])
def test_a_function_with_a_vjp_of_its_own_keeps_batch_and_heads(wrapped):
    specs = (P("data", "tensor"), P(), P(), P("data"))
    q, k, v = check(gradients(wrapped, (0, 1, 2)), (Q, K, V, SEGMENTS), specs, {})
    assert q.sharding.spec == k.sharding.spec == v.sharding.spec == P("data", "tensor")


def test_heads_that_divide_no_further_are_gathered():
    check(attention, (Q, K, V, SEGMENTS), (P(None, ("data", "tensor")), P(), P(), P()), {"all-gather": 2})


@pytest.mark.parametrize(
    "f, expected",
    [
        (lambda x, w: jax.jvp(lambda x: matmul(x, w), (x,), (x,)), {}),
        (lambda x, w: jax.vmap(matmul, in_axes=(0, None))(x, w), {}),
        (lambda x, w: jax.vmap(gradients(matmul, (0, 1)), in_axes=(0, None))(x, w), {"all-reduce": 1}),
        (lambda x, w: jax.jacfwd(lambda w: matmul(x, w))(w), {}),
        (lambda x, w: jax.jacrev(lambda w: matmul(x, w))(w), {"all-reduce": 1}),
        (lambda x, w: gradients(gradients(lambda x: matmul(x, w) ** 2, 0), 0)(x), None),
    ],
    ids=["jvp", "vmap", "vmapped gradients", "jacfwd", "jacrev", "second order"],
)
def test_transformations(f, expected):
    args, specs = (X, W), (P("data"), P(None, "tensor"))
    if expected is None:  # XLA finds that one sum is of zeros
        with sharding.mesh(SIZES):
            np.testing.assert_allclose(sharding.jit(f, in_shardings=specs)(*args), f(*args), rtol=1e-4, atol=1e-4)
    else:
        check(f, args, specs, expected)


def test_in_a_scan():
    def loss(x, w):
        return (jax.lax.scan(lambda c, _: (jnp.tanh(matmul(matmul(c, w), w.T)), None), x, None, length=3)[0] ** 2).sum()

    check(jax.grad(loss, argnums=(0, 1)), (X, 0.1 * W), (P("data"), P(None, "tensor")), {"all-reduce": 12})


def test_a_kernel_reads_its_own_shard():
    mine = kernels.with_rule(pallas_kernels.matmul, "m k, k n -> m n")
    args = array(16, 32), array(32, 16)
    check(mine, args, (P("data", "tensor"), P("tensor")), {"all-reduce": 1})


def test_it_is_the_function_itself_elsewhere():
    np.testing.assert_allclose(jax.jit(matmul)(X, W), X @ W, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(matmul(X, W), X @ W, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients(matmul, 1)(X, W), gradients(jnp.matmul, 1)(X, W), rtol=1e-4, atol=1e-4)


def test_factors_that_only_some_results_have_are_needed_whole():
    stats = kernels.with_rule(lambda x: (x - x.max(-1, keepdims=True), x.max(-1)), "m n -> m n, m")
    found = check(stats, (array(8, 8),), P("data", "tensor"), {"all-gather": 1})
    assert found[1].sharding.spec == P("data")


def test_results_may_be_integers():
    both = kernels.with_rule(lambda x: (x * x, x.argmax(-1)), "m n -> m n, m", need_replication=["n"])
    check(jax.grad(lambda x: both(x)[0].sum()), (array(8, 8),), P("data"), {})


@pytest.mark.parametrize(
    "make, complaint",
    [
        (lambda: kernels.with_rule(7, "i -> i"), "a function of arrays"),
        (lambda: kernels.with_rule(jnp.sin, "i i -> i"), "'i' twice"),
        (lambda: kernels.with_rule(jnp.sin, "i -> i")(X), "operand 0 has 3 dims"),
        (lambda: kernels.with_rule(jnp.sum, "i -> i")(array(4)), "result 0 has 0 dims"),
    ],
)
def test_bad_rules_fail_before_anything_compiles(make, complaint):
    with pytest.raises(ShardingError, match=complaint):
        make()


def test_results_of_shards_that_contradict_the_rule():
    wrong = kernels.with_rule(lambda x: jnp.ones((8, 8)), "m n -> m n")
    with sharding.mesh(SIZES), pytest.raises(ShardingError, match=r"shards of shape \(4, 8\)"):
        sharding.jit(wrong, in_shardings=P("data"))(array(8, 8))


def test_arrays_that_the_function_captures():
    table = np.arange(16, dtype=np.float32).reshape(1, 1, 16)
    scaled = kernels.with_rule(lambda x: x * jnp.asarray(table), "... k -> ... k", need_replication="k")
    check(gradients(lambda x: scaled(jnp.sin(x)), (0,)), (X,), (P("data"),), {})


def test_an_outline_has_the_same_arrays_and_does_not_run():
    """Its kernels do nothing, also where a function under `jax.jit` calls them: that is traced again to run."""

    @jax.jit
    def norm(x, scale):
        return kernels.rms_norm(x, scale, implementation="mosaic_tpu")

    run = kernels.with_rule(norm, "r m, m -> r m", need_replication=["m"])
    x, scale = array(32, 128), array(128)
    (eqn,) = jax.make_jaxpr(run)(x, scale).eqns
    shards = [x[:8], scale]
    outline, whole = eqn.params["call"].outline(shards), eqn.params["call"].jaxpr(shards)
    assert outline.out_avals == whole.out_avals
    assert eqn.params["call"].outline([x, scale]) is eqn.params["call"].jaxpr([x, scale])
    expected = kernels.rms_norm(x, scale, implementation="xla")
    np.testing.assert_allclose(run(x[:8], scale), expected[:8], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(x, scale), expected, rtol=1e-5, atol=1e-5)


def test_a_function_is_traced_once_for_operands_of_equal_shapes():
    shapes = []

    def double(x):
        shapes.append(x.shape)
        return x * 2

    run = kernels.with_rule(double, "a b -> a b")
    jax.make_jaxpr(lambda x, y: run(run(x)) + run(y))(array(4, 8), array(4, 8))
    assert shapes == [(4, 8)]
    jax.make_jaxpr(run)(array(8, 8))
    assert shapes == [(4, 8), (8, 8)]
    with jax.default_matmul_precision("highest"):
        jax.make_jaxpr(run)(array(4, 8))
    assert len(shapes) == 3
    with sharding.mesh(x=8, devices="v5p:2x2x2"):  # where kernels are not interpreted
        jax.make_jaxpr(run)(array(4, 8))
    assert len(shapes) == 4


def test_layers_share_the_calls_of_kernels():
    def loss(x, scales):
        for scale in scales:
            x = kernels.rms_norm(x, scale, implementation="mosaic_tpu")
        return x.sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(array(16, 128), [array(128) for _ in range(3)])
    eqns = [inner for eqn in jaxpr.eqns for inner in compat.equations(eqn)]
    calls = [eqn.params["call"] for eqn in eqns if eqn.primitive.name == "kernel_call"]
    assert len(calls) == 6
    assert len({id(call) for call in calls}) == 2  # forward and backward


@pytest.mark.parametrize("devices", ["v5p:2x2x1", "h100:1x4"])
def test_outlines_of_kernels_have_their_memory(devices, monkeypatch):
    def loss(params, x, labels):
        w, scale, head = params
        y = kernels.rotary((kernels.rms_norm(x, scale) @ w).reshape(*x.shape[:2], 4, 128))
        y = kernels.attention(y, y, y, causal=True)
        y = kernels.gelu(y.reshape(x.shape) @ w)
        return kernels.linear_cross_entropy(kernels.scaled_softmax(y), head, labels).mean()

    shapes = [((512, 512), jnp.bfloat16), ((512,), jnp.bfloat16), ((512, 1024), jnp.bfloat16)]
    params = [jax.ShapeDtypeStruct(*one) for one in shapes]
    x, labels = jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16), jax.ShapeDtypeStruct((8, 256), jnp.int32)
    peaks = []
    for traced in (KernelCall.outline, KernelCall.jaxpr):
        monkeypatch.setattr(KernelCall, "outline", traced)
        with sharding.mesh(data=4, devices=devices):
            completion = sharding.jit(jax.grad(loss), in_shardings=(None, P("data"), P("data"))).complete(
                params, x, labels
            )
            assert "kernel_call" in {op.name for op in completion.assignment.graph.ops} or "h100" in devices
            peaks.append(completion.memory().peak_bytes)
    assert peaks[0] == peaks[1]
