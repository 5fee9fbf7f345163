"""The specs that are tried for each annotation of a plan, and the next best one."""

from types import SimpleNamespace

import numpy as np
import pytest

from sharding import P
from sharding.planner import plan_polish
from sharding.planner.plan_polish import ALTERNATIVES, NextBests, Polish
from sharding.planner.problem import FORBIDDEN
from sharding.spec import Dim, Spec

AXES = ("a", "b", "c", "d", "e")
PRESENT = P("a")


def others(monkeypatch, totals):
    """What is tried instead of `P("a")`, the first strategy of a plan that costs 100."""
    monkeypatch.setattr(plan_polish, "alternatives", lambda of, choice, node: np.array(totals, float))
    of = SimpleNamespace(
        node_of_value=lambda v: 0,
        spec=lambda node, k: Spec(dims=(Dim(axes=(AXES[k],)),)),
        problem=SimpleNamespace(cost=lambda choice: 100.0),
    )
    search = SimpleNamespace(value=lambda name, annotations: 0)
    polish = Polish(of=of, choice=np.zeros(1, int), search=search, fits=lambda costs: True, deadline=0.0)
    return polish.others(SimpleNamespace(annotations={"w": PRESENT}), "w")


def test_specs_that_cost_little_more_are_tried(monkeypatch):
    assert others(monkeypatch, [10, 11, 12, 12.1, 50]) == {P("b"): True, P("c"): True}


def test_the_first_is_known_whatever_it_costs(monkeypatch):
    assert others(monkeypatch, [10, 90, 40]) == {P("c"): False}


def test_of_many_close_ones_the_first_are_tried(monkeypatch):
    found = others(monkeypatch, [10, 10.4, 10.3, 10.2, 10.1])
    assert list(found) == [P("e"), P("d"), P("c")]
    assert len(found) == ALTERNATIVES


def test_what_is_forbidden_is_never_tried(monkeypatch):
    assert others(monkeypatch, [10, FORBIDDEN, FORBIDDEN]) == {}


def test_a_cheaper_one_is_tried(monkeypatch):
    assert others(monkeypatch, [10, 9]) == {P("b"): True}


def test_next_best_specs_are_found_once_and_when_asked_for():
    asked = []
    found = NextBests({"w": lambda: asked.append("w") or "best", "v": lambda: asked.append("v") or "other"})
    assert (list(found), len(found), asked) == (["w", "v"], 2, [])
    assert found["w"] == found.get("w") == "best"
    assert asked == ["w"]
    with pytest.raises(KeyError, match="u"):
        found["u"]
