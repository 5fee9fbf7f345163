"""The types of what matrix products read."""

import jax
import pytest

import sharding
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower


@pytest.mark.parametrize(
    ("left", "right", "platforms"),
    [
        ("float32", "complex64", {"cpu", "gpu", "tpu"}),
        ("bfloat16", "float32", {"cpu", "gpu"}),
        ("float8_e4m3fn", "float8_e5m2", set()),
        ("float32", "float32", set()),
    ],
)
def test_operands_of_two_types_are_converted_as_jax_does(left, right, platforms):
    def product(x, y):
        out = jax.numpy.result_type(x, y) if "float8" not in left else "float32"
        return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=out)

    x, y = jax.ShapeDtypeStruct((64, 32), left), jax.ShapeDtypeStruct((32, 64), right)
    with sharding.mesh({"data": 8}):
        assignment = sharding.jit(product).complete(x, y).assignment
    converted = {
        platform
        for platform in TRAITS
        if any("convert" in one.name for one in lower(assignment, TRAITS[platform]).body.instructions)
    }
    assert converted == platforms
