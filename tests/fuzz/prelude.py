"""Helpers called by generated programs; its source is prepended to a printed program.

Loops, branches and wrappers take flat functions: arrays in, a tuple of arrays out.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def plain(x, spec=None, *, name=None, priority=0):
    """Replaces `sharding.annotate` without a mesh."""
    return x


def scan(f, carried, length, *args, **options):
    """`lax.scan` with the first `carried` arguments carried and the others stacked."""

    def body(carry, xs):
        out = f(*carry, *xs)
        return tuple(out[:carried]), tuple(out[carried:])

    carry, ys = lax.scan(body, args[:carried], args[carried:], length=length, **options)
    return (*carry, *ys)


def while_loop(f, times, *args):
    """Repeats `f`; the trip count `times` is known only at run time."""
    return lax.while_loop(lambda s: s[0] < times, lambda s: (s[0] + 1, *f(*s[1:])), (jnp.int32(0), *args))[1:]


def fori_loop(f, times, *args):
    return lax.fori_loop(0, times, lambda i, s: tuple(f(*s)), args)


def custom_vjp(f, *args):
    """`f` with a custom derivative rule equal to its true derivative."""
    g = jax.custom_vjp(f)
    g.defvjp(lambda *xs: (f(*xs), xs), lambda xs, ct: jax.vjp(f, *xs)[1](ct))
    return g(*args)


def custom_jvp(f, *args):
    g = jax.custom_jvp(f)
    g.defjvp(lambda xs, ts: jax.jvp(f, xs, ts))
    return g(*args)


def twice(f, *args):
    """Two equal calls of a jitted `f` that is recomputed for the gradients."""
    g = jax.jit(jax.checkpoint(f))
    return tuple(jnp.maximum(a, b) for a, b in zip(g(*args), g(*args), strict=True))


def gradient(f, *args):
    """Gradients of the sum of `f`'s results with respect to all arguments."""
    return jax.grad(lambda *xs: sum(jnp.sum(jnp.sin(y)) for y in f(*xs)), argnums=tuple(range(len(args))))(*args)


def tangent(f, *args):
    return jax.jvp(f, args, args)[1]


def with_gradients(f, by, counted):
    """`f` that also returns the gradients of the sum of its results `counted` with respect to its arguments `by`."""

    def loss(*args):
        out = f(*args)
        return sum(jnp.sum(jnp.sin(out[i])) for i in counted), out

    def program(*args):
        (_, out), gradients = jax.value_and_grad(loss, argnums=by, has_aux=True)(*args)
        return (*out, *gradients)

    return program


def array(seed, kind, shape):
    """An argument: floats are multiples of 1/8 within 2, integers 0 to 7."""
    random = np.random.default_rng(seed)
    if kind == "key":
        return jax.random.split(jax.random.key(seed), shape) if shape else jax.random.key(seed)
    if kind == "bool":
        return random.integers(0, 2, shape) == 1
    if jnp.issubdtype(kind, jnp.floating):
        return np.asarray(random.integers(-16, 17, shape) / 8, kind)
    return np.asarray(random.integers(0, 8, shape), kind)
