"""Products of 16-bit floats as XLA:CPU's library runs them."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from support import peak_memory

import sharding
from sharding.memory import usage
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.cpu_fusion import fuse_on_cpu
from sharding.memory.device_program import lower


def temporary_bytes(f, *args):
    with sharding.mesh({"data": 8}):
        return usage(sharding.jit(f).complete(*args).assignment).temporary_bytes


def lowered(f, *args, **options):
    """The text of a compiled program, and the predicted instructions of one device."""
    with sharding.mesh({"data": 8}):
        jitted = sharding.jit(f, **options)
        body = lower(jitted.complete(*args).assignment, TRAITS["cpu"]).body
        return jitted.lower(*args).compile().as_text(), body.live_instructions()


def arrays(text):
    """Type and number of elements of each array that a compiled program computes and stores."""
    entry = text.partition("\nENTRY")[2]
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* (?!parameter|bitcast|tuple)", entry)
    return [(dtype, math.prod(map(int, filter(None, dims.split(","))))) for dtype, dims in found]


@peak_memory.newest_jax_only
def test_products_of_16_bits_are_widened_only_where_the_left_operand_is_transposed():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 256), (256, 384)))
    straight = temporary_bytes(lambda x, w: jnp.sum(x @ w), x, w)
    turned = temporary_bytes(lambda x, w: jnp.sum(jnp.einsum("ka,kb->ab", x, x @ w)), x, w)
    assert straight <= 2 * 2048 * 384 + 4 * 2048 < 4 * 2048 * (256 + 384) <= turned


def swapped(x):
    return x.transpose(0, 2, 1, 3)


def scores(q, k):
    return jnp.einsum("bgsd,bgtd->bgst", q, k)


HEADS, ROWS = (8, 16, 32, 64), (8, 32, 16, 64)
"""[batch, heads, length, size], and heads and length swapped."""
PRODUCTS = {
    "heads first": (scores, HEADS, HEADS),
    "heads moved": (lambda q, k: scores(swapped(q), k), ROWS, HEADS),
    "both moved": (lambda q, k: scores(swapped(q), swapped(k)), ROWS, ROWS),
    "moved, then scaled": (lambda q, k: scores(2 * swapped(q), k), ROWS, HEADS),
    "moved by einsum": (lambda q, k: jnp.einsum("bsgd,btgd->bgst", q, k), ROWS, ROWS),
    "matrix transposed": (lambda x, w: x @ w.T, (1024, 256), (512, 256)),
    "rows of a batch": (lambda x, w: x @ w.T, (4, 256, 256), (512, 256)),
    "a vector": (lambda x, w: x @ w, (4096, 256), (256, 1)),
    "in float32": (lambda x, w: jnp.dot(x, w.T, preferred_element_type="float32"), (1024, 256), (512, 256)),
}


@peak_memory.newest_jax_only
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_read_16_bits_where_those_of_the_compiled_program_do(name):
    """XLA:CPU widens operands that the program transposes, tiny matrices and vectors."""
    product, *shapes = PRODUCTS[name]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text, instructions = lowered(product, *args)
    (dot,) = [one for one in instructions if one.name == "dot_general"]
    (body,) = [part for part in text.split("\n\n") if " dot(" in part]
    operands = re.search(r" dot\((%\S+), (%\S+)\)", body).groups()
    widths = {"bf16": 2, "f32": 4}
    found = [widths[re.search(re.escape(x) + r" = (\w+)\[", body)[1]] for x in operands]
    assert [x.itemsize for x in dot.operands] == found


@peak_memory.newest_jax_only
@pytest.mark.parametrize("dim", range(3))
def test_an_all_gather_along_a_later_dim_is_transposed(dim):
    spec = jax.P(*("data" if d == dim else None for d in range(3)))

    def f(x, w):
        return jnp.einsum("abc,cd->abd", jax.lax.with_sharding_constraint(jnp.tanh(x), jax.P()), w)

    args = peak_memory.floats(64, 64, 64), peak_memory.floats(64, 32)
    text, instructions = lowered(f, *args, in_shardings=(spec, jax.P()), out_shardings=jax.P())
    whole = [x for x in arrays(text) if x == ("f32", 64**3)]
    kernels = fuse_on_cpu(instructions, instructions[-1:])
    assert sum(k.root.num_elements == 64**3 for k in kernels) == len(whole) == (1 if dim == 0 else 2)


@peak_memory.newest_jax_only
@pytest.mark.parametrize("is_constrained", [False, True])
def test_a_constrained_value_stays_rounded(is_constrained):
    """XLA drops a rounding to 16 bits and back, unless a sharding constraint stands between."""
    rows = jax.P("data")

    def f(x, y):
        z = x + y
        z = jax.lax.with_sharding_constraint(z, rows) if is_constrained else z
        wide = z.astype(jnp.float32)
        return wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True)), z + y

    x = jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16)
    text, instructions = lowered(f, x, x, in_shardings=(rows, rows), out_shardings=(rows, rows))
    halves = [a for a in arrays(text) if a == ("bf16", 8 * 32 * 128)]
    results = [one for one in instructions if one.name == "mul" or one.itemsize == 2][-2:]
    kernels = fuse_on_cpu(instructions, results)
    stored = [k.root for k in kernels if k.root.role != "argument" and k.root.itemsize == 2]
    assert len(stored) == len(halves) == 1 + is_constrained


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


def test_a_transposed_constant_is_no_transposed_array():
    def rows(x):
        return jnp.einsum("ijk,kij->i", jnp.transpose(jax.lax.broadcasted_iota(x.dtype, (4, 2, 4), 2), (0, 2, 1)), x)

    assert temporary_bytes(rows, peak_memory.floats(2, 4, 4)) == temporary_bytes(
        lambda x: jnp.einsum("ijk,kij->i", jnp.zeros((4, 4, 2)), x), peak_memory.floats(2, 4, 4)
    )


TURNED = {
    "for one product": lambda x, w: jnp.exp(x).T @ w,
    "for two": lambda x, w: ((y := jnp.exp(x).T) @ w, y @ y.T),
    "of a batch": lambda x, w: jnp.exp(x).reshape(8, 256, 64).swapaxes(1, 2) @ w.reshape(8, 256, 32),
    "whose batch moves": lambda x, w: jnp.exp(x).reshape(256, 8, 64).transpose(1, 2, 0) @ w.reshape(8, 256, 32),
    "of a row": lambda x, w: (jnp.exp(x)[:, :1].T + 1) @ w,
}


@peak_memory.newest_jax_only
@pytest.mark.parametrize("name", TURNED)
def test_a_product_reads_what_the_program_transposes_before_that(name):
    args = peak_memory.floats(2048, 64), peak_memory.floats(2048, 32)
    found = peak_memory.peak_of(TURNED[name], *args, sizes={"data": 8})
    assert found.ratio == pytest.approx(1, abs=0.01)
