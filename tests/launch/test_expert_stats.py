"""Statistics of experts over layers: sums of losses and choices, and the worst load."""

import jax.numpy as jnp
import numpy as np

from sharding import expert
from sharding.launch.expert_stats import ExpertStats


def balance(seed: int, *layers: int) -> expert.Balance:
    generator = np.random.default_rng(seed)
    return expert.Balance(
        auxiliary_loss=jnp.asarray(generator.random(layers), "float32"),
        losses={},
        load=jnp.asarray(generator.integers(1, 50, (*layers, 4)), "int32"),
        dropped=jnp.asarray(generator.integers(0, 9, layers), "int32"),
    )


def check(found: ExpertStats, parts: list[expert.Balance]) -> None:
    loads = np.concatenate([np.asarray(part.load).reshape(-1, 4) for part in parts])
    assert np.allclose(found.auxiliary_loss, sum(float(np.sum(part.auxiliary_loss)) for part in parts))
    assert np.isclose(found.peak_load, max(load.max() / load.mean() for load in loads))
    assert found.dropped == sum(int(np.sum(part.dropped)) for part in parts) and found.choices == loads.sum()
    assert {value.dtype for value in found} == {jnp.dtype("float32")}


def test_layers_one_by_one_and_stacked():
    one, stacked, more = balance(0), balance(1, 3), balance(2, 2)
    check(ExpertStats.of(one), [one])
    check(ExpertStats.of(stacked), [stacked])
    check(ExpertStats.of(one).add(stacked).add(more), [one, stacked, more])
