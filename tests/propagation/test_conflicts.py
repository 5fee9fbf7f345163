"""Conflicts: each disagreement once, with both claims, who won and what it costs."""

import jax
import jax.numpy as jnp
from pins import ABC, named, run

import sharding
from sharding import P
from sharding.propagation import complete


def only(assignment):
    (conflict,) = assignment.conflicts
    return conflict


def test_agreement_is_no_conflict():
    a = run(lambda x, w: jnp.tanh(x @ w), ((8, 8), "a ?"), ((8, 8), "? b"))
    assert a.conflicts == ()


def test_both_claims_and_their_origins_are_told():
    a = run(lambda x, y: named(x + y, "sum"), ((8, 8), "a -"), ((8, 8), "- a"))
    total = a.graph.names["sum"]
    lost = [c for c in a.conflicts if c.kept.value == total]
    assert [str(c.lost) for c in lost] == ["x1 dim 1: (a) from pin - a"]
    assert [str(c.kept) for c in lost] == [f"{lost[0].kept.name} dim 0: (a) from pin a -"]
    assert lost[0].rule == "the axis already splits another dim"
    assert lost[0].op == "add" and "test_conflicts.py" in lost[0].source


def test_other_axes_on_the_same_dim():
    a = run(lambda x, y: x + y, ((8, 8), "a? -"), ((8, 8), "b? -"))
    assert {c.rule for c in a.conflicts} >= {"the dim is split by other axes, which came first"}


def test_a_closed_dim_says_so():
    a = run(lambda x: jnp.sin(x), ((8, 8), "a -"), outs=["- -"])
    conflict = next(c for c in a.conflicts if c.kept.value == a.graph.names["y0"])
    assert conflict.rule == "the annotation closes the dim"
    assert conflict.kept.origin == "pin - -"


def test_bytes_lost_are_what_each_device_holds_in_excess():
    a = run(lambda x: jnp.sin(x), ((8, 8), "a,b -"), outs=["- -"])
    conflict = next(c for c in a.conflicts if c.kept.value == a.graph.names["y0"])
    whole = 8 * 8 * 4
    assert conflict.bytes_lost == whole - whole // 4


def test_two_annotations_of_one_value_that_contradict_each_other():
    def f(x):
        return jax.jit(jnp.sin, in_shardings=jax.sharding.NamedSharding(m, P(None, "b")))(x)

    with sharding.mesh(ABC, devices=8) as m:
        a = run(f, ((8, 8), "a -"))
    clash = next(c for c in a.conflicts if c.op == "annotation")
    assert clash.rule == "the first annotation of a value stays"
    assert clash.kept.origin == "pin a -" and clash.lost.origin == "in_shardings of sin"
    assert clash.bytes_lost == 8 * 8 * 4


def test_conflicts_do_not_change_what_was_decided():
    a = run(lambda x, y: x @ y, ((8, 4), "a,b ?"), ((4, 16), "? a,c"))
    b = complete(a.graph, a.sizes)
    assert [str(c) for c in a.conflicts] == [str(c) for c in b.conflicts] and a.conflicts
    assert [s.axes for s in a.specs] == [s.axes for s in b.specs]
