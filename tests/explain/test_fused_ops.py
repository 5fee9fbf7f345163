"""What ops read and write of stored arrays, against sizes by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import sharding
from sharding import hardware

N = 1 << 24
F32 = jax.ShapeDtypeStruct((N,), jnp.float32)


def adam(p, m, v, g):
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


@pytest.fixture
def memory_bytes(tmp_path):
    """(function, arguments, chip) -> what its ops read and write, by the time of those that memory bounds."""

    def found(fn, args, device):
        chip = dataclasses.replace(hardware.chip(device), op_seconds=1e-15)
        hardware.save(chip, tmp_path / "machine.json", how={})
        with sharding.mesh(a=1, devices=f"{device}:1x1x1" if device == "v5p" else f"{device}:1x1"):
            estimate = sharding.jit(fn).complete(*args).estimate(str(tmp_path / "machine.json"))
        seconds = sum(p.seconds for p in estimate.parts if p.limit == "memory")
        return seconds * chip.memory_bytes_per_second

    return found


@pytest.mark.parametrize("device", ["h100", "v5p"])
def test_an_update_reads_each_array_once(memory_bytes, device):
    # p, m, v and g are read; p, m and v written: what a pass over them takes
    assert memory_bytes(adam, [F32] * 4, device) == pytest.approx(7 * 4 * N, rel=0.01)


def test_what_is_read_again_after_another_kernel_counts_again(memory_bytes):
    def f(x, w):
        y = x * 2
        z = y @ w
        return z, x * 3 + 1

    x, w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 16), jnp.bfloat16)
    one = 2 * 4096 * 4096
    found = memory_bytes(f, [x, w], "h100")
    assert found == pytest.approx(5 * one, rel=0.02)  # x, y written, y, x again, the second result


@pytest.mark.parametrize(("device", "itemsize"), [("h100", 2), ("v5p", 2), ("cpu", 4 + 4 + 2)])
def test_products_round_their_results(memory_bytes, device, itemsize):
    def f(x, w):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    x, w = jax.ShapeDtypeStruct((8192, 8), jnp.bfloat16), jax.ShapeDtypeStruct((8, 8192), jnp.bfloat16)
    assert memory_bytes(f, [x, w], device) == pytest.approx(itemsize * 8192 * 8192, rel=0.01)


def test_slices_that_products_read_are_copied_on_gpus(memory_bytes):
    def body(h, w):
        return h @ w, None

    w = jax.ShapeDtypeStruct((8, 4096, 4096), jnp.bfloat16)
    stack = 2 * 8 * 4096 * 4096
    f = lambda w: jax.lax.scan(body, jnp.zeros((16, 4096), jnp.bfloat16), w)[0]  # noqa: E731
    found = {d: memory_bytes(f, [w], d) for d in ("h100", "v5p")}
    assert found["v5p"] == pytest.approx(stack, rel=0.05)
    assert found["h100"] == pytest.approx(3 * stack, rel=0.05)


def test_stacked_results_begin_as_zeros_on_gpus(memory_bytes):
    def body(h, _):
        h = h + 1
        return h, h * 2

    def f():
        return jax.lax.scan(body, jnp.zeros((4096, 4096)), None, length=8)

    stack = 4 * 8 * 4096 * 4096
    found = {d: memory_bytes(f, [], d) for d in ("h100", "v5p")}
    assert found["h100"] - found["v5p"] == pytest.approx(stack, rel=0.01)


def test_a_checkpoint_name_accesses_no_memory():
    def f(x, named):
        y = jnp.sin(x) @ x
        y = checkpoint_name(y, "y") if named else y
        return y @ x

    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    with sharding.mesh(a=1, devices="h100:1x1"):
        named, plain = (sharding.jit(lambda x, n=n: f(x, n)).complete(x).estimate().seconds for n in (True, False))
    assert named == pytest.approx(plain, rel=1e-3)
