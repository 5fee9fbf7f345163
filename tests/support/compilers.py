"""The three compilers that predictions are held against: XLA:CPU, and ahead of time those of TPUs and GPUs."""

import importlib.util

import jax
import pytest

import sharding
from sharding import cost


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"no {package}")


COMPILERS = {
    "cpu": pytest.param("cpu", ""),
    "tpu": pytest.param("tpu", "v5p:2x2x2", marks=needs("libtpu")),
    "gpu": pytest.param("gpu", "h100:1x8", marks=needs("jax_cuda13_plugin")),
}
"""Platform -> the parameters (platform, description of the devices to compile for; empty for virtual ones)."""


def devices(described):
    """Eight devices to compile for."""
    return cost.compile_only(described) if described else jax.devices()[:8]


def compiled_for_one(f, args, described, **options):
    """A function compiled for one of the described devices, with options of `jax.jit`."""
    one = jax.sharding.SingleDeviceSharding(devices(described)[0])
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), args)
    return jax.jit(f, **options).lower(*given).compile()


def predicted_and_compiled(f, args, backend, described, sizes, **options):
    """The collectives by kind that the ledger has, and those of the compiled program."""
    with sharding.mesh(sizes, devices=devices(described)):
        jitted = sharding.jit(f, **options)
        predicted = jitted.complete(*args).communication().lowered(backend).by_kind()
        return predicted, cost.read_compiled(jitted.lower(*args).compile()).by_kind()
