"""Refs, donation and memory kinds."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def ref_arguments(jit):
    """Refs as arguments, read and written: indices, slices, `swap`, `addupdate`"""

    def f(ref, x):
        ref[0] = x[0]
        ref[1:3] = x[1:3] * 2
        old = jax.ref.swap(ref, (3,), x[3])
        jax.ref.addupdate(ref, (..., 0), x[0])
        return old, ref[...].sum(), ref[np.array([1, 2])]

    ref, g = jax.new_ref(jnp.asarray(X)), jit(f)
    out = [g(ref, X) for _ in range(3)]
    return out, ref[...]


def ref_pytrees(jit):
    """Refs in pytrees, next to arrays"""
    state = {"n": jax.new_ref(jnp.zeros(())), "w": jnp.asarray(X)}

    def f(state):
        state["n"][...] += split(state["w"]).sum()
        return state["w"] * state["n"][...]

    g = jit(f)
    return g(state), g(state), state["n"][...]


def ref_closures(jit):
    """Refs that the function closes over"""
    ref = jax.new_ref(jnp.zeros(8))

    def f(x):
        ref[...] += split(x).sum(axis=0)

    g = jit(f)
    return [g(X) for _ in range(3)], ref[...]


def ref_inside(jit):
    """Refs made inside: still pure, also under `grad` and `vmap`"""

    def f(x):
        ref = jax.new_ref(x)
        ref[...] = jnp.sin(ref[...]) * 2
        return split(ref[...])

    return jit(f)(X), jax.grad(lambda x: jit(f)(x).sum())(X), jax.vmap(jit(f))(X)


def ref_results(jit):
    """Returning a Ref argument is an error"""
    ref = jax.new_ref(jnp.zeros(8))
    return raised(lambda: jit(lambda r: r)(ref))


def ref_made_and_returned(jit):
    """Returning a Ref made inside is an error"""
    return raised(lambda: jit(lambda x: jax.new_ref(x))(X))


def ref_twice(jit):
    """One Ref for two arguments is an error"""
    ref = jax.new_ref(jnp.zeros(8))
    return raised(lambda: jit(lambda a, b: a[...] + b[...])(ref, ref))


def ref_as_argument_and_closure(jit):
    """A Ref both as an argument and closed over is an error"""
    ref = jax.new_ref(jnp.zeros(8))
    return raised(lambda: jit(lambda a: a[...] + ref[...])(ref))


def ref_for_gradients(jit):
    """Gradients written into a Ref by `custom_vjp`"""

    @jax.custom_vjp
    def stash(ref, x):
        return x

    def backward(ref, g):
        ref[...] = g
        return None, g

    stash.defvjp(lambda ref, x: (x, ref), backward)

    def f(x, ref):
        return jax.grad(lambda x: jnp.sin(stash(ref, split(x) * 2)).sum())(x)

    ref = jax.new_ref(jnp.zeros((8, 8)))
    return jit(f)(X, ref), ref[...]


def ref_donated(jit):
    """`jax.freeze` of a Ref made outside after calls"""
    ref = jax.new_ref(jnp.asarray(X))
    jit(lambda r, x: r.__setitem__(..., r[...] + split(x)))(ref, X)
    return jax.freeze(ref)


def unused_donation(jit):
    """Donated buffers that nothing can reuse are a warning"""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        y = jit(lambda x: split(x).sum(), donate_argnums=0)(jnp.array(X))
    return y, any("onated" in str(w.message) for w in seen)


def donated_numpy(jit):
    """Donated NumPy arrays stay intact"""
    x = X.copy()
    f = jit(lambda x: split(x) * 2, donate_argnums=0)
    return f(x), f(x), x


def donated_twice_in_one_call(jit):
    """One array donated in two arguments is an error, or is used once"""
    x = jnp.array(X)
    return raised(lambda: jit(lambda x, y: (x + 1, y + 2), donate_argnums=(0, 1))(x, x)) != ""


def _on_host(mesh_of):
    return NamedSharding(mesh_of, P("data"), memory_kind="pinned_host")


def _mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def host_arguments(jit):
    """Arguments in pinned host memory, moved by `device_put` inside"""
    x = jax.device_put(X, _on_host(_mesh()))
    y = jit(lambda x: jax.device_put(x, jax.memory.Space.Device) * 2)(x)
    return y, y.sharding.memory_kind == "device" or y.sharding.memory_kind


def host_results(jit):
    """Results in pinned host memory, by `out_shardings` and by `device_put`"""
    y = jit(lambda x: x * 2, out_shardings=_on_host(_mesh()))(X)
    z = jit(lambda x: jax.device_put(split(x) * 2, jax.memory.Space.Host))(
        jax.device_put(X, NamedSharding(_mesh(), P()))
    )
    return y, z, y.sharding.memory_kind, z.sharding.memory_kind


def offloaded_activations(jit):
    """Checkpoint policies that offload activations"""
    from jax.ad_checkpoint import checkpoint_name

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def f(w, x):
        body = jax.checkpoint(lambda x, _: (jnp.tanh(checkpoint_name(split(x), "h") @ w), None), policy=policy)
        return jax.lax.scan(body, x, None, length=3)[0].sum()

    return jit(jax.grad(f))(X, X)
