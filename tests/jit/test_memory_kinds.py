"""Arrays in the host's memory: their kind of memory is kept, and they are not counted as the device's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

import sharding
from sharding import P

X = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@pytest.fixture
def mesh():
    with sharding.mesh(data=8) as m:
        yield m


def on_host(mesh, spec):
    return NamedSharding(mesh, spec, memory_kind="pinned_host")


def kinds(tree):
    return [x.sharding.memory_kind or "device" for x in jax.tree.leaves(tree)]


def momentum(state, x):
    """A step whose momentum is on the host."""
    w, m = state
    m = 0.9 * jax.device_put(m, DEVICE) + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return (w - m, jax.device_put(m, HOST)), m.sum()


def test_kinds_of_arguments_and_results_are_those_of_jax_jit(mesh):
    def f(x):
        y = 2 * jax.device_put(x, NamedSharding(mesh, P("data"), memory_kind="device"))
        return y, jax.device_put(y, on_host(mesh, P("data"))), jax.device_put(y, HOST)

    x = jax.device_put(X, on_host(mesh, P("data")))
    step = sharding.jit(f)
    found, expected = step(x), jax.jit(f)(x)
    assert kinds(found) == kinds(expected) == ["device", "pinned_host", "pinned_host"]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    lowered = step.lower(x).as_text()
    assert 'mhlo.memory_kind = "pinned_host"' in lowered.split("->")[0]
    assert step.complete(x).in_shardings[0].memory_kind == "pinned_host"
    assert jax.device_put(X, step.complete(x).in_shardings[0]).sharding == x.sharding
    assert [getattr(s, "memory_kind", None) for s in step.complete(x).out_shardings] == [None, *["pinned_host"] * 2]
    assert "[data, -] in pinned_host" in str(step.complete(x))
    assert [s.sharding.memory_kind for s in step.eval_shape(x)][1:] == ["pinned_host"] * 2


@pytest.mark.parametrize("form", ["in_shardings", "out_shardings", "ShapeDtypeStruct"])
def test_a_kind_is_given_by_shardings_and_abstract_arrays(mesh, form):
    host = on_host(mesh, P("data"))
    if form == "out_shardings":
        step = sharding.jit(lambda x: x + 1, in_shardings=P("data"), out_shardings=host)
        assert kinds(step(X)) == ["pinned_host"]
        return
    step = sharding.jit(lambda x: jax.device_put(x, DEVICE) + 1, in_shardings=host if form == "in_shardings" else None)
    x = X if form == "in_shardings" else jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=host)
    report = step.complete(x).memory()
    assert (report.argument_bytes, report.host.argument_bytes) == (0, X.nbytes // 8)
    assert 'mhlo.memory_kind = "pinned_host"' in step.lower(x).as_text()


def test_an_array_in_another_memory_than_asked_for_is_an_error(mesh):
    x = jax.device_put(X, NamedSharding(mesh, P("data"), memory_kind="device"))
    step = sharding.jit(lambda x: x + 1, in_shardings=on_host(mesh, P("data")))
    with pytest.raises(sharding.ShardingError, match="(?s)device memory.*requires pinned_host memory"):
        step(x)


def test_a_replicated_array_on_the_host_is_not_run_by_the_program_for_the_device(mesh):
    step = sharding.jit(lambda x: x + 1)
    assert kinds(step(jax.device_put(X, NamedSharding(mesh, P())))) == ["device"]
    assert kinds(step(jax.device_put(X, on_host(mesh, P())))) == ["pinned_host"]


def test_a_device_put_inside_is_an_annotation(mesh):
    def f(x):
        return jax.device_put(jnp.sin(x), on_host(mesh, P(None, "data")))

    completion = sharding.jit(f).complete(SHAPE)
    assert completion.spec("out") == P(None, "data")
    assert "device_put at test_memory_kinds.py" in str(completion.why("out", dim=1))
    np.testing.assert_allclose(sharding.jit(f)(X), np.sin(X), rtol=1e-5)


@pytest.mark.parametrize("engine", ["sharding", "shardy"])
def test_a_device_put_inside_is_met(mesh, engine):
    def f(x):
        return jax.device_put(x, NamedSharding(mesh, P(None, None), memory_kind="device"))

    step = sharding.jit(f, in_shardings=on_host(mesh, P("data")), out_shardings=P("data"), engine=engine)
    a = step.complete(X).assignment
    assert {str(a.specs[v]) for v, it in a.graph.annotations.items() if "device_put" in it.origin} == {"[-, -]"}
    np.testing.assert_array_equal(step(X), X)


@pytest.mark.parametrize("engine", ["sharding", "shardy"])
@pytest.mark.parametrize("around", ["jit", "cond"])
def test_a_loop_carries_an_array_of_the_host(mesh, engine, around):
    def loop(x):
        def body(carry, row):
            total, last = carry
            total = total + row + jax.device_put(last, DEVICE)
            return (total, jax.device_put(jnp.sin(total), HOST)), jax.device_put(total, HOST)

        return jax.lax.scan(body, (x[0], jax.device_put(x[1], HOST)), x)

    def f(x):
        return loop(x) if around == "jit" else jax.lax.cond(x[0, 0] < 1, loop, lambda x: loop(-x), x)

    found, expected = sharding.jit(f, in_shardings=P(None, "data"), engine=engine)(X), jax.jit(f)(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    assert kinds(found) == kinds(expected)


def test_an_array_of_the_host_under_explicit_axes():
    with jax.set_mesh(jax.make_mesh((8,), ("data",))) as _:
        x = jax.device_put(X, on_host(jax.sharding.get_mesh(), P("data")))
        y = sharding.jit(lambda x: jax.device_put(x * 2, DEVICE) + 1)(x)
        assert kinds(y) == ["device"]
        np.testing.assert_array_equal(y, X * 2 + 1)


def test_an_offloaded_state_stays_on_the_host_and_off_the_device(mesh):
    w = np.ones((8, 8), np.float32)
    state = (w, jax.device_put(np.zeros_like(w), on_host(mesh, P("data"))))
    step = sharding.jit(momentum, in_shardings=((P("data"), P("data")), P("data")), donate_argnums=0)
    completion = step.complete(state, X)
    report = completion.memory()
    assert report.host.argument_bytes == w.nbytes // 8 and report.host.result_bytes == 0  # donated
    assert report.argument_bytes == (w.nbytes + X.nbytes) // 8
    assert "in the host's memory: 32 bytes (32 bytes of arguments)" in str(report)
    again = sharding.jit(lambda: (jnp.ones((8, 8)), jnp.zeros((8, 8))), out_shardings=completion.in_shardings[0])()
    assert kinds(again) == ["device", "pinned_host"]
    reference = (w, np.zeros_like(w))
    for _ in range(3):
        state, loss = step(state, X)
        reference, expected = jax.jit(momentum)(reference, X)
        assert kinds(state) == ["device", "pinned_host"]
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_offloaded_activations_are_resharded_on_the_device(mesh):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(ws, x):
        def body(x, w):
            return jnp.tanh(checkpoint_name(x, "h") @ w), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(body, policy=policy), x, ws)[0])

    step = sharding.jit(jax.grad(loss), in_shardings=(P(None, "data"), P("data")))
    ws, x = np.ones((4, 16, 16), np.float32) / 16, np.ones((16, 16), np.float32)
    completion = step.complete(ws, x)
    graph, specs = completion.assignment.graph, completion.assignment.specs
    moves = [op for op in graph.ops if op.results and op.results[0] in graph.memory_kinds]
    assert {op.name for op in moves} >= {"device_put", "scan ys"}
    for op in moves:
        row = specs[op.results[0]].row if op.name == "scan ys" else specs[op.results[0]]
        assert op.name == "scan xs" or all(row.axes == specs[v].axes for v in op.operands)
    assert completion.memory().host.temporary_bytes == 4 * 16 * 16 * 4 // 8
    np.testing.assert_allclose(step(ws, x), jax.grad(loss)(ws, x), rtol=1e-5)
