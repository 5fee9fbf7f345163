"""Control flow and library functions inside."""

import jax
import jax.numpy as jnp
import numpy as np

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def scan(jit):
    """`scan` with `reverse`, `unroll`, `length` and pytrees; with a jitted body; gradients"""

    def f(x):
        body = jit(lambda c, row: ({"c": c["c"] * 0.5 + row}, c["c"].sum()))
        forward = jax.lax.scan(body, {"c": jnp.zeros(8)}, split(x))
        back = jax.lax.scan(lambda c, row: (c * row, c), x[0], split(x), reverse=True, unroll=2)
        none = jax.lax.scan(lambda c, _: (c + 1, None), split(x), None, length=3)
        return forward, back, none

    return jit(f)(X), jax.grad(lambda x: jit(f)(x)[1][0].sum())(X)


def while_loop(jit):
    """`while_loop`, `fori_loop`, with a jitted body and a condition over a sharded array"""
    f = jit(lambda x: jax.lax.while_loop(lambda x: (x**2).sum() > 1, jit(lambda x: split(x) * 0.5), x))
    g = jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: split(x) + i, x))
    return f(X), g(X, 3), g(X, 3), jit(jax.grad(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * x, x).sum()))(X)


def cond(jit):
    """`cond`, `switch`, `select`, with jitted branches, and their gradients"""
    double, halve = jit(lambda x: split(x) * 2), jit(lambda x: split(x) / 2)
    other = jit(lambda i, x: jax.lax.switch(i, [lambda x: split(x, None, "tensor"), lambda x: split(x) * 2], x))
    f = jit(lambda p, x: jax.lax.cond(p, double, halve, x))
    g = jit(lambda i, x: jax.lax.switch(i, [double, halve, lambda x: x], x))
    gradient = jax.grad(lambda x: f(x.sum() > 0, x).sum())
    return (
        f(True, X),
        f(False, X),
        [g(i, X) for i in range(4)],
        gradient(X),
        jax.vmap(f, (0, None))(X[:, 0] > 0, X),
        other(1, X),
    )


def associative_scan(jit):
    """`associative_scan`, `map` with `batch_size`, `reduce`"""
    f = jit(lambda x: (jax.lax.associative_scan(jnp.add, split(x)), jax.lax.map(jnp.sin, split(x), batch_size=3)))
    return f(X), jit(lambda x: jax.lax.reduce(split(x), np.float32(0), jax.lax.add, (0,)))(X)


def python_control_flow(jit):
    """Python control flow over traced values is JAX's error, over static ones fine"""
    branch = lambda x: x if x.sum() > 0 else -x  # noqa: E731
    static = jit(lambda x, n: sum(split(x) * i for i in range(n)), static_argnums=1)
    return (
        raised(lambda: jit(branch)(X)),
        raised(lambda: jit(lambda x, n: [x for _ in range(n)])(X, 3)),
        raised(lambda: jit(lambda x: np.asarray(x))(X)),
        raised(lambda: jit(lambda x: x[x > 0])(X)),
        raised(lambda: jit(lambda x, i: [1, 2][i])(X, 1)),
        static(X, 3),
    )


def indexing(jit):
    """Indexing: slices, masks, `.at`, out of bounds modes, dynamic slices, `take`, `where`"""

    def f(x, i):
        x = split(x)
        updated = x.at[i].set(0).at[:, 1].add(2).at[i, i].mul(3).at[10].set(1, mode="drop")
        taken = x[i], x[..., None, ::2], x.at[20].get(mode="fill", fill_value=7), jnp.take(x, i, axis=1)
        return updated, taken, jax.lax.dynamic_slice(x, (i[0], 0), (2, 8)), jnp.where(x > 0, x, 0), x[-1]

    return jit(f)(X, np.array([1, 3, 1]))


def random(jit):
    """Random numbers: `split`, `fold_in`, distributions, permutations"""

    def f(key):
        a, b, c, d = jax.random.split(key, 4)
        choice = jax.random.permutation(a, 8), jax.random.categorical(b, split(jnp.asarray(X)))
        return choice, jax.random.normal(jax.random.fold_in(c, 3), (8, 8)), jax.random.randint(d, (8,), 0, 9)

    return jit(f)(jax.random.key(0))


def linear_algebra(jit):
    """`jnp.linalg`, `einsum`, `fft`, `sort`, `cumsum`, convolutions"""

    def f(x):
        x = split(x)
        a = x @ x.T + 4 * jnp.eye(8)
        image = x[None, :, :, None]
        conv = jax.lax.conv_general_dilated(
            image, jnp.ones((3, 3, 1, 2)), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (
            jnp.linalg.solve(a, x),
            jnp.linalg.cholesky(a),
            jnp.einsum("ij,kj->ik", x, x),
            jnp.fft.rfft(x),
            (
                jnp.sort(x, axis=0),
                jnp.argsort(x),
                jnp.cumsum(x, axis=0),
                conv,
                jnp.median(x),
            ),
        )

    return jit(f)(X)


def foreach(jit):
    """Loops over Refs: `jax.lax.fori_loop` that writes into one"""

    def f(x):
        ref = jax.new_ref(jnp.zeros_like(x))

        def body(i, _):
            ref[i] = split(x)[i] * 2

        jax.lax.fori_loop(0, 8, body, None)
        return jax.freeze(ref)

    return jit(f)(X)
