"""Partial sums: produced by sharded contractions, kept by linear ops, reduced for the first op that needs the sum."""

import jax
import jax.numpy as jnp
import pytest
from support.propagation_programs import PROGRAMS, floats, grads_of

import sharding
from sharding import P, annotate
from sharding.cost import read_compiled

SIZES = {"data": 2, "tensor": 4}
X, W1, W2 = floats(8, 16), floats(16, 32), floats(32, 16)


def sums(f, *shapes, specs):
    with sharding.mesh(SIZES):
        c = sharding.jit(f, in_shardings=specs).complete(*shapes)
    return [(p.until, p.axes, p.num_bytes, p.until_bytes) for p in c.unreduced]


MEGATRON = (None, P(None, "tensor"), P("tensor"))


@pytest.mark.parametrize(
    "f, expected",
    [
        (lambda x, w1, w2: jnp.tanh((x @ w1) @ w2), [("tanh", 512, 512)]),
        (lambda x, w1, w2: (x @ w1) @ w2 + x, [("add", 512, 512)]),
        (lambda x, w1, w2: jnp.exp(((x @ w1) @ w2 * 2).T.reshape(4, 32)[:2]), [("exp", 512, 256)]),
        (lambda x, w1, w2: jnp.sum((x @ w1) @ w2), [("returned", 512, 4)]),
        (lambda x, w1, w2: jnp.sin((x @ w1) @ w2 + jnp.cos(x @ w1) @ w2), [("sin", 512, 512)] * 2),
        (lambda x, w1, w2: jax.nn.relu((x @ w1) @ w2) @ w1, [("max", 512, 512)]),
        (lambda x, w1, w2: x @ w1, []),
        (lambda x, w1, w2: (x @ w1) / jnp.sum((x @ w1) ** 2), [("div", 4, 4)]),
    ],
    ids=["nonlinear", "residual", "smaller later", "returned", "both", "relu", "none", "denominator"],
)
def test_where_sums_begin_and_end(f, expected):
    assert sums(f, X, W1, W2, specs=MEGATRON) == [(until, ("tensor",), a, b) for until, a, b in expected]


def test_a_sum_that_is_also_sharded_is_reduce_scattered():
    def f(x, w1, w2):
        return annotate((x @ w1) @ w2, P("tensor"))

    (found,) = sums(f, X, W1, W2, specs=MEGATRON)
    assert found[:2] == ("sharded", ("tensor",))


def test_a_lookup_in_a_sharded_table_is_a_partial_sum():
    def f(table, rows):
        return jnp.tanh(table[rows])

    found = sums(f, floats(32, 8), jax.ShapeDtypeStruct((6,), jnp.int32), specs=(P("tensor"), None))
    assert [until for until, *_ in found] == ["tanh"]


def test_sums_of_the_batch_are_those_of_the_gradients():
    def f(x, w1, w2):
        return jnp.tanh(x @ w1) @ w2

    with sharding.mesh(SIZES):
        c = sharding.jit(grads_of(f), in_shardings=(P("data"), None, None)).complete(X, W1, W2)
    assert {p.axes for p in c.unreduced} == {("data",)}
    assert sorted(p.num_bytes for p in c.unreduced)[-2:] == [2048, 2048]  # of w1 and w2
    assert "is a partial sum over data" in str(c.unreduced[0])
    assert "propagation_programs.py" in str(c.unreduced[0])


def test_as_many_as_the_compiled_program_has_reductions():
    """Two layers: one sum over `tensor` each, forward."""

    def f(x, w1, w2):
        for _ in range(2):
            x = x + jnp.tanh(x @ w1) @ w2
        return x

    with sharding.mesh(SIZES):
        step = sharding.jit(f, in_shardings=(P("data"), P(None, "tensor"), P("tensor")))
        found = step.complete(X, W1, W2).unreduced
        compiled = read_compiled(step.lower(X, W1, W2).compile())
    assert len(found) == 2 == len(compiled.collectives)


@pytest.mark.filterwarnings("ignore:.*XLA pads it")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program(name):
    fn, shapes, specs = PROGRAMS[name]
    specs = [*specs, *[None] * (len(shapes) - len(specs))]

    def annotated(*args):
        return fn(*[x if s is None else annotate(x, s) for x, s in zip(args, specs, strict=True)])

    with sharding.mesh(SIZES, devices=8):
        c = sharding.jit(annotated).complete(*shapes)
    for p in c.unreduced:
        assert p.axes and p.num_bytes > 0 and p.until and str(p)
