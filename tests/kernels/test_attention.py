"""Attention: values, statistics and gradients of the dense reference, on one device, sharded and ahead of time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_checks
from support.kernel_checks import AHEAD_OF_TIME, MESHES, SIZES

import sharding
from sharding import P, ShardingError, compat, kernels
from sharding.cost import work
from sharding.kernels import cached_attention, chunked_attention, tpu_attention

OWN = ("xla_chunked", "xla_cached", "mosaic_tpu")

CASES = {  # lengths of queries and keys, batch, query heads, key heads, features; dtype; options
    "odd": ((7, 7, 2, 4, 2, 8), "float32", {}),
    "causal, more keys, one key head": ((7, 9, 1, 4, 1, 16), "float32", {"causal": True}),
    "window, more queries": ((33, 20, 2, 2, 2, 8), "bfloat16", {"window": (3, 2)}),
    "queries that see nothing": ((300, 20, 1, 2, 1, 8), "float32", {"window": 3}),
    "segments": ((40, 40, 2, 2, 1, 16), "float32", {"segment_ids": True, "causal": True}),
    "scale": ((150, 130, 1, 4, 1, 32), "bfloat16", {"scale": 0.3, "causal": True}),
}

MORE_CASES = ("causal, more keys, one key head", "queries that see nothing", "scale")
"""Which run with the slow tests."""

SWEEP = [
    ((600, 700, 1, 2, 1, 32), "float32", {"window": (90, 5)}),
    ((1100, 1300, 1, 2, 1, 16), "float32", {}),
    ((1100, 1100, 1, 2, 2, 64), "bfloat16", {"causal": True}),
    ((1100, 30, 1, 1, 1, 8), "float32", {"window": (3, 0)}),
    ((530, 650, 2, 4, 1, 16), "float32", {"segment_ids": True}),
    ((1030, 1030, 1, 2, 1, 128), "bfloat16", {"segment_ids": True, "causal": True, "window": 200}),
]


def arrays(shape, dtype="float32", seed=0):
    T, S, B, H, G, D = shape
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(x), dtype) for x in ((B, T, H, D), (B, S, G, D), (B, S, G, D))]


def segments(shape):
    T, S, B, *_ = shape
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(np.sort(rng.integers(0, 3, (B, n)), axis=1)) for n in (T, S))


def attend(implementation, **options):
    return functools.partial(kernels.attention, return_stats=True, implementation=implementation, **options)


def check(implementation, shape, dtype, options):
    if "segment_ids" in options:
        options = options | {"segment_ids": segments(shape)}
    f, reference = attend(implementation, **options), attend("xla", **options)
    kernel_checks.check(f, reference, arrays(shape, dtype), (0, 1, 2))


@pytest.fixture
def small_blocks(monkeypatch):
    """So that short sequences have several, and queries several parts, of at most two heads."""
    monkeypatch.setattr(chunked_attention, "CPU_BLOCK", (16, 8))
    monkeypatch.setattr(cached_attention, "LEAST_BLOCK", 8)
    monkeypatch.setattr(tpu_attention, "FORWARD_BLOCK", (128, 128))
    monkeypatch.setattr(tpu_attention, "BACKWARD_BLOCK", (128, 128))
    monkeypatch.setattr(tpu_attention, "QUERY_GRADIENT_BYTES", 2 * 128 * 128 * 12)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("implementation", OWN)
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in MORE_CASES)) for c in CASES])
def test_values_and_gradients(implementation, case):
    check(implementation, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", OWN)
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_long_sequences(implementation, case, monkeypatch):
    monkeypatch.setattr(cached_attention, "LONGEST", 1300)
    check(implementation, *case)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 1)}, {"causal": True, "window": 4}], ids=str)
def test_reference_is_that_of_jax(options):
    q, k, v = arrays((12, 12, 2, 4, 2, 8))
    own = {"is_causal": options.get("causal", False), "local_window_size": options.get("window")}

    def theirs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, return_residual=True, **own)

    kernel_checks.assert_close(attend("xla", **options)(q, k, v), theirs(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_causal_mask_starts_at_the_first_positions(causal):
    q, k, v = arrays((3, 8, 1, 1, 1, 4))
    moved = kernels.attention(q, k.at[:, 3:].add(1), v.at[:, 3:].add(1), causal=causal)
    assert bool((moved == kernels.attention(q, k, v, causal=causal)).all()) == causal


@pytest.mark.parametrize("implementation", ["xla", *OWN])
def test_parts_combine_by_their_statistics(implementation):
    q, k, v = arrays((20, 24, 2, 4, 2, 8))

    def in_parts(q, k, v):
        parts = [attend(implementation)(q, k[:, i : i + 12], v[:, i : i + 12]) for i in (0, 12)]
        lse = jnp.logaddexp(*(one for _, one in parts))
        return sum(out * jnp.exp(one - lse)[..., None] for out, one in parts), lse

    kernel_checks.check(in_parts, attend("xla"), (q, k, v), (0, 1, 2))


@pytest.mark.parametrize("implementation", ["xla", *OWN])
def test_query_without_keys(implementation):
    q, k, v = arrays((3, 3, 1, 1, 1, 8))
    ids = jnp.array([[0, 1, 7]]), jnp.array([[0, 0, 1]])
    (out, lse), gradients = kernel_checks.with_gradients(attend(implementation, segment_ids=ids), (0, 1, 2))(q, k, v)
    assert float(jnp.abs(out[0, 2]).max()) == 0 and float(lse[0, 2, 0]) == np.float32(-1e30)
    assert float(jnp.abs(gradients[0][0, 2]).max()) == 0
    assert all(bool(jnp.isfinite(x).all()) for x in gradients)


@pytest.mark.parametrize("shape", [(0, 5, 1, 2, 1, 8), (5, 0, 1, 2, 1, 8), (5, 5, 0, 2, 1, 8)], ids=str)
def test_empty(shape):
    for implementation in OWN:
        out, lse = attend(implementation)(*arrays(shape))
        assert out.shape == (shape[2], shape[0], 2, 8) and lse.shape == out.shape[:3]
        assert not np.asarray(out).any()


@pytest.mark.parametrize("implementation", OWN)
def test_mapped(implementation):
    q, k, v = (jnp.stack([x, 2 * x]) for x in arrays((5, 6, 1, 2, 1, 8)))
    found = jax.vmap(attend(implementation), (0, None, 0))(q, k[0], v)
    kernel_checks.assert_close(found, jax.vmap(attend("xla"), (0, None, 0))(q, k[0], v))


SUMS = {"all-reduce": 4}
"""Of the loss' parts, and of gradients of keys and values that several query heads have."""


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_sharded(sizes, seed):
    args = arrays((16, 16, 4, 4, 2, 8))
    implementation, options = OWN[seed], [{}, {"causal": True}, {"window": (5, 1)}][seed]
    specs = kernel_checks.random_specs([x.shape for x in args], sizes, seed)
    most = {"all-reduce": 6, "all-gather": 12, "all-to-all": 12, "collective-permute": 12}  # between other specs
    f, reference = attend(implementation, **options), attend("xla", **options)
    kernel_checks.check_sharded(f, reference, args, (0, 1, 2), specs, sizes, most)


@pytest.mark.parametrize("implementation", OWN)
@pytest.mark.parametrize("groups, of_keys", [(4, ("b", "c")), (2, "b"), (1, None)])
def test_batch_and_heads_stay_sharded(implementation, groups, of_keys):
    args = arrays((16, 16, 4, 8, groups, 8))
    f, reference = attend(implementation, causal=True), attend("xla", causal=True)
    specs = P("a", None, ("b", "c")), *[P("a", None, of_keys)] * 2
    kernel_checks.check_sharded(f, reference, args, (0, 1, 2), specs, MESHES[1], SUMS)


def test_queries_stay_sharded_without_a_band():
    args = arrays((16, 16, 4, 4, 4, 8))
    specs = P("data", "tensor"), P("data"), P("data")
    kernel_checks.check_sharded(
        attend("xla_chunked"), attend("xla"), args, (0, 1, 2), specs, MESHES[0], {"all-reduce": 4}
    )


def test_segments_sharded():
    shape = (16, 16, 4, 4, 2, 8)
    ids = segments(shape)

    def own(implementation):
        return lambda q, k, v, *ids: attend(implementation, causal=True, segment_ids=ids)(q, k, v)

    specs = (P("data"),) * 5
    args = (*arrays(shape), *ids)
    kernel_checks.check_sharded(own("xla_chunked"), own("xla"), args, (0, 1, 2), specs, MESHES[0], SUMS)


@pytest.mark.parametrize(("platform", "described"), AHEAD_OF_TIME)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", [64, 128])
def test_compiles(platform, described, dtype, features):
    if platform == "gpu" and dtype == "float32":
        pytest.skip("cuDNN has 16-bit attention only")
    like = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    length = 1101 if features == 64 else 1100
    args = like((4, length, 8, features)), *[like((4, length, 4, features))] * 2
    f = functools.partial(kernels.attention, causal=True, return_stats=platform == "tpu")
    specs = [P("data", None, "tensor")] * 3
    compiled = kernel_checks.check_ahead_of_time(platform, described, f, args, (0, 1, 2), specs, SUMS)
    assert ("__cudnn" in compiled.as_text()) == (platform == "gpu")


@pytest.mark.parametrize(("platform", "described"), AHEAD_OF_TIME[:2])
def test_compiles_with_all_masks(platform, described):
    like = functools.partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    args = like((4, 2048, 8, 128)), *[like((4, 2048, 2, 128))] * 2, jax.ShapeDtypeStruct((4, 2048), "int32")

    def f(q, k, v, ids):
        return kernels.attention(q, k, v, window=(300, 0), segment_ids=ids, return_stats=True)

    specs = P("data"), P("data"), P("data"), P("data")
    kernel_checks.check_ahead_of_time(platform, described, f, args, (0, 1, 2), specs, SUMS)


@pytest.mark.parametrize(
    ("implementation", "length"),
    [
        ("xla_cached", 512),
        ("xla_cached", 1024),
        *((one, n) for one in OWN if one != "xla_cached" for n in (2048, 4096)),
    ],
)
def test_flops(implementation, length):
    """Forward 4 BHTSD, of the blocks that a causal mask leaves; with the backward pass 3.5 times that."""
    q = jax.ShapeDtypeStruct((1, length, 2, 64), "float32")
    f = functools.partial(kernels.attention, causal=True, implementation=implementation)
    whole = 4 * 2 * length**2 * 64

    def flops(f):
        return sum(
            work("kernel_call", [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params).flops
            for eqn in kernel_calls(jax.make_jaxpr(f)(q, q, q))
        )

    forward, both = flops(f), flops(jax.grad(lambda *xs: f(*xs).sum(), argnums=(0, 1, 2)))
    assert 0.5 < forward / whole < 0.85
    assert 3 < both / forward < 4


def kernel_calls(jaxpr):
    """The ops of blockwise attention."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "kernel_call":
            yield eqn
        else:
            for _, _, inner in compat.sub_jaxprs(eqn.params):
                yield from kernel_calls(inner)


def runs(q, **options):
    """The primitives that tell which implementation `"auto"` takes for queries, keys and values of one shape."""
    f = functools.partial(kernels.attention, **options)
    bodies = [
        str(jax.make_jaxpr(eqn.params["call"].function)(*(v.aval for v in eqn.invars)))
        for eqn in kernel_calls(jax.make_jaxpr(f)(q, q, q))
    ]
    return [name for name in ("pallas_call", "scan") for body in bodies if name in body]


def test_auto():
    q = jax.ShapeDtypeStruct((1, 4, 2, 8), "bfloat16")
    with sharding.mesh(a=8, devices="v5p:2x2x2"):
        assert runs(q) == runs(q, segment_ids=jnp.zeros((1, 4), int)) == ["pallas_call"]
        assert runs(q.update(dtype="float16")) == ["scan"]
    with sharding.mesh(a=8, devices="h100:1x8"):
        assert runs(q, segment_ids=jnp.zeros((1, 4), int)) == runs(q.update(dtype="float32")) == ["scan"]
    assert runs(q.update(shape=(1, 255, 2, 8))) == []
    assert runs(q.update(shape=(1, 256, 2, 8))) == runs(q.update(shape=(1, 1025, 2, 8))) == ["scan"]


def test_scores_stay_in_a_cache():
    q = jax.ShapeDtypeStruct((16, 256, 4, 16), "float32")
    of_one_example = 4 * 256 * 256 * 4

    def bytes_of(implementation):
        attention = functools.partial(kernels.attention, causal=True, implementation=implementation)
        gradients = jax.grad(lambda *args: (attention(*args) ** 2).sum(), argnums=(0, 1, 2))
        return jax.jit(gradients).lower(q, q, q).compile().memory_analysis().temp_size_in_bytes

    arrays = 8 * 16 * 256 * 4 * 16 * 4
    assert bytes_of("auto") == bytes_of("xla_cached") < arrays + of_one_example < 16 * of_one_example < bytes_of("xla")


def temporary_bytes(length, implementation="xla_chunked"):
    q = jax.ShapeDtypeStruct((1, length, 2, 16), "float32")

    def loss(q, k, v):
        return (kernels.attention(q, k, v, causal=True, implementation=implementation) ** 2).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_length():
    assert temporary_bytes(8192) < 2.05 * temporary_bytes(4096)
    assert temporary_bytes(4096) < temporary_bytes(4096, "xla") / 20


GOOD = (1, 8, 4, 16)


@pytest.mark.parametrize(
    "shapes, options, match",
    [
        ([(8, 4, 16), GOOD, GOOD], {}, "4 dims"),
        ([GOOD, (1, 8, 3, 16), (1, 8, 3, 16)], {}, "multiple of key heads"),
        ([GOOD, (1, 8, 4, 8), GOOD], {}, "one shape"),
        ([GOOD, (2, 8, 4, 16), (2, 8, 4, 16)], {}, "batch and features"),
        ([GOOD] * 3, {"window": -1}, "number of keys"),
        ([GOOD] * 3, {"window": (1, 2, 3)}, "number of keys"),
        ([GOOD] * 3, {"segment_ids": jnp.zeros((1, 7), int)}, r"integers \[1, 8\]"),
        ([GOOD] * 3, {"segment_ids": jnp.zeros((1, 8))}, "integers"),
        ([GOOD, (1, 9, 4, 16), (1, 9, 4, 16)], {"segment_ids": jnp.zeros((1, 8), int)}, "a pair"),
        (
            [GOOD] * 3,
            {"implementation": "triton"},
            "one of 'auto', 'xla', 'mosaic_tpu', 'cudnn', 'xla_cached', 'xla_chunked'",
        ),
        ([GOOD] * 3, {"implementation": "cudnn"}, "GPUs"),
        ([(1, 1025, 1, 8)] * 3, {"implementation": "xla_cached"}, "at most 1,024 queries"),
        ([(1, 8, 1, 1024)] * 3, {"implementation": "mosaic_tpu"}, "at most 256 features"),
    ],
    ids=str,
)
def test_errors(shapes, options, match):
    with pytest.raises(ShardingError, match=match):
        kernels.attention(*(jnp.zeros(shape) for shape in shapes), **options)


def test_dtypes_must_agree():
    q = jnp.zeros(GOOD)
    with pytest.raises(ShardingError, match="one floating-point dtype"):
        kernels.attention(q, q.astype("bfloat16"), q)
    with pytest.raises(ShardingError, match="one floating-point dtype"):
        kernels.attention(*[q.astype(int)] * 3)


@pytest.mark.parametrize(
    "change, options, match",
    [
        ({"dtype": "float32"}, {}, "float16 or bfloat16"),
        ({"shape": (1, 8, 4, 20)}, {}, "multiple of 8 features"),
        ({}, {"segment_ids": jnp.zeros((1, 8), int)}, "no segment_ids"),
        ({}, {"return_stats": True}, "no return_stats"),
        ({}, {"window": (2, 1)}, "without keys after"),
        ({"shape": (1, 7, 4, 16)}, {"window": (2, 0)}, "even lengths"),
    ],
    ids=str,
)
def test_what_cudnn_cannot_run(change, options, match):
    q = jnp.zeros(change.get("shape", GOOD), change.get("dtype", "bfloat16"))
    with sharding.mesh(a=8, devices="h100:1x8"), pytest.raises(ShardingError, match=match):
        kernels.attention(q, q, q, implementation="cudnn", **options)
