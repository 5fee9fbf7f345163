"""Published cases: golden propagations of Shardy, GSPMD's table of mergeable shardings. Both engines have to meet them.

References: Shardy's documentation and tests (openxla/shardy), in our words; Xu et al., GSPMD, arXiv:2105.04663, section
3.5.
"""

import functools

import jax.numpy as jnp
import pins
import pytest
from pins import named, of


@pytest.fixture(params=["sharding", "shardy"])
def run(request):
    """The pass on a small program, ours and then Shardy's."""
    return functools.partial(pins.run, engine=request.param)


def test_add_then_dot(run):
    a = run(lambda x, y, w: named(x + y, "sum") @ w, ((8, 8), "a b"), ((8, 8), None), ((8, 16), None))
    assert of(a, "x0", "x1", "sum", "x2", "y0") == ["a b", "a b", "a b", "b -", "a -"]


def test_within_a_factor_the_common_head_counts(run):
    a = run(lambda x, y: x + y, ((8, 8), "a? -"), ((8, 8), "b? -"))
    assert of(a, "y0") == "- -"
    a = run(lambda x, y: x + y, ((8, 8), "a b"), ((8, 8), "- a,b,c"))
    assert of(a, "x0", "x1", "y0") == ["a b", "- a,b,c", "a -"]


def test_across_factors_of_equal_size_the_first_array_wins(run):
    a = run(lambda x, y: x + y, ((8, 8), "a ?"), ((8, 8), "? a"))
    assert of(a, "y0") == "a -"


def test_across_factors_the_larger_source_wins(run):
    a = run(lambda x, y: x @ y, ((8, 4), "a,b ?"), ((4, 16), "? a,c"))
    assert of(a, "y0") == "- a,c"


def test_a_real_conflict_frees_the_axis_for_the_other_dim(run):
    a = run(lambda x, y: x + y, ((8, 8), "a? ?"), ((8, 8), "b? a?"))
    assert of(a, "y0") == "- a"


def test_elementwise_ops_come_before_dots(run):
    def f(x, w):
        dot = named(x @ w, "dot")
        return (dot + 1.0) * 2.0

    a = run(f, ((8, 8), "a? ?"), ((8, 8), None), outs=["? a"])
    assert of(a, "dot", "x1", "x0") == ["- a", "- a", "a -"]


def test_ops_on_values_used_twice_wait(run):
    def f(x):
        s = named(jnp.sin(x), "sin")
        p, q = named(s + s, "p"), named(s + 1.0, "q")
        return jnp.cos(p), jnp.cos(q)

    a = run(f, ((8, 8), "a -"), outs=["- a", "- a"])
    assert of(a, "sin", "p", "q") == ["a -", "- a", "- a"]


def test_user_priority_comes_before_everything(run):
    def f(x, y):
        return named(named(x + y, "sum") / y, "div")

    a = run(f, ((8, 8), "a b@4"), ((8, 8), None), outs=["? c?@1"])
    assert of(a, "x0", "x1", "sum", "div", "y0") == ["a b", "a c", "a c", "a c", "a c"]


def test_a_lower_priority_is_used_where_a_higher_one_left_room(run):
    def f(x):
        return named(jnp.sin(x), "mid") * 2.0

    a = run(f, ((8, 8), "a?@1 b@1"), outs=["c ?"])
    assert of(a, "x0", "mid", "y0") == ["a b", "c b", "c b"]


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 7), (3, 9), (2, 1)])
def test_priorities_may_have_gaps(run, first, second):
    a = run(lambda x, y: named(x + y, "sum"), ((8, 8), f"a@{first} -"), ((8, 8), f"b@{second} -"))
    assert of(a, "sum") == ("a -" if first < second else "b -")


def test_equal_priorities_are_one_conflict(run):
    a = run(lambda x, y: named(x + y, "sum"), ((8, 8), "a?@1 -"), ((8, 8), "b?@1 -"))
    assert of(a, "sum") == "- -"


def test_an_axis_of_a_waiting_dim_is_held_for_it(run):
    a = run(lambda x, y: x + y, ((8, 8), "? a@1"), ((8, 8), "a -"))
    assert of(a, "x0", "x1") == ["- a", "a -"]


# One step of Shardy's documentation: three arrays that share factors agree on the longest compatible axes of each


def test_three_arrays_of_one_op(run):
    def f(x, y, z):
        return named(jnp.concatenate([x, y, z], axis=2), "all")

    a = run(f, ((8, 8, 2), "a? ? ?"), ((8, 8, 2), "a,b? ? ?"), ((8, 8, 2), "? c? ?"))
    assert of(a, "x0", "x1", "x2", "all") == ["a,b c -"] * 4
    a = run(f, ((8, 8, 2), "a? ? ?"), ((8, 8, 2), "a,b? c? ?"), ((8, 8, 2), "? b? ?"))
    assert of(a, "all").split()[0] == "a,b"


# GSPMD: two shardings of one array merge where one exists that has both


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        ("a? ?", "? b?", "a b"),
        ("a? ?", "a,b? ?", "a,b -"),
        ("a,b? ?", "a? ?", "a,b -"),
        ("a? b?", "? ?", "a b"),
        ("a? ?", "a? ?", "a -"),
        ("a? b?", "a,c? b?", "a,c b"),
        ("a? ?", "? a?", "a -"),  # one axis for two dims: the first stays
        ("a? ?", "b? ?", "- -"),  # two ways to cut one dim: neither
        ("a,b? ?", "a,c? ?", "a -"),  # as far as they agree
        ("a,b? ?", "b,a? ?", "- -"),
    ],
)
def test_merging(run, first, second, merged):
    a = run(lambda x, y: named(x + y, "sum"), ((8, 8), first), ((8, 8), second))
    assert of(a, "sum") == merged


@pytest.mark.parametrize(("x", "w", "out"), [("a ?", "? b", "a b"), ("a c", "c b", "a b"), ("a,b ?", "? c", "a,b c")])
def test_a_product_is_split_as_its_operands_are(run, x, w, out):
    a = run(lambda x, w: x @ w, ((8, 8), x), ((8, 8), w))
    assert of(a, "y0") == out


def test_completing_again_changes_nothing(run):
    def f(x, w):
        return named(jnp.tanh(x @ w), "h") @ w.T

    first = run(f, ((8, 8), "a ?"), ((8, 8), "? b"))
    texts = of(first, "x0", "x1")
    again = run(f, ((8, 8), texts[0]), ((8, 8), texts[1]))
    assert of(again, "x0", "x1", "h", "y0") == of(first, "x0", "x1", "h", "y0")
