"""The graph of a `shard_map`: its boundary, the axes that stay free inside, and linear solves."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P, compat, graph
from sharding.graph import Annotation
from sharding.propagation import complete
from sharding.rules import Kind
from sharding.spec import Dim, Spec

SIZES = {"a": 2, "b": 4, "one": 1}


def build(fn, *shapes, specs=()):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with sharding.mesh(SIZES, devices=8):
        program = jax.make_jaxpr(fn)(*args)
    annotations = [None if one is None else Annotation(spec=one, origin="in") for one in specs]
    return graph.build(
        program,
        sizes=SIZES,
        in_names=[f"x{i}" for i in range(len(args))],
        out_names=[f"y{i}" for i in range(len(program.out_avals))],
        in_annotations=annotations or [None] * len(args),
        out_annotations=[None] * len(program.out_avals),
    )


def mapped(body, in_specs, out_specs, axes):
    return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, axis_names=axes)


def spec(*dims):
    return Spec(dims=tuple(Dim(axes=dim) for dim in dims))


def test_shapes_are_local_along_manual_axes():
    g = build(mapped(jnp.sin, P("a", None), P("a", None), {"a"}), (8, 12))
    (sin,) = [op for op in g.ops if op.name == "sin"]
    assert g.shapes[sin.operands[0]] == g.shapes[sin.results[0]] == (4, 12)
    entry, leave = [op for op in g.ops if op.name == "shard_map"]
    assert [g.shapes[v] for v in (*entry.operands, *entry.results, *leave.operands, *leave.results)] == [
        (8, 12), (4, 12), (4, 12), (8, 12),
    ]  # fmt: skip
    assert (str(entry.rule), entry.rule.sizes) == ("ij k -> j k", (2, 4, 12))
    assert (str(leave.rule), leave.rule.sizes) == ("j k -> ij k", (2, 4, 12))
    assert {*entry.rule.kinds, *leave.rule.kinds} == {Kind.PASS}


def test_the_boundary_has_the_manual_axes_and_the_body_cannot():
    g = build(mapped(jnp.sin, P("a", None), P(None, "a"), {"a"}), (8, 12))
    entry, leave = [op for op in g.ops if op.name == "shard_map"]
    outside, inside = entry.operands[0], entry.results[0]
    assert (
        str(g.annotations[outside].spec) == "[(a,?), ?]"
        and "in_specs of the shard_map at" in g.annotations[outside].origin
    )
    assert str(g.annotations[leave.results[0]].spec) == "[?, (a,?)]"
    assert "out_specs of the shard_map at" in g.annotations[leave.results[0]].origin
    assert g.manual[inside] == g.manual[leave.operands[0]] == frozenset({"a"})
    assert g.manual[outside] == g.manual[leave.results[0]] == frozenset()  # it is sharded over a already
    assert not {*g.inputs, *g.outputs} & g.manual.keys()


def test_a_replicated_operand_is_not_annotated_and_cannot_be_sharded_over_manual_axes():
    g = build(mapped(lambda x, y: x + y[None], (P("a", None), P(None)), P("a", None), {"a"}), (8, 12), (12,))
    (replicated,) = [op.operands[0] for op in g.ops if op.name == "shard_map" and g.shapes[op.operands[0]] == (12,)]
    assert replicated not in g.annotations and g.manual[replicated] == frozenset({"a"})


def test_other_axes_pass_through_the_body():
    f = mapped(lambda x: jnp.tanh(x), P("a", None), P("a", None), {"a"})
    found = complete(build(f, (8, 12), specs=[spec((), ("b",))]), SIZES)
    assert found.specs[found.graph.outputs[0]].axes == (("a",), ("b",))
    (tanh,) = [op for op in found.graph.ops if op.name == "tanh"]
    assert found.specs[tanh.results[0]].axes == ((), ("b",))
    behind = complete(build(f, (8, 12), specs=[Spec(dims=(Dim(axes=("a", "b")), Dim()))]), SIZES)
    assert behind.specs[behind.graph.outputs[0]].axes == (("a", "b"), ())


def test_without_free_axes_the_body_is_left_out():
    f = mapped(lambda x: jnp.tanh(x), P("a", "b"), P("a", "b"), {"a", "b"})
    g = build(f, (8, 12))
    assert not [op for op in g.ops if op.name == "tanh"]  # the axis of size 1 is nothing to shard over
    entry, leave = [op for op in g.ops if op.name == "shard_map"]
    assert g.dependencies[leave.operands[0]] == {entry.results[0]}
    assert {*entry.operands, *g.inputs} <= g.live_values
    assert g.scope.children == {}


def test_bodies_run_once_per_run_of_the_equation():
    f = mapped(jnp.sin, P("a"), P("a"), {"a"})
    g = build(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=5)[0], (8,))
    assert {op.times for op in g.ops if op.name in ("shard_map", "sin")} == {5}


def test_each_scope_is_found_by_the_place_of_its_jaxpr_in_the_equation():
    local = mapped(lambda x: jnp.sin(x), P("a"), P("a"), {"a"})

    def f(x):
        x = jax.lax.scan(lambda c, _: (local(c), None), x, None, length=5)[0]
        x = jax.lax.while_loop(lambda c: jnp.sum(c) < 1, jax.jit(jnp.cos), x)
        x = jax.lax.cond(jnp.sum(x) > 0, jnp.tanh, jax.checkpoint(jnp.exp), x)
        return jax.lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, y: y / 2)

    found = set()
    for one in build(f, (8,)).scopes():
        for (i, key, position), child in one.children.items():
            eqn = one.jaxpr.eqns[i]
            given = {(k, p): compat.open_jaxpr(jaxpr) for k, p, jaxpr in compat.sub_jaxprs(eqn.params)}
            assert given[key, position] is child.jaxpr
            found.add(eqn.primitive.name)
    assert found >= {"shard_map", "scan", "while", "cond", "custom_linear_solve"}


def test_a_loop_in_a_body_may_diverge_where_devices_differ():
    def body(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 1, lambda c: c + jnp.sin(c), x)

    g = build(mapped(body, P("a"), P("a"), {"a"}), (8,))
    (sin,) = [op for op in g.ops if op.name == "sin"]
    assert g.diverges(sin) and not any(g.diverges(op) for op in g.ops if op.name == "shard_map")
    alone = build(mapped(body, P("one"), P("one"), {"one"}), (8,))
    assert not any(map(alone.diverges, alone.ops))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_linear_solve_is_its_solve_body(transposed):
    def fn(w, x):
        def solve(_, y):
            return jnp.tanh(w) @ y

        return jax.lax.custom_linear_solve(lambda v: w @ v, x, solve, transpose_solve=solve, symmetric=transposed)

    g = build(fn, (8, 8), (8,))
    names = [op.name for op in g.ops]
    assert names.count("tanh") == names.count("dot_general") == 1  # not the product with w itself
    (product,) = [op for op in g.ops if op.name == "dot_general"]
    assert [g.shapes[v] for v in product.operands] == [(8, 8), (8,)]
    found = complete(g.with_annotations({g.inputs[0]: Annotation(spec=spec(("b",), ()), origin="w")}), SIZES)
    assert found.specs[g.outputs[0]].axes == (("b",),)
