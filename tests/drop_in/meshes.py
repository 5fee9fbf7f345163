"""Meshes, explicit sharding and shard_map."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def _mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)


def constraints(jit):
    """`with_sharding_constraint` with NamedSharding and PartitionSpec"""
    mesh = _mesh()

    def f(x):
        y = jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("data", "tensor")))
        return jax.lax.with_sharding_constraint(y, P("data"))

    with jax.set_mesh(mesh):
        y = jit(f)(X)
    return y, y.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def set_mesh(jit):
    """`jax.set_mesh` as a context with Auto axes, around the call"""
    with jax.set_mesh(_mesh()):
        y = jit(lambda x: jax.lax.with_sharding_constraint(x * 2, P("data")))(X)
    return y, y.sharding.spec


def explicit_mesh(jit):
    """A mesh with Explicit axes: arguments placed by `jax.device_put`"""
    with jax.set_mesh(_mesh(AxisType.Explicit)):
        x = jax.device_put(X, P("data", "tensor"))
        y = jit(lambda x: jnp.sin(x) * 2)(x)
    return y, y.sharding.spec


def explicit_types(jit):
    """Explicit axes: shardings in types, `jax.typeof(x).sharding`

    Differs: traced with Auto axes, so that types name no axes.
    """
    with jax.set_mesh(_mesh(AxisType.Explicit)):
        seen = []
        jit(lambda x: seen.append(jax.typeof(x).sharding.spec) or x)(jax.device_put(X, P("data")))
    return str(seen[0])


def explicit_reshard(jit):
    """Explicit axes: `jax.sharding.reshard` inside"""
    with jax.set_mesh(_mesh(AxisType.Explicit)):
        return jit(lambda x: jax.sharding.reshard(x, P("data")))(X)


def explicit_out_sharding(jit):
    """Explicit axes: `out_sharding=` of operations"""
    with jax.set_mesh(_mesh(AxisType.Explicit)):
        x = jax.device_put(X, P("data", None))
        return jit(lambda x, y: jnp.dot(x, y, out_sharding=P("data")))(x, X)


def auto_axes(jit):
    """Explicit axes: `jax.sharding.auto_axes` and `explicit_axes` inside"""
    with jax.set_mesh(_mesh(AxisType.Explicit)):
        inner = jax.sharding.auto_axes(lambda x: jnp.sin(x), out_sharding=P("data"))
        return jit(lambda x: inner(x) * 2)(jax.device_put(X, P("data")))


def shard_map(jit):
    """`shard_map` inside: collectives, `axis_index`, some axes, gradients"""
    mesh = _mesh()

    def body(x):
        total = jax.lax.psum(x, "data")
        rolled = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        scattered = jax.lax.psum_scatter(gathered, "data", tiled=True)
        return total.sum() * rolled + scattered * (1 + jax.lax.axis_index("data"))

    with jax.set_mesh(mesh):
        f = jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
        some = jit(
            jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        )
        return f(X), jax.grad(lambda x: f(x).sum())(X), some(X), jit(lambda x: some(x) + split(x))(X)


def called_in_shard_map(jit):
    """A jitted function called in the body of a `shard_map`"""
    mesh = _mesh()
    with jax.set_mesh(mesh):
        return jax.jit(jax.shard_map(jit(lambda x: x * 2), mesh=mesh, in_specs=P("data"), out_specs=P("data")))(X)


def shard_map_mesh_from_context(jit):
    """`shard_map` with the mesh in context"""
    with jax.set_mesh(_mesh()):
        return jit(lambda x: jax.shard_map(lambda x: x * 2, in_specs=P("data"), out_specs=P("data"))(x))(X)


def sharded_arguments(jit):
    """Arguments sharded by `jax.device_put`, whose shardings the program takes"""
    mesh = _mesh()
    x = jax.device_put(X, NamedSharding(mesh, P("data", "tensor")))
    y = jit(lambda x: x * 2)(x)
    return y, y.sharding.is_equivalent_to(x.sharding, 2), [s.data.shape for s in y.addressable_shards][0]


def arrays_of_shards(jit):
    """Arrays made of shards and by callbacks: `make_array_from_callback`, `make_array_from_process_local_data`"""
    rows = NamedSharding(_mesh(), P("data"))
    x = jax.make_array_from_callback(X.shape, rows, lambda index: X[index])
    y = jax.make_array_from_process_local_data(rows, X)
    z = jax.make_array_from_single_device_arrays(X.shape, rows, [s.data for s in y.addressable_shards])
    return jit(lambda x, y, z: x + y * z)(x, y, z)


def transposed_mesh(jit):
    """Arguments of another mesh over the same devices"""
    other = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(X, NamedSharding(other, P("a", "b")))
    return jit(lambda x: x * 2)(x)


def single_device_shardings(jit):
    """`SingleDeviceSharding` in `in_shardings`"""
    return jit(lambda x: x * 2, in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))(X)


def threads(jit):
    """Calls from several threads, of one function"""
    f = jit(lambda x: split(x) * 2)

    def run(n):
        with _entered():
            return f(np.full((8, n), n, np.float32))

    with ThreadPoolExecutor(4) as pool:
        return [*pool.map(run, [2, 4, 2, 4, 8, 8])]


def _entered():
    import contextlib

    import sharding

    return sharding.mesh(data=2, tensor=4) if hasattr(sharding, "mesh") else contextlib.nullcontext()


def mesh_of_one_device(jit):
    """A mesh of one device"""
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",))):
        return jit(lambda x: x * 2)(X)


def unknown_axes(jit):
    """Errors of axes that the mesh does not have"""
    with jax.set_mesh(_mesh()):
        return raised(lambda: jit(lambda x: jax.lax.with_sharding_constraint(x, P("nope")))(X))
