"""Products of 16-bit floats as XLA:CPU's library runs them."""

import jax
import jax.numpy as jnp
import pytest
from support import peak_memory

import sharding
from sharding.memory import usage
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower


def temporary_bytes(f, *args):
    with sharding.mesh({"data": 8}):
        return usage(sharding.jit(f).complete(*args).assignment).temporary_bytes


@peak_memory.newest_jax_only
def test_products_of_16_bits_are_widened_only_where_the_left_operand_is_transposed():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 256), (256, 384)))
    straight = temporary_bytes(lambda x, w: jnp.sum(x @ w), x, w)
    turned = temporary_bytes(lambda x, w: jnp.sum(jnp.einsum("ka,kb->ab", x, x @ w)), x, w)
    assert straight <= 2 * 2048 * 384 + 4 * 2048 < 4 * 2048 * (256 + 384) <= turned


@pytest.mark.parametrize(("size", "is_large"), [(4095, False), (4096, True), (4097, True)])
def test_a_library_reduces_from_4096_elements_on_on_cpus(size, is_large):
    with sharding.mesh({"data": 1}, devices=jax.devices()[:1]):
        assignment = sharding.jit(lambda x: x.sum()).complete(peak_memory.floats(size)).assignment
    for platform, traits in TRAITS.items():
        (one,) = [one for one in lower(assignment, traits).body.instructions if one.name == "reduce_sum"]
        assert one.is_library_reduction == (is_large and platform == "cpu")


def test_a_matrix_is_read_transposed_and_other_dims_are_moved():
    def moved_bytes(equation, *shapes):
        args = [peak_memory.floats(*shape) for shape in shapes]
        return temporary_bytes(lambda x, y: jnp.einsum(equation, x, y), *args)

    assert moved_bytes("ka,kb->ab", (64, 32), (64, 32)) == 0
    assert moved_bytes("kla,klb->ab", (8, 8, 32), (8, 8, 32)) == 8 * 8 * 32 * 4
    assert moved_bytes("kla,klb->ab", (2, 1, 32), (2, 1, 32)) == 2 * 32 * 4
    assert moved_bytes("kla,klb->ab", (1, 1, 32), (1, 1, 32)) == 0  # only dims of size 1 move
