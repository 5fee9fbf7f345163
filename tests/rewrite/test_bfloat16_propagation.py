"""Float32 values that XLA:TPU keeps in bfloat16, as only products at default precision read them."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.rewrite.bfloat16_propagation import rounded_values

X, W = jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((256, 256), "float32")


def read_by_a_product(x, w):
    return jax.nn.relu(jnp.sin(x)).T.reshape(256, 64).T @ w


def returned_too(x, w):
    y = jnp.sin(x)
    return y @ w, y


def at_highest_precision(x, w):
    return jnp.matmul(jnp.sin(x), w, precision="highest")


def with_a_vector(x, w):
    return jnp.sin(x[0]) @ w


def converted(x, w):
    return jnp.sin(x).astype(jnp.bfloat16) * w[0, 0].astype(jnp.bfloat16)


def carried(x, w):
    def body(carry, _):
        y, total = carry
        return (jnp.roll(y, 1, 0), total + y @ w), None

    return jax.lax.scan(body, (jnp.sin(x), x), None, length=4)[0][1]


def completed(f):
    with sharding.mesh(model=8):
        return sharding.jit(f).complete(X, W)


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (read_by_a_product, True),
        (returned_too, False),
        (at_highest_precision, False),
        (with_a_vector, False),
        (converted, True),
        (carried, True),
    ],
)
def test_is_rounded(f, expected):
    graph = completed(f).assignment.graph
    (sine,) = (op for op in graph.ops if op.name == "sin")
    assert (sine.results[0] in rounded_values(graph)) == expected


def test_takes_half_the_memory_on_tpu():
    def bytes_of_sine(platform):
        program = lower(completed(read_by_a_product).assignment, TRAITS[platform])
        return [one.num_bytes for one in program.body.instructions if one.name == "sin"]

    assert bytes_of_sine("gpu") == [2 * size for size in bytes_of_sine("tpu")] == [64 * 256 * 4]
