"""JAX's configuration."""

import jax
import jax.numpy as jnp
import numpy as np

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def x64(jit):
    """`jax.enable_x64`, also switched between calls"""
    f = jit(lambda x: x * 2)
    first = f(X.astype(np.float64))
    with jax.enable_x64(True):
        return first, f(X.astype(np.float64)), f(1), jit(lambda: jnp.arange(8) + 2**40)()


def prng_impl(jit):
    """Another default PRNG: `jax_default_prng_impl`"""
    f = jit(lambda seed: jax.random.normal(jax.random.key(seed), (8, 8)))
    first = f(3)
    with jax.default_prng_impl("rbg"):
        return first, f(3).shape, str(jit(lambda: jax.random.key(0))().dtype)


def threefry_partitionable(jit):
    """`jax_threefry_partitionable` off"""
    with jax.threefry_partitionable(False):
        return jit(lambda key: split(jax.random.normal(key, (8, 8))))(jax.random.key(0))


def matmul_precision(jit):
    """`jax.default_matmul_precision` reaches the program"""
    f = jit(lambda x: split(x) @ x)
    with jax.default_matmul_precision("highest"):
        high = f.lower(X).as_text()
    return f(X), "HIGHEST" in high, "HIGHEST" in f.lower(X).as_text()


def rank_promotion(jit):
    """`jax_numpy_rank_promotion` and strict dtype promotion"""
    with jax.numpy_dtype_promotion("strict"):
        strict = raised(lambda: jit(lambda x: x * jnp.int8(2))(X))
    return strict, raised(lambda: jit(lambda x: x + x[0])(X))


def transfer_guard(jit):
    """`jax.transfer_guard`: no transfers for arrays on the mesh"""
    f = jit(lambda x: split(x) * 2)
    x = f(X)
    f(x)
    with jax.transfer_guard("disallow_explicit"):
        return f(x)


def default_device(jit):
    """`jax.default_device`"""
    with jax.default_device(jax.devices()[0]):
        return jit(lambda x: split(x) * 2)(X)


def changed_flags(jit):
    """Flags that change tracing between calls"""
    seen = []
    f = jit(lambda x: seen.append(1) or split(x) * 2)
    f(X)
    with jax.default_matmul_precision("highest"):
        f(X)
    f(X)
    return len(seen)


def async_dispatch(jit):
    """Asynchronous dispatch: `block_until_ready`, `copy_to_host_async`"""
    y = jit(lambda x: split(x) * 2)(X)
    y.copy_to_host_async()
    return jax.block_until_ready({"y": y})


def compute_dtype(jit):
    """`jax.numpy` default dtypes: `jax_default_dtype_bits` of Python numbers"""
    return jit(lambda: (jnp.arange(8), jnp.ones(3), jnp.asarray(1.0), jnp.array([1, 2])))()
