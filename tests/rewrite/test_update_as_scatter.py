"""Rows written at a computed position of a sharded dim: no device sends any, and the values are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import quick_compile

import sharding
from sharding import P, cost
from sharding.rewrite.update_as_scatter import scattered_dims
from sharding.spec import Dim, Spec

CACHE = np.arange(4 * 8 * 16, dtype=np.float32).reshape(4, 8, 16)


def write(cache, rows, *starts):
    return jax.lax.dynamic_update_slice(cache, rows, starts)


@functools.cache
def compiled(spec, shape, computed):
    with sharding.mesh(a=2, b=4):
        args = (CACHE, np.zeros(shape, np.float32), *[np.int32(0)] * sum(computed))
        step = sharding.jit(with_starts(computed), in_shardings=(P(*spec), *[None] * (len(args) - 1)))
        return step.complete(*args), step.lower(*args).compile(quick_compile.OPTIONS)


def with_starts(computed):
    """A write whose start is computed in some dims, and 0 in the others."""

    def f(cache, rows, *starts):
        given = iter(starts)
        return write(cache, rows, *(next(given) if c else 0 for c in computed))

    return f


CASES = [
    ((None, "b"), (4, 3, 16), (0, 1, 0)),
    (("a", "b"), (4, 2, 16), (0, 1, 0)),
    (("a", "b"), (2, 3, 5), (1, 1, 1)),
    ((None, ("a", "b"), None), (4, 7, 4), (0, 1, 1)),
    ((None, "b"), (4, 1, 16), (0, 1, 0)),
]


@pytest.mark.parametrize(("spec", "shape", "computed"), CASES)
def test_values_are_those_of_one_device(spec, shape, computed):
    _, step = compiled(spec, shape, computed)
    rows = -1 - np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for start in (0, 1, 3, 7, 50, -9):
        starts = [np.int32(start)] * sum(computed)
        args = jax.device_put((CACHE, rows, *starts), step.input_shardings[0])
        expected = with_starts(computed)(jnp.asarray(CACHE), rows, *starts)
        np.testing.assert_array_equal(step(*args), expected)


@pytest.mark.parametrize(("spec", "shape", "computed"), CASES)
def test_nothing_is_sent(spec, shape, computed):
    completion, step = compiled(spec, shape, computed)
    assert not completion.communication() and not cost.read_compiled(step).collectives


@pytest.mark.parametrize(
    ("spec", "shape", "computed", "expected"),
    [
        ((None, "b", None), (4, 3, 16), (0, 1, 0), (1,)),
        (("a", "b", None), (2, 3, 16), (1, 1, 0), (0, 1)),
        ((None, "b", None), (4, 3, 16), (0, 0, 0), ()),  # at a constant start
        ((None, "b", None), (4, 1, 16), (0, 1, 0), ()),  # one row
        ((None, "b", None), (4, 8, 5), (0, 1, 1), ()),  # all rows of the sharded dim
        ((None, None, "b"), (4, 3, 16), (0, 1, 0), ()),  # sharded along another dim
    ],
)
def test_other_writes_stay_what_they_are(spec, shape, computed, expected):
    starts = [np.int32(0)] * sum(computed)
    eqns = jax.make_jaxpr(with_starts(computed))(CACHE, np.zeros(shape, np.float32), *starts).eqns
    (eqn,) = (e for e in eqns if e.primitive.name == "dynamic_update_slice")
    dims = Spec(dims=tuple(Dim(axes=(axis,) if axis else ()) for axis in spec))
    assert scattered_dims(eqn, dims, {"a": 2, "b": 4}) == expected
