"""Copies to and from the host: their bytes in the ledger, their time in the estimate."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import sharding
from sharding import P, hardware
from sharding.explain.host_copies import HostCopy

ROWS = P("data")
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
STACK = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32)


def completed(f, *args, spec=ROWS):
    with sharding.mesh(data=8, devices="v5p:2x2x2") as mesh:
        host = NamedSharding(mesh, spec, memory_kind="pinned_host")
        return sharding.jit(f, in_shardings=(host, *[P("data")] * (len(args) - 1))).complete(*args)


def momentum(m, w):
    m = 0.9 * jax.device_put(m, DEVICE) + w
    return jax.device_put(m, HOST), w - m


def test_the_ledger_lists_copies_apart_from_collectives():
    ledger = completed(momentum, SQUARE, SQUARE).communication()
    assert [(c.direction, c.count, c.bytes) for c in ledger.host_copies] == [
        ("from host", 1, SQUARE.size * 4 // 8),
        ("to host", 1, SQUARE.size * 4 // 8),
    ]
    assert len(ledger) == 0 and ledger.total_bytes == 0
    assert "copies, per device: 524 kB from host, 524 kB to host" in str(ledger)
    assert "test_host_copies.py:26 (momentum)" in str(ledger) and len(ledger.tables()) == 2
    assert ledger.lowered("tpu").host_copies == ledger.host_copies


def test_a_program_without_copies_has_one_table():
    ledger = completed(lambda m, w: (m, w @ w), SQUARE, SQUARE).communication()
    assert ledger.host_copies == () and len(ledger.tables()) == 1 and "from host" not in str(ledger)


def test_what_is_put_where_it_is_already_is_not_copied():
    def f(m, w):
        return m, jax.device_put(w, DEVICE) + 1

    assert completed(f, SQUARE, SQUARE).communication().host_copies == ()


def test_a_loop_copies_each_slice():
    def streamed(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ jax.device_put(w, DEVICE)), None), x, ws)[0]

    (copy,) = completed(streamed, STACK, SQUARE, spec=P(None, "data")).communication().host_copies
    assert (copy.direction, copy.count, copy.bytes) == ("from host", 4, STACK.size * 4 // 8)


def test_dead_copies_are_not_listed():
    def f(m, w):
        jax.device_put(m, DEVICE)
        return w + 1

    assert completed(f, SQUARE, SQUARE).communication().host_copies == ()


def test_the_estimate_has_both_directions_at_once():
    chip = hardware.parse("v5p:2x2x2").chip
    estimate = completed(momentum, SQUARE, SQUARE).estimate()
    copies = [p for p in estimate.parts if p.is_collective]
    assert [(p.name, p.limit) for p in copies] == [("copy from host", "host link"), ("copy to host", "host link")]
    each = chip.host_wire.latency_seconds + SQUARE.size * 4 / 8 / chip.host_wire.bytes_per_second
    assert [p.seconds for p in copies] == pytest.approx([each, each])
    assert estimate.seconds >= 2 * each  # the second waits for the first, and runs beside the subtraction
    assert 1.9 * each < estimate.by_limit["host link"] < 2 * each

    def independent(m, w):
        return jax.device_put(w, HOST), jax.device_put(m, DEVICE)

    estimate = completed(independent, SQUARE, SQUARE).estimate()
    assert estimate.seconds == pytest.approx(each) and estimate.by_limit == pytest.approx({"host link": each})


def test_copies_of_cpu_devices_hold_up_the_device():
    with sharding.mesh(data=8) as mesh:
        host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
        estimate = sharding.jit(momentum, in_shardings=(host, P("data"))).complete(SQUARE, SQUARE).estimate("cpu")
    spans = [estimate.timeline[f"{k} {p.name}"] for k, p in enumerate(estimate.parts)]
    assert all(a.end_seconds <= b.start_seconds for a, b in zip(spans, spans[1:], strict=False))


def test_text():
    copy = HostCopy(direction="to host", dtype="float32", array_bytes=8, count=3, source="a.py:1 (f)")
    assert str(copy) == "to host, 3 x 8 bytes of float32: a.py:1 (f)" and copy.bytes == 24


@pytest.mark.parametrize("name", hardware.CHIPS)
def test_host_links_are_slower_than_memory(name):
    chip = hardware.chip(name)
    assert 0 < chip.host_wire.total_bytes_per_second < chip.memory_bytes_per_second
    assert chip.without_overheads().host_wire.latency_seconds == 0
