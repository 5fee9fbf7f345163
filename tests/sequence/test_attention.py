"""Attention over a sharded sequence and its gradients equal attention on one device, for every kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention_reference import arrays, assert_close, dense, with_gradients

import sharding
from sharding import P, ShardingError, sequence
from sharding.pipeline import schedules


@functools.cache
def reference(length, heads, groups, causal):
    """Outputs and gradients on one device, without a mesh."""
    return jax.jit(with_gradients(functools.partial(dense, causal=causal)))(*arrays(length, heads=heads, groups=groups))


def check(axes, kind, *, length=13, heads=8, groups=4, causal=True, order="plain", jit=sharding.jit):
    attend = functools.partial(sequence.attention, kind=kind, causal=causal, order=order)
    expected = reference(length, heads, groups, causal)
    with sharding.mesh(axes, devices=jax.devices()[: np.prod(list(axes.values()))]):
        args = arrays(length, heads=heads, groups=groups)
        if order == "zigzag":
            args = [sequence.zigzag(np.asarray(x), axes["seq"]) for x in args]
        found = jax.device_get(jit(with_gradients(attend))(*args))
        if order == "zigzag":
            found = [sequence.unzigzag(x, axes["seq"]) for x in found]
        assert_close(found, expected)


@pytest.mark.parametrize("kind", sequence.KINDS)
def test_an_indivisible_length(kind):
    check({"seq": 4}, kind)


def test_zigzag():
    check({"seq": 4}, "ring", length=16, order="zigzag")


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_other_axes_and_plain_jit(kind):
    check({"data": 2, "seq": 2, "tensor": 2}, kind, causal=False, jit=jax.jit)


def test_one_device():
    q, k, v, weights = arrays(13)
    check({"data": 8, "seq": 1}, "ring")
    assert_close([sequence.attention(q, k, v)], [dense(q, k, v)])  # no mesh


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", sequence.KINDS)
def test_grid(kind, causal, devices):
    for length, groups in ((16, 8), (16, 2), (13, 1), (9, 8), (23, 4)):
        check({"seq": devices}, kind, length=length, groups=groups, causal=causal)
    if kind != "ulysses":  # any number of heads
        check({"seq": devices}, kind, heads=3, groups=3, causal=causal)
    check({"seq": devices}, kind, length=16, causal=causal, order="zigzag")
    check({"seq": devices, "data": 8 // devices}, kind, length=16, causal=causal, jit=jax.jit)


@pytest.mark.slow
def test_indivisible_key_heads():
    check({"seq": 4}, "ulysses", heads=12, groups=6)
    check({"data": 2, "seq": 2, "tensor": 2}, "ulysses", length=16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sequence.KINDS)
def test_in_a_shard_map(kind):
    q, k, v, weights = arrays(16)
    attend = with_gradients(functools.partial(sequence.attention, kind=kind))
    expected = reference(16, 8, 4, True)
    for manual, spec in (({"seq"}, P(None, "seq")), ({"data"}, P("data")), ({"data", "seq"}, P("data", "seq"))):
        with sharding.mesh(data=2, seq=4):
            body = jax.shard_map(attend, in_specs=spec, out_specs=spec, axis_names=manual, check_vma=False)
            for jit in (jax.jit, sharding.jit):
                assert_close(jax.block_until_ready(jit(body)(q, k, v, weights)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sequence.KINDS)
def test_bfloat16_outside_jit(kind):
    halves = [x.astype(jnp.bfloat16) for x in arrays(16)]
    expected = with_gradients(dense)(*(x.astype(jnp.float32) for x in halves))
    with sharding.mesh(data=2, seq=4):
        found = jax.block_until_ready(with_gradients(functools.partial(sequence.attention, kind=kind))(*halves))
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    assert_close([x.astype(jnp.float32) for x in found], expected, rtol=2e-2)


def check_error(match, *, axes=None, q=(2, 16, 8, 4), k=(2, 16, 4, 4), v=None, **options):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q, k, v or k)]
    with sharding.mesh(axes or {"seq": 4}, devices=4), pytest.raises(ShardingError, match=match):
        sharding.jit(functools.partial(sequence.attention, **options)).complete(*shapes)


def test_errors():
    check_error("one of 'ring_self', 'ring', 'ulysses'", kind="rings")
    check_error("one of 'plain', 'zigzag'", order="zig-zag")
    check_error("a mesh axis 'seq'", axes={"data": 4})
    check_error("6 heads over 4 devices: 6 / 4 = 1.5", kind="ulysses", q=(2, 16, 6, 4), k=(2, 16, 6, 4))
    check_error("3 positions over 4 devices", q=(2, 3, 8, 4), k=(2, 3, 4, 4))
    check_error("12 positions, 2 x 4 chunks", order="zigzag", q=(2, 12, 8, 4), k=(2, 12, 4, 4))
    check_error("keys and values of one shape", v=(2, 16, 8, 4))
    check_error("that differ only in heads", k=(2, 12, 4, 4))
    check_error("query heads that are a multiple of key heads", k=(2, 16, 3, 4))
    for q, k in (((2, 16, 8, 4), (2, 16, 0, 4)), ((2, 16, 0, 4),) * 2, ((0, 16, 8, 4),) * 2, ((2, 16, 8, 0),) * 2):
        check_error("query heads that are a multiple of key heads", q=q, k=k)
    check_error("each .batch, length", q=(2, 16, 8), k=(2, 16, 8))


def pipelined(kind):
    """A pipelined step with attention in its stages, and its arguments."""

    def stage(w, x):
        return x + sequence.attention(x * w, x, x, kind=kind)

    step = sharding.pipeline.value_and_grad(
        stage, lambda y, t: jnp.mean((y - t) ** 2), schedules.gpipe(stages=2, microbatches=2)
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 8, 2, 4)), jnp.float32)
    return step, (jnp.ones((2, 1, 1, 1, 1)), x, jnp.zeros_like(x))


def test_a_ring_in_a_one_program_pipeline_is_an_error():
    step, args = pipelined("ring")
    with sharding.mesh(pipe=2, seq=2, devices=4), pytest.raises(ShardingError, match="kind='ulysses'"):
        sharding.jit(step).complete(*args)


@pytest.mark.slow
def test_ulysses_in_a_one_program_pipeline():
    step, (w, x, targets) = pipelined("ulysses")

    def loss(w):
        out = jax.vmap(lambda x: functools.reduce(lambda x, w: x + dense(x * w, x, x), w, x))(x)
        return jnp.mean((out - targets) ** 2)

    with sharding.mesh(pipe=2, seq=2, devices=jax.devices()[:4]):
        found = jax.block_until_ready(sharding.jit(step)(w, x, targets))
    assert_close(jax.tree.leaves(found), jax.tree.leaves(jax.value_and_grad(loss)(w)))
