"""Programs on which propagation engines are compared: a function, argument shapes, and specs of some arguments.

Axes absent from a mesh are dropped from the specs, so that one program serves several meshes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharding import P

U = P.UNCONSTRAINED
NHWC = ("NHWC", "HWIO", "NHWC")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def grads_of(f):
    """The sum of squares of `f`'s output and its gradients with respect to all float arguments."""

    def step(*args):
        by = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
        return jax.value_and_grad(lambda *a: jnp.sum(f(*a) ** 2), argnums=by)(*args)

    return step


def mlp(x, w1, b, w2):
    return jax.nn.relu(x @ w1 + b[None, :]) @ w2


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale[None, None] + bias[None, None]


def attention(x, wq, wk, wv, wo):
    q, k, v = (jnp.einsum("bsm,mhd->bshd", x, w) for w in (wq, wk, wv))
    score = jnp.einsum("bshd,bthd->bhst", q, k)
    score = jnp.where(jnp.tri(score.shape[-1], dtype=bool)[None, None], score, -jnp.inf)
    return jnp.einsum("bhst,bthd,hdm->bsm", jax.nn.softmax(score, -1), v, wo)


def multi_query(x, wq, wk, wv, wo):
    q, k, v = jnp.einsum("bsm,mhd->bshd", x, wq), x @ wk, x @ wv
    weight = jax.nn.softmax(jnp.einsum("bshd,btd->bhst", q, k), -1)
    return jnp.einsum("bhst,btd,hdm->bsm", weight, v, wo)


def packed_attention(heads):
    def f(x, wqkv, wo):
        batch, length, _ = x.shape
        parts = jnp.split(x @ wqkv, 3, axis=-1)
        q, k, v = (t.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3) for t in parts)
        out = jax.nn.softmax(q @ k.swapaxes(-1, -2), -1) @ v
        return out.transpose(0, 2, 1, 3).reshape(batch, length, -1) @ wo

    return f


def linear_attention(q, k, v):
    memory = jnp.einsum("bthd,bthe->bhde", jax.nn.elu(k) + 1, v)
    return jnp.einsum("bshd,bhde->bshe", jax.nn.elu(q) + 1, memory)


def mixture(x, gate, w1, w2):
    """Mixture of experts by one-hot dispatch, with the second-best expert found by sorting."""
    weight = jax.nn.softmax(jnp.einsum("bsm,me->bse", x, gate))
    chosen = (weight >= jnp.sort(weight, axis=-1)[..., -2:-1]).astype(jnp.float32)
    place = (jnp.cumsum(chosen, axis=1) * chosen).astype(jnp.int32)
    dispatch = jax.nn.one_hot(place, 4) * chosen[..., None]
    h = jax.nn.relu(jnp.einsum("ebcm,emf->ebcf", jnp.einsum("bsec,bsm->ebcm", dispatch, x), w1))
    return jnp.einsum("ebcf,efm,bsec->bsm", h, w2, dispatch * weight[..., None])


def conv_net(x, w1, w2):
    h = jax.nn.relu(lax.conv_general_dilated(x, w1, (1, 1), "SAME", dimension_numbers=NHWC))
    h = lax.conv_general_dilated(h, w2, (2, 2), "SAME", dimension_numbers=NHWC)
    return h.mean((1, 2))


def pooled_conv_net(x, w1, w2):
    h = jax.nn.relu(lax.conv_general_dilated(x, w1, (1, 1), "VALID", dimension_numbers=NHWC))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = lax.conv_general_dilated(h, w2, (1, 1), "SAME", dimension_numbers=NHWC)
    h = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return h.reshape(h.shape[0], -1)


def depthwise(x, w, mix):
    h = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=x.shape[-1])
    return lax.conv_general_dilated(h, mix, (1, 1), "SAME", dimension_numbers=NHWC)


def lstm(x, wx, wh, b):
    def cell(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ wx + h @ wh + b[None], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[1], wh.shape[0]))
    return lax.scan(cell, (start, start), x)[1]


def gru(x, wx, wh):
    def cell(h, x):
        (r, z, n), (ur, uz, un) = jnp.split(x @ wx, 3, -1), jnp.split(h @ wh, 3, -1)
        r, z = jax.nn.sigmoid(r + ur), jax.nn.sigmoid(z + uz)
        h = (1 - z) * jnp.tanh(n + r * un) + z * h
        return h, h

    return lax.scan(cell, jnp.zeros((x.shape[1], wh.shape[0])), x)[0]


def embedding_loss(tokens, targets, table, w):
    score = jax.nn.log_softmax(jnp.take(table, tokens, axis=0) @ w)
    return -jnp.take_along_axis(score, targets[..., None], axis=-1)[..., 0]


def segment_sum(x, i):
    return jax.ops.segment_sum(x, i, num_segments=8)


def segment_max(x, i):
    return jax.ops.segment_max(x, i, num_segments=8)


def sorted_and_summed(x, y):
    total = jnp.sort(x, axis=-1) + jnp.cumsum(x, axis=1)
    return total, jnp.argsort(y, axis=0), jnp.argmax(x, -1), lax.cummax(y, axis=0)


def dropout(x, w, seed):
    keep = jax.random.bernoulli(jax.random.wrap_key_data(seed), 0.5, x.shape)
    return jnp.where(keep, x, 0.0) @ w


def shifted(x):
    return jnp.roll(x, 1, axis=0) + jnp.flip(x, 1) + jnp.pad(x, ((1, 1), (0, 0)))[1:-1]


def indexed(x, i):
    along = jnp.take_along_axis(x, i[:, None] * jnp.ones((1, x.shape[1]), jnp.int32), 0)
    return x[i], x[:, 1], x[:, i], along, x.at[i].set(0.0), x.at[i].add(1.0)


def indexed_in_batches(x, i):
    slices = jax.vmap(lambda a, j: lax.dynamic_slice(a, (j,), (2,)))(x, i)
    return jax.vmap(lambda a, j: a[j])(x, i), slices, jax.vmap(lambda a, j: a.at[j].set(1.0))(x, i)


def reshaped(x):
    n, m = x.shape
    return x.reshape(-1), x.reshape(2, -1, m), x.reshape(n * 2, -1), x.T.reshape(-1, 4), x.reshape(2, n // 2, 2, -1)


def stacked(x, y):
    a, b, *_ = jnp.unstack(jnp.stack([x, y, x + y], axis=1), axis=1)
    return jnp.tile(a * b, (1, 2))


def power(x, w):
    return lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ w), x)


def branches(x, w1, w2):
    return lax.cond(x.sum() > 0, lambda x: x @ w1, lambda x: jnp.tanh(x @ w2), x)


SQUARE = floats(16, 16)
HEADS = (floats(8, 16, 32), floats(32, 8, 4), floats(32, 8, 4), floats(32, 8, 4), floats(8, 4, 32))
IMAGES = (floats(8, 16, 16, 4), floats(3, 3, 4, 8), floats(3, 3, 8, 16))
EXPERTS = (floats(8, 16, 32), floats(32, 8), floats(8, 32, 64), floats(8, 64, 32))
CELL = (floats(6, 8, 16), floats(16, 64), floats(16, 64), floats(64))
UNEVEN = (floats(15, 30), floats(30, 63), floats(63), floats(63, 30))
LAYERS = (floats(16, 32), floats(32, 64), floats(64), floats(64, 32))

PROGRAMS = {
    "mlp": (grads_of(mlp), LAYERS, (P("data"), P(None, "tensor"))),
    "mlp, open": (grads_of(mlp), LAYERS, (P("data", U), P("data", "tensor"), None, P("tensor", "data"))),
    "mlp, uneven": (grads_of(mlp), UNEVEN, (P("data"), P(None, "tensor"))),
    "layer norm": (grads_of(layer_norm), (floats(8, 16, 32), floats(32), floats(32)), (P("data", None, "tensor"),)),
    "attention": (grads_of(attention), HEADS, (P("data"), P(None, "tensor"))),
    "attention, by sequence": (grads_of(attention), HEADS, (P("data", "tensor"),)),
    "attention, few heads": (
        grads_of(attention), (floats(8, 16, 32), *[floats(32, 2, 4)] * 3, floats(2, 4, 32)),
        (P("data"), P(None, "tensor")),
    ),
    "multi-query attention": (
        grads_of(multi_query), (floats(8, 16, 32), floats(32, 8, 4), floats(32, 4), floats(32, 4), floats(8, 4, 32)),
        (P("data"), P(None, "tensor")),
    ),
    "packed attention": (
        grads_of(packed_attention(4)), (floats(8, 16, 32), floats(32, 96), floats(32, 32)),
        (P("data"), P(None, "tensor")),
    ),
    "packed attention, uneven": (
        grads_of(packed_attention(6)), (floats(6, 15, 36), floats(36, 108), floats(36, 36)),
        (P("data"), P(None, "tensor")),
    ),
    "linear attention": (grads_of(linear_attention), (floats(8, 16, 8, 8),) * 3, (P("data", None, "tensor"),)),
    "experts": (grads_of(mixture), EXPERTS, (P("data"), None, P("tensor"))),
    "experts, by features": (grads_of(mixture), EXPERTS, (P("data"), None, P(None, None, "tensor"))),
    "conv net": (grads_of(conv_net), IMAGES, (P("data"), P(None, None, None, "tensor"))),
    "conv net, by height": (grads_of(conv_net), IMAGES, (P("data", "tensor"),)),
    "pooled conv net": (grads_of(pooled_conv_net), IMAGES, (P("data"), P(None, None, None, "tensor"))),
    "pooled conv net, by height": (grads_of(pooled_conv_net), IMAGES, (P("data", "tensor"),)),
    "depthwise": (
        grads_of(depthwise), (floats(8, 16, 16, 8), floats(3, 3, 1, 8), floats(1, 1, 8, 16)),
        (P("data"), P(None, None, None, "tensor")),
    ),
    "lstm": (grads_of(lstm), CELL, (P(None, "data"), P(None, "tensor"))),
    "lstm, by state": (grads_of(lstm), CELL, (P(None, "data"), None, P("tensor"))),
    "gru": (grads_of(gru), (floats(6, 8, 16), floats(16, 48), floats(16, 48)), (P(None, "data"), P(None, "tensor"))),
    "embedding": (
        grads_of(embedding_loss), (ints(8, 16), ints(8, 16), floats(64, 32), floats(32, 64)),
        (P("data"), None, P("tensor")),
    ),
    "embedding, by features": (
        grads_of(embedding_loss), (ints(8, 16), ints(8, 16), floats(64, 32), floats(32, 64)),
        (P("data"), None, P(None, "tensor"), P(None, "tensor")),
    ),
    "segment sum": (grads_of(segment_sum), (floats(32, 16), ints(32)), (P("data", "tensor"),)),
    "segment max": (grads_of(segment_max), (floats(32, 16), ints(32)), (None, P("data"))),
    "sort": (sorted_and_summed, (SQUARE, SQUARE), (P("data", "tensor"), P("tensor", "data"))),
    "einsum chain": (
        grads_of(lambda a, b, c, d: jnp.einsum("ij,jk,kl,lm->im", a, b, c, d)),
        (floats(16, 32), floats(32, 64), floats(64, 32), floats(32, 16)),
        (P("data"), P(None, "tensor"), None, P(None, "tensor")),
    ),
    "einsum of three": (
        grads_of(lambda a, b, c: jnp.einsum("abc,cde,aef->bdf", a, b, c)),
        (floats(8, 16, 32), floats(32, 8, 4), floats(8, 4, 16)),
        (P("data", None, "tensor"), None, P(None, None, "tensor")),
    ),
    "dropout": (
        grads_of(dropout), (SQUARE, SQUARE, jax.ShapeDtypeStruct((2,), jnp.uint32)), (P("data"), P(None, "tensor")),
    ),
    "moved": (shifted, (SQUARE,), (P("data", "tensor"),)),
    "looked up": (indexed, (SQUARE, ints(16)), (P("data", "tensor"),)),
    "looked up, by index": (indexed, (SQUARE, ints(16)), (None, P("data"))),
    "looked up in batches": (indexed_in_batches, (SQUARE, ints(16)), (P("data", "tensor"),)),
    "looked up in batches, by index": (indexed_in_batches, (SQUARE, ints(16)), (None, P("tensor"))),
    "reshaped": (reshaped, (floats(16, 24),), (P("data", "tensor"),)),
    "reshaped, major": (reshaped, (floats(16, 24),), (P(("tensor", "data")),)),
    "reshaped, minor": (reshaped, (floats(16, 24),), (P(None, ("tensor", "data")),)),
    "reshaped, uneven": (reshaped, (floats(12, 20),), (P("tensor", "data"),)),
    "stacked": (grads_of(stacked), (SQUARE, SQUARE), (P("data", "tensor"),)),
    "power": (grads_of(power), (SQUARE, SQUARE), (P("data"), P(None, "tensor"))),
    "branches": (grads_of(branches), (SQUARE, SQUARE, SQUARE), (P("data"), P(None, "tensor"))),
}  # fmt: skip
