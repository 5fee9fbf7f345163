"""Products that XLA:GPU merges."""

import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.instruction import Body, Instruction
from sharding.memory.product_merging import MOST_BYTES, merge_products

N = 256
ARRAY = jax.ShapeDtypeStruct((N, N), "float32")
PRODUCT = SimpleNamespace(params={"dimension_numbers": (((1,), (0,)), ((), ()))})


def queries_keys_values(x, q, k, v):
    return jnp.tanh(x @ q) + jnp.sin(x @ k) + jnp.cos(x @ v)


def chain(x, q, k, v):
    return x @ q @ k @ v


def scanned(x, q, k, v):
    return jax.lax.scan(lambda c, _: (queries_keys_values(c, q, k, v), None), x, None, length=3)[0]


def products(f, platform):
    with sharding.mesh({"data": 8}):
        completed = sharding.jit(f, in_shardings=(P("data"), None, None, None)).complete(*[ARRAY] * 4)
    body = lower(completed.assignment, TRAITS[platform]).body
    bodies = [body, *(inner for one in body.live_instructions() for inner in one.bodies)]
    return [one for b in bodies for one in b.live_instructions() if one.name == "dot_general"]


@pytest.mark.parametrize("f", [queries_keys_values, scanned])
def test_products_of_one_array_are_one_on_gpus_only(f):
    (one,) = products(f, "gpu")
    assert one.num_bytes == 3 * N * N * 4 / 8
    assert len(products(f, "tpu")) == len(products(f, "cpu")) == 3


def test_products_that_depend_on_each_other_stay_apart():
    assert len(products(chain, "gpu")) == 3


@pytest.mark.parametrize(("large", "count"), [(1, 1), (2, 2)])
def test_one_of_two_products_has_to_be_small(large, count):
    sizes = [MOST_BYTES if k < large else 4 for k in range(2)]
    x, *weights = (Instruction("argument", "argument", [], (1,), 4) for _ in range(3))
    made = [
        Instruction("dot_general", "unfusible", [x, w], (n // 4,), n, eqn=PRODUCT)
        for w, n in zip(weights, sizes, strict=True)
    ]
    body = Body([x, *weights, *made], [x, *weights], made)
    merge_products(body)
    assert [one.name for one in body.live_instructions()].count("dot_general") == count


@pytest.mark.parametrize("seed", range(30))
def test_merging_a_random_program_keeps_what_it_computes_and_its_order(seed):
    r = random.Random(seed)
    made = [Instruction("argument", "argument", [], (1,), 4) for _ in range(4)]
    for _ in range(40):
        name = r.choice(["dot_general", "add"])
        role = "unfusible" if name == "dot_general" else "fusible"
        size = r.choice([4, 2 * MOST_BYTES])
        made.append(Instruction(name, role, r.sample(made[-8:], 2), (size // 4,), size, eqn=PRODUCT))
    reads = {one: list(one.operands) for one in made}
    results = made[-3:]
    body = Body(list(made), made[:4], results)
    merge_products(body)
    done = set()
    for one in body.instructions:
        assert done.issuperset(one.operands)
        done.add(one)
    assert done.issuperset(made)
    for one in made:
        if one.operands != reads[one]:
            (product,) = one.operands
            assert one.name == "slice" and set(reads[one]) <= set(product.operands)


@pytest.mark.parametrize(("rows", "count"), [(4096, 1), (2**16, 2)])
def test_products_of_many_megabytes_stay_apart(rows, count):
    """XLA:GPU merges products whose result and own operand take up to 64 MiB: here 4 and 68 MB."""
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((rows, N), (N, N), (N, N))]
    with sharding.mesh({"data": 1}, devices=jax.devices()[:1]):
        completed = sharding.jit(lambda x, q, k: jnp.tanh(x @ q) + jnp.sin(x @ k)).complete(*arrays)
    body = lower(completed.assignment, TRAITS["gpu"]).body
    assert [one.name for one in body.live_instructions()].count("dot_general") == count
