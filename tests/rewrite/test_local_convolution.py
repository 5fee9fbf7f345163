"""Grouped convolutions run on each device's shards; values, and what is sent, are those predicted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import quick_compile

import sharding
from sharding import P, cost
from sharding.rewrite.local_convolution import local_convolution

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 12, 8), dtype=np.float32)


def kernel(groups):
    return RNG.standard_normal((3, 8 // groups, 16), dtype=np.float32)


def convolve(x, w, *, groups, stride=1):
    numbers = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(x, w, (stride,), "SAME", dimension_numbers=numbers, feature_group_count=groups)


def squares(x, w, *, groups):
    return jnp.sum(convolve(x, w, groups=groups) ** 2)


@functools.cache
def stepped(groups, spec, differentiate):
    f = functools.partial(squares if differentiate else convolve, groups=groups)
    with sharding.mesh(a=4, b=2):
        step = sharding.jit(jax.grad(f, (0, 1)) if differentiate else f, in_shardings=(P(*spec), P()))
        args = (X, kernel(groups))
        return step.complete(*args), step.lower(*args).compile(quick_compile.OPTIONS)


SPECS = [("a",), (("a", "b"),), (None, None, "a"), ("b", None, "a"), ("b", "a")]


@pytest.mark.parametrize("differentiate", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("groups", [4, 8])
def test_values_are_those_of_one_device(groups, spec, differentiate):
    _, step = stepped(groups, spec, differentiate)
    args = (X, kernel(groups))
    f = functools.partial(squares if differentiate else convolve, groups=groups)
    expected = (jax.grad(f, (0, 1)) if differentiate else f)(*args)
    found = step(*jax.device_put(args, step.input_shardings[0]))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("groups", [4, 8])
@pytest.mark.parametrize("spec", [("a",), (("a", "b"),)], ids=str)
def test_only_the_gradient_of_the_kernel_is_sent(groups, spec):
    completion, step = stepped(groups, spec, True)
    expected = {"all-reduce": (1, kernel(groups).nbytes)}
    assert completion.communication().by_kind() == cost.read_compiled(step).by_kind() == expected


@pytest.mark.parametrize("spec", [("a",), (None, None, "a"), ("b", None, "a")], ids=str)
@pytest.mark.parametrize("groups", [4, 8])
def test_nothing_is_sent_forward(groups, spec):
    completion, step = stepped(groups, spec, False)
    assert not completion.communication() and not cost.read_compiled(step).collectives


def plan(lhs, rhs, out, *, groups=1, batch_groups=1, shapes=((8, 6, 8), (3, 2, 16), (8, 6, 16))):
    numbers = lax.conv_dimension_numbers(*shapes[:2], ("NHC", "HIO", "NHC"))
    params = {"dimension_numbers": numbers, "feature_group_count": groups, "batch_group_count": batch_groups}
    axes = [[(axis,) if axis else () for axis in dims] for dims in (lhs, rhs, out)]
    return local_convolution(params, shapes, axes, {"a": 4, "b": 2})


NONE = (None, None, None)


def test_where_devices_need_no_others():
    found = plan(("a", None, None), NONE, ("a", None, None), groups=4)
    assert found is not None and (found.feature_groups, found.summed) == (4, ())
    found = plan(("b", None, "a"), (None, None, "a"), ("b", None, "a"), groups=4)
    assert found is not None and found.feature_groups == 1
    found = plan((None, None, "a"), (None, "a", None), NONE, batch_groups=4, shapes=((8, 6, 8), (3, 8, 16), (2, 6, 16)))
    assert found is not None and (found.batch_groups, found.summed) == (4, ("a",))


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "groups"),
    [
        (("a", None, None), NONE, ("b", None, None), 4),  # the batch over other axes
        ((None, "b", None), NONE, (None, "b", None), 4),  # halos
        ((None, None, "a"), NONE, (None, None, "a"), 4),  # kernels of other groups
        ((None, None, "a"), (None, None, "a"), (None, None, "a"), 2),  # half a group
        (("a", None, None), NONE, ("a", None, None), 1),  # no groups
        (NONE, NONE, NONE, 4),
    ],
)
def test_where_they_do(lhs, rhs, out, groups):
    assert plan(lhs, rhs, out, groups=groups) is None
