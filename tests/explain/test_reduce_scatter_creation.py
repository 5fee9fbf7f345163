"""Which sums end as reduce-scatters: those whose only use is a slice over the summed axes."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.explain.reduce_scatter_creation import reduce_scattered
from sharding.rewrite.op_strategy import OpStrategies

X, W = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((32, 8), jnp.float32)


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
