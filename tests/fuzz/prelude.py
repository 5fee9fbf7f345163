"""Helpers called by generated programs; its source is prepended to a printed program.

Loops, branches and wrappers take flat functions: arrays in, a tuple of arrays out.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def plain(x, spec=None, *, name=None, priority=0):
    """Replaces `sharding.annotate` without a mesh."""
    return x


def put_on_one_device(x, spec, kind):
    """Replaces `put` without a mesh."""
    return jax.device_put(x, jax.memory.Space.Host if kind == "pinned_host" else jax.memory.Space.Device)


def put_on(mesh):
    """`jax.device_put` into a kind of memory, over a mesh where there is a spec and its axes are Auto."""

    def put(x, spec, kind):
        if spec is None or jax.sharding.AxisType.Explicit in mesh.axis_types:
            return put_on_one_device(x, spec, kind)
        return jax.device_put(x, jax.NamedSharding(mesh, spec, memory_kind=kind))

    return put


def current_mesh():
    return jax.sharding.get_mesh()


def on_host(x):
    """An array in the memory of the host of one device."""
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


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


def while_below(f, limit, counts, *args):
    """Repeats `f` while the sum of `counts`, to which each step adds, is below the limit."""
    return lax.while_loop(lambda s: jnp.sum(s[0]) < limit, lambda s: (s[0] + 1, *f(*s[1:])), (counts, *args))


def fori_loop(f, times, *args):
    return lax.fori_loop(0, times, lambda i, s: tuple(f(*s)), args)


def fori_between(f, start, stop, *args):
    """`fori_loop` whose bounds are known only at run time."""
    return lax.fori_loop(start, stop, lambda i, s: tuple(f(*s)), args)


def in_shard_map(f, axis, check, *args):
    """`f` in a `shard_map` over one axis, along which all devices compute the same; without a mesh as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get(axis, 1) == 1 or jax.sharding.AxisType.Explicit in mesh.axis_types:
        return f(*args)
    P = jax.sharding.PartitionSpec
    return jax.shard_map(f, in_specs=P(), out_specs=P(), axis_names={axis}, check_vma=check)(*args)


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


def offloaded(f, *args):
    """`f` recomputed but for its arguments, which wait in the host's memory."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(lambda *xs: f(*(checkpoint_name(x, "x") for x in xs)), policy=policy)(*args)


def written(ref, x, *index):
    """Writes into a ref and reads it there."""
    ref[index] = x
    return ref[index]


def added(ref, x, *index):
    ref[index] += x
    return ref[index]


def rows_written(f, ref, *args):
    """Replaces the rows of a ref, one by one, by what `f` returns of the row."""

    def step(i, carry):
        ref[i] = f(ref[i], *args)[0]
        return carry

    lax.fori_loop(0, ref.shape[0], step, 0)
    return (ref[...],)


NOTED = []
"""What callbacks were called with, in no order."""
NOTED_IN_ORDER = []


def note(notes, tag, exact, x):
    x = np.asarray(x)
    notes.append((tag, x.shape, str(x.dtype), x.tobytes() if exact else b""))


def noted(x, tag, exact):
    """Calls back with `x`."""
    io_callback(functools.partial(note, NOTED, tag, exact), None, lax.stop_gradient(x))
    return x


def noted_in_order(x, tag, exact):
    call = functools.partial(note, NOTED_IN_ORDER, tag, exact)
    io_callback(call, None, lax.stop_gradient(x), ordered=True)
    return x


def debugged(x, tag, exact):
    jax.debug.callback(functools.partial(note, NOTED, tag, exact), x)
    return x


def printed(x, tag):
    jax.debug.print(tag + " {}", x)
    return x


def half(x):
    return np.asarray(np.asarray(x) * 0.5, x.dtype)


def half_called_back(x, vmap_method):
    """Half of `x`, computed on the host."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(half, like, lax.stop_gradient(x), vmap_method=vmap_method)


def half_noted(x, tag, exact):
    """Half of `x`, computed on the host by a callback with an effect."""

    def call(x):
        note(NOTED, tag, exact, x)
        return half(x)

    return io_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.stop_gradient(x))


def _mirrored(x):
    return jnp.flip(x, -1) * 0.5


mirror_p = Primitive("mirror")
"""A linear op that only its lowering knows."""
mirror_p.def_impl(_mirrored)
mirror_p.def_abstract_eval(lambda x: x.update(weak_type=False))
mlir.register_lowering(mirror_p, mlir.lower_fun(_mirrored, multiple_results=False))
ad.deflinear2(mirror_p, lambda ct, x: [mirror_p.bind(ct)])
batching.primitive_batchers[mirror_p] = lambda xs, dims: (mirror_p.bind(jnp.moveaxis(xs[0], dims[0], 0)), 0)


def mirror(x):
    return mirror_p.bind(x)


@custom_partitioning
def own_sin(x):
    return jnp.sin(x)


own_sin.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=lambda mesh, args, result: (mesh, jnp.sin, args[0].sharding, (args[0].sharding,)),
    sharding_rule="... -> ...",
)


@custom_partitioning
def own_cos(x):
    return jnp.cos(x)


own_cos.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=lambda mesh, args, result: (mesh, jnp.cos, args[0].sharding, (args[0].sharding,)),
    sharding_rule=lambda mesh, ins, outs: "... -> ...",
)


def cholesky_by_ffi(x):
    """The Cholesky factor of `x @ x.T + 1`, by a call into LAPACK."""
    n = x.shape[-1]
    x = jnp.einsum("...ij,...kj->...ik", x, x) / n + jnp.eye(x.shape[-2], dtype=x.dtype)[(None,) * (x.ndim - 2)]
    with jax.ensure_compile_time_eval():
        jnp.linalg.cholesky(jnp.eye(1))  # loads LAPACK
    call = jax.ffi.ffi_call(
        "lapack_spotrf_ffi" if x.dtype == jnp.float32 else "lapack_dpotrf_ffi",
        (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], jnp.int32)),
        input_layouts=[(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)],
        output_layouts=[(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2), None],
        vmap_method="broadcast_all",
    )
    return jnp.tril(call(lax.stop_gradient(x), uplo=np.uint8(ord("L")))[0])


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

    @functools.wraps(f)
    def program(*args, **by_name):
        args = inspect.signature(f).bind(*args, **by_name).args
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
