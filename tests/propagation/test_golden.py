"""Published cases, for both engines: Shardy's propagations and GSPMD's table of mergeable shardings.

References: Shardy's documentation and tests (openxla/shardy), paraphrased; Xu et al., GSPMD, arXiv:2105.04663, section
3.5.
"""

import functools

import jax.numpy as jnp
import pytest
from support import annotated_programs
from support.annotated_programs import named, specs_of


@pytest.fixture(params=["sharding", "shardy"])
def propagate(request):
    """Propagates through a small program with this library's engine, then with Shardy."""
    return functools.partial(annotated_programs.propagate, engine=request.param)


def test_add_then_dot(propagate):
    a = propagate(lambda x, y, w: named(x + y, "sum") @ w, ((8, 8), "a b"), ((8, 8), None), ((8, 16), None))
    assert specs_of(a, "x0", "x1", "sum", "x2", "y0") == ["a b", "a b", "a b", "b -", "a -"]


def test_within_a_factor_the_common_prefix_propagates(propagate):
    a = propagate(lambda x, y: x + y, ((8, 8), "a? -"), ((8, 8), "b? -"))
    assert specs_of(a, "y0") == "- -"
    a = propagate(lambda x, y: x + y, ((8, 8), "a b"), ((8, 8), "- a,b,c"))
    assert specs_of(a, "x0", "x1", "y0") == ["a b", "- a,b,c", "a -"]


def test_across_factors_of_equal_size_the_first_array_wins(propagate):
    a = propagate(lambda x, y: x + y, ((8, 8), "a ?"), ((8, 8), "? a"))
    assert specs_of(a, "y0") == "a -"


def test_across_factors_the_larger_source_wins(propagate):
    a = propagate(lambda x, y: x @ y, ((8, 4), "a,b ?"), ((4, 16), "? a,c"))
    assert specs_of(a, "y0") == "- a,c"


def test_a_real_conflict_frees_the_axis_for_the_other_dim(propagate):
    a = propagate(lambda x, y: x + y, ((8, 8), "a? ?"), ((8, 8), "b? a?"))
    assert specs_of(a, "y0") == "- a"


def test_elementwise_ops_come_before_dots(propagate):
    def f(x, w):
        dot = named(x @ w, "dot")
        return (dot + 1.0) * 2.0

    a = propagate(f, ((8, 8), "a? ?"), ((8, 8), None), outs=["? a"])
    assert specs_of(a, "dot", "x1", "x0") == ["- a", "- a", "a -"]


def test_ops_on_values_with_several_uses_come_later(propagate):
    def f(x):
        s = named(jnp.sin(x), "sin")
        p, q = named(s + s, "p"), named(s + 1.0, "q")
        return jnp.cos(p), jnp.cos(q)

    a = propagate(f, ((8, 8), "a -"), outs=["- a", "- a"])
    assert specs_of(a, "sin", "p", "q") == ["a -", "- a", "- a"]


def test_user_priority_comes_before_everything(propagate):
    def f(x, y):
        return named(named(x + y, "sum") / y, "div")

    a = propagate(f, ((8, 8), "a b@4"), ((8, 8), None), outs=["? c?@1"])
    assert specs_of(a, "x0", "x1", "sum", "div", "y0") == ["a b", "a c", "a c", "a c", "a c"]


def test_a_lower_priority_takes_what_a_higher_one_left_free(propagate):
    def f(x):
        return named(jnp.sin(x), "mid") * 2.0

    a = propagate(f, ((8, 8), "a?@1 b@1"), outs=["c ?"])
    assert specs_of(a, "x0", "mid", "y0") == ["a b", "c b", "c b"]


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 7), (3, 9), (2, 1)])
def test_priorities_may_have_gaps(propagate, first, second):
    a = propagate(lambda x, y: named(x + y, "sum"), ((8, 8), f"a@{first} -"), ((8, 8), f"b@{second} -"))
    assert specs_of(a, "sum") == ("a -" if first < second else "b -")


def test_equal_priorities_conflict(propagate):
    a = propagate(lambda x, y: named(x + y, "sum"), ((8, 8), "a?@1 -"), ((8, 8), "b?@1 -"))
    assert specs_of(a, "sum") == "- -"


def test_an_axis_of_a_deferred_dim_is_reserved_for_it(propagate):
    a = propagate(lambda x, y: x + y, ((8, 8), "? a@1"), ((8, 8), "a -"))
    assert specs_of(a, "x0", "x1") == ["- a", "a -"]


# An example of Shardy's documentation: three arrays get the longest compatible major axes of each factor


def test_three_arrays_of_one_op(propagate):
    def f(x, y, z):
        return named(jnp.concatenate([x, y, z], axis=2), "all")

    a = propagate(f, ((8, 8, 2), "a? ? ?"), ((8, 8, 2), "a,b? ? ?"), ((8, 8, 2), "? c? ?"))
    assert specs_of(a, "x0", "x1", "x2", "all") == ["a,b c -"] * 4
    a = propagate(f, ((8, 8, 2), "a? ? ?"), ((8, 8, 2), "a,b? c? ?"), ((8, 8, 2), "? b? ?"))
    assert specs_of(a, "all").split()[0] == "a,b"


# GSPMD: two shardings of one array merge if one sharding refines both


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        ("a? ?", "? b?", "a b"),
        ("a? ?", "a,b? ?", "a,b -"),
        ("a,b? ?", "a? ?", "a,b -"),
        ("a? b?", "? ?", "a b"),
        ("a? ?", "a? ?", "a -"),
        ("a? b?", "a,c? b?", "a,c b"),
        ("a? ?", "? a?", "a -"),  # one axis for two dims: the first wins
        ("a? ?", "b? ?", "- -"),  # two shardings of one dim: neither
        ("a,b? ?", "a,c? ?", "a -"),  # as far as they agree
        ("a,b? ?", "b,a? ?", "- -"),
    ],
)
def test_merging(propagate, first, second, merged):
    a = propagate(lambda x, y: named(x + y, "sum"), ((8, 8), first), ((8, 8), second))
    assert specs_of(a, "sum") == merged


@pytest.mark.parametrize(("x", "w", "out"), [("a ?", "? b", "a b"), ("a c", "c b", "a b"), ("a,b ?", "? c", "a,b c")])
def test_a_matmul_is_sharded_as_its_operands(propagate, x, w, out):
    a = propagate(lambda x, w: x @ w, ((8, 8), x), ((8, 8), w))
    assert specs_of(a, "y0") == out


def test_completion_is_idempotent(propagate):
    def f(x, w):
        return named(jnp.tanh(x @ w), "h") @ w.T

    first = propagate(f, ((8, 8), "a ?"), ((8, 8), "? b"))
    texts = specs_of(first, "x0", "x1")
    again = propagate(f, ((8, 8), texts[0]), ((8, 8), texts[1]))
    assert specs_of(again, "x0", "x1", "h", "y0") == specs_of(first, "x0", "x1", "h", "y0")
