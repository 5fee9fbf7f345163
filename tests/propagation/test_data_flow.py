"""Which dims flow freely, in programs whose answer is known."""

import jax
import jax.numpy as jnp
import pytest
from support.annotated_programs import propagate

from sharding.propagation.data_flow import DataFlow


def flows(f, *shapes):
    """For each argument the dims that flow freely: `[[0], []]`."""
    graph = propagate(f, *[(shape, None) for shape in shapes]).graph
    flow = DataFlow(graph)
    return [[d for d in range(len(graph.shapes[v])) if flow.of((v, d)).is_free] for v in graph.inputs]


def mlp(x, up, down):
    return jnp.tanh(x @ up) @ down


X, UP, DOWN = (8, 4), (4, 16), (16, 4)


def test_forward_only_the_batch_and_the_last_features_flow():
    assert flows(mlp, X, UP, DOWN) == [[0], [], [1]]


def test_gradients_contract_the_batch_with_itself():
    def gradients(x, up, down):
        return jax.grad(lambda ws: (mlp(x, *ws) ** 2).sum())((up, down))

    assert flows(gradients, X, UP, DOWN)[0] == [0]


def test_the_cotangent_of_a_mean_is_no_other_array():
    def gradients(x, up, down):
        return jax.grad(lambda ws: mlp(x, *ws).mean())((up, down))

    assert flows(gradients, X, UP, DOWN)[0] == [0]


def test_rows_of_a_table_are_indexed_by_tokens():
    def lookup(table, x):
        return table[jnp.argmax(x, axis=1)]

    assert flows(lookup, (16, 4), (8, 32)) == [[1], [0, 1]]  # a maximum over one array meets no other


def test_attention_contracts_a_sequence_with_itself():
    def attention(x, w):
        q = x @ w
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, x))
        return jnp.einsum("bqk,bkd->bqd", scores, x)

    assert flows(attention, (8, 4, 16), (16, 16))[0] == [0, 1]


@pytest.mark.parametrize("reverse", [False, True])
def test_what_a_loop_carries_is_reached_later(reverse):
    def loss(w, xs):
        def step(h, x):
            h = jnp.tanh(x + h @ w)
            return h, h

        return (jax.lax.scan(step, jnp.zeros((8, 4)), xs, reverse=reverse)[1] ** 2).sum()

    weights, batch = flows(jax.grad(loss), (4, 4), (3, 8, 4))
    assert 1 in batch and not weights


def test_bytes_of_activations_and_of_the_weights_they_meet():
    graph = propagate(mlp, (X, None), (UP, None), (DOWN, None)).graph
    flow = DataFlow(graph).of((graph.inputs[0], 0))
    assert len(flow.contractions) == 2
    assert flow.met_bytes == 4 * (4 * 16 + 16 * 4)
    assert flow.own_bytes == 4 * (8 * 4 + 8 * 16 + 8 * 16 + 8 * 4)


def test_experts_are_batched_in_their_first_contraction_and_heads_are_not():
    def experts(x, w):
        return jnp.einsum("ebd,edf->ebf", x * 2.0, jnp.tanh(w))

    graph = propagate(experts, ((4, 8, 16), None), ((4, 16, 32), None)).graph
    flow = DataFlow(graph)
    assert [flow.is_batched((graph.inputs[1], d)) for d in range(3)] == [True, False, False]

    def heads(x, w):
        q = jnp.einsum("bld,dhk->blhk", x, w)
        return jnp.einsum("blhk,bmhk->bhlm", q, q)

    graph = propagate(heads, ((4, 8, 16), None), ((16, 2, 8), None)).graph
    flow = DataFlow(graph)
    assert not any(flow.is_batched((graph.inputs[1], d)) for d in range(3))


def test_the_first_contraction_counts_however_many_ops_lie_between():
    def f(x, y, w, z, more):
        for _ in range(3):
            z = jnp.sin(z)
        first = jnp.einsum("bd,edf->ebf", y, w)
        for _ in range(more):
            z = jnp.sin(z)
        return first, z, jnp.einsum("ebd,edf->ebf", x, w)

    shapes = ((4, 8, 16), None), ((8, 16), None), ((4, 16, 32), None), ((4,), None)
    for more in range(56, 64):  # at some of these the index of the last op comes first in a set
        graph = propagate(lambda *args, more=more: f(*args, more), *shapes).graph
        flow = DataFlow(graph)
        assert not flow.is_batched((graph.inputs[2], 0)) and flow.is_batched((graph.inputs[0], 0))
