"""What XLA:TPU computes in the kernel of a product after it, and what in the kernels that read that, such as itself."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, floats

ROWS, SIZE, WIDE = 65536, 1024, 1024
X, W, V, H = floats(ROWS, SIZE), floats(SIZE, WIDE), floats(WIDE, SIZE), floats(ROWS, WIDE)
WHOLE = 2 * ROWS * WIDE
"""Bytes of a product's result in 16 bits."""


def gradient(activation):
    """Of a cotangent and what the activation reads."""
    return lambda g, z: jax.vjp(activation, z)[1](g)[0]


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def for_products(f):
    """Two products of a function of a product and another array: those of a layer's gradients."""
    return lambda x, w, h, v: (lambda e: (x.T @ e, e @ v))(f(x @ w, h))


def and_a_bias(f):
    """Its sum, too: a bias's gradient."""
    return lambda x, w, h, v: (lambda e: (x.T @ e, e @ v, e.sum(0)))(f(x @ w, h))


def of_arguments(build, f):
    """The same, of an argument instead of a product."""
    return lambda x, q, h, v: build(lambda _, h: f(q, h))(x, v.T, h, v)


ARGUMENTS = (X, W, H, V)
NARROW = (floats(ROWS, SIZE // 2), floats(SIZE // 2, WIDE), H, floats(WIDE, SIZE // 2))
GIVEN = (X, H, H, V)
PROGRAMS = {
    "used once": (for_products(lambda y, h: y * (1 - h * h)), ARGUMENTS, 1),
    "used once, beside much else": (for_products(lambda y, h: y * jax.nn.gelu(h)), ARGUMENTS, 1),
    "used twice": (for_products(lambda y, _: y * (y + 1)), ARGUMENTS, 2),
    "used twice, from less": (for_products(lambda y, _: y * (y + 1)), NARROW, 1),
    "GELU": (for_products(lambda y, _: jax.nn.gelu(y)), ARGUMENTS, 2),
    "used twice after a tanh": (for_products(lambda y, _: (lambda t: t * (t + 1))(jnp.tanh(y))), ARGUMENTS, 1),
    "gradient of SiLU": (for_products(gradient(jax.nn.silu)), ARGUMENTS, 2),
    "gradient of SiLU, a bias": (and_a_bias(gradient(jax.nn.silu)), ARGUMENTS, 1),
    "gradient of a cube, a bias": (and_a_bias(gradient(lambda x: x * x * x)), ARGUMENTS, 2),
    "gradient of the exact GELU": (for_products(gradient(exact_gelu)), ARGUMENTS, 1),
    "two arguments": (of_arguments(for_products, lambda q, h: q * (h + q)), GIVEN, 0),
    "arguments, gradient of SiLU": (of_arguments(for_products, gradient(jax.nn.silu)), GIVEN, 0),
    "arguments, gradient of SiLU, a bias": (of_arguments(and_a_bias, gradient(jax.nn.silu)), GIVEN, 1),
    "arguments, gradient of a cube, a bias": (of_arguments(and_a_bias, gradient(lambda x: x * x * x)), GIVEN, 0),
    "arguments, gradient of the exact GELU": (of_arguments(for_products, gradient(exact_gelu)), GIVEN, 1),
    "a sine": (of_arguments(for_products, lambda q, _: jnp.sin(q)), GIVEN, 1),
}
"""A program, its arguments, and how many results of the large product, in 16 bits, it stores."""


def pair(second, summed, columns, made, after=lambda y, h: y * (1 - h * h)):
    """A product of a function of a product, which nothing else reads, and their arguments."""
    x, u = floats(ROWS, made), floats(columns, made)
    args = (floats(ROWS, summed), floats(summed, columns), floats(ROWS, columns), u if second == "output" else x)
    return (lambda y, v, h, x: SECOND[second](after(y @ v, h), x)), args


def chain(y, v, h, x):
    """Three products, one after the other."""
    return x.T @ (((y @ v) * h @ v) * h)


SECOND = {"output": lambda e, u: e @ u, "gradient": lambda e, x: x.T @ e}
"""What reads a product's result: the next layer, or the gradient of the weights before it."""
HALF = floats(ROWS, 512)
NESTED = {
    "output, narrow": (*pair("output", 512, 512, 512), 0),
    "output, wider": (*pair("output", 1024, 1024, 512), 0),
    "output, too wide": (*pair("output", 1024, 1024, 1024), 2 * ROWS * 1024),
    "output, no function": (*pair("output", 256, 768, 1024, after=lambda y, _: y), 0),
    "gradient, wide": (*pair("gradient", 1024, 1024, 1024), 0),
    "gradient, too wide": (*pair("gradient", 1536, 1024, 1024), 2 * ROWS * 1024),
    "gradient, classes": (*pair("gradient", 10, 512, 512), 0),
    "gradient, read twice": (*pair("gradient", 512, 512, 512, after=lambda y, _: y * (1 - y)), 0),
    "gradient, read twice, too wide": (
        *pair("gradient", 1024, 1024, 1024, after=lambda y, _: y * jnp.tanh(y)),
        4 * ROWS * 1024,
    ),
    "few summed": (*pair("output", 16, 4096, 2048), 0),
    "sum of the output": ((lambda y, v, h, x: (((y @ v) * h) @ x).sum()), pair("output", 512, 512, 512)[1], 0),
    "three products": (chain, (HALF, floats(512, 512), HALF, HALF), 2 * ROWS * 512),
}
"""A program, its arguments, and the bytes of what it stores between two products."""


@pytest.mark.parametrize("name", NESTED)
def test_a_product_inside_of_another_one(name):
    f, args, stored = NESTED[name]
    check_temporaries((f, args, stored / WHOLE), WHOLE)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", NESTED)
def test_the_compiler_for_tpus_computes_it_there(name):
    f, args, stored = NESTED[name]
    check_compiled_temporaries((f, args, stored / WHOLE), WHOLE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_stored_of_what_follows_a_product(name):
    check_temporaries(PROGRAMS[name], WHOLE)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_as_much_of_it(name):
    check_compiled_temporaries(PROGRAMS[name], WHOLE)
