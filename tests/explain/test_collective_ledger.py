"""The ledger: expected rows on small programs, and the compiled program on train steps."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import peak_memory
from support.train_steps import hand_written, small_models
from support.train_steps.step import MESHES, STYLES

import sharding
from sharding import P, ShardingError, cost

STEPS = small_models.STEPS | hand_written.STEPS


def rows(ledger):
    return [(c.kind, c.axes, c.count, c.result_bytes) for c in ledger]


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(s, "float32") for s in sizes]


def ledger_of(fn, sizes, args, **options):
    with sharding.mesh(sizes, devices=jax.devices()[: np.prod(list(sizes.values()))]):
        return sharding.jit(fn, **options).complete(*args).communication()


def test_all_reduce_over_a_contracted_dim():
    specs = (P(None, "tensor"), P("tensor"))
    found = ledger_of(lambda x, w: x @ w, {"tensor": 4}, shapes((8, 16), (16, 12)), in_shardings=specs)
    assert rows(found) == [("all-reduce", ("tensor",), 1, 8 * 12 * 4)]
    assert "dot_general contracts a dim sharded over tensor" in found[0].cause
    assert "test_collective_ledger.py" in found[0].source
    assert found[0].wire_bytes == 2 * 8 * 12 * 4 * 3 // 4


def test_reduce_scatter_over_a_contracted_dim():
    specs = (P(None, "tensor"), P("tensor"))
    options = {"in_shardings": specs, "out_shardings": P("tensor")}
    found = ledger_of(lambda x, w: x @ w, {"tensor": 4}, shapes((64, 4096), (4096, 256)), **options)
    assert rows(found) == [("reduce-scatter", ("tensor",), 1, 64 * 256 * 4)]
    assert rows(found.lowered("cpu")) == [("all-reduce", ("tensor",), 1, 64 * 256 * 4)]
    assert rows(found.lowered("tpu")) == rows(found)


def test_weights_are_all_gathered_for_a_sharded_batch():
    specs = (P("fsdp"), P("fsdp"))
    found = ledger_of(lambda x, w: x @ w, {"fsdp": 4}, shapes((64, 16), (16, 12)), in_shardings=specs)
    assert rows(found) == [("all-gather", ("fsdp",), 1, 16 * 12 * 4)]
    assert found[0].is_move and "w" in found[0].cause and "w" in found[0].hint


def grown(x):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c * 2, x)


def branched(x):
    return jax.lax.cond(jnp.max(x) < 1.0, lambda: x * 2, lambda: x + 1)


def repeated(x):
    return jax.lax.fori_loop(0, jnp.sum(x).astype(int), lambda _, c: c * 2, x)


def nested(x):
    return jax.lax.scan(lambda c, _: (jax.lax.cond(jnp.max(c) < 1.0, grown, jnp.sin, c), None), x, length=3)[0]


def switched(x):
    return jax.lax.switch(jnp.argmax(x[0]), [jnp.sin, lambda x: x @ x.T @ x], x)


@pytest.mark.parametrize("spec", [P("data"), P("tensor", "data"), P(None, ("data", "tensor"))], ids=str)
@pytest.mark.parametrize("fn", [branched, grown, nested, repeated, switched], ids=lambda fn: fn.__name__)
def test_conditions_are_computed(fn, spec):
    x = jax.ShapeDtypeStruct((16, 64), "float32")
    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(fn, in_shardings=spec)
        found = step.complete(x).verify(step.lower(x).compile())
    assert found.agrees and found.predicted


def halves(x):
    a, b = jnp.split(x, 2)
    return a * jnp.sin(b)


SHIFTING = {
    "cumsum": lambda x: jnp.cumsum(x, 0) * 2,
    "gradient of concatenate": jax.grad(lambda x: (jnp.concatenate([x, 2 * x]) ** 3).sum()),
    "rotary": lambda x: jnp.concatenate([-x[:, 32:], x[:, :32]], 1) * x,
    "scanned rows": lambda x: jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(64), x)[1],
    "sort": lambda x: jnp.sort(x, 0) * 2,
    "split": halves,
    "stack": lambda x: jnp.stack([x, 2 * x]) * 3,
    "stack of a new sharded dim": lambda x: sharding.annotate(jnp.stack([x] * 4, 2), P(None, None, "tensor")),
}


@pytest.mark.parametrize("spec", [P("data"), P("tensor", "data"), P(("data", "tensor"))], ids=str)
@pytest.mark.parametrize("name", SHIFTING)
def test_ops_that_need_a_whole_dim(name, spec):
    x = jax.ShapeDtypeStruct((32, 64), "float32")
    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(SHIFTING[name], in_shardings=spec)
        found = step.complete(x).verify(step.lower(x).compile())
    assert found.agrees


def test_an_array_and_its_transpose_are_gathered_each():
    found = ledger_of(lambda x: x @ x.T @ x, {"data": 4}, shapes((16, 64)), in_shardings=P("data"))
    assert rows(found) == [("all-gather", ("data",), 1, 16 * 64 * 4)] * 2


def test_a_row_is_all_reduced():
    found = ledger_of(lambda x: x[0] * 2, {"data": 4}, shapes((16, 64)), in_shardings=P("data"))
    assert rows(found) == [("all-reduce", ("data",), 1, 64 * 4)]


@pytest.mark.parametrize("differentiate", [False, True])
def test_scanned_layers_that_are_sharded_are_all_gathered_once(differentiate):
    def fn(w, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0].sum()

    args = shapes((8, 16, 16), (8, 16))
    with sharding.mesh(data=8):
        step = sharding.jit(jax.grad(fn) if differentiate else fn, in_shardings=(P("data"), P()))
        completion, lowered = step.complete(*args), step.lower(*args)
        assert completion.verify(lowered.compile()).agrees
    (gather,) = [c for c in completion.communication() if c.kind == "all-gather"]
    assert (gather.count, gather.result_bytes) == (1, 8 * 16 * 16 * 4)
    before, _, _ = lowered.as_text().partition("stablehlo.while")
    assert "sdy.sharding_constraint %arg0 <@mesh, [{}, {}, {}]>" in before


def test_loop_invariants_are_all_gathered_once():
    def fn(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=5)[0]

    found = ledger_of(fn, {"fsdp": 4}, shapes((64, 16), (16, 16)), in_shardings=(P("fsdp"), P("fsdp")))
    assert rows(found) == [("all-gather", ("fsdp",), 1, 16 * 16 * 4)]


def test_collectives_in_a_loop_count_per_iteration():
    def fn(x, w):
        return jax.lax.scan(lambda c, own: (jnp.tanh(c @ own), None), x, w)[0]

    found = ledger_of(
        fn, {"tensor": 4}, shapes((8, 16), (5, 16, 16)), in_shardings=(P(None, "tensor"), P(None, "tensor"))
    )
    assert Counter(c.count for c in found) == {5: len(found)} and len(found) > 0


def test_explicit_collectives_in_a_shard_map():
    def fn(x):
        def body(x):
            x = jax.lax.scan(lambda c, _: (jax.lax.ppermute(c, "a", [(0, 1), (1, 0)]), None), x, length=3)[0]
            return jax.lax.psum(x.sum(), "a"), jax.lax.all_gather(x, "a", tiled=True)

        mesh = jax.sharding.get_abstract_mesh()
        return jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=(P(), P()), check_vma=False)(x)

    found = ledger_of(fn, {"a": 2}, shapes((8, 4)), in_shardings=P("a"))
    own = {(c.kind, c.count, c.result_bytes) for c in found if c.is_manual}
    assert own == {("collective-permute", 3, 64), ("all-reduce", 1, 4), ("all-gather", 1, 128)}


def test_a_rotation_along_a_sharded_dim():
    found = ledger_of(lambda x: jnp.roll(x, 2, 0) * 2, {"a": 4}, shapes((16, 4)), in_shardings=P("a"))
    assert rows(found) == [("collective-permute", ("a",), 1, 2 * 4 * 4)]


def test_the_hint_for_a_rotation_of_a_gathered_array():
    def rotated(x):
        return sharding.annotate(jnp.roll(x, 1, 0), P())

    (gather,) = ledger_of(rotated, {"a": 2}, shapes((6, 2)), in_shardings=P("a"))
    assert gather.hint == "annotate x as [-, -] (now [a, -] from in_shardings); slice needs its dim 0 replicated"


def test_an_argmax_along_a_sharded_dim_gathers_values_and_indices():
    def f(x):
        return jnp.argmax(x, -1), jnp.argmin(jnp.sin(x).astype("bfloat16"), -1)

    x = jax.ShapeDtypeStruct((128, 64), "float32")
    with sharding.mesh(data=2, tensor=4):
        jitted = sharding.jit(f, in_shardings=P("data", "tensor"))
        ledger = jitted.complete(x).communication()
        compiled = cost.read_compiled(jitted.lower(x).compile())
    rows = 4 * 64
    assert sorted((c.dtype, c.result_bytes) for c in ledger) == [
        ("bfloat16", 2 * rows), ("float32", 4 * rows), ("int32", 4 * rows), ("int32", 4 * rows),
    ]  # fmt: skip
    assert compiled.by_kind() == ledger.lowered("cpu").by_kind()


def test_dead_code_is_not_run():
    def fn(x):
        (x * 2).sum()
        return x + 1

    assert not ledger_of(fn, {"a": 4}, shapes((16, 4)), in_shardings=P("a"))


@pytest.mark.parametrize(("is_used", "count"), [(True, 1), (False, 0)])
def test_an_operand_that_a_call_ignores_is_dead(is_used, count):
    def fn(x, y):
        return jax.jit(lambda low, y: y + low if is_used else y + 1)(jnp.min(x, keepdims=True), y)

    assert len(ledger_of(fn, {"a": 4}, shapes((16, 4), (16, 4)), in_shardings=(P("a"), None))) == count


def test_a_broadcast_scalar_is_reduced_first():
    found = ledger_of(lambda x: jnp.broadcast_to(x.sum(), (8,)), {"a": 4}, shapes((16, 4)), in_shardings=P("a"))
    assert rows(found) == [("all-reduce", ("a",), 1, 4)]


@pytest.mark.parametrize("is_returned", [False, True])
def test_a_broadcast_scalar_is_reduced_only_if_it_is_used(is_returned):
    def fn(x, y):
        def body(carry, row):
            a, b = carry
            return (a + row.sum(), b + jnp.broadcast_to(jnp.tanh(row.sum() + jnp.sum(y)), b.shape)), None

        a, b = jax.lax.scan(body, (jnp.zeros(()), jnp.zeros((4, 8))), y)[0]
        return (a, b) if is_returned else a

    found = ledger_of(fn, {"a": 4}, shapes((16, 4), (16, 4)), in_shardings=(P("a"), P(None, "a")))
    assert len(found) == (2 if is_returned else 1)


def test_a_reduction_that_cannot_be_partitioned_is_gathered():
    x = jax.ShapeDtypeStruct((16, 8), "int32")
    with sharding.mesh(a=8):
        step = sharding.jit(lambda x: jax.lax.reduce(x, jnp.int32(0), jax.lax.bitwise_xor, (0,)), in_shardings=P("a"))
        found = step.complete(x).verify(step.lower(x).compile())
    assert found.agrees and list(found.predicted) == ["all-gather"]


def test_a_reshape_that_breaks_up_a_sharded_dim():
    x = jax.ShapeDtypeStruct((6, 2, 6), "float32")
    with sharding.mesh(a=3, devices=jax.devices()[:3]):
        step = sharding.jit(lambda x: jnp.sum(x.reshape(9, 8), (0, 1)), in_shardings=P(None, None, "a"))
        found = step.complete(x).verify(step.lower(x).compile())
    assert found.agrees and found.predicted == {"all-gather": (1, 6 * 2 * 6 * 4)}


def test_a_short_slice_of_a_sharded_dim():
    x = jax.ShapeDtypeStruct((6, 8), "float32")
    for start, end in [(0, 3), (1, 4), (0, 1), (2, 5)]:
        with sharding.mesh(a=4, devices=jax.devices()[:4]):
            step = sharding.jit(lambda x, start=start, end=end: x[:, start:end], in_shardings=P(None, "a"))
            assert step.complete(x).verify(step.lower(x).compile()).agrees


def test_a_reshard_for_one_op_leaves_the_value_in_place_for_the_others():
    def fn(x, z, w):
        h = jnp.exp(z @ w) * x
        return sharding.annotate(z.T @ h, P("b")), h.sum(0)

    rows = P(("a", "b"))
    with sharding.mesh(a=2, b=2, devices=jax.devices()[:4]):
        step = sharding.jit(fn, in_shardings=(rows, rows, P("b")), out_shardings=(None, P()))
        args = shapes((16, 16), (16, 32), (32, 16))
        completion = step.complete(*args)
        found = completion.communication()
        assert [c.op for c in found if c.kind == "all-reduce"] == ["reduce_sum"]
        assert any(c.is_move and c.op == "dot_general" for c in found)
        assert completion.verify(step.lower(*args).compile()).agrees


def test_as_a_table():
    specs = (P("fsdp"), P("fsdp"))
    text = str(ledger_of(lambda x, w: x @ w, {"fsdp": 4}, shapes((64, 16), (16, 12)), in_shardings=specs))
    assert ", per device: 1 all-gather (768 bytes)" in text and "resharded from [fsdp, -] to [-, -]" in text


def test_an_implicit_all_gather_above_the_limit_is_an_error():
    options = {"in_shardings": (P("fsdp"), P("fsdp")), "max_implicit_bytes": 700}
    with pytest.raises(
        ShardingError, match=r"test_collective_ledger.py.*\n.*w, resharded from \[fsdp, -\] to \[-, -\]"
    ):
        ledger_of(lambda x, w: x @ w, {"fsdp": 4}, shapes((64, 16), (16, 12)), **options)
    ledger_of(lambda x, w: x @ w, {"fsdp": 4}, shapes((64, 16), (16, 12)), **(options | {"max_implicit_bytes": 768}))
    with pytest.raises(ShardingError, match="an engine whose reshards are known before compilation"):
        sharding.jit(lambda x: x, engine="xla", max_implicit_bytes=1)


def compared(name, style, sizes):
    """Predicted and compiled collectives: kind -> (count, bytes)."""
    step = STEPS[name](style, sizes)
    with sharding.mesh(sizes):
        jitted = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0)
        predicted = jitted.complete(*step.args).communication().lowered("cpu")
        return predicted.by_kind(), cost.read_compiled(jitted.lower(*step.args).compile()).by_kind()


def test_a_train_step_compiles_to_the_predicted_collectives():
    predicted, compiled = compared("gpt, scanned, remat", "weights", MESHES[-1])
    assert predicted == compiled and predicted["all-gather"][0] > 8


@peak_memory.newest_jax_only
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MESHES)))
@pytest.mark.parametrize("name", STEPS)
def test_train_steps_compile_to_the_predicted_collectives(name, number):
    for style in STYLES:
        predicted, compiled = compared(name, style, MESHES[number])
        assert predicted == compiled, style


def printed_sum(x):
    jax.debug.print("{}", x.sum())
    return 2 * x


def each_devices_sums(x):
    jax.debug.callback(lambda _: None, x.sum(0), partitioned=True)
    return 2 * x


def printed_in_a_loop(x):
    def body(h, _):
        jax.debug.print("{}", jnp.vdot(h, h))
        return jnp.sin(h), None

    return jax.lax.scan(body, x, None, length=3)[0]


def printed_if_positive(x):
    jax.lax.cond(x.sum() > 0, lambda: jax.debug.print("{}", x.max()), lambda: None)
    return 2 * x


def printed_while_small(x):
    def body(state):
        jax.debug.print("another")
        return 2 * state[0], state[1] + 1

    jax.lax.while_loop(lambda state: (state[0].sum() < 1e3) & (state[1] < 4), body, (x, 0))
    return 2 * x


@pytest.mark.parametrize(
    ("f", "count"),
    [(printed_sum, 2), (each_devices_sums, 1), (printed_in_a_loop, 6), (printed_if_positive, 4)],
)
def test_what_is_only_printed_is_reduced_too(f, count):
    """As what decides whether something is printed."""
    x = jax.ShapeDtypeStruct((8, 16), "float32")
    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(f, in_shardings=P("data", "tensor"))
        found = step.complete(x).verify(step.lower(x).compile())
    assert found.agrees and found.predicted["all-reduce"][0] == count


def test_what_decides_how_often_a_loop_prints_is_reduced_too():
    x = jax.ShapeDtypeStruct((8, 16), "float32")
    with sharding.mesh(data=2, tensor=4):
        found = sharding.jit(printed_while_small, in_shardings=P("data", "tensor")).complete(x).communication()
    assert "all-reduce" in found.by_kind()
