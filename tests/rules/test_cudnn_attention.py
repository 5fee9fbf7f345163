"""cuDNN's attention under the H100 compiler: batch and heads stay sharded, forward and backward."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from support.compilers import predicted_and_compiled

from sharding import P

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no jax_cuda13_plugin")

HEADS = P("data", None, "tensor")


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


Q, KV, BIAS = shape(8, 64, 8, 64), shape(8, 64, 4, 64), shape(1, 8, 64, 64)


def attention(*args, **options):
    return jax.nn.dot_product_attention(*args, implementation="cudnn", **options)


def gradients(f, count):
    return jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), argnums=tuple(range(count)))


@pytest.mark.parametrize(
    "f, args, expected",
    [
        (attention, (Q, KV, KV), {}),
        (lambda *args: attention(*args, is_causal=True, local_window_size=(8, 0)), (Q, Q, Q), {}),
        (gradients(lambda *args: attention(*args, is_causal=True), 3), (Q, KV, KV), {}),
        (gradients(attention, 4), (Q, KV, KV, BIAS), {"all-reduce": 1}),  # the bias of all examples
        (
            lambda *args: attention(*args[:3], query_seq_lengths=args[3], key_value_seq_lengths=args[3]),
            (Q, KV, KV, shape(8, dtype=jnp.int32)),
            {},
        ),
    ],
    ids=["grouped queries", "window", "gradients", "gradient of a bias", "lengths"],
)
def test_batch_and_heads_stay_sharded(f, args, expected):
    sizes, specs = {"data": 2, "tensor": 4}, (HEADS, *[P()] * (len(args) - 1))
    predicted, compiled = predicted_and_compiled(f, args, "gpu", "h100:1x8", sizes, in_shardings=specs)
    assert {str(k): n for k, (n, _) in predicted.items()} == expected
    assert predicted == compiled
