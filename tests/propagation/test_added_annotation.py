"""Annotations added to those of a program: by name, beside what a value has, with all faults together."""

import jax.numpy as jnp
import pytest
from support.annotated_programs import ABC, named, propagate, specs_of

from sharding import P, ShardingError
from sharding.propagation import complete
from sharding.propagation.added_annotation import named_annotations

U = P.UNCONSTRAINED
SQUARE = (8, 8)


def added(f, args, annotations):
    graph = propagate(f, *args).graph
    return complete(graph.with_annotations(named_annotations(graph, annotations, ABC)), ABC)


def total(x, y):
    return named(x + y, "total")


def test_they_come_before_annotations_of_a_later_priority():
    found = added(total, [(SQUARE, "a@1 @1"), (SQUARE, None)], {"x1": P(None, "a")})
    assert specs_of(found, "x1", "total") == ["- a", "- a"]
    assert specs_of(added(total, [(SQUARE, "a -"), (SQUARE, None)], {"x1": P(None, "a")}), "total") == "a -"


def test_they_are_joined_with_what_a_value_has():
    found = added(total, [(SQUARE, "a ?"), (SQUARE, None)], {"x0": P(U, "b")})
    assert specs_of(found, "x0", "total") == ["a b", "a b"]
    origin = found.origin(found.graph.names["total"], 1, "b")
    assert "annotation a ?" in origin and "annotate('x0'" in origin


def test_contradictions_and_indivisible_ends_are_refused_together():
    with pytest.raises(ShardingError, match=r"(?s)2 failures.*'x0'.*P\('a',\).*'x1'.*P\('a',\)"):
        added(total, [(SQUARE, "a -"), (SQUARE, "a -")], {"x*": P("b", None)})
    with pytest.raises(ShardingError, match="divisible"):
        added(total, [((7, 8), None), ((7, 8), None)], {"x0": P("a")})
    found = added(lambda x, y: jnp.sin(total(x, y)), [((7, 8), None), ((7, 8), None)], {"total": P("a")})
    assert specs_of(found, "total") == "a -"  # inside the program XLA pads it


def test_a_name_that_the_program_has_not():
    with pytest.raises(ShardingError, match="nothing"):
        added(total, [(SQUARE, None), (SQUARE, None)], {"nothing": P("a")})
