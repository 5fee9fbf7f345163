"""A small transformer of tensor-parallel layers, and the dense one it must equal."""

import jax
import jax.numpy as jnp
import numpy as np

from sharding import tensor

BATCH, LENGTH, FEATURES, HEADS, VOCAB = 4, 8, 64, 8, 96
"""Few positions and many features, so that moving activations is cheaper than moving weights."""

ROLES = {"*/qkv": 1, "*/out": 0, "*/w1": "column", "*/b1": "column_bias", "*/w2": "row", "table": "vocabulary"}


def params(layers=1, vocab=VOCAB):
    generator = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(generator.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    head, wide = FEATURES // HEADS, 2 * FEATURES
    shapes = {
        "qkv": (FEATURES, HEADS, 3, head),
        "out": (HEADS, head, FEATURES),
        "out_bias": (FEATURES,),
        "w1": (FEATURES, wide),
        "b1": (wide,),
        "w2": (wide, FEATURES),
        "b2": (FEATURES,),
    }
    blocks = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(layers)]
    return {"blocks": blocks, "table": normal(vocab, FEATURES)}


def tokens(vocab=VOCAB):
    return np.random.default_rng(1).integers(0, vocab, (2, BATCH, LENGTH)).astype(np.int32)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def attention_output(qkv):
    q, k, v = jnp.moveaxis(qkv, 3, 0)
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1]))
    return jnp.einsum("bhst,bthd->bshd", weights, v)


def dense_loss(params, inputs, targets):
    """The loss on one device, without a mesh."""
    x = params["table"][inputs]
    for p in params["blocks"]:
        bias = [p[name].reshape(1, 1, -1) for name in ("out_bias", "b1", "b2")]
        a = attention_output(jnp.einsum("bsm,mhcd->bshcd", norm(x), p["qkv"]))
        x = x + jnp.einsum("bshd,hdm->bsm", a, p["out"]) + bias[0]
        x = x + jax.nn.gelu(norm(x) @ p["w1"] + bias[1]) @ p["w2"] + bias[2]
    z = norm(x) @ params["table"].T
    chosen = jnp.take_along_axis(z, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(z, axis=-1) - chosen)


def identity(x):
    return x


def loss_of(*, sequence_parallel=False):
    """The loss of tensor-parallel layers."""
    branch_input, branch_output = (tensor.gathered, tensor.scattered) if sequence_parallel else (identity, identity)

    def attention(p, x):
        return tensor.row_parallel(attention_output(tensor.column_parallel(x, p["qkv"])), p["out"], p["out_bias"])

    def mlp(p, x):
        return tensor.row_parallel(jax.nn.gelu(tensor.column_parallel(x, p["w1"], p["b1"])), p["w2"], p["b2"])

    def loss(params, inputs, targets):
        x = branch_output(tensor.embed(params["table"], inputs))
        for p in params["blocks"]:
            x = x + branch_output(attention(p, branch_input(norm(x))))
            x = x + branch_output(mlp(p, branch_input(norm(x))))
        return tensor.cross_entropy(tensor.logits(branch_input(norm(x)), params["table"]), targets)

    return loss
