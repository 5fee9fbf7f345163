"""Convolutions as XLA:GPU hands them to cuDNN, with the shapes that it was seen to compile."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sharding
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower

IMAGES = jax.ShapeDtypeStruct((8, 32, 32, 16), jnp.float32)
DIMS = ("NHWC", "HWIO", "NHWC")


def kernel(size, features=16):
    return jax.ShapeDtypeStruct((size, size, features, 32), jnp.float32)


def convolved(stride, **options):
    return lambda x, w: lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=DIMS, **options)


def upsampled(x, w):
    return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=DIMS)


def gradients(f):
    return jax.grad(lambda x, w: jnp.sin(f(x, w)).sum(), (0, 1))


def instructions(f, *args):
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        return lower(sharding.jit(f).complete(*args).assignment, TRAITS["gpu"]).body.live_instructions()


def sizes(found, name):
    return [one.num_elements for one in found if one.name == name]


@pytest.mark.parametrize(
    ("f", "w", "padded"),
    [
        (convolved(1), kernel(3), []),
        (convolved(2), kernel(4), []),
        (convolved(2), kernel(3), [33 * 33]),
        (convolved(1), kernel(2), [33 * 33]),
        (convolved(1, feature_group_count=2), kernel(3, 8), []),
        (convolved(1, rhs_dilation=(2, 2)), kernel(3), []),
        (upsampled, kernel(4), [67 * 67]),
    ],
)
def test_uneven_or_dilated_inputs_are_padded_in_memory(f, w, padded):
    assert sizes(instructions(f, IMAGES, w), "pad") == [8 * 16 * n for n in padded]


def test_a_kernel_is_stored_with_output_channels_first():
    found = instructions(convolved(1), IMAGES, kernel(3))
    (conv,) = (one for one in found if one.name == "conv_general_dilated")
    assert conv.operands[1].name == "transpose" and conv.operands[1].shape == (32, 3, 3, 16)


def test_gradients_of_an_even_convolution_copy_kernels_only():
    found = instructions(gradients(convolved(2)), IMAGES, kernel(4))
    assert sizes(found, "pad") == []
    forward, *backward = (one for one in found if one.name == "conv_general_dilated")
    for_input, for_kernel = sorted(backward, key=lambda one: -one.num_elements)
    assert forward.operands[1] is for_input.operands[1]
    assert for_kernel.shape == (32, 4, 4, 16) and for_input.shape == IMAGES.shape


def test_gradients_of_an_uneven_one_read_the_padded_input_and_cut_its_gradient():
    found = instructions(gradients(convolved(2)), IMAGES, kernel(3))
    assert sizes(found, "pad") == [8 * 33 * 33 * 16]
    assert max(sizes(found, "conv_general_dilated")) == 8 * 33 * 33 * 16
    assert 8 * 32 * 32 * 16 in sizes(found, "slice")


def test_the_gradient_of_a_dilated_input_reads_it_without_dilation():
    """Input and kernel exchanged: one of them may be dilated for nothing."""
    found = instructions(gradients(upsampled), IMAGES, kernel(4))
    assert sizes(found, "pad") == [8 * 67 * 67 * 16]


def test_one_without_spatial_dims_or_elements_is_forward():
    def product(x, w):
        return lax.conv_general_dilated(x, w, (), "VALID", dimension_numbers=("NC", "IO", "NC"))

    x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32)
    (conv,) = (one for one in instructions(product, x, w) if one.name == "conv_general_dilated")
    assert conv.shape == (8, 32)
    empty = jax.ShapeDtypeStruct((8, 0, 0, 16), jnp.float32)
    found = instructions(lambda x, w: convolved(1)(x, w), empty, kernel(3))
    assert sizes(found, "conv_general_dilated") == [0]
