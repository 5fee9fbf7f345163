"""Places are given out in the order of the paper, and no expert has more tokens than places."""

import math

import jax
import numpy as np
import pytest
from mixture import kept

from sharding.expert import capacity
from sharding.expert.gshard import top_2
from sharding.expert.noisy_top_k import noisy_top_k

EXPERTS = 8
LOGITS = 2 * jax.random.normal(jax.random.key(0), (3, 24, EXPERTS))
ROUTINGS = {
    "two": top_2(jax.nn.softmax(LOGITS), None),
    "by chance": top_2(jax.nn.softmax(LOGITS), jax.random.key(1)),
    "four": noisy_top_k(LOGITS, jax.numpy.ones_like(LOGITS), 4, jax.random.key(1)),
}


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "num_experts", "places"),
    [
        (1.0, 1024, 2, 128, 16),  # 2 S / E
        (1.25, 64, 1, 8, 10),
        (1.25, 63, 1, 8, 10),  # rounded up
        (0.01, 16, 1, 8, 1),
        (9, 16, 2, 8, 16),  # no more than tokens
        (math.inf, 16, 2, 8, 16),
    ],
)
def test_number_of_places(factor, tokens, top_k, num_experts, places):
    assert capacity.num_places(factor, tokens=tokens, top_k=top_k, num_experts=num_experts) == places


@pytest.mark.parametrize("places", [1, 3, 24])
@pytest.mark.parametrize("name", ROUTINGS)
def test_places_are_those_of_walking_through(name, places):
    routing = ROUTINGS[name]
    place = capacity.places(routing, EXPERTS)
    np.testing.assert_array_equal((place >= 0) & (place < places), kept(routing, places))
    dispatch = np.asarray(capacity.dispatch(routing, place, EXPERTS, places))
    assert set(np.unique(dispatch)) <= {0, 1}
    assert dispatch.sum(1).max() <= 1  # a place is one token's
    assert dispatch.sum((1, 3)).max() <= places
    np.testing.assert_array_equal(dispatch.sum((2, 3)), kept(routing, places).sum(-1))


def test_weights_sum_to_one_where_both_are_kept():
    routing = ROUTINGS["by chance"]
    place = capacity.places(routing, EXPERTS)
    sums = np.asarray(capacity.combine(routing, place, EXPERTS, 4)).sum((2, 3))
    found = kept(routing, 4)
    assert found.all(-1).any() and (~found.any(-1)).any()
    np.testing.assert_allclose(sums[found.all(-1)], 1, rtol=1e-6)
    np.testing.assert_allclose(sums, (routing.weights_GSK * found).sum(-1), rtol=1e-6)
    assert not sums[~found.any(-1)].any()  # of nothing comes nothing: the residual alone goes on
