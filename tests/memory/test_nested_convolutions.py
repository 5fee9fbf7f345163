"""Convolutions of one element at a time in the kernels of those that read them, on TPUs."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries


def convolution(x, w, *, is_depthwise=False, stride=1):
    groups = x.shape[-1] if is_depthwise else 1
    dims = ("NHWC", "HWIO", "NHWC")
    made = jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=dims, feature_group_count=groups
    )
    return jax.nn.relu(made)


def program(size, features, wide, window, after, **options):
    """Two convolutions, the first one with some window, and the arrays between them that it stores."""
    is_depthwise = after == "depthwise"
    second = (
        (3, 3, 1, wide) if is_depthwise else (1, 1, wide, features) if after == "pointwise" else (3, 3, wide, features)
    )
    shapes = (64, size, size, features), (window, window, features, wide), second
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return lambda x, v, w: convolution(convolution(x, v), w, is_depthwise=is_depthwise, **options), args


PROGRAMS = {
    "before a depthwise one": (program(28, 128, 256, 1, "depthwise"), 0),
    "before a strided depthwise one": (program(28, 128, 256, 1, "depthwise", stride=2), 0),
    "before another one": (program(14, 512, 512, 1, "pointwise"), 0),
    "before one with a window": (program(28, 128, 256, 1, "window"), 0),
    "of many features": (program(14, 1024, 1024, 1, "pointwise"), 1),
    "of many features, before one with a window": (program(14, 1024, 1024, 1, "window"), 1),
    "with a window": (program(28, 128, 256, 3, "depthwise"), 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_stored_between_convolutions(name):
    check_temporaries(*stored(name), parts=10)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_as_much(name):
    check_compiled_temporaries(*stored(name), parts=10)


def stored(name):
    (f, args), count = PROGRAMS[name]
    x, v, _ = args
    return (f, args, count), 2 * x.size // x.shape[-1] * v.shape[-1]
