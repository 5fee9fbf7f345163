"""Fused kernels by hand, and of products on accelerators."""

import random

import jax
import jax.numpy as jnp
import pytest
from support.fused_kernels import argument, by_root, check_all_computed, make

import sharding
from sharding import P
from sharding.memory.compiler_traits import TRAITS, CompilerTraits
from sharding.memory.device_program import lower
from sharding.memory.fusion import fuse
from sharding.memory.instruction import Body


def stored(*instructions, **options):
    """Name of each stored instruction but arguments -> those computed inside its kernel."""
    kernels = fuse(instructions, [instructions[-1]], **options)
    return by_root(kernels)


def test_a_chain_is_one_kernel():
    x = argument()
    a = make("a", x, elementwise=True)
    b = make("b", a, elementwise=True)
    assert stored(x, a, b) == {"b": ["a"]}


def test_an_unfusible_op_reads_stored_operands():
    x = argument()
    a = make("a", x, elementwise=True)
    dot = make("dot", a, x, role="unfusible")
    assert stored(x, a, dot) == {"a": [], "dot": []}


def test_a_cheap_op_is_duplicated_and_an_expensive_one_stored():
    for expensive, expected in ((False, {"b": ["a"], "c": ["a"]}), (True, {"a": [], "b": [], "c": []})):
        x = argument()
        a = make("a", x, elementwise=True, expensive=expensive)
        b, c = make("b", a, elementwise=True), make("c", a, elementwise=True)
        dot = make("dot", b, c, role="unfusible")
        found = stored(x, a, b, c, dot)
        assert found.pop("dot") == [] and found == expected


@pytest.mark.parametrize(("size", "is_stored"), [(31, True), (32, False), (33, False)])
def test_a_sum_is_stored_where_that_moves_less_than_computing_it_in_each_of_three_consumers(size, is_stored):
    """Three reads of 64 elements, against one of 64, a write and three reads of the result."""
    wide = [make("x", shape=(32,), role="argument"), make("y", shape=(32,), role="argument")]
    a = make("a", *wide, shape=(size,))
    ends = [make(name, a, shape=(size,)) for name in "bcd"]
    found = stored(*wide, a, *ends, make("dot", *ends, role="unfusible"))
    assert ("a" in found) == is_stored
    assert all(found[name] == ([] if is_stored else ["a"]) for name in "bcd")


def test_an_expensive_op_read_by_one_kernel_is_fused():
    x = argument()
    a = make("a", x, elementwise=True, expensive=True)
    b = make("b", a, elementwise=True)
    c = make("c", a, b, elementwise=True)
    assert stored(x, a, b, c) == {"c": ["a", "b"]}


def test_a_chain_of_sums_is_not_read_again_by_every_consumer():
    arguments = [argument() for _ in range(8)]
    found, total, ends = [*arguments], arguments[0], []
    for x in arguments[1:]:
        total = make("add", total, x, elementwise=True)
        ends.append(make("dot", make("norm", total, elementwise=True), role="unfusible"))
        found += [total, ends[-1].operands[0], ends[-1]]
    end = make("end", *ends, role="unfusible")
    kernels = fuse([*found, end], [end])
    assert max(len(k.operands) for k in kernels if k.root is not end) <= 4


@pytest.mark.parametrize(
    ("elements", "found"), [(2**12, {"term": [], "reduce_sum": []}), (2**11, {"reduce_sum": ["term"]})]
)
def test_what_a_block_of_threads_reduces_is_stored_for_it(elements, found):
    """It would compute it more slowly than all blocks do."""
    x = argument()
    term = make("term", x, elementwise=True)
    total = make("reduce_sum", term, shape=(1,))
    assert stored(x, term, total, traits=CompilerTraits(block_elements=elements)) == found


def test_a_tpu_computes_an_activation_in_the_products_that_read_it():
    def loss(x, up, down):
        return jnp.mean((jax.nn.gelu(x @ up) @ down) ** 2)

    x, up, down = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 64), (64, 256), (256, 64)))
    with sharding.mesh({"data": 8}):
        completed = sharding.jit(jax.grad(loss, argnums=(1, 2)), in_shardings=(P("data"), None, None))
        assignment = completed.complete(x, up, down).assignment
    computed = {}
    for platform in ("gpu", "tpu"):
        body = lower(assignment, TRAITS[platform]).body
        names = [[m.name for m in k.members] for k in fuse(body.live_instructions(), body.results)]
        computed[platform] = sum("tanh" in inside for inside in names if "dot_general" in inside)
    assert computed["gpu"] == 0
    assert computed["tpu"] == 3  # the next product, the gradient of its weights, and that of the activation


@pytest.mark.parametrize("seed", range(40))
def test_kernels_of_a_random_program_compute_everything_that_they_need(seed):
    r = random.Random(seed)
    made = [argument() for _ in range(3)]
    for k in range(30):
        role = r.choice(["fusible", "fusible", "fusible", "unfusible", "bitcast"])
        operands = r.sample(made[-8:], r.choice([1, 2, 2]) if role != "bitcast" else 1)
        made.append(make(f"i{k}", *operands, role=role, elementwise=True, expensive=r.random() < 0.3))
    results = r.sample(made[-6:], 2)
    alive = Body(made, made[:3], results).live_instructions()
    check_all_computed(fuse(alive, results), alive, results)


def test_a_product_is_computed_with_the_elementwise_ops_after_it():
    """Up to what several read; of two products in a row, the first's kernel computes what is between them."""
    x = argument()
    first = make("first", x, x, role="unfusible", fuses_operands=True)
    then, last = make("then", first, elementwise=True), None
    last = make("last", then, elementwise=True)
    second = make("second", last, x, role="unfusible", fuses_operands=True)
    moved = make("moved", second, elementwise=True)
    assert stored(x, first, then, last, second, moved) == {
        "last": ["first", "then"],
        "moved": ["second"],
    }


def test_a_product_is_stored_for_several_readers():
    x = argument()
    dot = make("dot", x, x, role="unfusible", fuses_operands=True)
    readers = [make(f"reader{k}", dot, elementwise=True) for k in range(2)]
    assert stored(x, dot, *readers, make("end", *readers, role="unfusible"))["dot"] == []
