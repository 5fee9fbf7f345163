"""`OpStrategies`: chooses the cheapest strategies, worked out by hand, and XLA runs them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sharding
from sharding import P, compat, cost
from sharding.explain.predicted_collectives import communication
from sharding.graph import Graph, Op
from sharding.propagation import Assignment
from sharding.rewrite.op_strategy import OpStrategies
from sharding.rewrite.rotation import rotation
from sharding.rules import identity
from sharding.spec import Dim, Spec


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def both(fn, args, sizes, **options):
    """Returns the ledger of a function, and the collectives of its compiled program by kind."""
    with sharding.mesh(sizes, devices=jax.devices()[: np.prod(list(sizes.values()))]):
        jitted = sharding.jit(fn, **options)
        ledger = jitted.complete(*args).communication()
        return ledger, cost.read_compiled(jitted.lower(*args).compile()).by_kind()


def spec(*dims):
    return Spec(dims=tuple(Dim(axes=tuple(d)) for d in dims))


def kinds(ledger):
    return [(c.kind, *c.axes) for c in ledger]


def test_strategies_follow_the_specs_of_their_arrays():
    """Also of specs that are given back, and of new ones that may lie where others did."""
    with sharding.mesh(a=8):
        jitted = sharding.jit(lambda x, w: jnp.tanh(x @ w) * 2, in_shardings=(P("a"), P()))
        assignment = jitted.complete(floats(64, 32), floats(32, 16)).assignment
    ops = [op for op in assignment.graph.ops if op.rule is not None]
    changed, before = OpStrategies(assignment), list(assignment.specs)
    known = [changed.of(op) for op in ops]
    arrays = [v for v, shape in enumerate(assignment.graph.shapes) if len(shape) == 2]
    for v, dims in itertools.product(arrays, [((), ()), (("a",), ()), ((), ("a",))]):
        specs = [*before[:v], spec(*dims), *before[v + 1 :]]
        changed.change(v, spec(*dims))
        anew = OpStrategies(dataclasses.replace(assignment, specs=tuple(specs)))
        assert [changed.of(op) for op in ops] == [anew.of(op) for op in ops]
        changed.change(v, before[v])
    assert [changed.of(op) for op in ops] == known


@pytest.mark.parametrize("rows, moved", [(4096, "w"), (8, "x")])
def test_the_smaller_operand_moves(rows, moved):
    specs = (P("a"), P("a"))
    ledger, compiled = both(lambda x, w: x @ w, [floats(rows, 256), floats(256, 512)], {"a": 4}, in_shardings=specs)
    assert ledger.lowered("cpu").by_kind() == compiled
    assert ledger[0].is_move and f", {moved}, " in ledger[0].cause


def test_gates_are_resharded_to_another_dim_and_back():
    def fn(x):
        a, b, c, d = jnp.split(x * 2, 4, axis=1)
        return jnp.tanh(a) * b + jnp.sin(c) * d

    ledger, compiled = both(fn, [floats(64, 512)], {"a": 8}, in_shardings=P(None, "a"), out_shardings=P(None, "a"))
    assert ledger.lowered("cpu").by_kind() == compiled
    assert set(kinds(ledger)) == {("all-to-all", "a")}


def test_an_axis_moves_to_a_dim_that_has_room_for_it_wherever_that_is():
    """Of dims before the one that is sorted, only the last is divisible."""
    shape = floats(2, 2, 2, 2, 8, 16)
    spec = P(*[None] * 5, "a")
    ledger, compiled = both(lambda x: jnp.sort(x * 2, 5), [shape], {"a": 8}, in_shardings=spec, out_shardings=spec)
    assert ledger.lowered("cpu").by_kind() == compiled
    assert kinds(ledger) == [("all-to-all", "a")] * 2


def test_a_reshape_to_dims_of_its_own_is_replicated_before_it_is_sliced():
    with sharding.mesh(a=4, devices=4):
        step = sharding.jit(lambda x: x.reshape(9, 4), in_shardings=P("a"), out_shardings=P(None, "a"))
        eqns = compat.open_jaxpr(step.trace(floats(4, 9)).jaxpr).eqns
    names = [eqn.primitive.name for eqn in eqns]
    behind = eqns[names.index("reshape") + 1 :]
    assert [str(eqn.params["spec"]) for eqn in behind] == ["[-, -]", "[-, a]"]


def test_a_sum_over_two_dims_is_reduced_dim_by_dim():
    specs = P("a", "b")
    ledger, compiled = both(lambda x: (x * x).sum(), [floats(8, 8)], {"a": 2, "b": 4}, in_shardings=specs)
    assert ledger.lowered("cpu").by_kind() == compiled
    assert kinds(ledger) == [("all-reduce", "b"), ("all-reduce", "a")]


def test_gradients_of_weights_are_reduce_scattered_first():
    def fn(x, y):
        return lax.dot_general(x, y, (((0,), (0,)), ((), ())))

    options = {"in_shardings": (P(("data", "fsdp")), P(("data", "fsdp"))), "out_shardings": P("fsdp")}
    ledger, compiled = both(fn, [floats(64, 8), floats(64, 8)], {"data": 2, "fsdp": 4}, **options)
    assert kinds(ledger) == [("reduce-scatter", "fsdp"), ("all-reduce", "data")]
    assert ledger.lowered("cpu").by_kind() == compiled


def test_a_value_is_gathered_once_for_two_uses():
    def fn(x, w):
        return x @ w + jnp.sin(x @ w)

    ledger, compiled = both(fn, [floats(64, 16), floats(16, 16)], {"a": 4}, in_shardings=(P("a"), P("a")))
    assert kinds(ledger) == [("all-gather", "a")] and ledger.lowered("cpu").by_kind() == compiled


UNASKED = {"find_reason": None, "with_annotations": None}
SPECS = [spec("", ""), spec("a", ""), spec("b", ""), spec("", "a"), spec("", "b"), spec("a", "b"), spec("ab", "")]


@pytest.mark.parametrize("operand, result", list(itertools.product(SPECS, repeat=2)))
def test_steps_lead_from_the_operand_spec_to_the_result_spec(operand, result):
    """For an identity op."""
    shape, sizes = (16, 32), {"a": 2, "b": 4}
    op = Op("copy", (0,), (1,), identity(1, shape), (), 1)
    graph = Graph(shapes=[shape] * 2, dtypes=[np.dtype("float32")] * 2, ops=[op], inputs=[0])
    strategy = OpStrategies(Assignment(graph=graph, sizes=sizes, specs=(operand, result), **UNASKED)).of(op)
    at = operand
    for step in (*strategy.operand_steps[0], *strategy.result_steps[0]):
        at = step.spec
    assert at.axes == result.axes
    assert strategy.operand_specs == strategy.result_specs


def rolled(x, n):
    return jnp.roll(x, n, 0)


@pytest.mark.parametrize("n, expected", [(3, 3), (-1, 7), (0, 0), (8, 0)])
def test_rotations_are_recognised(n, expected):
    with sharding.mesh(a=2, devices=jax.devices()[:2]):
        graph = sharding.jit(rolled, static_argnums=1).complete(floats(8, 2), n).assignment.graph
    found = [rotation(op, graph.makers) for op in graph.ops if op.name == "concatenate"]
    assert [f for f in found if f is not None] == [expected]


def test_two_slices_that_are_no_rotation():
    def fn(x):
        return jnp.concatenate([x[:3], x[3:]]), jnp.concatenate([x[4:], x[:3]])

    with sharding.mesh(a=2, devices=jax.devices()[:2]):
        assignment = sharding.jit(fn).complete(floats(8, 2)).assignment
    found = [rotation(op, assignment.graph.makers) for op in assignment.graph.ops if op.name == "concatenate"]
    assert found == [None, None]
    assert not communication(assignment)


@pytest.mark.parametrize("sizes", [{"data": 2, "idle": 4}, {"data": 4, "idle": 2}, {"data": 2, "one": 2, "two": 2}])
def test_a_scattered_sum_beside_idle_devices(sizes):
    """XLA divides the sum over devices that would compute the same, if their number is a multiple."""

    def f(x, w):
        return jnp.sin(sharding.annotate(x @ w, P(None, "data")))

    x = jax.ShapeDtypeStruct((48, 48), "float32")
    with sharding.mesh(sizes):
        jitted = sharding.jit(f, in_shardings=(P(None, "data"), P("data")))
        predicted = jitted.complete(x, x).communication().lowered("cpu").by_kind()
        assert sharding.cost.read_compiled(jitted.lower(x, x).compile()).by_kind() == predicted
