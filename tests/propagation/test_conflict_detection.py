"""Conflicts: each once, with both claims, the rule that decided and the bytes lost."""

import jax
import jax.numpy as jnp
from support.annotated_programs import ABC, named, propagate

import sharding
from sharding import P
from sharding.propagation import complete


def only(assignment):
    (conflict,) = assignment.conflicts
    return conflict


def test_agreement_is_no_conflict():
    a = propagate(lambda x, w: jnp.tanh(x @ w), ((8, 8), "a ?"), ((8, 8), "? b"))
    assert a.conflicts == ()


def test_both_claims_and_their_origins_are_reported():
    a = propagate(lambda x, y: named(x + y, "sum"), ((8, 8), "a -"), ((8, 8), "- a"))
    total = a.graph.names["sum"]
    lost = [c for c in a.conflicts if c.kept.value == total]
    assert [str(c.lost) for c in lost] == ["x1 dim 1: (a) from annotation - a"]
    assert [str(c.kept) for c in lost] == [f"{lost[0].kept.name} dim 0: (a) from annotation a -"]
    assert lost[0].rule == "the axis already shards another dim"
    assert lost[0].op == "add" and "test_conflict_detection.py" in lost[0].source


def test_other_axes_on_the_same_dim():
    a = propagate(lambda x, y: x + y, ((8, 8), "a? -"), ((8, 8), "b? -"))
    assert {c.rule for c in a.conflicts} >= {"the dim is already sharded over other axes"}


def test_a_closed_dim():
    a = propagate(lambda x: jnp.sin(x), ((8, 8), "a -"), outs=["- -"])
    conflict = next(c for c in a.conflicts if c.kept.value == a.graph.names["y0"])
    assert conflict.rule == "the annotation closes the dim"
    assert conflict.kept.origin == "annotation - -"


def test_bytes_lost_are_the_extra_bytes_per_device():
    a = propagate(lambda x: jnp.sin(x), ((8, 8), "a,b -"), outs=["- -"])
    conflict = next(c for c in a.conflicts if c.kept.value == a.graph.names["y0"])
    full = 8 * 8 * 4
    assert conflict.bytes_lost == full - full // 4


def test_conflicting_annotations_of_one_value():
    def f(x):
        return jax.jit(jnp.sin, in_shardings=jax.sharding.NamedSharding(m, P(None, "b")))(x)

    with sharding.mesh(ABC, devices=8) as m:
        a = propagate(f, ((8, 8), "a -"))
    conflict = next(c for c in a.conflicts if c.op == "annotation")
    assert conflict.rule == "the first annotation of a value wins"
    assert conflict.kept.origin == "annotation a -" and conflict.lost.origin == "in_shardings of sin"
    assert conflict.bytes_lost == 8 * 8 * 4


def test_finding_conflicts_does_not_change_the_specs():
    a = propagate(lambda x, y: x @ y, ((8, 4), "a,b ?"), ((4, 16), "? a,c"))
    b = complete(a.graph, a.sizes)
    assert [str(c) for c in a.conflicts] == [str(c) for c in b.conflicts] and a.conflicts
    assert [s.axes for s in a.specs] == [s.axes for s in b.specs]
