"""`engine="shardy"`: specs, reasons and numbers, compared with this library's engine."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.shardy_oracle import program_values
from support.train_steps.small_models import STEPS

import sharding
from sharding import P, ShardingError, annotate
from sharding.propagation import shardy, shardy_results
from sharding.spec import Dim

SIZES = {"data": 2, "tensor": 4}
U = P.UNCONSTRAINED


def num_tied(completion):
    """The number of outputs that reuse donated inputs' shardings."""
    graph = completion.assignment.graph
    return len([v for v in graph.outputs if v in {*graph.inputs}])


def controlled(params, x):
    """Every op with a body: a scan with constants and slices, a while, branches, remat, calls."""
    w = annotate(params["w"], P(None, "tensor"), name="w")

    def layer(h, slice_w):
        h = jnp.tanh(h @ w @ slice_w)
        return h, jax.nn.relu(h).sum(0)

    h, stacked = lax.scan(jax.checkpoint(layer), x, params["stack"])
    h = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1] @ w @ params["v"])), (0, h))[1]
    h = lax.cond(h.sum() > 0, lambda h: h @ w, lambda h: jnp.cos(h @ w), h)
    return jnp.mean(jax.nn.gelu(annotate(h, name="last")) ** 2) + jnp.mean(stacked**2)


def update(params, x):
    """A train step; the loop of unknown length has no derivative, so its weights are not updated."""
    free = {k: params[k] for k in ("w", "stack")}
    value, gradients = jax.value_and_grad(lambda p: loss({**params, **p}, x))(free)
    return {**params, **jax.tree.map(lambda p, g: p - 0.1 * g, free, gradients)}, value + controlled(params, x)


def loss(params, x):
    def layer(h, slice_w):
        return jnp.tanh(h @ annotate(params["w"], P(None, "tensor")) @ slice_w), None

    return jnp.mean(lax.scan(layer, x, params["stack"])[0] ** 2)


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w": (8, 16), "v": (16, 8), "stack": (3, 16, 8)}
    params = {k: 0.3 * jax.random.normal(key, shape) for key, (k, shape) in zip(keys, params.items(), strict=False)}
    return params, jax.random.normal(keys[3], (16, 8))


def alone():
    return sharding.mesh(data=1, tensor=1, devices=jax.devices()[:1])


def step(engine):
    return sharding.jit(update, in_shardings=(None, P("data")), donate_argnums=0, engine=engine)


def grounded(assignment):
    """Checks that every axis has a chain of reasons back to an annotation, along ops and values that have the axis."""
    near = {}
    for op in assignment.graph.ops:
        for v in (*op.operands, *op.results):
            near.setdefault(v, set()).update(op.operands, op.results)
    known = set(program_values(assignment.graph))
    assert assignment.reasons
    for v, d, axis in assignment.reasons:
        steps = assignment.chain(v, d, axis)
        assert steps[-1][2].word == "annotated", (v, d, axis, steps)
        for at, _, reason in steps[:-1]:
            assert axis in assignment.specs[reason.value].dims[reason.dim].axes or not isinstance(axis, str)
            stacks = near[at] - known  # a loop's own, not values in Shardy
            assert reason.value in near[at].union(*(near[v] for v in stacks)), (at, reason)


def test_specs_agree_and_have_reasons():
    with sharding.mesh(SIZES, devices=8):
        ours, theirs = (step(engine).complete(*arrays()) for engine in ("sharding", "shardy"))
    assert [s.axes for s in ours.assignment.specs] == [s.axes for s in theirs.assignment.specs]
    assert theirs.spec("last") == P("data", "tensor")
    assert theirs.in_shardings == ours.in_shardings and num_tied(theirs) == 3
    assert [str(line) for line in theirs.why("params/v", 0)][-1].endswith("(loss.<locals>.layer)")
    grounded(theirs.assignment)


def test_a_train_step_with_tied_state():
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    with sharding.mesh(sizes, devices=8):
        one = STEPS["gpt, scanned, remat"]("weights", sizes)
        ours, theirs = (
            sharding.jit(one.run, in_shardings=one.specs, donate_argnums=0, engine=engine, policy="shardy").complete(
                *one.args
            )
            for engine in ("sharding", "shardy")
        )
    assert [s.axes for s in ours.assignment.specs] == [s.axes for s in theirs.assignment.specs]
    assert num_tied(theirs) == len(jax.tree.leaves(one.args[0]))
    grounded(theirs.assignment)


def test_a_donated_argument_is_sharded_as_the_result_that_takes_its_place():
    def f(state, x, y):
        return x * 2.0, state + y

    with sharding.mesh(SIZES, devices=8):
        shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 3
        c = sharding.jit(f, in_shardings=(None, None, P("data")), donate_argnums=0, engine="shardy").complete(*shapes)
    assert c.in_shardings == (P("data"),) * 3 and c.out_shardings == (P("data"),) * 2


def test_reasons_name_the_op_that_an_axis_came_back_through():
    def f(x):
        return annotate(jnp.tanh(x), P("data"))

    with sharding.mesh(SIZES, devices=8):
        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        ours, theirs = (sharding.jit(f, engine=e).complete(shape).why("x", 0) for e in ("sharding", "shardy"))
    assert [str(line) for line in theirs] == [str(line) for line in ours]
    assert "tanh at test_shardy_engine.py" in str(theirs)


def test_numbers_are_those_of_one_device():
    params, x = arrays()
    with alone():
        expected, value = jax.jit(update)(params, x)
    with sharding.mesh(SIZES):
        run = step("shardy")
        found, total = run(jax.tree.map(jnp.copy, params), x)
        assert found["w"].sharding.spec == P(None, "tensor")
        again, _ = jax.block_until_ready(run(jax.tree.map(jnp.copy, found), x))
    np.testing.assert_allclose(total, value, rtol=1e-5)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    assert again["w"].sharding.spec == P(None, "tensor")


@pytest.mark.parametrize(("first", "second"), [(0, 1), (3, 1), (1, 1)])
def test_priorities(first, second):
    def f(x, y):
        x = annotate(x, P("data", None), priority=first)
        return annotate(x + annotate(y, P("tensor", None), priority=second), name="sum")

    with sharding.mesh(SIZES, devices=8):
        shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
        found = [sharding.jit(f, engine=engine).complete(*shapes).spec("sum") for engine in ("shardy", "sharding")]
    assert found == [P("data") if first < second else P("tensor") if second < first else P()] * 2


def test_sub_axes_open_dims_and_uneven_dims():
    def f(x, y):
        return annotate(x.reshape(2, 4, 8), name="cut"), annotate(annotate(y, P("all")) * 2.0, name="padded")

    with sharding.mesh(all=8, devices=8), pytest.warns(UserWarning, match="XLA pads it"):
        shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((7,), jnp.float32)]
        c = sharding.jit(f, in_shardings=(P(("all", U), None), None), engine="shardy").complete(*shapes)
    assert str(c.assignment.specs[c.value("cut")]) == "[all:(1)2, all:(2)4, -]"
    assert str(c.assignment.specs[c.value("padded")]) == "[all]"
    assert c.spec("y") == P() and len(c.uneven) == 3


def test_a_reshape_that_merges_parts_of_an_axis():
    """Recording where the axes come from, Shardy reads past the end of a list of axes and aborts."""
    options = {"in_shardings": P(U, U, U), "out_shardings": P("all"), "engine": "shardy"}
    with sharding.mesh(all=4, devices=4):
        c = sharding.jit(lambda x: x.reshape(288), **options).complete(jax.ShapeDtypeStruct((6, 6, 8), jnp.float32))
    assert str(c.assignment.specs[c.value("x")]) == "[all:(1)2, -, -]"
    assert "no origin recorded" in str(c.why("x", dim=0))


def test_origins_are_recorded_only_for_a_reason(monkeypatch):
    runs, run = [], shardy._Passes.run

    def counted(self, *, records):
        runs.append(records)
        return run(self, records=records)

    monkeypatch.setattr(shardy._Passes, "run", counted)
    with sharding.mesh(SIZES, devices=8):
        shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
        options = {"in_shardings": (P("data", None), P(U, U)), "engine": "shardy"}
        c = sharding.jit(lambda x, y: (x + y, y.sum()), **options).complete(*shapes)
        assert (c.spec("y"), runs) == (P("data"), [False])
        assert "Shardy" not in str(c.why("y", dim=0)) and runs == [False, True]


@pytest.mark.parametrize("is_divided", [True, False])
def test_no_origins_are_recorded_where_axes_do_not_divide_a_merged_dim(monkeypatch, is_divided):
    """Recording, Shardy may end the process there: it reads past the end of a list of axes."""
    runs, run = [], shardy._Passes.run
    monkeypatch.setattr(
        shardy._Passes, "run", lambda self, *, records: runs.append(records) or run(self, records=records)
    )
    options = {"in_shardings": P("c", ("b", "a"), U), "engine": "shardy"}
    if not is_divided:
        options["out_shardings"] = P(None, ("c", "b"))
    with sharding.mesh(a=2, b=2, c=2, devices=8):
        shape = jax.ShapeDtypeStruct((2 if is_divided else 6, 4, 3), jnp.float32)
        c = sharding.jit(lambda x: (x + 1).reshape(1, -1), **options).complete(shape)
    assert c.out_shardings == (P(None, ("c", "b", "a")) if is_divided else P(None, ("c", "b")))
    assert [*c.assignment.reasons.values()]
    assert runs == ([False, True] if is_divided else [False])


def test_under_grad_with_closed_over_tracers():
    params, x = arrays()

    def outer(scale):
        inner = sharding.jit(lambda h: loss(params, h * scale), in_shardings=P("data"), engine="shardy")
        return inner(x)

    with alone():
        expected = jax.grad(lambda scale: loss(params, x * scale))(1.5)
    with sharding.mesh(SIZES):
        np.testing.assert_allclose(jax.grad(outer)(1.5), expected, rtol=1e-5)


def complete():
    with sharding.mesh(SIZES, devices=8):
        return sharding.jit(lambda x: x * 2.0, engine="shardy").complete(jnp.ones(8))


def test_without_the_mlir_bindings_the_error_names_the_other_engines(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxlib.mlir", None)
    message = r"(?s)engine='shardy'.*found: +jax \d.*jaxlib \d.*JAX 0\.10\.2 to .*fix: +engine='sharding'"
    with pytest.raises(ShardingError, match=message):
        complete()


def test_without_the_pipeline_too(monkeypatch):
    monkeypatch.setattr(shardy, "_PIPELINE", "builtin.module(sdy-no-such-pass)")
    with pytest.raises(ShardingError, match=r"(?s)engine='shardy'.*sdy-no-such-pass.*engine='xla'"):
        complete()


@pytest.mark.parametrize("axes", [(), ("data",), ("data", ("tensor", 2, 2)), (("tensor", 1, 2), "data")])
def test_axes_and_parts_of_axes_are_read_as_written(axes):
    dims = [Dim(axes=axes), Dim(axes=axes, open=True), Dim(axes=axes, priority=1)]
    text = f"[{', '.join(map(shardy._dim_text, dims))}]"
    assert shardy_results.dims(text) == (axes,) * 3
