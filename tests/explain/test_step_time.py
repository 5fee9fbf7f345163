"""Step time estimates compared with hand-computed times from a chip's rates."""

import dataclasses

import jax
import pytest

import sharding
from sharding import P, ShardingError, hardware
from sharding.cost import collective_seconds, topology


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


def completed(fn, args, sizes, **options):
    with sharding.mesh(sizes, devices="v5p:2x2x1"):
        return sharding.jit(fn, **options).complete(*args)


def test_a_matmul_runs_at_the_chips_peak_rate():
    found = completed(
        lambda x, w: x @ w, [floats(8192, 8192), floats(8192, 8192)], {"a": 4}, in_shardings=(P("a"), None)
    )
    chip = hardware.chip("v5p")
    by_hand = 2 * 8192**3 / 4 / chip.rates.bfloat16_flops_per_second + chip.op_seconds
    assert found.estimate("v5p").seconds == pytest.approx(by_hand)
    assert found.estimate("v5p").exposed_seconds == pytest.approx(0)


def test_a_collective_that_everything_depends_on_is_exposed():
    specs = (P(None, "a"), P("a"))
    found = completed(lambda x, w: x @ w, [floats(512, 8192), floats(8192, 8192)], {"a": 4}, in_shardings=specs)
    estimate = found.estimate("v5p")
    with sharding.mesh({"a": 4}, devices="v5p:2x2x1") as mesh:
        alone = collective_seconds("all-reduce", 512 * 8192 * 2, ("a",), topology(mesh, "v5p"))
    assert estimate.communication_seconds == pytest.approx(alone)
    assert estimate.seconds == pytest.approx(estimate.compute_seconds + alone)


def test_copies_to_the_host_run_beside_compute():
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def fn(x, w):
        kept = jax.device_put(x, host)
        return (x @ w) @ jax.device_put(kept, device)

    found = completed(fn, [floats(8192, 8192), floats(8192, 8192)], {"a": 4}, in_shardings=(P("a"), None))
    estimate, copy = found.estimate("v5p"), 8192**2 * 2 / 4 / 15e9
    copies = [p.seconds for p in estimate.parts if p.name.startswith("copy")]
    assert copies == [pytest.approx(copy, rel=0.01)] * 2  # and the latency
    assert estimate.by_limit["host link"] == pytest.approx(2 * copy, rel=0.5)
    assert estimate.seconds < estimate.compute_seconds + estimate.communication_seconds


def test_a_loop_starts_behind_what_precedes_it():
    def fn(x, ws):
        on_host = jax.device_put(ws, jax.memory.Space.Host)
        x = jax.lax.scan(lambda x, w: (x @ jax.device_put(w, jax.memory.Space.Device), None), x, on_host)[0]
        return jax.lax.scan(lambda x, w: (x + w @ w, None), x, ws)[0]

    estimate = completed(fn, [floats(1024, 1024), floats(8, 1024, 1024)], {"a": 4}).estimate("v5p")
    first, second = [f"{k} {p.name}" for k, p in enumerate(estimate.parts) if p.name == "dot_general"]
    assert estimate.timeline[second].start_seconds >= estimate.timeline[first].end_seconds


def test_what_bounds_a_step():
    square = floats(8192, 8192)
    one = completed(lambda x, w: x @ w, [square, square], {"a": 4}, in_shardings=(P("a"), None)).estimate("v5p")
    assert one.by_limit == {"compute": pytest.approx(one.seconds)}
    assert one.mfu == pytest.approx(1, abs=0.01)
    two = completed(lambda x: x * 2, [square], {"a": 4}, in_shardings=(P("a"),)).estimate("v5p")
    assert two.by_limit == {"memory": pytest.approx(two.seconds)}
    assert two.mfu == 0


@pytest.mark.parametrize("chip", ["v5p", "cpu"])
def test_the_seconds_of_all_limits_are_those_of_the_step(chip):
    def fn(x, u, w):
        return jax.numpy.tanh(x @ u) @ w

    specs = (P(None, "a"), P("a"), P("a"))
    found = completed(fn, [floats(512, 4096), floats(4096, 4096), floats(4096, 4096)], {"a": 4}, in_shardings=specs)
    estimate = found.estimate(chip)
    assert sum(estimate.by_limit.values()) == pytest.approx(estimate.seconds)
    (link,) = [limit for limit in estimate.by_limit if limit.endswith(" over a")]
    assert estimate.by_limit[link] == pytest.approx(estimate.exposed_seconds)
    assert f"bound by       {next(iter(estimate.by_limit))}" in str(estimate)
    assert 0 < estimate.mfu < 1


@pytest.mark.parametrize(("chip", "overlaps"), [("h100", True), ("v5p", False), ("v5e", True), ("cpu", False)])
def test_an_all_gather_of_later_weights_overlaps_where_it_is_asynchronous(chip, overlaps):
    def fn(x, u, w):
        return (x @ u) @ w

    specs = (P("a"), None, P("a"))
    args = [floats(65536, 4096), floats(4096, 4096), floats(4096, 4096)]
    estimate = completed(fn, args, {"a": 4}, in_shardings=specs).estimate(chip)
    assert estimate.communication_seconds > 0
    waits = 0 if overlaps else estimate.communication_seconds
    assert estimate.seconds == pytest.approx(estimate.compute_seconds + waits)


def test_host_cores_do_not_overlap_compute_and_communication():
    def fn(x, u, w):
        return (x @ u) @ w

    specs = (P("a"), None, P("a"))
    args = [floats(4096, 512), floats(512, 512), floats(512, 512)]
    found = completed(fn, args, {"a": 4}, in_shardings=specs)
    measured = dataclasses.replace(hardware.chip("cpu"), shares_cores=False)  # as of a calibration
    for chip in (hardware.chip("cpu"), measured):
        estimate = found.estimate(chip)
        assert estimate.communication_seconds > 0
        assert estimate.exposed_seconds == pytest.approx(estimate.communication_seconds)


def test_loops_are_multiplied_by_their_trip_count():
    def fn(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, length=7)[0]

    args = [floats(4096, 4096), floats(4096, 4096)]
    once = completed(lambda x, w: x @ w, args, {"a": 4}, in_shardings=(P("a"), None)).estimate("v5p")
    often = completed(fn, args, {"a": 4}, in_shardings=(P("a"), None)).estimate("v5p")
    assert often.seconds == pytest.approx(7 * once.seconds)


def test_elementwise_ops_are_fused():
    def fn(x):
        return jax.numpy.tanh(x * 2 + 1) * 3

    args = [floats(8192, 8192)]
    estimate = completed(fn, args, {"a": 4}, in_shardings=(P("a"),)).estimate("v5p")
    chip = hardware.chip("v5p")
    traffic = 2 * 2 * 8192 * 8192 / 4 / chip.memory_bytes_per_second
    assert traffic < estimate.seconds < 2 * traffic


def test_a_larger_chip_is_faster():
    args = [floats(8192, 8192), floats(8192, 8192)]
    found = completed(lambda x, w: x @ w, args, {"a": 4}, in_shardings=(P("a"), None))
    estimate = found.estimate("h100")
    assert estimate.seconds_at_peak == pytest.approx(estimate.mfu * estimate.seconds)
    assert estimate.bound_text.startswith("compute ")
    assert found.estimate("b200").seconds < found.estimate("h100").seconds < found.estimate("a100").seconds
    assert " per step\n" in str(found.estimate("h100"))


def test_gpus_run_other_kernels_while_a_collective_is_in_flight():
    """The partial sum is reduced while the second product runs, though the program has it behind both products."""

    def fn(x, v, w):
        second = v @ v
        return jax.nn.relu(x @ w), second

    options = {"in_shardings": (P(None, "a"), None, P("a")), "out_shardings": (P(), P())}
    found = completed(fn, [floats(8192, 8192)] * 3, {"a": 4}, **options).estimate("h100")
    assert found.communication_seconds > 0
    assert found.exposed_seconds < found.communication_seconds / 2
    assert found.seconds < found.compute_seconds + found.communication_seconds


def test_devices_that_do_not_fit():
    found = completed(lambda x: x * 2, [floats(8, 8)], {"a": 4})
    with pytest.raises(ShardingError, match="4"):
        found.estimate("v5p:4x4x4")
    assert found.estimate().chip == "v5p:2x2x1"
    with sharding.mesh({"a": 4}, devices=4):
        of_no_kind = sharding.jit(lambda x: x * 2).complete(floats(8, 8))
    with pytest.raises(ShardingError, match="required: a chip or a description of the devices"):
        of_no_kind.estimate()
