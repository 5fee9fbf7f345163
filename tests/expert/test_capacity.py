"""Slots are assigned in the order of the GShard paper, and no expert exceeds its capacity."""

import math

import jax
import numpy as np
import pytest
from support.expert_reference import within_capacity

from sharding.expert import capacity
from sharding.expert.gshard import top_2
from sharding.expert.noisy_top_k import noisy_top_k

EXPERTS = 8
LOGITS = 2 * jax.random.normal(jax.random.key(0), (3, 24, EXPERTS))
ROUTINGS = {
    "two": top_2(jax.nn.softmax(LOGITS), None),
    "random second": top_2(jax.nn.softmax(LOGITS), jax.random.key(1)),
    "four": noisy_top_k(LOGITS, jax.numpy.ones_like(LOGITS), 4, jax.random.key(1)),
}


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "num_experts", "expected"),
    [
        (1.0, 1024, 2, 128, 16),  # 2 S / E
        (1.25, 64, 1, 8, 10),
        (1.25, 63, 1, 8, 10),  # rounded up
        (0.01, 16, 1, 8, 1),
        (9, 16, 2, 8, 16),  # no more than tokens
        (math.inf, 16, 2, 8, 16),
    ],
)
def test_expert_capacity(factor, tokens, top_k, num_experts, expected):
    assert capacity.expert_capacity(factor, tokens=tokens, top_k=top_k, num_experts=num_experts) == expected


@pytest.mark.parametrize("num_slots", [1, 3, 24])
@pytest.mark.parametrize("name", ROUTINGS)
def test_slots_equal_a_sequential_assignment(name, num_slots):
    routing = ROUTINGS[name]
    slot = capacity.assign_slots(routing, EXPERTS)
    np.testing.assert_array_equal((slot >= 0) & (slot < num_slots), within_capacity(routing, num_slots))
    dispatch = np.asarray(capacity.dispatch(routing, slot, EXPERTS, num_slots))
    assert set(np.unique(dispatch)) <= {0, 1}
    assert dispatch.sum(1).max() <= 1  # one token per slot
    assert dispatch.sum((1, 3)).max() <= num_slots
    np.testing.assert_array_equal(dispatch.sum((2, 3)), within_capacity(routing, num_slots).sum(-1))


def test_combine_weights_sum_to_one_if_both_choices_are_dispatched():
    routing = ROUTINGS["random second"]
    slot = capacity.assign_slots(routing, EXPERTS)
    sums = np.asarray(capacity.combine(routing, slot, EXPERTS, 4)).sum((2, 3))
    found = within_capacity(routing, 4)
    assert found.all(-1).any() and (~found.any(-1)).any()
    np.testing.assert_allclose(sums[found.all(-1)], 1, rtol=1e-6)
    np.testing.assert_allclose(sums, (routing.weights_GSK * found).sum(-1), rtol=1e-6)
    assert not sums[~found.any(-1)].any()  # dropped tokens pass on the residual only
