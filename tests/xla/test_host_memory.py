"""Bytes in the host's memory, as XLA:TPU allocates them."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import sharding
from sharding import P

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def offloaded(x):
    y = 2 * jax.device_put(x, DEVICE)
    return y, jax.device_put(y, HOST)


def streamed(ws, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ jax.device_put(w, DEVICE)), None), x, ws)[0]


def momentum(state, x):
    w, m = state
    m = 0.9 * jax.device_put(m, DEVICE) + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return (w - m, jax.device_put(m, HOST)), m.sum()


def kept_aside(x):
    y = jax.device_put(jnp.sin(x), HOST)
    return jax.device_put(y, DEVICE) * jnp.sum(x @ x.T)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("f", [offloaded, streamed, momentum, kept_aside], ids=lambda f: f.__name__)
def test_host_bytes_are_those_of_the_tpu_compiler(f):
    square, stack = (jax.ShapeDtypeStruct((*lead, 1024, 1024), jnp.float32) for lead in ((), (4,)))
    with sharding.mesh(data=4, devices=sharding.cost.compile_only("v5p:2x2x1")) as mesh:
        host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
        args, specs, donated = {
            "offloaded": ((square,), (host,), ()),
            "streamed": (
                (stack, square),
                (NamedSharding(mesh, P(None, "data"), memory_kind="pinned_host"), P("data")),
                (),
            ),
            "momentum": (((square, square), square), ((P("data"), host), P("data")), (0,)),
            "kept_aside": ((square,), (P("data"),), ()),
        }[f.__name__]
        step = sharding.jit(f, in_shardings=specs, donate_argnums=donated)
        report, compiled = step.complete(*args).memory(), step.lower(*args).compile()
    found = compiled.memory_analysis()
    assert report.host.argument_bytes == found.host_argument_size_in_bytes
    assert report.host.result_bytes == found.host_output_size_in_bytes - found.host_alias_size_in_bytes
    assert report.host.temporary_bytes == found.host_temp_size_in_bytes
    assert report.argument_bytes == found.argument_size_in_bytes
