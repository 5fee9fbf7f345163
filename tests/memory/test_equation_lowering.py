"""Instructions of single equations: their pass, and equal ones that are computed once."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, cost, kernels
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.instruction import all_instructions

SQUARE = jax.ShapeDtypeStruct((32, 32), jnp.float32)


def instructions(f, *args, platform="gpu"):
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        return [*all_instructions(lower(sharding.jit(f).complete(*args).assignment, TRAITS[platform]).body)]


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def scanned(w, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0].sum()


@pytest.mark.parametrize("f", [loss, scanned])
def test_instructions_belong_to_the_pass_that_computes_them(f):
    alone = {one.phase for one in instructions(f, SQUARE, SQUARE, platform="tpu") if one.name != "argument"}
    both = instructions(jax.value_and_grad(f), SQUARE, SQUARE, platform="tpu")
    (outside,) = alone
    phases = {name: [one.phase for one in both if one.name == name] for name in ("tanh", "dot_general")}
    assert phases["tanh"] == ["forward"]
    assert phases["dot_general"][0] == "forward" and {*phases["dot_general"][1:]} == {"backward"}
    assert outside not in ("forward", "backward")


@pytest.mark.parametrize("platform", TRAITS)
def test_only_equal_equations_are_computed_once(platform):
    def count(f):
        return Counter(one.name for one in instructions(f, SQUARE, SQUARE, platform=platform))

    assert count(lambda x, y: jnp.sin(x) * jnp.sin(x).sum())["sin"] == 1
    assert count(lambda x, y: jnp.sin(x) * jnp.sin(y).sum())["sin"] == 2
    assert (
        count(lambda x, y: jnp.roll(x, 1, 0) * jnp.roll(x, 2, 0)).total()
        > count(lambda x, y: jnp.roll(x, 1, 0) * jnp.roll(x, 1, 0)).total()
    )
    assert count(lambda x, y: (x + 1.0) * (x + 2.0).sum())["add"] == 2
    assert count(lambda x, y: (x + 1.0) * (x + 1.0).sum())["add"] == 1


@pytest.mark.parametrize("platform", TRAITS)
def test_a_copy_is_its_operand(platform):
    """JAX lowers `jnp.copy` to nothing."""
    assert "copy" not in {one.name for one in instructions(lambda x: jnp.sin(jnp.copy(x)), SQUARE, platform=platform)}


def test_equations_of_different_constants_are_computed_apart():
    def added(factor):
        return lambda x: x + factor * jax.lax.broadcasted_iota(jnp.float32, x.shape, 0)

    found = [one.name for one in instructions(lambda x: added(2)(x) * added(3)(x).sum(), SQUARE)]
    assert found.count("add") == 2


@pytest.mark.parametrize(("dtype", "is_rounded"), [("float32", False), ("int8", True), ("float64", True)])
def test_a_cpu_converts_to_float32_what_it_has_not_rounded_yet(dtype, is_rounded):
    half = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    with jax.enable_x64(True):
        found = instructions(lambda x: jnp.tanh(x).astype(dtype), half, platform="cpu")
    tanh = next(one for one in found if one.name == "tanh")
    assert tanh.itemsize == 4
    converts = [one for one in found if one.name == "convert_element_type"]
    assert [one.itemsize for one in converts] == ([jnp.dtype(dtype).itemsize] if is_rounded else [])


def test_the_result_of_a_function_on_shards_is_the_value_of_the_program():
    double = kernels.with_rule(lambda x: jnp.sin(x) * 2, "a b -> a b")
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        assignment = sharding.jit(lambda x: double(x) @ x).complete(SQUARE).assignment
    body = lower(assignment, TRAITS["tpu"]).body
    dot = next(one for one in body.instructions if one.name == "dot_general")
    x, doubled = dot.operands[1], dot.operands[0]
    op = next(op for op in assignment.graph.ops if op.name == "dot_general")
    assert [doubled.value, x.value] == [*op.operands]
    assert doubled.eqn.primitive.name == "kernel_call"
    passed = kernels.with_rule(lambda x: x, "a b -> a b")
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        body = lower(sharding.jit(lambda x: passed(x) @ x).complete(SQUARE).assignment, TRAITS["tpu"]).body
    dot = next(one for one in body.instructions if one.name == "dot_general")
    assert (
        dot.operands[0] is dot.operands[1] is body.arguments[0] and dot.operands[0].value == assignment.graph.inputs[0]
    )


def test_each_part_of_a_split_is_an_array_of_its_own():
    found = instructions(lambda x: jax.lax.split(x, (16, 16)), SQUARE)
    assert len({id(one) for one in found if one.name == "split"}) == 2


def test_a_value_is_copied_where_its_memory_changes():
    def f(x):
        host = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
        return jnp.cos(jax.device_put(jax.device_put(host, jax.memory.Space.Device), jax.memory.Space.Device))

    found = [one for one in instructions(f, SQUARE) if one.name == "copy"]
    assert [one.num_bytes for one in found] == [0, 4 * 32 * 32]  # to the host, and back


@pytest.mark.parametrize(
    ("specs", "kinds"),
    [
        ((P("data"), P("data")), []),
        ((P("data"), P(None, "data")), ["all-to-all"]),
        ((P("data"), P(None, None)), ["all-gather"]),
        ((P(None, None), P("data")), []),
    ],
)
def test_an_annotated_value_is_resharded(specs, kinds):
    def f(x):
        return sharding.annotate(sharding.annotate(jnp.sin(x), specs[0]), specs[1])

    with sharding.mesh(data=8):
        assignment = sharding.jit(f, in_shardings=specs[0], out_shardings=specs[1]).complete(SQUARE).assignment
    body = lower(assignment, TRAITS["gpu"]).body
    sent = [one.name for one in body.live_instructions() if "all-" in one.name]
    assert sent == kinds and body.results[0].num_bytes == 4 * 32 * 32 // (8 if "data" in specs[1] else 1)


def test_what_depends_on_no_argument_is_stored_by_none():
    """Each kernel computes it again, as XLA does."""
    found = instructions(lambda x: x + jnp.sin(jax.lax.broadcasted_iota(jnp.float32, x.shape, 0) * 2), SQUARE)
    assert [one.name for one in found] == ["argument", "add"]


@pytest.mark.parametrize("has_branch", [False, True])
def test_a_permute_moves_shards_to_other_devices_unless_only_some_run_it(has_branch):
    def moved(x):
        return sharding.annotate(sharding.annotate(jnp.sin(x), P(("a", "b"))), P(("b", "a")))

    def f(x):
        return jax.lax.cond(x[0, 0] > 0, moved, lambda x: x, x) if has_branch else moved(x)

    def branch(x):
        return jax.shard_map(f, in_specs=P("c"), out_specs=P("c"), axis_names={"c"}, check_vma=False)(x)

    with sharding.mesh(a=2, b=2, c=2):
        assignment = sharding.jit(branch).complete(SQUARE).assignment
    found = {one.name for one in all_instructions(lower(assignment, TRAITS["gpu"]).body)}
    assert ("collective-permute" in found) == (not has_branch)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn", "int8", "bool"])
def test_elements_of_less_than_a_byte_are_packed(dtype):
    rows, columns = 256, 64
    with sharding.mesh(data=8):
        step = sharding.jit(lambda x: x.T, in_shardings=P("data"))
        predicted = step.complete(jax.ShapeDtypeStruct((rows, columns), dtype)).memory(platform="cpu")
        compiled = cost.read_compiled(step.lower(jax.ShapeDtypeStruct((rows, columns), dtype)).compile())
    assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, abs=64)
    assert predicted.peak_bytes == 2 * rows * columns // 8 // (2 if "4" in dtype else 1)


def test_cotangents_of_integers_in_a_branch_or_loop():
    """float0 arrays, which have no bytes in NumPy, are booleans in XLA's bodies."""

    @jax.custom_vjp
    def scaled(x, n):
        return x * n

    def backward(residuals, ct):
        return ct * residuals, np.zeros(residuals.shape, jax.dtypes.float0)

    scaled.defvjp(lambda x, n: (x * n, n), backward)

    def both(x, n):
        return jax.vjp(scaled, x, n)[1](x)

    def branched(x, n):
        return jax.lax.cond(x.sum() > 0, both, both, x, n)

    def repeated(x, n):
        return jax.lax.scan(lambda x, _: both(x, n), x, None, length=3)

    args = jnp.ones((8, 64)), jnp.full((8, 64), 3)
    for f in (branched, repeated):
        with sharding.mesh(data=2, devices=jax.devices()[:2]):
            step = sharding.jit(f, in_shardings=(P("data"), P("data")))
            c = step.complete(*args)
            assert c.verify(step.lower(*args).compile()).agrees
            assert c.memory().peak_bytes >= 2 * 4 * 64 * 4
