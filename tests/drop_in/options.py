"""Options of `jax.jit`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def _power(x, n, *, flip=False):
    y = split(x) ** n
    return -y if flip else y


def static_argnums(jit):
    """`static_argnums`, also negative, and as a tuple"""
    f, g = jit(_power, static_argnums=1), jit(_power, static_argnums=(-1,))
    return f(X, 2), f(X, 3), f(X, 2), g(X, 3)


def static_argnames(jit):
    """`static_argnames`, by position and by keyword"""
    f = jit(_power, static_argnames=("n", "flip"))
    return f(X, 2), f(X, n=3), f(x=X, n=2, flip=True), f(X, 2, flip=False)


def static_inferred(jit):
    """Static arguments given by number and passed by keyword, and the other way round"""
    return jit(_power, static_argnums=1)(X, n=2), jit(_power, static_argnames="n")(X, 2)


def static_list(jit):
    """`static_argnums` and `static_argnames` as lists or None"""
    return jit(_power, static_argnums=[1])(X, 2), jit(lambda x: x * 2, static_argnums=None, static_argnames=None)(X)


def static_iterator(jit):
    """`static_argnames` as any iterable"""
    return jit(_power, static_argnames={"n": 0})(X, 2), jit(_power, static_argnames=(n for n in ["n"]))(X, 2)


def static_callable(jit):
    """Functions, dtypes and strings as static arguments"""
    f = jit(lambda x, g, dtype, name: {name: g(split(x)).astype(dtype)}, static_argnums=(1, 2, 3))
    return f(X, jnp.sin, jnp.bfloat16, "a"), f(X, jnp.cos, "float32", "b")


def static_unhashable(jit):
    """An unhashable static argument is an error"""
    return raised(lambda: jit(lambda x, n: x, static_argnums=1)(X, [1]))


def static_out_of_range(jit):
    """`static_argnums` out of range are an error"""
    return raised(lambda: jit(lambda x: x, static_argnums=3)(X))


def static_unknown_name(jit):
    """Unknown `static_argnames` are an error"""
    return raised(lambda: jit(lambda x: x, static_argnames="y")(X))


def static_with_default(jit):
    """A static parameter left at its default"""
    return jit(lambda x, n=3: split(x) * n if n == 3 else x, static_argnames="n")(X)


def donate_argnums(jit):
    """`donate_argnums`: buffers are reused and deleted"""
    x, y = jnp.array(X), jnp.array(X)
    z = jit(lambda x, y: split(x) + y, donate_argnums=0)(x, y)
    return z, x.is_deleted(), y.is_deleted()


def donate_argnames(jit):
    """`donate_argnames`, also of keyword-only arguments"""
    x, y = jnp.array(X), jnp.array(X)
    z = jit(lambda x, *, y: split(x) + y, donate_argnames=("y",))(x, y=y)
    return z, x.is_deleted(), y.is_deleted()


def donate_pytree(jit):
    """A donated pytree, also one passed by keyword"""
    state = {"a": jnp.array(X), "b": [jnp.array(X)]}
    out = jit(lambda state: jax.tree.map(lambda x: split(x) * 2, state), donate_argnums=(0,))(state=state)
    return out, [x.is_deleted() for x in jax.tree.leaves(state)]


def donate_twice(jit):
    """Using a donated array is an error"""
    x, f = jnp.array(X), jit(lambda x: x * 2, donate_argnums=0)
    f(x)
    return raised(lambda: f(x)), raised(lambda: x + 1)


def donate_list(jit):
    """`donate_argnums` as a list or None"""
    x, y = jnp.array(X), jnp.array(X)
    jit(lambda x: x * 2, donate_argnums=[0])(x), jit(lambda x: x * 2, donate_argnums=None, donate_argnames=None)(y)
    return x.is_deleted(), y.is_deleted()


def donate_and_static(jit):
    """An argument that is both static and donated is an error"""
    return raised(lambda: jit(lambda x, n: x, static_argnums=1, donate_argnums=1)(X, 2))


def in_shardings_named(jit):
    """`in_shardings` and `out_shardings` as NamedSharding"""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "tensor"))
    y = jit(lambda x: {"y": x * 2}, in_shardings=rows, out_shardings={"y": columns})(X)
    return y, y["y"].sharding.is_equivalent_to(columns, 2)


def in_shardings_format(jit):
    """`in_shardings` and `out_shardings` as Formats, which name a layout"""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    columns = Format(Layout((1, 0)), NamedSharding(mesh, P("data")))
    y = jit(lambda x: {"y": x @ x.T}, in_shardings=columns, out_shardings={"y": columns})(X)
    return y, y["y"].format.layout.major_to_minor


def in_shardings_of_arrays(jit):
    """`in_shardings` read off arrays"""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = {"x": jax.device_put(X, NamedSharding(mesh, P("data"))), "y": jax.device_put(X, NamedSharding(mesh, P()))}
    y = jit(lambda x: jax.tree.map(jnp.sin, x), in_shardings=(jax.tree.map(lambda x: x.sharding, x),))(x)
    return y, [a.sharding.is_equivalent_to(b.sharding, 2) for a, b in [(y["x"], x["x"])]]


def in_shardings_prefix(jit):
    """`in_shardings` as a pytree prefix with None for some arguments"""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    f = jit(lambda a, b, c: (a["p"] + a["q"] + b, c), in_shardings=(NamedSharding(mesh, P("data")), None, None))
    return f({"p": X, "q": X}, X, 2.0)


def in_shardings_mismatch(jit):
    """`in_shardings` of another structure than the arguments are an error"""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, P("data"))
    return (
        raised(lambda: jit(lambda x: x, in_shardings=({"a": rows},))({"b": X})),
        raised(lambda: jit(lambda x, y: x, in_shardings=(rows,))(X, X)),
        raised(lambda: jit(lambda x: x, in_shardings=rows)(X[:7])),
        raised(lambda: jit(lambda x: x, in_shardings=rows)(X[0, 0])),
        raised(lambda: jit(lambda x: {"y": x}, out_shardings={"z": rows})(X)),
    )


def keep_unused(jit):
    """`keep_unused`"""
    text = jit(lambda x, y: split(x) * 2, keep_unused=True).lower(X, X).as_text()
    return "%arg1" in text, "%arg1" in jit(lambda x, y: x * 2).lower(X, X).as_text()


def inline(jit):
    """`inline`"""
    return jit(lambda x: jit(lambda x: split(x) * 2, inline=True)(x) + 1)(X)


def compiler_options(jit):
    """`compiler_options`, unknown ones an error"""
    y = jit(lambda x: split(x) * 2, compiler_options={"xla_embed_ir_in_executable": True})(X)
    return y, raised(lambda: jit(lambda x: x * 2, compiler_options={"xla_no_such_option": True})(X))


def device(jit):
    """`device`, deprecated in JAX"""
    with warnings.catch_warnings(action="ignore"):
        return jit(lambda x: x * 2, device=jax.devices()[0])(X)


def backend(jit):
    """`backend`, deprecated in JAX"""
    with warnings.catch_warnings(action="ignore"):
        return jit(lambda x: x * 2, backend="cpu")(X)


def decorator(jit):
    """As a decorator, without and with options"""

    @jit
    def f(x):
        return split(x) * 2

    @jit(static_argnames="n")
    def g(x, n):
        return split(x) * n

    return f(X), g(X, 3)
