"""Facts of programs compiled ahead of time by the real XLA:TPU and XLA:GPU, without a chip.

They need libtpu (extra `tpu`) and `jax[cuda13]`; tests of a missing compiler are skipped.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding

import sharding
from sharding import P, ShardingError
from sharding.cost import compile_only, lower_collective, read_compiled

COMPILERS = {"v5p:2x2x2": "libtpu", "h100:1x8": "jax_cuda13_plugin"}


def is_there(package):
    return importlib.util.find_spec(package) is not None


@pytest.fixture(
    params=[
        pytest.param(text, marks=pytest.mark.skipif(not is_there(package), reason=f"{package} is not installed"))
        for text, package in COMPILERS.items()
    ]
)
def text(request):
    """A description of eight devices whose compiler is installed."""
    return request.param


@pytest.fixture
def backend(text):
    """The name of a backend, and a mesh of its devices."""
    platform = {"v5p": "tpu", "h100": "gpu"}[text.partition(":")[0]]
    return platform, Mesh(np.array(compile_only(text)).reshape(2, 4), ("data", "tensor"))


@pytest.mark.skipif(any(map(is_there, COMPILERS.values())), reason="a compiler is installed")
@pytest.mark.parametrize("devices, extra", [("v5p:8x8x8", "tpu"), ("h100:64x8", "cuda13")])
def test_what_to_install(devices, extra):
    fix = rf"ahead-of-time compilation for {devices}[\s\S]*pip install 'sharding-jax\[{extra}\]'"
    with pytest.raises(ShardingError, match=fix):
        compile_only(devices)


def test_no_compiler_is_needed_for_cpus():
    with pytest.raises(ShardingError, match="virtual CPU devices need no description"):
        compile_only("cpu:1x8")


@pytest.mark.skipif(not is_there("jax_cuda13_plugin"), reason="jax_cuda13_plugin is not installed")
def test_a_gpu_without_a_target_config():
    with pytest.raises(ShardingError, match='no target config for h200[\\s\\S]*"h100:2x8"'):
        compile_only("h200:2x8")


@pytest.mark.slow
def test_a_step_over_compile_only_devices(text):
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in [(4096, 1024), (1024, 4096), (4096, 1024)]]
    specs = (P("data"), P(None, "tensor"), P("tensor"))
    with sharding.mesh(data=2, tensor=4, devices=compile_only(text)):
        step = sharding.jit(lambda x, w, v: jax.nn.relu(x @ w) @ v, in_shardings=specs)
        found = step.complete(*args).verify(step.lower(*args).compile())
    assert found.agrees and found.compiled == {"all-reduce": (1, 2048 * 1024 * 2)}
    arguments = 2 * (2048 * 1024 + 2 * 1024 * 1024)
    assert found.compiled_peak_bytes > arguments


def facts(mesh, f, *shapes, dtype="bfloat16"):
    args = [jax.ShapeDtypeStruct(s, dtype, sharding=NamedSharding(mesh, P())) for s in shapes]
    f = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return read_compiled(jax.jit(f).lower(*args).compile(), mesh=mesh)


@pytest.mark.slow
def test_nested_loops(backend):
    def inner(c, _):
        return lax.psum(c, "tensor") / 4, None

    def outer(c, _):
        c = lax.scan(inner, lax.ppermute(c, "data", [(0, 1), (1, 0)]), None, length=3)[0]
        return c + lax.psum_scatter(jnp.sin(lax.all_gather(c, "tensor", tiled=True)), "tensor", tiled=True), None

    found = facts(backend[1], lambda x: lax.scan(outer, x, None, length=5)[0], (512, 256))
    one = 512 * 256 * 2
    assert found.by_axes() == {
        ("collective-permute", ("data",)): (5, 5 * one),
        ("all-gather", ("tensor",)): (5, 5 * 4 * one),
        ("reduce-scatter", ("tensor",)): (5, 5 * 4 * one),
        ("all-reduce", ("tensor",)): (15, 15 * one),
    }
    assert all(c.is_counted and c.source.startswith("test_ahead_of_time.py:") for c in found.collectives)
    assert found.memory.argument_bytes == found.memory.output_bytes == one
    assert found.peak_bytes - 2 * one == found.memory.temp_bytes >= 4 * one


KINDS = {
    "all-reduce": lambda x: lax.psum(x, "tensor"),
    "all-gather": lambda x: lax.all_gather(x, "tensor", tiled=True),
    "reduce-scatter": lambda x: lax.psum_scatter(x, "tensor", tiled=True),
    "all-to-all": lambda x: lax.all_to_all(x, "tensor", 0, 1, tiled=True),
    "collective-permute": lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "int16", "int32", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_table(backend, kind, dtype):
    platform, mesh = backend
    (c,) = facts(mesh, KINDS[kind], (512, 512), dtype=dtype).collectives
    num_bytes = 512 * 512 * jnp.dtype(dtype).itemsize * (4 if kind == "all-gather" else 1)
    written = lower_collective(platform, kind, dtype, num_bytes, is_manual=True)
    assert (c.kind, c.dtype, c.result_bytes) == written


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int16"])
def test_a_reduce_scatter_by_the_partitioner(backend, dtype):
    platform, mesh = backend

    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    f = jax.jit(jnp.matmul, in_shardings=(at(None, "tensor"), at("tensor")), out_shardings=at("tensor"))
    square = jax.ShapeDtypeStruct((1024, 1024), dtype)
    (c,) = read_compiled(f.lower(square, square).compile(), mesh=mesh).collectives
    written = lower_collective(platform, "reduce-scatter", dtype, 2**20 * jnp.dtype(dtype).itemsize)
    assert (c.kind, c.dtype, c.result_bytes) == written


@pytest.mark.slow
@pytest.mark.skipif(not is_there("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize("devices", ["v5p:2x4x4", "v5p:4x4x4", "v5p:2x4x8", "v5e:8x8", "v6e:4x8"])
def test_gathers_over_a_whole_slice(devices):
    """Those of at least 64 devices are all-reduces of padded shards; with links in two dims only small ones are."""
    described = sharding.hardware.parse(devices)
    count, side = described.num_devices, described.shape[-1]
    for sizes in ({"x": count}, {"x": count // side, "y": side}):
        for rows in (32, 128):
            with sharding.mesh(sizes, devices=compile_only(devices)):
                step = sharding.jit(lambda x: sharding.annotate(x, P()), in_shardings=P("x"), out_shardings=P())
                x = jax.ShapeDtypeStruct((count * rows, 1024), "float32")
                found = step.complete(x).verify(step.lower(x).compile())
            assert found.predicted == found.compiled, (sizes, rows)
