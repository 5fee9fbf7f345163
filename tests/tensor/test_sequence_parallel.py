"""Sequence parallelism: reduce-scatters and all-gathers in place of all-reduces."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tensor_parallel_reference

import sharding
from sharding import P, ShardingError, tensor
from sharding.cost import compile_only, read_compiled

ACTIVATION = 4 * tensor_parallel_reference.BATCH * tensor_parallel_reference.LENGTH * tensor_parallel_reference.FEATURES
"""Bytes of b x s x h."""


def step(sequence_parallel=True):
    return sharding.jit(jax.value_and_grad(tensor_parallel_reference.loss_of(sequence_parallel=sequence_parallel)))


def test_two_all_gathers_and_two_reduce_scatters_each_way_per_layer():
    args = tensor_parallel_reference.params(2), *tensor_parallel_reference.tokens()
    with sharding.mesh(data=2, tensor=4) as mesh:
        ledger = step().complete(*args).communication()
        plain = step(False).complete(*args).communication()
        facts = read_compiled(step().lower(*args).compile(), mesh=mesh)
    large = [c for c in ledger if c.result_bytes == ACTIVATION]
    count = {
        kind: sum(c.count for c in large if c.kind == kind) for kind in ("all-gather", "reduce-scatter", "all-reduce")
    }
    # Four of each per layer, and one of each for the embedding and the logits.
    assert count == {"all-gather": 2 * 4 + 2, "reduce-scatter": 2 * 4 + 2, "all-reduce": 0}
    assert sum(c.wire_bytes for c in large) == sum(c.wire_bytes for c in plain if c.result_bytes == ACTIVATION)
    # The rest are gradients of row-parallel biases.
    assert all(
        c.kind == "all-reduce" and c.result_bytes <= 4 * tensor_parallel_reference.FEATURES
        for c in ledger
        if c not in large
    )
    assert ledger.lowered("cpu").by_kind() == facts.by_kind()


def test_the_stream_is_sharded_and_the_branches_are_not():
    def f(x, w1, w2):
        x = sharding.annotate(tensor.scattered(x), name="stream")
        h = sharding.annotate(tensor.column_parallel(tensor.gathered(jnp.sin(x)), w1), name="inside")
        return x + tensor.scattered(tensor.row_parallel(jnp.tanh(h), w2))

    with sharding.mesh(data=2, seq=2, tensor=2):
        args = jnp.zeros((4, 8, 16)), jnp.zeros((16, 32)), jnp.zeros((32, 16))
        completion = sharding.jit(f, in_shardings=(P("data"), None, None)).complete(*args)
    assert completion.spec("stream") == completion.spec("out") == P("data", "tensor")
    assert completion.spec("inside") == P("data", None, "tensor")


def test_with_another_axis_over_the_length():
    def f(x):
        x = tensor.scattered(x, length_axis="seq")
        return jnp.mean(tensor.gathered(jnp.sin(x), length_axis="seq") ** 2)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 16)), jnp.float32)
    expected = jax.grad(lambda x: jnp.mean(jnp.sin(x) ** 2))(x)
    with sharding.mesh(data=2, seq=2, tensor=2):
        run = sharding.jit(jax.grad(f), in_shardings=P("data", "seq"))
        ledger = run.complete(x).communication()
        np.testing.assert_allclose(run(x), expected, rtol=1e-5, atol=1e-7)
    assert {c.axes for c in ledger if c.kind == "all-gather"} == {("tensor",)}


def test_a_sum_that_is_also_used_replicated_stays_one_all_reduce():

    def f(x, w):
        y = tensor.row_parallel(x, w)
        return y, tensor.scattered(y)

    with sharding.mesh(data=2, tensor=4):
        args = jnp.zeros((2, 8, 16)), jnp.zeros((16, 16))
        kinds = sharding.jit(f, out_shardings=(P(), None)).complete(*args).communication().by_kind()
    assert kinds.keys() == {"all-reduce"}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: tensor.scattered(x[:, :6]), r"6 positions over tensor=4: 6 = 1 x 4 \+ 2"),
        (lambda x: tensor.gathered(x[:, :6]), r"tensor\.gathered[\s\S]*6 positions"),
        (lambda x: tensor.scattered(x[:, :4], length_axis="data"), "4 positions over data=2, tensor=4"),
        (lambda x: tensor.scattered(x, length_axis="tensor"), "a length_axis other than axis"),
        (lambda x: tensor.scattered(x, axis="model"), "a mesh axis 'model'"),
        (lambda x: tensor.scattered(x, dim=3), "dim=3"),
    ],
)
def test_errors(call, match):
    with sharding.mesh(data=2, tensor=4), pytest.raises(ShardingError, match=match):
        call(jnp.zeros((2, 8, 4)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_collectives_compiled_ahead_of_time_for_tpus(monkeypatch):
    """The bytes of all-reduces, less half of what only products read: the three gathers of the forward pass are of
    bfloat16. Large enough that this compiler emits reduce-scatters."""
    monkeypatch.setattr(tensor_parallel_reference, "LENGTH", 512)
    monkeypatch.setattr(tensor_parallel_reference, "FEATURES", 512)
    activation = 4 * tensor_parallel_reference.BATCH * 512 * 512
    args = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        (tensor_parallel_reference.params(), *tensor_parallel_reference.tokens()),
    )
    found, sent = {}, {}
    with sharding.mesh(tensor=4, devices=compile_only("v5p:2x2x1")) as mesh:
        for sequence_parallel in (False, True):
            ledger = step(sequence_parallel).complete(*args).communication().lowered("tpu")
            facts = read_compiled(step(sequence_parallel).lower(*args).compile(), mesh=mesh)
            assert ledger.by_kind() == facts.by_kind()
            shape = (tensor_parallel_reference.BATCH, 512, 512)
            found[sequence_parallel] = [c.kind for c in facts.collectives if c.shape == shape]
            sent[sequence_parallel] = sum(c.wire_bytes for c in ledger if c.result_bytes >= activation / 2)
    assert sent[False] == 6 * 2 * activation * 3 / 4
    assert sent[True] == sent[False] - 3 * activation / 2 * 3 / 4
    assert sorted(found[False]) == ["all-reduce"] * 6
    assert sorted(found[True]) == ["all-gather"] * 6 + ["reduce-scatter"] * 6
