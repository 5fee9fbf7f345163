"""Updates are gathered for TPUs instead of new weights, which the compiler would store twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import compilers, partitioned_ops
from support.peak_memory import floats

import sharding
from sharding import P
from sharding.jit import construction
from sharding.memory import usage
from sharding.rewrite.placed_reshards import with_placed_reshards

SIZES = {"data": 8}
LAYERS, SIZE, ROWS = 4, 2048, 8192
OPTIMIZER = optax.adamw(1e-3)


def loss(weights, x):
    for up, down in weights:
        x = x + jax.nn.gelu(x @ up) @ down
    return (x * x).mean()


def updated(state, x):
    updates, moments = OPTIMIZER.update(jax.grad(loss)(state["weights"], x), state["moments"], state["weights"])
    return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}


def averaged(state, x):
    new = updated({k: state[k] for k in ("weights", "moments")}, x)
    mean = jax.tree.map(lambda mean, new: 0.99 * mean + 0.01 * new, state["mean"], new["weights"])
    return new | {"mean": mean}


def unless_too_large(state, x):
    new = updated(state, x)
    is_finite = jnp.isfinite(loss(state["weights"], x))
    return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new, state)


def of_master_weights(state, x):
    gradients = jax.tree.map(lambda x: x.astype("float32"), jax.grad(loss)(state["weights"], x.astype("bfloat16")))
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["master"])
    master = optax.apply_updates(state["master"], updates)
    weights = jax.tree.map(lambda x: x.astype("bfloat16"), master)
    return {"weights": weights, "master": master, "moments": moments}


STEPS = {"updated": updated, "averaged": averaged, "unless too large": unless_too_large}


def abstract_args(step, layers=LAYERS, size=SIZE, rows=ROWS):
    """A step's state and batch, and their specs: the optimizer's state is sharded, and master weights."""
    weights = [(floats(size, 4 * size), floats(4 * size, size))] * layers
    moments = jax.eval_shape(OPTIMIZER.init, weights)
    state = {"weights": weights, "moments": moments}
    specs = {"weights": P(), "moments": jax.tree.map(lambda x: P("data") if x.ndim else P(), moments)}
    if step is averaged:
        state["mean"], specs["mean"] = weights, P()
    if step is of_master_weights:
        half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), weights)
        state |= {"weights": half, "master": weights}
        specs["master"] = P("data")
    return (state, floats(rows, size)), (specs, P("data"))


def jitted_and_completed(step, devices):
    args, specs = abstract_args(step)
    with sharding.mesh(SIZES, devices=devices):
        jitted = sharding.jit(step, in_shardings=specs, donate_argnums=0)
        return jitted, args, jitted.complete(*args)


def gathers(completion):
    ledger = completion.communication()
    return [(c.dtype, c.result_bytes) for c in ledger if c.kind == "all-gather" for _ in range(c.count)]


def temporary_bytes(completion, args):
    donated = range(len(jax.tree.leaves(args[0])))
    return usage(completion.assignment, donated, platform="tpu").temporary_bytes


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_weights_are_stored_once(step):
    """What is gathered is added at once, so that one or two updates are stored beside the weights, not all."""
    _, args, before = jitted_and_completed(step, 8)
    _, _, found = jitted_and_completed(step, "v5p:2x2x2")
    assert gathers(found) == [("float32", 4 * 4 * SIZE**2)] * 2 * LAYERS
    assert len(gathers(before)) == 2 * len(gathers(found)) if step is averaged else gathers(before) == gathers(found)
    one = 4 * 4 * SIZE**2
    assert temporary_bytes(before, args) - temporary_bytes(found, args) > LAYERS * one


def test_weights_that_are_rounded_after_the_update_are_gathered_themselves():
    _, _, found = jitted_and_completed(of_master_weights, "v5p:2x2x2")
    assert gathers(found) == [("bfloat16", 2 * 4 * SIZE**2)] * 2 * LAYERS


def test_annotated_weights_stay():
    def step(state, x):
        new = updated(state, x)
        return new | {"weights": jax.tree.map(lambda w: sharding.annotate(w, P("data")), new["weights"])}

    _, args, found = jitted_and_completed(step, "v5p:2x2x2")
    assert temporary_bytes(found, args) > 2 * LAYERS * 4 * 4 * SIZE**2


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_axis_has_a_reason(step):
    """With weights over a tensor axis, which what is gathered keeps."""
    args, (specs, batch) = abstract_args(step)
    specs = specs | {name: P(None, "model") for name in specs if name != "moments"}
    specs["moments"] = jax.tree.map(lambda spec: P("data", "model") if spec else spec, specs["moments"])
    with sharding.mesh({"data": 4, "model": 2}, devices="v5p:2x2x2"):
        completion = sharding.jit(step, in_shardings=(specs, batch), donate_argnums=0).complete(*args)
    reasons = completion.assignment.reasons
    assert all(reason.word for reason in reasons.values())
    new = [op.operands[0] for op in completion.assignment.graph.ops if op.name == "edge" and not op.site]
    assert any(key[0] in new for key in reasons)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_values_are_those_of_one_device(step, monkeypatch):
    monkeypatch.setattr(construction, "with_placed_reshards", lambda found, _: with_placed_reshards(found, "tpu"))
    (shapes, batch), specs = abstract_args(step, layers=2, size=16, rows=2048)
    keys = iter(jax.random.split(jax.random.key(0), 99))
    state = jax.tree.map(lambda x: abs(jax.random.normal(next(keys), x.shape)).astype(x.dtype), shapes)
    x = jax.random.normal(next(keys), batch.shape)
    expected = jax.jit(step)(state, x)
    with sharding.mesh(SIZES):
        jitted = sharding.jit(step, in_shardings=specs, donate_argnums=0)
        completion = jitted.complete(state, x)
        found = jitted(state, x)
    assert len(gathers(completion)) == 4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_as_the_compiler_for_tpus_does(step):
    jitted, args, completion = jitted_and_completed(step, "v5p:2x2x2")
    with sharding.mesh(SIZES, devices=sharding.cost.compile_only("v5p:2x2x2")):
        compiled = jitted.lower(*args).compile()
    found = sharding.cost.read_compiled(compiled).by_kind()
    assert found == completion.communication().lowered("tpu").by_kind()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * LAYERS * 4 * 4 * SIZE**2


def test_new_weights_that_an_op_without_a_rule_reads_are_gathered_themselves():
    """It is not known what such an op needs: here its rule depends on the devices."""
    read = partitioned_ops.elementwise(jnp.sin, lambda mesh, *_: "... -> ..." if mesh.devices.size else "")

    def step(state, x):
        new = updated(state, x)
        return new, read(new["weights"][0][0])

    _, _, found = jitted_and_completed(step, "v5p:2x2x2")
    graph, specs = found.assignment.graph, found.assignment.specs
    results = [graph.names[f"out/0/weights/{k}/{i}"] for k in range(LAYERS) for i in range(2)]
    is_sharded = [any(specs[graph.makers[v].operands[0]].axes) for v in results]
    assert is_sharded == [True] + [False] * (2 * LAYERS - 1)
