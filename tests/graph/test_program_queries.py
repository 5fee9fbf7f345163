"""What a graph says of its ops and values, for programs small enough to read off."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sharding
from sharding import graph
from sharding.errors import ShardingError
from sharding.graph import Loop


def build(fn, *shapes, **options):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with sharding.mesh(a=2, b=4, devices=8):
        program = jax.make_jaxpr(fn)(*args)
    n_in, n_out = len(args), len(program.out_avals)
    return graph.build(
        program,
        sizes={"a": 2, "b": 4},
        in_names=[f"x{i}" for i in range(n_in)],
        out_names=[f"y{i}" for i in range(n_out)],
        in_annotations=[None] * n_in,
        out_annotations=[None] * n_out,
        **options,
    )


def op_named(g, name):
    (found,) = [op for op in g.ops if op.name == name]
    return found


# Kinds of memory


def test_kinds_of_memory_of_arguments_and_results():
    def fn(x, y):
        return x, jnp.sin(y), x

    g = build(fn, (4,), (4,), in_memory_kinds=["pinned_host", "device"], out_memory_kinds=[None, "device", "device"])
    assert g.memory_kinds == {g.inputs[0]: "pinned_host"}
    assert g.output_memory_kinds == ["pinned_host", None, None]
    g = build(fn, (4,), (4,), out_memory_kinds=[None, "unpinned_host"])
    assert g.memory_kinds == {} and g.output_memory_kinds == [None, "unpinned_host", None]


def test_a_copy_between_memories_changes_them():
    def fn(x):
        there = jax.device_put(x, jax.memory.Space.Host)
        return jax.device_put(there, jax.memory.Space.Device) + 1.0

    g = build(fn, (4, 4))
    copies = [op for op in g.ops if op.name == "device_put"]
    assert [g.memory_kinds.get(op.results[0]) for op in copies] == ["pinned_host", None]
    assert all(map(g.changes_memory, copies)) and not g.changes_memory(op_named(g, "add"))


# Makers, uses, sizes


def test_who_makes_and_reads_a_value():
    g = build(lambda x, y: (jnp.sin(x) * jnp.sin(x), x + y), (4, 8), (4, 8))
    (square,), (first, second) = [op for op in g.ops if op.name == "mul"], [op for op in g.ops if op.name == "sin"]
    assert g.makers[square.results[0]] is square and not any(v in g.makers for v in g.inputs)
    assert [op.name for op in g.users[g.inputs[0]]] == ["sin", "sin", "add"]
    assert g.users[first.results[0]] == g.users[second.results[0]] == [square]
    assert g.num_uses[g.inputs[0]] == 3 and g.num_uses[g.outputs[0]] == 1
    assert all(g.times[v] == 1 for v in (*g.inputs, *g.makers))


def test_an_operand_that_is_read_twice_counts_twice():
    g = build(lambda x: x * x, (4,))
    square = op_named(g, "mul")
    assert g.users[g.inputs[0]] == [square, square] and g.num_uses[g.inputs[0]] == 2


def test_bytes_and_labels():
    g = build(lambda x: x.astype(jnp.bfloat16), (3, 5))
    half = op_named(g, "convert_element_type").results[0]
    assert (g.num_bytes(g.inputs[0]), g.num_bytes(half), g.itemsize(half)) == (60, 30, 2)
    assert g.label(g.inputs[0]) == "x0" and g.label(half) == "bfloat16[3, 5]"
    g.names["again"] = g.inputs[0]
    assert g.label(g.inputs[0]) == "x0"  # the first name


def test_a_key_has_no_item_size():
    key = jax.eval_shape(jax.random.key, 0)
    with sharding.mesh(a=2, b=4, devices=8):
        program = jax.make_jaxpr(jax.random.bits)(key)
    g = graph.build(program, sizes={"a": 2, "b": 4}, in_names=["k"], out_names=["y"], in_annotations=[None],
                    out_annotations=[None])  # fmt: skip
    assert g.itemsize(g.inputs[0]) in (0, key.dtype.itemsize)


# Dead code


def live_ops(g):
    live = g.live_values
    return [op.name for op in g.ops if g.is_live(op, live)]


def test_what_no_result_depends_on_is_dead():
    def fn(x):
        jnp.cos(x)
        return jnp.sin(x)

    g = build(fn, (4,))
    assert "sin" in live_ops(g) and "cos" not in live_ops(g)


def test_the_condition_of_a_loop_and_the_index_of_a_branch_are_live():
    def fn(x, limit, which):
        y = lax.while_loop(lambda c: c[0] < jnp.tanh(limit), lambda c: c + jnp.sin(c), x)
        return lax.cond(jnp.cosh(which) > 1, jnp.cos, jnp.exp, y)

    g = build(fn, (4,), (), ())
    assert {"tanh", "sin", "cosh", "cos", "exp"} <= {*live_ops(g)}


def test_an_effect_keeps_what_it_reads():
    def fn(x):
        jax.debug.print("{}", jnp.cos(x))
        jnp.tanh(x)
        return jnp.sin(x)

    assert {"cos", "sin"} <= {*live_ops(build(fn, (4,)))} and "tanh" not in live_ops(build(fn, (4,)))


# Loops


def executions(jaxpr, name, while_runs):
    """How often a primitive runs, by walking through the iterations."""
    total = 0
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        total += kind == name
        if kind == "scan":
            total += sum(executions(eqn.params["jaxpr"].jaxpr, name, while_runs) for _ in range(eqn.params["length"]))
        elif kind == "while":
            total += sum(executions(eqn.params["body_jaxpr"].jaxpr, name, while_runs) for _ in range(while_runs))
            total += sum(executions(eqn.params["cond_jaxpr"].jaxpr, name, while_runs) for _ in range(while_runs + 1))
        elif kind == "jit":
            total += executions(eqn.params["jaxpr"].jaxpr, name, while_runs)
    return total


def nested(x):
    def inner(c):
        return jnp.sin(c) + jax.jit(jnp.cos)(c)

    def row(c, _):
        c = lax.while_loop(lambda c: jnp.tanh(c[0]) < 1, inner, jnp.exp(c))
        return c, lax.scan(lambda d, _: (jnp.sin(d), jnp.log(d)), c, None, length=5)[1]

    return lax.scan(row, x, None, length=3)


@pytest.mark.parametrize("runs", [0, 1, 2, 7])
def test_ops_run_as_often_as_the_loops_around_them(runs):
    g = build(nested, (4,)).with_trips(runs)
    jaxpr = jax.make_jaxpr(nested)(jnp.ones(4)).jaxpr
    for name in ("sin", "cos", "tanh", "exp", "log"):
        assert sum(op.times for op in g.ops if op.name == name) == executions(jaxpr, name, runs), name
    assert not any(op.loops for op in g.ops) and g.trips == runs


def two_loops(x):
    x = lax.while_loop(lambda c: jnp.tanh(c[0]) < 1, jnp.sin, x)
    return lax.while_loop(lambda c: jnp.exp(c[0]) < 1, jnp.cos, x)


def test_trips_of_one_loop_of_two():
    g = build(two_loops, (4,))
    first, second = (op_named(g, name).loops[0] for name in ("sin", "cos"))
    assert first != second and not first.is_condition and op_named(g, "tanh").loops == (Loop(first.source, True),)
    some = g.with_trips({first.source.partition(" ")[0]: 4})
    assert [op_named(some, name).times for name in ("sin", "tanh", "cos", "exp")] == [4, 5, 1, 2]
    assert [bool(op_named(some, name).loops) for name in ("sin", "tanh", "cos", "exp")] == [False, False, True, True]
    both = some.with_trips({second.source: 3})
    assert [op_named(both, name).times for name in ("sin", "tanh", "cos", "exp")] == [4, 5, 3, 4]


@pytest.mark.parametrize(("trips", "fault"), [(-1, "-1 iterations"), ({"nowhere.py:1": 2}, "no loop at nowhere.py:1")])
def test_trips_of_no_loop(trips, fault):
    with pytest.raises(ShardingError, match=fault):
        build(two_loops, (4,)).with_trips(trips)


def test_a_loop_invariant_is_read_as_often_as_the_loop_is_entered():
    def fn(w, x):
        def inner(c):
            return lax.scan(lambda c, _: (c @ w, None), c, None, length=6)[0]

        return lax.scan(lambda c, _: (inner(c), None), x, None, length=3)[0]

    g = build(fn, (4, 4), (2, 4))
    product = op_named(g, "dot_general")
    assert product.times == 18 and g.loop_invariants[product.operands[1]] == 3
    assert product.operands[0] not in g.loop_invariants


def test_regions_are_the_innermost_loops_and_branches():
    def fn(x):
        x = jax.jit(jnp.sin)(x)
        x = lax.scan(lambda c, _: (jnp.cos(c), None), x, None, length=2)[0]
        return jax.checkpoint(jax.jit(jnp.tanh))(x)

    g = build(fn, (4,))
    regions = {op.name: g.regions.get(id(op.site[0])) for op in g.ops if op.site and op.name in ("sin", "cos", "tanh")}
    assert regions["sin"] is None and regions["cos"] is not None
    scopes = [*g.scopes()]
    assert scopes[0] is g.scope and len(scopes) == 1 + sum(len(one.children) for one in scopes)
    assert math.prod(len(one.jaxpr.eqns) for one in scopes) > 0
