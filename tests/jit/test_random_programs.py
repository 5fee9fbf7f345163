"""Random programs compute the same after simplification, also what it was not made for."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sharding import compat
from sharding.jit.simplification import simplify

FLOATS = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
INTS = np.random.default_rng(1).integers(-2, 3, (4, 3), np.int32)


def ints(made: list, generator: random.Random) -> jax.Array:
    return generator.choice([x for x in made if x.dtype == jnp.int32])


def floats(made: list, generator: random.Random) -> jax.Array:
    return generator.choice([x for x in made if x.dtype == jnp.float32])


def looped(c: jax.Array, w: jax.Array, generator: random.Random) -> jax.Array:
    length = generator.choice([1, 1, 3])
    is_stacked = generator.random() < 0.5
    rows = jnp.stack([w + k for k in range(length)])

    def body(carry, row):
        invariant = jnp.sum(w * w) + jnp.max(c)
        return jnp.tanh(carry + invariant) * (row if is_stacked else 1.0), carry * 2

    carry, stacked = lax.scan(body, c, rows)
    return carry + stacked[-1]


def counted(c: jax.Array, w: jax.Array) -> jax.Array:
    """Vmapped, so that each row stops at a number of steps of its own."""

    def one(row, limit):
        return lax.while_loop(lambda s: s[0] < limit, lambda s: (s[0] + 1, s[1] * 0.5 + w.sum()), (0, row))[1]

    return jax.vmap(one)(c, jnp.arange(len(c)))


FLOAT_OPS = [
    lambda a, b, g: a + b,
    lambda a, b, g: a * b,
    lambda a, b, g: jnp.maximum(a, a if g.random() < 0.5 else b),
    lambda a, b, g: lax.select_n(a > b, a, a if g.random() < 0.5 else b),
    lambda a, b, g: a - b * 0,
    lambda a, b, g: jnp.tanh(a.T @ b)[:1] + b * 1.0,
    lambda a, b, g: a + jnp.vdot(a, b),
    lambda a, b, g: (b.T @ a).T @ jnp.ones((3, 3)) @ jnp.ones((3, 3)) @ a.T[:, :3].T[:3] + a[:3],
    lambda a, b, g: jnp.sum(jnp.concatenate([a, b], g.randrange(2)), g.randrange(2), keepdims=True).max() + b,
    lambda a, b, g: lax.reshape(lax.reshape(a, (3, 4), (1, 0)), (4, 3)) + b,
    lambda a, b, g: jax.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(a) + b,
    lambda a, b, g: jax.vmap(lambda x: lax.pmax(x, "i"), axis_name="i", in_axes=1, out_axes=1)(a) + b,
    lambda a, b, g: lax.pad(a, 2.0, ((-3, 3 + g.randrange(2) - 1, 0), (0, 0, 0)))[:3].sum() + b,
    lambda a, b, g: lax.pad(a, 2.0, ((g.choice([-4, -3]), 4, 0), (0, 0, 0)))[-4:] + b,
    lambda a, b, g: jnp.take(a[:, :1], 0, axis=1)[:, None] + b,
    lambda a, b, g: jnp.stack([jnp.take(a[:1], 0, axis=0)] * 4) * b,
    lambda a, b, g: a + lax.rev(b[:1], (0,)) + lax.rev(b, (g.randrange(2),)),
    lambda a, b, g: looped(a, b, g),
    lambda a, b, g: counted(a, b),
    lambda a, b, g: lax.cond(g.random() < 0.5, lambda: a, lambda: b * 2),
    lambda a, b, g: jnp.square(a) + a * a + a**2,
    lambda a, b, g: jax.jit(lambda x, y: (x + y) * (x + x))(a, a if g.random() < 0.5 else b),
]
INT_OPS = [
    lambda a, b: a - a + b,
    lambda a, b: (a == a).astype(jnp.int32) + (a < a).astype(jnp.int32) * b,
    lambda a, b: (a >= b).astype(jnp.int32) - (a != a).astype(jnp.int32),
    lambda a, b: a ^ a ^ b,
    lambda a, b: lax.rem(a, jnp.int32(1)) + b,
    lambda a, b: jnp.minimum(a, a) & (b | b),
    lambda a, b: jnp.broadcast_to(jnp.arange(3) < 0, (4, 3)).astype(jnp.int32) + a * b,
]


def program(generator: random.Random):
    def fn(x, n):
        made = [x, n]
        for _ in range(7):
            if generator.random() < 0.3:
                made.append(generator.choice(INT_OPS)(ints(made, generator), ints(made, generator)))
            elif generator.random() < 0.15:
                made.append(ints(made, generator).astype(jnp.float32))
            else:
                op = generator.choice(FLOAT_OPS)
                new = op(floats(made, generator), floats(made, generator), generator)
                made.append(jnp.tanh(jnp.broadcast_to(new if new.ndim == 2 and new.shape[0] != 3 else new[:1], (4, 3))))
        return made[2:]

    return fn


@pytest.mark.parametrize("seed", range(4))
def test_simplified_programs_compute_the_same(seed: int):
    changed = 0
    with jax.numpy_rank_promotion("allow"):
        for number in range(10):
            closed = jax.make_jaxpr(program(random.Random(100 * seed + number)))(FLOATS, INTS)
            simple = simplify(closed)
            changed += simple is not closed
            expected, found = (compat.jaxpr_fun(each)(FLOATS, INTS) for each in (closed, simple))
            for a, b in zip(expected, found, strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=str((seed, number)))
    assert changed > 7
