"""Sums of which every use takes a slice are reduce-scatters."""

import jax
import jax.numpy as jnp
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P, annotate
from sharding.explain.reduce_scatter_creation import reduce_scattered
from sharding.rewrite.op_strategy import OpStrategies

X, W = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((32, 8), jnp.float32)


def gradient(x, g):
    return x.T @ g


def gradients_added(x, g):
    return (2 * x).T @ jnp.sin(g) + x.T @ g


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("f", [gradient, gradients_added])
def test_a_sum_of_which_each_device_keeps_a_part(f, backend, described):
    args = jax.ShapeDtypeStruct((512, 1024), "float32"), jax.ShapeDtypeStruct((512, 512), "float32")
    specs = {"in_shardings": P("data"), "out_shardings": P("data")}

    def step(x, g):
        return annotate(f(x, g), P())

    predicted, compiled = predicted_and_compiled(step, args, backend, described, {"data": 2, "model": 4}, **specs)
    assert predicted == compiled


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize(
    ("batch", "spec"),
    [
        ("ab", P("a", "b")),
        ("ab", P(("b", "a"))),
        ("abc", P("a", ("b", "c"))),
        ("abc", P(("b", "a"))),
        ("abc", P(None, ("c", "b", "a"))),
        ("abc", P(None, ("a", "b", "c"))),
        ("bc", P("c", "b")),
        ("ba", P(("b", "a"))),
        ("cba", P(("c", "b", "a"))),
    ],
)
def test_a_sum_is_scattered_along_one_dim_in_the_order_of_its_groups(batch, spec, backend, described):
    """Else it is an all-reduce."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)

    args = jax.ShapeDtypeStruct((1024, 2048), "float32"), jax.ShapeDtypeStruct((8192, 1024), "float32")
    sizes, specs = {"a": 2, "b": 2, "c": 2}, (spec, P(tuple(batch)))
    predicted, compiled = predicted_and_compiled(step, args, backend, described, sizes, in_shardings=specs)
    assert predicted == compiled


@pytest.mark.parametrize(
    "f, expected",
    [
        (lambda z, y: z + y, {"a"}),
        (lambda z, y: jnp.sort(z, axis=1) + y, {"a"}),
        (lambda z, y: jnp.sort(z, axis=0) + y, set()),  # its result alone is sliced
        (lambda z, y: (z + y, z[:1]), set()),  # the whole sum is read, too
    ],
    ids=["slice", "sorted rows", "sorted columns", "read whole"],
)
def test_a_sum_that_is_only_sliced(f, expected):
    with sharding.mesh(devices=8, a=8):
        specs = (P(None, "a"), P("a"), P("a"))
        step = sharding.jit(lambda x, w, y: f(sharding.annotate(x @ w, P(None, None)), y), in_shardings=specs)
        c = step.complete(X, W, jax.ShapeDtypeStruct((16, 8), jnp.float32))
    assignment, strategies = c.assignment, OpStrategies(c.assignment)
    found = reduce_scattered(
        assignment.graph,
        assignment.specs,
        lambda op: zip(op.operands, strategies.of(op).operand_steps, strict=True) if op.rule is not None else (),
        assignment.sizes,
    )
    (product,) = [op for op in assignment.graph.ops if op.name == "dot_general"]
    assert found.get(product.results[0], frozenset()) == expected
