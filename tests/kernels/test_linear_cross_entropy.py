"""Cross entropy of a linear layer: values and gradients of whole logits, which no compiled program stores."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import kernel_checks
from support.kernel_checks import AHEAD_OF_TIME, MESHES, SIZES

import sharding
from sharding import P, ShardingError, cost, kernels
from sharding.kernels import cross_entropy_gpu, cross_entropy_scan
from sharding.kernels.cross_entropy_block import Cotangents

RNG = np.random.default_rng(0)
SCAN = "xla_chunked"
SUMS = {"all-reduce": 8}
"""Forward of the logsumexp (2) and the label's logit, backward of the gradients (3), and of the test's own sums (2)."""

OPTIONS = [
    {},
    {"softcap": 2.0},
    {"transposed": True},
    {"has_bias": True},
    {"softcap": 2.0, "transposed": True, "has_bias": True},
]


def arrays(lead, features, vocabulary, dtype="float32", has_bias=False, transposed=False, **_):
    """x, w, labels, a quarter of them ignored, and bias if any."""
    x = jnp.asarray(RNG.standard_normal((*lead, features)), dtype)
    w = jnp.asarray(RNG.standard_normal((features, vocabulary)) * 2 / features**0.5, dtype)
    labels = RNG.integers(0, vocabulary, lead)
    labels = jnp.asarray(np.where(RNG.random(lead) < 0.25, -1, labels), "int32")
    bias = [jnp.asarray(RNG.standard_normal(vocabulary), "float32")] if has_bias else []
    return x, w.T if transposed else w, labels, *bias


def losses(implementation, has_bias=False, **options):
    """Losses and logsumexps as a function of x, w, labels and bias."""
    call = functools.partial(kernels.linear_cross_entropy, implementation=implementation, return_stats=True, **options)
    return (lambda x, w, labels, bias: call(x, w, labels, bias=bias)) if has_bias else call


def check(implementation, lead, features, vocabulary, dtype="float32", **options):
    args = arrays(lead, features, vocabulary, dtype, **options)
    wrt = (0, 1, 3) if len(args) > 3 else (0, 1)
    kernel_checks.check(losses(implementation, **options), losses("xla", **options), args, wrt)


@pytest.mark.parametrize("implementation", [SCAN, "mosaic_tpu"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options, implementation):
    check(implementation, (5, 7), 32, 300, **options)


@pytest.mark.parametrize("implementation", [SCAN, "mosaic_tpu"])
@pytest.mark.parametrize("lead, features, vocabulary", [((), 8, 5), ((1,), 1, 1), ((3, 0), 8, 16), ((2, 1, 3), 7, 131)])
def test_odd_shapes(lead, features, vocabulary, implementation):
    check(implementation, lead, features, vocabulary, has_bias=True)


@pytest.mark.parametrize("implementation", [SCAN, "mosaic_tpu"])
def test_16_bits(implementation):
    check(implementation, (70,), 128, 1300, "bfloat16", has_bias=True)


@pytest.mark.skipif(not kernel_checks.HAS_MOSAIC_GPU, reason="JAX 0.11 has today's GPU kernels")
@pytest.mark.parametrize("options", [OPTIONS[2], pytest.param(OPTIONS[4], marks=pytest.mark.slow)], ids=str)
def test_tiles_on_gpus(options):
    check("mosaic_gpu", (2, 65), 64, 264, "bfloat16", **options)


@pytest.mark.slow
@pytest.mark.skipif(not kernel_checks.HAS_MOSAIC_GPU, reason="JAX 0.11 has today's GPU kernels")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens, features, vocabulary", [(128, 320, 256), (300, 128, 1032), (5, 64, 120)])
def test_many_tiles_on_gpus(tokens, features, vocabulary, options):
    check("mosaic_gpu", (tokens,), features, vocabulary, "bfloat16", **options)


@pytest.mark.slow
@pytest.mark.skipif(not kernel_checks.HAS_MOSAIC_GPU, reason="JAX 0.11 has today's GPU kernels")
@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[2]], ids=str)
def test_many_blocks_on_gpus(monkeypatch, options):
    monkeypatch.setattr(cross_entropy_gpu, "MOST_COLUMNS", 256)
    check("mosaic_gpu", (70,), 64, 776, "bfloat16", **options)


@pytest.mark.slow
@pytest.mark.skipif(not kernel_checks.HAS_MOSAIC_GPU, reason="JAX 0.11 has today's GPU kernels")
def test_tiles_on_gpus_have_no_races():
    x, w, labels = arrays((260,), 320, 520, "bfloat16")
    static = {"softcap": None, "is_transposed": False}
    params = plgpu.InterpretGPUParams(detect_races=True, on_race="raise")
    found = cross_entropy_gpu.forward(x, w, None, labels[:, None], **static, interpret=params)
    expected = cross_entropy_scan.forward(x, w, None, labels[:, None], **static)
    kernel_checks.assert_close(found.logsumexp_T1, expected.logsumexp_T1)
    ones = jnp.ones((260, 1))
    cts = Cotangents(labels[:, None], expected.logsumexp_T1, ones, -ones)
    gradients = cross_entropy_gpu.backward(x, w, None, cts, **static, interpret=params)
    for one, other in zip(gradients[:2], cross_entropy_scan.backward(x, w, None, cts, **static)[:2], strict=True):
        kernel_checks.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [SCAN, "mosaic_tpu"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens, features, vocabulary", [(1100, 640, 2304), (130, 1024, 9000), (2049, 64, 1025)])
def test_many_blocks(tokens, features, vocabulary, dtype, options, implementation):
    check(implementation, (tokens,), features, vocabulary, dtype, **options)


def test_losses_are_those_of_numpy():
    x, w, labels = arrays((6,), 8, 50)
    logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(6), labels]
    for implementation in (SCAN, "mosaic_tpu", "xla"):
        found = kernels.linear_cross_entropy(x, w, labels, implementation=implementation)
        np.testing.assert_allclose(found, np.where(labels < 0, 0, expected), rtol=1e-5)


def test_ignored_tokens_have_no_gradient():
    x, w, _ = arrays((4,), 8, 16)
    labels = jnp.array([3, -1, -100, 0])
    total = functools.partial(lambda x, stats: sum(y.sum() for y in losses(SCAN)(x, w, labels)), stats=True)
    assert (jnp.abs(jax.grad(total)(x)).sum(-1) > 0).tolist() == [True, False, False, True]


def test_large_logits_do_not_overflow():
    x, w, labels = arrays((6,), 8, 50)
    x, w = jnp.round(10 * x), 100 * jnp.round(w)  # so that logits are exact
    for implementation in (SCAN, "mosaic_tpu"):
        kernel_checks.check(losses(implementation), losses("xla"), (x, w, labels), (0, 1))


def test_operands_of_two_dtypes():
    x, w, labels = arrays((6,), 8, 50)
    of = losses(SCAN)
    found = kernel_checks.with_gradients(of, (0, 1))(x.astype(jnp.bfloat16), w, labels)
    assert [y.dtype for y in jax.tree.leaves(found)] == ["float32", "float32", "bfloat16", "float32"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("implementation", [SCAN, "mosaic_tpu"])
def test_sharded(implementation, sizes, seed):
    options = OPTIONS[seed]
    args = arrays((8, 16), 16, 64, **options)
    specs = kernel_checks.random_specs([x.shape for x in args], sizes, seed)
    most = SUMS | {"all-gather": 12, "all-to-all": 6, "collective-permute": 6}  # operands sharded differently
    wrt = (0, 1, 3) if len(args) > 3 else (0, 1)
    kernel_checks.check_sharded(
        losses(implementation, **options), losses("xla", **options), args, wrt, specs, sizes, most
    )


@pytest.mark.parametrize("implementation", [SCAN, "mosaic_tpu"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sharded_vocabulary_is_not_gathered(options, implementation):
    args = arrays((8, 4), 16, 24, **options)
    specs = P("data"), P("tensor") if options.get("transposed") else P(None, "tensor"), P("data"), P("tensor")
    wrt = (0, 1, 3) if len(args) > 3 else (0, 1)
    of = losses(implementation, **options), losses("xla", **options)
    kernel_checks.check_sharded(*of, args, wrt, specs[: len(args)], MESHES[0], SUMS)


def test_vocabulary_over_axes_of_other_sizes():
    args = arrays((4, 2), 8, 30)  # 30 = 2 x 3 x 5
    with sharding.mesh(a=2, b=3, devices=jax.devices()[:6]):
        run = sharding.jit(losses(SCAN), in_shardings=(P(), P(None, ("a", "b")), P()))
        found, kinds = run(*args), run.complete(*args).communication().by_kind()
    assert {str(kind) for kind in kinds} == {"all-reduce"}
    kernel_checks.assert_close(found, losses("xla")(*args))


def arrays_of(text):
    """Element counts of the arrays of a compiled program."""
    return {int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\[(\d+(?:,\d+)*)\]", text)}


@pytest.mark.parametrize("implementation", [SCAN, "xla"])
def test_no_logits_in_the_compiled_program(implementation):
    args = arrays((512,), 16, 8 * 2048 + 512)
    both = kernel_checks.with_gradients(losses(implementation), (0, 1))
    compiled = jax.jit(both).lower(*args).compile()
    logits = 512 * (8 * 2048 + 512)
    assert (max(arrays_of(compiled.as_text())) >= logits) == (implementation == "xla")
    if implementation == SCAN:
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * logits


def described(platform):
    """Large arrays with a sharded vocabulary, and the specs that shard it: 8 x 1024 tokens, 128,000 columns."""
    x = jax.ShapeDtypeStruct((8, 1024, 1024), "bfloat16")
    w = jax.ShapeDtypeStruct((1024, 128_000), "bfloat16")
    labels = jax.ShapeDtypeStruct((8, 1024), "int32")
    return (x, w, labels), (P("data"), P(None, "tensor"), P("data"))


@pytest.mark.parametrize(("platform", "devices"), AHEAD_OF_TIME)
def test_compiles(platform, devices):
    args, specs = described(platform)
    compiled = kernel_checks.check_ahead_of_time(
        platform, devices, kernels.linear_cross_entropy, args, (0, 1), specs, SUMS
    )
    assert max(arrays_of(compiled.as_text())) < 4 * 1024 * 32_000
    with sharding.mesh(MESHES[0], devices=cost.compile_only(devices)):
        dense = functools.partial(kernels.linear_cross_entropy, implementation="xla")
        step = sharding.jit(kernel_checks.with_gradients(dense, (0, 1)), in_shardings=specs)
        whole = step.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 2


@pytest.mark.parametrize(("platform", "devices"), AHEAD_OF_TIME)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.slow
def test_compiles_with_all_options(options, platform, devices):
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays((8, 512), 256, 1280, "bfloat16", **options)]
    wrt = (0, 1, 3) if len(args) > 3 else (0, 1)
    specs = P("data"), P("tensor") if options.get("transposed") else P(None, "tensor"), P("data"), P("tensor")
    kernel_checks.check_ahead_of_time(platform, devices, losses("auto", **options), args, wrt, specs[: len(args)], SUMS)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"w": jnp.ones((9, 16))}, r"x of \[..., M\] and w of \[M, V\]"),
        ({"labels": jnp.zeros(4)}, "integer labels"),
        ({"labels": jnp.zeros(3, "int32")}, "leading dims of x"),
        ({"bias": jnp.ones(15)}, r"bias of \[V\]"),
        ({"x": jnp.ones((4, 8), "int32")}, "floating-point"),
        ({"softcap": -1.0}, "softcap > 0"),
        ({"transposed": True}, r"w of \[V, M\]"),
        ({"implementation": "triton"}, "one of 'auto', 'xla', 'mosaic_tpu'"),
    ],
    ids=str,
)
def test_errors(change, message):
    call = {"x": jnp.ones((4, 8)), "w": jnp.ones((8, 16)), "labels": jnp.zeros(4, "int32")} | change
    with pytest.raises(ShardingError, match=message):
        kernels.linear_cross_entropy(**call)


@pytest.mark.parametrize(
    "implementation, features, vocabulary, dtype, message",
    [
        ("mosaic_tpu", 8, 16, "float16", "float32 or bfloat16"),
        ("mosaic_tpu", 520, 16, "float32", "at most 512 features, or a multiple of 128"),
        ("mosaic_tpu", 16384, 16, "float32", "at most 8,192 features"),
        ("mosaic_gpu", 64, 128, "float32", "bfloat16 or float16"),
        ("mosaic_gpu", 96, 128, "bfloat16", "features of a multiple of 64"),
        ("mosaic_gpu", 64, 260, "bfloat16", "a vocabulary of a multiple of 8, or w transposed"),
    ],
)
def test_a_kernel_says_what_it_needs(implementation, features, vocabulary, dtype, message):
    if implementation == "mosaic_gpu" and not kernel_checks.HAS_MOSAIC_GPU:
        message = "JAX 0.11"
    x, w, labels = jnp.ones((4, features), dtype), jnp.ones((features, vocabulary), dtype), jnp.zeros(4, "int32")
    with pytest.raises(ShardingError, match=message):
        kernels.linear_cross_entropy(x, w, labels, implementation=implementation)
