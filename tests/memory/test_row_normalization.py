"""What XLA:TPU stores of softmaxes, alone and in attention: the kernel of a maximum goes on to the exponentials."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, floats

LENGTH = 1024
SCORES = (4, 8, LENGTH, LENGTH)
ROWS = (64, 128, 2048)


def arrays(dtype, *shapes):
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def softmax_gradient(before=lambda x: x, axis=-1, function=jax.nn.softmax):
    return jax.grad(lambda x, t: (function(before(x), axis=axis) * t).sum())


def less_its_mean(x, axis):
    return x - x.mean(axis, keepdims=True)


def masked(x):
    return jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -1e9)


ALONE = {
    "a softmax": (softmax_gradient(), floats(*ROWS), 1),
    "of scaled and masked scores": (softmax_gradient(lambda x: masked(x * 0.1)), floats(*ROWS), 1),
    "over the second last dim": (softmax_gradient(axis=1), floats(*ROWS), 1),
    "over the first dim": (softmax_gradient(axis=0), floats(*ROWS), 0),
    "of a matrix": (softmax_gradient(), floats(8192, 4096), 0),
    "with a dim of one element": (softmax_gradient(), floats(1, 4096, 4096), 0),
    "with a fourth dim of one element": (softmax_gradient(), floats(1, *ROWS), 0),
    "of long rows": (softmax_gradient(), floats(64, 64, 16384), 0),
    "a logarithm": (softmax_gradient(function=jax.nn.log_softmax), floats(*ROWS), 1),
    "rows less their mean": (softmax_gradient(function=less_its_mean), floats(*ROWS), 0),
}
"""A function of two arrays, their shape, and how many arrays of that size it stores."""


def attention(before=lambda s: s, dtype=None, scale=1):
    def apply(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.asarray(scale, q.dtype)
        p = jax.nn.softmax(before(scores if dtype is None else scores.astype(dtype)))
        return jnp.einsum("bhqk,bkhd->bqhd", p.astype(q.dtype), v)

    return jax.grad(lambda *xs: (apply(*xs).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2))


BEFORE = {
    "plain": lambda s: s,
    "scaled": lambda s: s * 0.125,
    "masked": masked,
    "scaled and masked": lambda s: masked(s * 0.125),
}
COUNTS = {"float32": [2, 2, 2, 2], "bfloat16": [3, 3, 3, 3], "bfloat16, a float32 softmax": [3, 4, 4, 4]}
"""How many arrays of scores, in the operands' type, the gradients of attention store, for each of `BEFORE`."""
ATTENTION = {
    f"{dtype}, {name}": (attention(before, jnp.float32 if "softmax" in dtype else None), dtype.split(",")[0], count)
    for dtype, counts in COUNTS.items()
    for (name, before), count in zip(BEFORE.items(), counts, strict=True)
}
ATTENTION["bfloat16, scaled before a float32 softmax"] = attention(dtype=jnp.float32, scale=0.125), "bfloat16", 3
ATTENTION["bfloat16, a float32 softmax of capped scores"] = (
    attention(lambda s: masked(50 * jnp.tanh(s / 50)), jnp.float32),
    "bfloat16",
    4,
)


ONE_SEQUENCE = ("bfloat16, masked", "bfloat16, a float32 softmax, masked")
"""Of `ATTENTION`, also with a batch of one."""


def programs():
    for name, (f, shape, count) in ALONE.items():
        yield name, (f, (shape, shape), count), 4 * shape.size
    for name, (f, dtype, count) in ATTENTION.items():
        for batch in (SCORES[0], 1) if name in ONE_SEQUENCE else SCORES[:1]:
            heads = SCORES[0] * SCORES[1] // batch
            operands = arrays(dtype, *[(batch, LENGTH, heads, 64)] * 3)
            itemsize = jnp.dtype(dtype).itemsize
            yield f"{name}, {batch}", (f, operands, count), itemsize * batch * heads * LENGTH**2


PROGRAMS = {name: (program, unit) for name, program, unit in programs()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_exponentials_are_stored_by_the_kernel_of_the_maximum(name):
    check_temporaries(*PROGRAMS[name], parts=8)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_as_many(name):
    check_compiled_temporaries(*PROGRAMS[name], parts=8)
