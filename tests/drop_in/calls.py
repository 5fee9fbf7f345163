"""Functions, and what a jitted function is."""

import functools
import inspect
import operator
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


class _Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return split(x) * self.factor

    def method(self, x):
        return split(x) + self.factor

    @classmethod
    def of_class(cls, x):
        return split(x) * 3

    @staticmethod
    def static(x):
        return split(x) * 4


def bound_methods(jit):
    """Bound, class and static methods"""
    return jit(_Scale(2).method)(X), jit(_Scale.of_class)(X), jit(_Scale.static)(X)


def callable_objects(jit):
    """Objects with `__call__`"""
    return jit(_Scale(2))(X), jit(jnp.square)(X)


def partials(jit):
    """`functools.partial`, and `jax.tree_util.Partial` as function and argument"""
    f = jit(functools.partial(lambda n, x, scale: split(x) * n * scale, 2, scale=3))
    g = jit(jax.tree_util.Partial(lambda n, x: split(x) * n, jnp.float32(2)))
    return f(X), g(X), jit(lambda h, x: h(x))(jax.tree_util.Partial(jnp.multiply, jnp.asarray(X)), X)


def decorated_methods(jit):
    """A jitted method of a class, with a static `self` and with a pytree for `self`"""

    class Model:
        @functools.partial(jit, static_argnums=0)
        def double(self, x):
            return split(x) * 2

    @jax.tree_util.register_pytree_node_class
    class State:
        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

        @jit
        def times(self, x):
            return split(x) * self.w

    return Model().double(X), State(jnp.asarray(X)).times(X)


def keywords(jit):
    """Keyword, keyword-only, positional-only, variadic arguments and defaults"""

    def f(a, /, b, *rest, c=1.0, **others):
        return split(a) + b * c + sum(rest) + sum(others.values())

    g = jit(f)
    return g(X, X), g(X, b=X), g(X, X, X, c=2.0), g(X, X, d=X, e=2.0), g(X, X, X, X, z=1.0)


def wrong_arguments(jit):
    """Missing and unexpected arguments are Python's errors"""
    f = jit(lambda x, *, y=1: x)
    return raised(lambda: f()), raised(lambda: f(X, X)), raised(lambda: f(X, z=1))


def closures(jit):
    """Closures over arrays, and over values of an enclosing trace"""
    w = jnp.asarray(X)
    return jit(lambda x: split(x) @ w)(X), jit(lambda y: jit(lambda x: split(x) * y)(X))(jnp.float32(2))


def side_effects_happen_once(jit):
    """The function's Python code runs once per signature"""
    seen = []

    def f(x):
        seen.append(x.shape)
        return split(x) * 2

    g = jit(f)
    for n in (8, 8, 16, 8, 16):
        g(np.ones((n, 8), np.float32))
    return [list(shape) for shape in seen]


def two_jits_of_one_function(jit):
    """A function jitted twice, and a jitted function jitted again"""
    f = lambda x: split(x) * 2  # noqa: E731
    return jit(f)(X), jit(f)(X), jit(jit(f))(X)


def builtins(jit):
    """Ufuncs, builtins and jitted functions of JAX"""
    return jit(jnp.sin)(X), jit(jax.nn.relu)(X), jit(sum)([X, X]), jit(operator.add)(X, X)


def names(jit):
    """`__name__`, `__doc__`, `__module__`, `__wrapped__` and the signature"""

    @jit
    def f(x, n: int = 2):
        """Doubles."""
        return x * n

    return f.__name__, f.__doc__, f.__module__, f.__wrapped__(3, 2), str(inspect.signature(f))


def attributes(jit):
    """Attributes of the function are those of the jitted one"""

    def f(x):
        return x

    f.kind = "identity"
    return jit(f).kind


def hashable(jit):
    """Jitted functions are hashable, equal to themselves, and weakly referenced"""
    f = jit(lambda x: x)
    return {f: 1}[f], f == f, weakref.ref(f)() is f, callable(f)


def clear_cache(jit):
    """`clear_cache` and `jax.clear_caches`"""
    seen = []

    @jit
    def f(x):
        seen.append(0)
        return split(x) * 2

    y = f(X)
    f.clear_cache()
    f(X)
    jax.clear_caches()
    f(X)
    return y, len(seen)


def cache_size(jit):
    """`_cache_size`, which tests of compilations read"""
    f = jit(lambda x: split(x) * 2)
    sizes = [f._cache_size()]
    for n in (8, 8, 16, 8):
        f(np.ones((n, 8), np.float32))
        sizes.append(f._cache_size())
    f.clear_cache()
    return [*sizes, f._cache_size()]


def wrapped_again(jit):
    """`functools.wraps` around a jitted function, and `functools.partial` of one"""
    f = jit(lambda x, y: split(x) * y)

    @functools.wraps(f)
    def g(*args):
        return f(*args) + 1

    return g(X, X), functools.partial(f, X)(y=X)


def recursion(jit):
    """A jitted function that calls itself, with a static argument"""

    @functools.partial(jit, static_argnums=1)
    def f(x, n):
        return split(x) if n == 0 else f(x, n - 1) * 2

    return f(X, 3)
