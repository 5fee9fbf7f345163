"""`graph.build`: names, ties, trip counts, edges, and primitives without a rule."""

import dataclasses

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sharding
from sharding import compat, graph
from sharding.graph import Annotation
from sharding.propagation import complete
from sharding.spec import Dim, Spec, open_spec

SIZES = {"a": 2, "b": 4}


def build(fn, *shapes, ties=None, in_annotations=None, out_annotations=None):
    args = [s if isinstance(s, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    with sharding.mesh(SIZES, devices=8):
        program = jax.make_jaxpr(fn)(*args)
    n_in, n_out = len(args), len(program.out_avals)
    return graph.build(
        program,
        sizes=SIZES,
        in_names=[f"x{i}" for i in range(n_in)],
        out_names=[f"y{i}" for i in range(n_out)],
        in_annotations=in_annotations or [None] * n_in,
        out_annotations=out_annotations or [None] * n_out,
        ties=ties,
    )


def spec(*dims):
    return Spec(dims=tuple(Dim(axes=(d,)) if d else Dim() for d in dims))


def times(g, name):
    return [op.times for op in g.ops if op.name == name]


# Names


def test_arguments_and_results_are_named_by_path():
    g = build(lambda x, w: x @ w, (8, 4), (4, 6))
    assert [g.names[n] for n in ("x0", "x1", "y0")] == [*g.inputs, *g.outputs]
    assert g.shapes[g.names["y0"]] == (8, 6)


def test_annotated_names_and_repeated_ones():
    def f(x):
        x = sharding.annotate(jnp.sin(x), name="hidden")
        x = sharding.annotate(jnp.cos(x), name="hidden")
        return sharding.annotate(x * 2.0, name="last")

    g = build(f, (8, 4))
    assert {"hidden#0", "hidden#1", "last"} <= set(g.names) and "hidden" not in g.names


def test_a_name_in_a_loop_is_one_entry():
    def f(x):
        return lax.scan(lambda c, _: (sharding.annotate(jnp.sin(c), name="hidden"), None), x, None, length=3)[0]

    assert "hidden" in build(f, (8, 4)).names


def test_the_source_of_a_value_is_the_users_line():
    g = build(lambda x: jnp.sin(x), (8, 4))
    (sin,) = [op for op in g.ops if op.name == "sin"]
    assert "test_graph.py" in sin.source and g.source(sin.results[0]) == sin.source
    assert g.source(g.inputs[0]) == ""


# Ties and annotations


def test_a_tied_result_is_its_argument():
    g = build(lambda state, x: (state + x, x * 2.0), (8, 4), (8, 4), ties={0: 0})
    assert g.outputs[0] == g.inputs[0] and g.outputs[1] not in g.inputs
    assert g.names["y0"] == g.names["x0"]


def test_a_tie_gives_the_argument_the_sharding_of_the_result():
    g = build(
        lambda state, x: state + x,
        (8, 4),
        (8, 4),
        ties={0: 0},
        in_annotations=[None, Annotation(spec=spec("a", "b"), origin="x")],
    )
    assert complete(g, SIZES).specs[g.inputs[0]].axes == (("a",), ("b",))


def test_annotations_of_a_result_and_its_tied_argument_conflict():
    g = build(lambda s: s * 2.0, (8, 4), ties={0: 0}, in_annotations=[Annotation(spec=spec("a", None), origin="in")],
              out_annotations=[Annotation(spec=spec(None, "b"), origin="out")])  # fmt: skip
    ((value, kept, lost),) = g.annotation_conflicts
    assert (value, kept.origin, lost.origin) == (g.inputs[0], "in", "out")


def test_a_second_annotation_is_on_a_new_value_after_the_first():
    def f(x):
        x = sharding.annotate(jnp.sin(x), P("a", None))
        return sharding.annotate(x, P(None, "a"))

    g = build(f, (8, 4))
    assert [op.name for op in g.ops] == ["sin", "annotate", "edge"]
    assert [str(g.annotations[v].spec) for v in sorted(g.annotations)] == ["[a, -]", "[-, a]"]


def test_annotations_of_different_dims_are_merged():
    def f(x):
        x = sharding.annotate(jnp.sin(x), P("a", P.UNCONSTRAINED))
        return sharding.annotate(x, P(P.UNCONSTRAINED, "b"))

    (annotation,) = build(f, (8, 4)).annotations.values()
    assert str(annotation.spec) == "[a, b]" and "; " in annotation.origin


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [
        (spec("a", None), spec("a", None), "[a, -]"),
        (spec("a", None), open_spec(2), "[a, -]"),
        (Spec(dims=(Dim(axes=("a",)), Dim(open=True))), Spec(dims=(Dim(open=True), Dim(axes=("b",)))), "[a, b]"),
        (Spec(dims=(Dim(axes=("a",)), Dim(open=True))), Spec(dims=(Dim(open=True), Dim(axes=("a",)))), None),
        (spec("a", None), spec(None, "a"), None),
    ],
)
def test_merged(one, other, want):
    both = graph.merged(one, other)
    assert (None if both is None else str(both)) == want


def test_plain_sharding_constraints_are_annotations():
    def f(x):
        return lax.with_sharding_constraint(jnp.sin(x), NamedSharding(m, P("a", P.UNCONSTRAINED)))

    with sharding.mesh(SIZES, devices=8) as m:
        program = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((8, 4), jnp.float32))
    g = graph.build(
        program, sizes=SIZES, in_names=["x"], out_names=["y"], in_annotations=[None], out_annotations=[None]
    )
    (annotation,) = g.annotations.values()
    assert str(annotation.spec) == "[a, ?]" and "with_sharding_constraint at test_graph.py" in annotation.origin


# Trip counts and edges


def test_trip_counts_multiply():
    def inner(c, _):
        return jnp.sin(c), None

    def outer(c, x):
        c = lax.scan(inner, jnp.cos(c), None, length=5)[0]
        return c, x * 2.0

    g = build(lambda x, xs: lax.scan(outer, jnp.tanh(x), xs), (8, 4), (3, 8))
    assert (times(g, "tanh"), times(g, "cos"), times(g, "sin"), times(g, "mul")) == ([1], [3], [15], [3])
    assert (times(g, "scan xs"), times(g, "scan ys")) == ([3], [3])


def test_a_while_counts_once_and_every_branch_too():
    def f(x):
        x = lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: jnp.sin(x), x)
        return lax.cond(x[0, 0] > 0, jnp.cos, jnp.tanh, x)

    g = build(f, (8, 4))
    assert (times(g, "sin"), times(g, "cos"), times(g, "tanh")) == ([1], [1], [1])


def test_a_called_function_appears_once_per_call():
    twice = jax.jit(lambda x: jnp.sin(jnp.sin(x)))
    g = build(lambda x: twice(twice(x)), (8, 4))
    assert times(g, "sin") == [1, 1, 1, 1]
    assert len(g.scope.children) == 2


def test_constant_expressions_are_not_values():
    g = build(lambda x: x + jnp.ones((8, 4)) * jnp.arange(4.0)[None, :], (8, 4))
    assert [op.name for op in g.ops] == ["add", "edge"]
    first, second = g.ops[0].operands
    assert first == g.inputs[0] and g.sites[second] == ()


# Primitives without a rule


def test_unknown_primitives_are_listed_and_stop_propagation():
    def f(x):
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, kind, jnp.sin(x)) + jax.pure_callback(np.cos, kind, x)

    g = build(f, (8, 8), in_annotations=[Annotation(spec=spec("a", "b"), origin="in")])
    assert g.unknown == {"pure_callback": 2}
    a = complete(g, SIZES)
    assert not any(a.specs[g.outputs[0]].axes)


def test_a_custom_primitive_is_listed():
    mystery = jex.Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    g = build(lambda x: mystery.bind(mystery.bind(x)), (8, 4))
    assert g.unknown == {"mystery": 2}


def test_an_unknown_primitive_of_scalars_does_not_count():
    mystery = jex.Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    assert build(lambda x: mystery.bind(jnp.sum(x)), (8, 4)).unknown == {}


def test_every_variable_has_a_value():
    g = build(lambda x, w: jnp.tanh(x @ w), (8, 4), (4, 6))
    for eqn in g.scope.jaxpr.eqns:
        for var in eqn.outvars:
            assert compat.is_drop(var) or g.shapes[g.scope.env[var]] == var.aval.shape


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "in a call"])
def test_an_array_depends_on_a_scalar_that_a_constant_expression_broadcasts(wrap):
    g = build(lambda x, s, t: x * wrap(lambda n: jnp.broadcast_to(n, (8,)))(s), (8,), (), ())
    assert not [op for op in g.ops if op.name == "broadcast_in_dim"]
    assert [v in g.live_values for v in g.inputs] == [True, True, False]


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_a_put_says_where_and_how_an_array_is(kind):
    def f(x):
        mesh = jax.sharding.get_abstract_mesh()
        return jax.device_put(x * 2.0, NamedSharding(mesh, P("a"), memory_kind=kind))

    g = build(f, (8,))
    (put,) = (op for op in g.ops if op.name == "device_put")
    assert g.memory_kinds.get(put.results[0]) == (kind if kind == "pinned_host" else None)
    assert not set(put.operands) & g.memory_kinds.keys()
    assert g.annotations[put.results[0]].spec.axes == (("a",),)


def test_a_loop_depends_on_a_scalar_only_where_its_body_does():
    def fn(x, w):
        total = jnp.broadcast_to(jnp.sum(x), (4,))
        _, ys = jax.lax.scan(lambda carry, row: (carry + total, row), w, x)
        carry, _ = jax.lax.scan(lambda carry, row: (carry + total, row), w, x)
        return ys, carry

    g = build(fn, (8, 4), (4,))
    (total,) = (op for op in g.ops if op.name == "reduce_sum")
    assert total.results[0] in g.live_values
    assert total.results[0] not in dataclasses.replace(g, outputs=g.outputs[:1]).live_values
