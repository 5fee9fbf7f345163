"""The memory report: peak memory by category, line and mesh axis, and whether it fits a chip."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support import peak_memory
from support.train_steps import small_models

import sharding
from sharding import P
from sharding.display.units import bytes_text
from sharding.explain import memory_report
from sharding.explain.collective_buffers import CONNECTION_BYTES, PEER_CHANNELS, RING_CHANNELS
from sharding.explain.largest_batch import largest_batch
from sharding.explain.memory_fit import fit

PARAMS = {"w1": peak_memory.floats(32, 128), "w2": peak_memory.floats(128, 32)}
ROWS = 4096
MESH = {"data": 2, "tensor": 4}


def loss(params, x):
    w1 = sharding.annotate(params["w1"], P(None, "tensor"))
    return jnp.mean((jnp.tanh(x @ w1) @ params["w2"]) ** 2)


def adam_like(state, x):
    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return (jax.tree.map(lambda p, m: p - m, params, moments), moments), value


def report_of(f, *args, sizes=None, **options):
    with sharding.mesh(sizes or MESH):
        return sharding.jit(f, **options).complete(*args).memory()


@pytest.fixture(scope="module")
def report():
    state = (PARAMS, PARAMS)
    return report_of(adam_like, state, peak_memory.floats(ROWS, 32), in_shardings=(None, P("data")), donate_argnums=0)


def test_classes_sum_to_the_peak(report):
    assert sum(report.by_class.values()) == report.peak_bytes
    assert sum(report.by_source.values()) == report.peak_bytes
    assert report.gap_bytes >= 0


def test_categories_of_arguments(report):
    weights = 2 * 32 * 128 * 4 // 4
    assert report.by_class["parameters"] == weights
    assert report.by_class["optimizer state"] == weights
    assert report.by_class["inputs"] == ROWS * 32 * 4 // 2
    assert report.argument_bytes == 2 * weights + ROWS * 32 * 4 // 2
    assert {a.name for a in report.arrays if a.kind == "parameters"} == {"state/0/w1", "state/0/w2"}


def test_saved_activations_are_read_by_the_backward_pass(report):
    saved = [a for a in report.arrays if a.kind == "saved activations"]
    assert any(a.op == "tanh" and a.num_bytes == ROWS * 128 * 4 // 8 for a in saved)
    assert all(a.born <= a.dies and "test_memory_report.py" in a.source for a in saved)


def test_gradients_have_the_shapes_of_parameters():
    def gradients(params, x):
        return jax.grad(loss)(params, x)

    report = report_of(gradients, PARAMS, peak_memory.floats(64, 32), in_shardings=(None, P("data")))
    assert report.by_class["parameters"] == report.by_class["results"] - 8 * 2
    steps = report_of(adam_like, (PARAMS, PARAMS), peak_memory.floats(64, 32), donate_argnums=0)
    gradients_bytes = {(a.op, a.num_bytes) for a in steps.arrays if a.kind == "gradients"}
    assert gradients_bytes == {("dot_general", 32 * 128 * 4 // 4)}  # of a weight; those of activations have 8192


def test_arguments_of_a_program_without_gradients_are_categorized_by_path():
    def forward(params, x):
        return x @ params["w1"]

    report = report_of(forward, PARAMS, peak_memory.floats(64, 32))
    assert report.by_class["parameters"] == 32 * 128 * 4  # the other one is not read
    assert report.by_class["inputs"] == 64 * 32 * 4


def test_axes(report):
    data, tensor = report.by_axis["data"], report.by_axis["tensor"]
    assert data.split_bytes + data.whole_bytes == tensor.split_bytes + tensor.whole_bytes
    assert data.split_bytes + data.whole_bytes == sum(a.num_bytes for a in report.arrays)
    assert tensor.split_bytes >= report.by_class["parameters"] + report.by_class["optimizer state"]
    assert 0 < data.saved_bytes <= data.whole_bytes // 2
    assert data.twice_as_long_saves == data.split_bytes // 2


def test_timeline_has_every_step_and_the_peak(report):
    assert [m.step for m in report.timeline] == list(range(len(report.timeline)))
    assert max(m.num_bytes for m in report.timeline) == report.peak_bytes - report.gap_bytes
    assert min(m.num_bytes for m in report.timeline) >= report.argument_bytes
    assert any("test_memory_report.py" in m.source for m in report.timeline)


def test_top_is_the_largest(report):
    sizes = [a.num_bytes for a in report.arrays]
    assert sizes == sorted(sizes, reverse=True)
    assert report.top(3) == report.arrays[:3]


def test_report_prints_as_a_table(report):
    text = str(report)
    assert (
        text.splitlines()[0]
        == f"adam_like on mesh data=2, tensor=4: peak memory {bytes_text(report.peak_bytes)} per device "
        f"({report.peak_bytes:,} bytes)"
    )
    for word in ("saved activations", "saved by sharding those", "largest arrays", "state/0/w1"):
        assert word in text


def test_donation_saves_the_donated_bytes():
    state, x = (PARAMS, PARAMS), peak_memory.floats(64, 32)
    kept = report_of(adam_like, state, x)
    donated = report_of(adam_like, state, x, donate_argnums=0)
    assert kept.result_bytes - donated.result_bytes == donated.argument_bytes - x.size * 4
    assert kept.by_class["parameters"] == donated.by_class["parameters"]


def test_remat_reduces_peak_memory():
    def deep(params, x, wrap):
        layer = wrap(lambda x: jnp.tanh(jnp.tanh(x @ params["w"]) @ params["w"]))
        return jnp.mean(jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=8)[0] ** 2)

    def step(wrap):
        return lambda params, x: jax.grad(lambda p: deep(p, x, wrap))(params)

    args = {"w": peak_memory.floats(64, 64)}, peak_memory.floats(256, 64)
    plain, remat = (report_of(step(wrap), *args) for wrap in (lambda f: f, jax.checkpoint))
    assert remat.by_class["saved activations"] * 2 < plain.by_class["saved activations"]
    assert remat.peak_bytes < plain.peak_bytes


def test_schedules_of_other_backends():
    sizes = {"data": 2, "tensor": 4}
    config = {"vocab": 4096, "context": 256, "layers": 2, "features": 512, "mlp_features": 2048}  # of whole tiles
    step = small_models.gpt_step(rows=16, **config)("weights", sizes)
    with sharding.mesh(sizes):
        completion = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0).complete(*step.args)
    assert completion.memory(platform="tpu").peak_bytes < completion.memory(platform="cpu").peak_bytes


@pytest.mark.filterwarnings("ignore:.*runs as plain JAX")  # rows are too short for the kernels
def test_described_devices_are_followed():
    step = small_models.STEPS["gpt"]("batch", {"data": 8})
    with sharding.mesh(data=8, devices="h100:1x8"):
        completion = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0).complete(*step.args)
    assert completion.memory().peak_bytes == completion.memory(platform="gpu").peak_bytes
    assert completion.memory().fits("h100")


def test_a_completion_with_one_more_annotation_has_a_report_of_its_own(report):
    state, x = (PARAMS, PARAMS), peak_memory.floats(64, 32)
    with sharding.mesh(MESH):
        step = sharding.jit(adam_like, in_shardings=(None, P("data")), donate_argnums=0).complete(state, x)
        more = step.annotate("state/0/w2", P("tensor", "data")).memory()
    assert more.by_class["parameters"] < step.memory().by_class["parameters"]


def test_fits(report):
    fit = report.fits("h100")
    assert fit and fit.spare_bytes == 60 * 10**9 - report.peak_bytes
    assert str(fit).startswith("fits h100:")
    assert report.fits("h100", usable=0.9).usable_bytes == 72 * 10**9
    with pytest.raises(sharding.ShardingError, match="the usable share of the memory"):
        report.fits("h100", usable=90)
    with pytest.raises(sharding.ShardingError, match="no built-in chip 'h1000'"):
        report.fits("h1000")
    with pytest.raises(sharding.ShardingError, match="it uses the host's memory"):
        report.fits("cpu")


def batches(limit_bytes=None):
    """A function from a number of rows to the memory report of the loss."""
    step = sharding.jit(jax.grad(loss), in_shardings=(None, P("data")))

    def memory(rows):
        with sharding.mesh(MESH):
            return step.complete(PARAMS, peak_memory.floats(rows, 32)).memory()

    return memory


def test_largest_batch_is_the_last_one_that_fits():
    memory = batches()
    found = largest_batch(memory, "v5e", multiple=2**16, limit=2**28)
    assert found.batch % 2**16 == 0
    assert found.fit and found.fit == memory(found.batch).fits("v5e")
    assert not found.next and found.next == memory(found.batch + 2**16).fits("v5e")
    assert "doubling axis 'data' would save" in found.hint
    assert str(found).startswith(f"batch {found.batch} fits v5e")


def test_largest_batch_may_be_none_or_all():
    memory = batches()
    none = largest_batch(memory, "v5e", multiple=2**28, limit=2**30)
    assert none.batch == 0 and none.fit is None and str(none).startswith("no batch fits")
    everything = largest_batch(memory, "v5e", multiple=2, limit=64)
    assert everything.batch == 64 and everything.next
    with pytest.raises(sharding.ShardingError, match="1 <= multiple <= limit"):
        largest_batch(memory, "v5e", multiple=0)


def test_reductions_of_constants():
    report = report_of(lambda x: x + jnp.sum(jnp.zeros((3, 2))), peak_memory.floats(64, 32), in_shardings=(P("data"),))
    assert report.argument_bytes == report.result_bytes == 64 * 32 * 4 // 2
    for alone in (lambda x: x + jnp.sum(jnp.zeros(())), lambda x: (x, jnp.sum(jnp.zeros(())))):
        report = report_of(alone, peak_memory.floats(64, 32), in_shardings=(P("data"),))
        assert report.argument_bytes == 64 * 32 * 4 // 2


@pytest.mark.parametrize(("low", "high", "is_wide"), [(0.7, 1.1, True), (0.9, 1.4, True), (0.85, 1.15, False)])
def test_the_range_is_that_of_the_platforms_record(report, monkeypatch, low, high, is_wide):
    error = dataclasses.replace(report.peak_error, low=low, high=high)
    monkeypatch.setitem(memory_report.PEAK_ERRORS, report.platform, error)
    least, most = report.range_bytes
    assert (least, most) == (int(report.peak_bytes * low), int(report.peak_bytes * high))
    assert (f"{bytes_text(least)} to {bytes_text(most)}" in str(report)) == is_wide


@pytest.mark.parametrize(
    ("range_bytes", "certainty"), [((40, 59), "yes"), ((50, 70), "unsure"), ((61, 90), "no")], ids=str
)
def test_a_fit_is_unsure_where_only_a_part_of_the_range_fits(range_bytes, certainty):
    low, high = (n * 10**9 for n in range_bytes)
    found = fit((low + high) // 2, "h100", range_bytes=(low, high))
    assert found.certainty == certainty
    assert bool(found) == ((low + high) // 2 <= found.usable_bytes)
    assert ("unsure: " in str(found)) == (certainty == "unsure")


@pytest.mark.filterwarnings("ignore:.*runs as plain JAX")  # rows are too short for the kernels
def test_buffers_of_nccl_are_outside_the_peak_and_counted_by_fits():
    step = small_models.STEPS["gpt"]("weights", {"data": 2, "tensor": 4})
    with sharding.mesh(data=2, tensor=4, devices="h100:1x8"):
        completion = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0).complete(*step.args)
    report = completion.memory()
    assert report.collective_buffer_bytes >= CONNECTION_BYTES * RING_CHANNELS
    assert report.peak_bytes == report.argument_bytes + report.result_bytes + report.temporary_bytes
    assert f"{bytes_text(report.collective_buffer_bytes)} for NCCL's buffers" in str(report)
    everything = report.fits("h100", usable=1.0)
    assert everything.usable_bytes == everything.memory_bytes - report.collective_buffer_bytes
    assert completion.memory(platform="tpu").collective_buffer_bytes == 0


def test_communicators_are_counted_once_per_set_of_axes():
    def buffers(f, **options):
        with sharding.mesh(data=2, tensor=4, devices="h100:1x8"):
            c = sharding.jit(f, in_shardings=(P("data", "tensor"),), **options).complete(peak_memory.floats(64, 32))
        return c.memory().collective_buffer_bytes // CONNECTION_BYTES

    assert buffers(lambda x: x * 2) == 0
    assert buffers(lambda x: x.sum(0)) == buffers(lambda x: x.sum(0) + jnp.sin(x).sum(0)) == RING_CHANNELS
    assert buffers(lambda x: (x.sum(0), x.sum(1))) == 2 * RING_CHANNELS
    moved = buffers(lambda x: sharding.annotate(x, P(("data", "tensor"))), out_shardings=P(("data", "tensor")))
    assert moved == 3 * PEER_CHANNELS  # each of four devices sends to three others
