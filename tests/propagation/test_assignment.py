"""An assignment as it runs: what is limited beside the inferred specs."""

import jax.numpy as jnp
import pytest
from jax import lax
from support.annotated_programs import named, propagate, specs_of


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
