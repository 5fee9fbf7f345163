"""The optimizer's step compared with AdamW's formula: clipping, decay of matrices alone, and the schedule."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.optimizer import optimizer

PARAMS = {
    "blocks": {"norm": {"scale": 2.0}, "norm1": {"scale": 3.0}, "up": {"kernel": 4.0, "bias": 5.0}},
    "normal": {"kernel": 6.0},
    "table": 7.0,
    "final_norm": {"scale": 8.0},
}
NO_DECAY = {("blocks", "norm", "scale"), ("blocks", "norm1", "scale"), ("blocks", "up", "bias")}
NO_DECAY |= {("final_norm", "scale")}


def leaves(tree: dict, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], float]:
    found = {}
    for name, value in tree.items():
        found |= leaves(value, (*path, name)) if isinstance(value, dict) else {(*path, name): float(value)}
    return found


def arrays(tree: dict, scale: float | None = None) -> dict:
    return {
        name: arrays(value, scale) if isinstance(value, dict) else jnp.asarray(value if scale is None else scale)
        for name, value in tree.items()
    }


@pytest.mark.parametrize("gradient", [0.0, 0.1, 100.0])
def test_two_steps_of_adamw(gradient: float):
    transform = optimizer(Optimization(weight_decay=0.5, clip=1.0), optax.constant_schedule(0.01))
    params = arrays(PARAMS)
    state, expected = transform.init(params), leaves(PARAMS)
    first = second = 0.0
    norm = gradient * np.sqrt(len(expected))
    used = gradient * min(1.0, 1.0 / norm) if norm else 0.0
    for step in (1, 2):
        updates, state = transform.update(arrays(PARAMS, gradient), state, params)
        params = optax.apply_updates(params, updates)
        first, second = 0.9 * first + 0.1 * used, 0.95 * second + 0.05 * used**2
        move = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
        for path, value in expected.items():
            decay = 0.0 if path in NO_DECAY else 0.5 * value
            expected[path] = value - 0.01 * (move + decay)
    assert leaves(params) == {path: pytest.approx(value, rel=1e-5) for path, value in expected.items()}
