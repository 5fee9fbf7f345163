"""An assignment as it runs: what is limited beside the inferred specs."""

import jax.numpy as jnp
import pytest
from jax import lax
from support.annotated_programs import named, propagate, specs_of

from sharding.explain.predicted_collectives import communication
from sharding.graph import Annotation
from sharding.rewrite.op_kind import op_kinds
from sharding.spec import Dim, Spec


def stacks(unroll):
    """The axes, inferred and as run, of an array whose rows a loop reads, and of one that it stacks."""

    def f(x, carry):
        carry, stacked = lax.scan(lambda c, row: (c + row, jnp.cos(row)), carry, jnp.sin(x), unroll=unroll)
        return carry, stacked * 2.0

    found = propagate(f, ((4, 8), "a b"), ((8,), None), outs=(None, "a b"))
    ops = {op.name: op for op in found.graph.ops}
    values = ops["scan xs"].operands[0], ops["scan ys"].results[0]
    return [[one.specs[v].axes for v in values] for one in (found, found.as_run)]


@pytest.mark.parametrize("unroll", [2, 4, True])
def test_what_an_unrolled_loop_slices_and_stacks_is_replicated_along_its_iterations(unroll):
    assert stacks(unroll) == [[(("a",), ("b",))] * 2, [((), ("b",))] * 2]


def test_a_loop_that_is_not_unrolled_leaves_its_stacks_sharded():
    assert stacks(1) == [[(("a",), ("b",))] * 2] * 2


def test_no_device_is_left_without_elements_but_where_an_annotation_says_so():
    def f(x):
        return named(x[:1] * 2.0, "few"), named(x[:3] * 2.0, "uneven")

    found = propagate(f, ((4, 8), None), outs=("a b", "a b"))
    assert specs_of(found, "few", "uneven", "y0") == ["a b", "a b", "a b"]
    assert specs_of(found.as_run, "few", "uneven", "y0") == ["- b", "a b", "a b"]


def test_arguments_arrive_in_even_shards():
    found = propagate(lambda x: named(x * 2.0, "twice"), ((3, 8), None), outs=("a b",))
    assert specs_of(found, "x0", "twice") == ["a b", "a b"]
    assert specs_of(found.as_run, "x0", "twice") == ["- b", "a b"]


def test_programs_with_other_annotations_share_what_was_searched():
    def f(x, w):
        return named(x @ w, "y")

    base = propagate(f, ((8, 16), "a -"), ((16, 8), None))
    v = base.graph.names["y"]

    def annotated(axes):
        spec = Spec(dims=tuple(Dim(axes=(axis,)) if axis else Dim() for axis in axes))
        return base.with_annotations({v: Annotation(spec=spec, origin="test")})

    one, same, other = annotated((None, "b")), annotated((None, "b")), annotated(("b", "a"))
    for found in (base, one):
        communication(found)
    assert base.searches.keys() != one.searches.keys()  # the base is saved without those of others
    known = dict(one.searches)
    assert known and one.searches is same.searches is other.searches
    before = communication(same).by_kind()
    assert one.searches == known and before == communication(one).by_kind()
    communication(other)
    assert len(one.searches) > len(known)


def test_annotations_leave_what_is_known_of_a_program_but_trip_counts_do_not():
    def f(x):
        return lax.while_loop(lambda c: c.sum() < 9.0, lambda c: c + 1.0, x)

    g = propagate(f, ((8, 16), "a -")).graph
    live, kinds = g.live_values, op_kinds(g)
    changed = g.with_annotations({g.outputs[0]: g.annotations[g.inputs[0]]})
    assert changed.live_values is live and op_kinds(changed) is kinds
    assert g.annotations.keys() == {g.inputs[0]} and changed.annotations.keys() == {g.inputs[0], g.outputs[0]}
    counted = g.with_trips(7)
    assert op_kinds(counted) is not kinds and op_kinds(counted).keys() == {id(op) for op in counted.ops if op.rule}
