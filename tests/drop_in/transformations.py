"""Transformations around a jitted function, and inside."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .comparison import split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
W = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8) / 3


def _loss(w, x):
    return (jnp.tanh(split(x) @ split(w, None, "tensor")) ** 2).sum()


def _layer(w, x):
    return jnp.tanh(split(x) @ split(w, None, "tensor"))


def _around_and_inside(transform):
    """A transformation applied to a jitted function, and inside one."""
    return lambda jit, f, *args: (transform(jit(f))(*args), jit(transform(f))(*args))


def grad(jit):
    """`grad`, `value_and_grad`, with `argnums` and `has_aux`"""
    both = _around_and_inside(lambda f: jax.value_and_grad(f, argnums=(0, 1)))
    aux = _around_and_inside(lambda f: jax.grad(f, has_aux=True))
    return both(jit, _loss, W, X), aux(jit, lambda w, x: (_loss(w, x), {"x": x.sum()}), W, X)


def vmap(jit):
    """`vmap` with `in_axes`, `out_axes`, `axis_name`, `axis_size`"""
    axes = _around_and_inside(lambda f: jax.vmap(f, in_axes=(None, 1), out_axes=1))
    named = _around_and_inside(lambda f: jax.vmap(lambda x: x - jax.lax.pmean(f(x), "i"), axis_name="i"))
    size = _around_and_inside(lambda f: jax.vmap(f, in_axes=None, axis_size=3))
    return axes(jit, _layer, W, np.stack([X, W], 1)), named(jit, lambda x: split(x) * 2, X), size(jit, _layer, W, X)


def jvp_and_vjp(jit):
    """`jvp`, `vjp`, `linearize`, `linear_transpose`"""
    f = jit(lambda x: _layer(W, x))
    inside = jit(lambda x, t: jax.jvp(lambda x: _layer(W, x), (x,), (t,)))(X, W)
    back = jit(lambda x, g: jax.vjp(lambda x: _layer(W, x), x)[1](g))(X, W)
    transposed = jax.linear_transpose(jit(lambda x: split(x) @ W), X)(X)
    return jax.jvp(f, (X,), (W,)), jax.vjp(f, X)[1](W), jax.linearize(f, X)[1](W), inside, back, transposed


def jacobians(jit):
    """`jacfwd`, `jacrev`, `hessian`"""
    v = X[0]

    def f(x):
        return jnp.tanh(split(W, None, "tensor") @ x)

    pairs = [_around_and_inside(t)(jit, f, v) for t in (jax.jacfwd, jax.jacrev)]
    return pairs, _around_and_inside(jax.hessian)(jit, lambda x: f(x).sum(), v)


def checkpoint(jit):
    """`checkpoint` with policies and static arguments, around and inside"""
    dots = _around_and_inside(lambda f: jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)))
    static = jit(jax.grad(lambda w: jax.checkpoint(lambda w, n: _loss(w, X) * n, static_argnums=1)(w, 2)))
    return dots(jit, _loss, W, X), static(W)


def higher_order(jit):
    """Nested derivatives through nested jitted functions"""
    f = jit(lambda x: jnp.sin(split(x)).sum())
    return jax.grad(lambda x: jit(jax.grad(f))(x).sum())(X), jit(jax.jacfwd(jax.grad(lambda x: (x**3).sum())))(X[0])


def nested_jit(jit):
    """`jax.jit` inside, and around"""
    f = jit(lambda x: jax.jit(lambda x: split(x) * 2)(x) + 1)
    return f(X), jax.jit(lambda x: f(x) * 3)(X), jax.grad(lambda x: jax.jit(f)(x).sum())(X)


def custom_vjp(jit):
    """`custom_vjp` with `nondiff_argnums`, around and inside"""

    @jax.custom_vjp
    def clip(x):
        return jit(lambda x: split(x) * 2)(x)

    clip.defvjp(lambda x: (clip(x), x), lambda x, g: (jnp.clip(g * x, -0.5, 0.5),))
    return clip(X), jax.grad(lambda x: jit(clip)(x).sum())(X), jit(jax.grad(lambda x: clip(x).sum()))(X)


def custom_jvp(jit):
    """`custom_jvp`, around and inside"""

    @jax.custom_jvp
    def f(x):
        return jit(lambda x: split(x) ** 2)(x)

    f.defjvp(lambda p, t: (f(*p), 3 * p[0] * t[0]))
    return f(X), jax.jvp(jit(f), (X,), (W,)), jit(jax.grad(lambda x: f(x).sum()))(X)


def custom_batching(jit):
    """`jax.custom_batching.custom_vmap`"""

    @jax.custom_batching.custom_vmap
    def f(x):
        return split(x) * 2

    f.def_vmap(lambda size, batched, x: (x * 3, True))
    return jit(f)(X), jit(jax.vmap(f))(X), jax.vmap(jit(f))(np.stack([X, X]))


def stop_gradient(jit):
    """`stop_gradient`, `custom_gradient`, optimization barriers"""

    @jax.custom_gradient
    def f(x):
        return split(x) * 2, lambda g: (g * 5,)

    g = jit(jax.grad(lambda x: (jax.lax.stop_gradient(split(x)) * x + f(jax.lax.optimization_barrier(x))).sum()))
    return g(X)


def ravel(jit):
    """`ravel_pytree` and `jax.tree` functions inside"""
    tree = {"a": X, "b": [X[0], 2.0]}

    def f(tree):
        flat, unravel = ravel_pytree(tree)
        return unravel(flat * 2), jax.tree.reduce(lambda a, b: a + jnp.sum(b), tree, 0.0)

    return jit(f)(tree)


def linear_solve(jit):
    """`custom_linear_solve`, `custom_root`, and `jax.scipy.sparse.linalg.cg`"""
    a = X @ X.T + 4 * np.eye(8, dtype=np.float32)

    def root(y):
        f = lambda x: x**3 - y  # noqa: E731

        def newton(f, x):
            return jax.lax.fori_loop(0, 30, lambda _, x: x - f(x) / (3 * x**2), x)

        return jax.lax.custom_root(f, 1.0, newton, lambda g, y: y / g(1.0))

    solved = jit(lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: split(a) @ x, b, maxiter=40)[0])(a, X[0])
    return solved, jit(jax.grad(root))(jnp.float32(2.0))


def jet(jit):
    """Taylor mode: `jax.experimental.jet`"""
    from jax.experimental import jet as taylor

    f = jit(lambda x: jnp.sin(split(x)))
    return taylor.jet(f, (X,), [[np.ones_like(X), np.zeros_like(X)]])


def closure_gradient(jit):
    """Gradients with respect to closed-over values"""
    return jax.grad(lambda w: jit(lambda x: (split(x) @ w).sum())(X))(W)


def fused_vjp_objects(jit):
    """A vjp function as a result and an argument"""
    y, vjp = jit(lambda x: jax.vjp(lambda x: jnp.sin(split(x)), x))(X)
    return y, jit(lambda vjp, g: vjp(g))(vjp, W), vjp(W)
