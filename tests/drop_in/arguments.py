"""Kinds of arguments and results."""

import collections
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


class _Pair(NamedTuple):
    a: object
    b: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _State:
    w: object
    n: int = dataclasses.field(default=1, metadata={"static": True})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Config:
    scale: float


def pytrees(jit):
    """Nested dicts, lists, tuples, named tuples, OrderedDicts, defaultdicts, empty ones and None"""
    tree = {
        "d": {"b": X, "a": [X, (X, None)]},
        "n": _Pair(X, []),
        "o": collections.OrderedDict(z=X, a=X),
        "e": {},
        "f": collections.defaultdict(list, x=X),
    }
    f = jit(lambda t: jax.tree.map(lambda x: split(x) * 2, t))
    return f(tree), f(tree)


def registered_dataclasses(jit):
    """Registered dataclasses with static fields, and static nodes"""
    f = jit(lambda s, c: (_State(split(s.w) * s.n * c.scale, s.n + 1), c))
    state, config = f(_State(X, 2), _Config(3.0))
    return f(state, config)[0].w, state.n, config.scale, f(_State(X, 3), _Config(2.0))[0].w


def none_arguments(jit):
    """None as an argument, a default and the whole result"""
    f = jit(lambda x, mask=None: split(x) if mask is None else split(x) * mask)
    return f(X), f(X, None), f(X, X), f(X, mask=None), jit(lambda x: None)(X), jit(lambda: None)()


def no_arguments(jit):
    """Functions without arguments, and constant results"""
    return jit(lambda: jnp.ones((8, 8)))(), jit(lambda x: (1, 2.0, True, X))(X), jit(lambda: ())()


def python_scalars(jit):
    """Python scalars, with their weak types"""
    f = jit(lambda x, s: (split(x) * s, s))
    x = X.astype(ml_dtypes.bfloat16)
    return f(x, 2), f(x, 2.5), f(x, True), f(X, 1j), jit(lambda n: n + 1)(3), jit(lambda n: n)(3.0)


def scalars_change_type(jit):
    """One function with int, float and bool scalars, and NumPy scalars, in turn"""
    f = jit(lambda s: s + 1)
    return [f(s) for s in (1, 1.0, True, np.int8(1), np.float16(2), jnp.int32(1), 1, np.float32(3))]


def large_python_integers(jit):
    """Python integers that don't fit 32 bits are an error"""
    return raised(lambda: jit(lambda n: n)(2**40))


def numpy_arrays(jit):
    """NumPy arrays: views, Fortran order, 64 bits, zero sizes, read-only, big endian"""
    frozen = X.copy()
    frozen.flags.writeable = False
    arrays = [X.T, X[::2], np.asfortranarray(X), X.astype(np.float64), X[:0], frozen, np.arange(8), np.float32(2)]
    f = jit(lambda x: x * 2)
    return [f(x) for x in arrays], raised(lambda: jit(lambda x: x * 2)(X.astype(">i4")))


def changed_numpy_arrays(jit):
    """A NumPy array changed between calls"""
    x, f = X.copy(), jit(lambda x: split(x) * 2)
    y = f(x)
    x += 1
    return y, f(x), f(x)


def dtypes(jit):
    """int4, uint4, int2, float8, float4, bfloat16, complex64 and bool arrays"""
    kinds = [jnp.int4, jnp.uint4, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.complex64, jnp.bool_, jnp.int8]
    kinds += [getattr(jnp, name) for name in ("int2", "float4_e2m1fn", "float8_e8m0fnu") if hasattr(jnp, name)]
    f = jit(lambda xs: [split(x) for x in xs])
    found = f([jnp.asarray(np.arange(64).reshape(8, 8) % 2, dtype) for dtype in kinds])
    return [str(x.dtype) for x in found], [x if x.dtype == jnp.complex64 else x.astype(jnp.float32) for x in found]


def float0(jit):
    """float0 tangents of integers"""

    def f(x, n):
        return split(x) * n

    zeros = np.zeros((), jax.dtypes.float0)
    _, tangent = jit(lambda x, n, t: jax.jvp(f, (x, n), (x, t)))(X, 2, zeros)
    g = jit(lambda x, n: jax.vjp(f, x, n)[1](x))(X, 2)
    return tangent, g[0], g[1].dtype == jax.dtypes.float0, jit(lambda z: z)(zeros).dtype == jax.dtypes.float0


def typed_keys(jit):
    """Typed PRNG keys, batches of them, and raw ones"""
    f = jit(lambda key: (jax.random.normal(key, (8, 8)), jax.random.split(key, 4)))
    noise, keys = f(jax.random.key(3))
    return noise, keys, f(jax.random.PRNGKey(3)), jit(lambda key: key)(jax.random.key(3, impl="rbg"))


def weak_types(jit):
    """Weakly typed arrays"""
    f = jit(lambda x: x * 2)
    return f(jnp.asarray(2)), f(jnp.asarray(2, jnp.int32)), jit(lambda x: x + jnp.bfloat16(1))(jnp.asarray(2.0))


def other_devices(jit):
    """An array committed to one device of several is an error"""
    x, y = (jax.device_put(X, jax.devices()[i]) for i in (1, 2))
    return raised(lambda: jit(lambda x, y: x + y)(x, y))


def one_device(jit):
    """An array committed to the first device"""
    return jit(lambda x: split(x) * 2)(jax.device_put(X, jax.devices()[0]))


def uncommitted(jit):
    """Uncommitted arrays, and results passed on"""
    f = jit(lambda x: split(x) * 2)
    return f(f(jnp.asarray(X))), f(jnp.asarray(X)) + f(X)


def results_are_arrays(jit):
    """Results are committed `jax.Array`s that NumPy, indexing, iteration and operators take"""
    y = jit(lambda x: split(x) * 2)(X)
    return (
        np.asarray(y),
        y[1],
        [*y][2],
        y.at[0].set(0),
        y + y,
        round(float(y.sum()), 4),
        y.block_until_ready(),
        y.tolist(),
    )


def the_argument_is_the_result(jit):
    """Results that are arguments, or one value twice"""
    x = jnp.asarray(X)
    y, z = jit(lambda x: (x, x))(x)
    return y, z, x.is_deleted()


def one_array_twice(jit):
    """One array for two arguments"""
    x = jnp.asarray(X)
    return jit(lambda x, y: split(x) + y)(x, x)


def strings(jit):
    """Strings and other objects are an error"""
    f = jit(lambda x, y: x)
    return raised(lambda: f(X, "a")), raised(lambda: f(X, object())), raised(lambda: f(X, np.array(["a"])))


def results_that_are_no_arrays(jit):
    """Results that are no arrays are an error"""
    return raised(lambda: jit(lambda x: "a")(X)), raised(lambda: jit(lambda x: object())(X))


def shape_dtype_structs(jit):
    """ShapeDtypeStructs for a call are an error"""
    return raised(lambda: jit(lambda x: x)(jax.ShapeDtypeStruct((8, 8), jnp.float32)))


def array_protocol(jit):
    """Objects with `__jax_array__` as arguments and inside"""

    class Wrapped:
        def __init__(self, x):
            self.x = x

        def __jax_array__(self):
            return jnp.asarray(self.x)

    return raised(lambda: jit(lambda x: x)(Wrapped(X))), jit(lambda x: split(x) + Wrapped(X))(X)


def leaked_tracers(jit):
    """A leaked tracer is JAX's error"""
    kept = []
    jit(lambda x: kept.append(x) or x)(X)
    return raised(lambda: kept[0] + 1)


def sharded_keys(jit):
    """Keys split and sharded over the mesh"""
    keys = jit(lambda key: split(jax.random.split(key, 8)))(jax.random.key(0))
    return jit(lambda keys: jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys))(keys)


def sparse(jit):
    """`jax.experimental.sparse` arrays"""
    from jax.experimental import sparse as s

    x = s.BCOO.fromdense(jnp.asarray(np.diag(np.arange(8, dtype=np.float32))))
    return jit(lambda m, x: m @ split(x))(x, X)
