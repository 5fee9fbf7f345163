"""A small network that scores the strategies of the node that is decided next, for searches that learn.

A score is an entry of a table, one for each strategy of the problem, and a function of what is known of the strategy
now, with weights that all nodes share:

    score(p) = table[p] + w2 . tanh(w1 features(p))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .problem import FORBIDDEN, Problem

NUM_FEATURES = 5
"""Cost added now, with the least of edges to undecided nodes, of the node alone; bytes; and 1."""
WIDTH = 16
LARGEST_FEATURE = 10.0


class Weights(NamedTuple):
    """Of the network."""

    table: jax.Array
    """[nodes, strategies]"""
    w1: jax.Array
    """[features, width]"""
    w2: jax.Array
    """[width]"""


def initial_weights(key: jax.Array, num_nodes: int, num_strategies: int) -> Weights:
    """Weights with an empty table, so that equal strategies have equal scores at first."""
    first, second = jax.random.split(key)
    return Weights(
        table=jnp.zeros((num_nodes, num_strategies), jnp.float32),
        w1=jax.random.normal(first, (NUM_FEATURES, WIDTH), jnp.float32) / NUM_FEATURES**0.5,
        w2=0.1 * jax.random.normal(second, (WIDTH,), jnp.float32),
    )


def scores(weights: Weights, node: jax.Array, features: jax.Array) -> jax.Array:
    """Of a node's strategies, [strategies], from their features, [strategies, features]; nodes may be a batch."""
    return weights.table[node] + jnp.tanh(features @ weights.w1) @ weights.w2


def features_of(costs: Sequence[Any], extra: Any, is_option: Any, xp: Any = np) -> Any:
    """The features of a node's strategies, [strategies, features], some of which are options.

    Args:
        costs: added now, with edges to undecided nodes, of the node alone; [strategies] in multiples of a scale.
        extra: bytes above the node's smallest.
        is_option: [strategies], at least one.
        xp: numpy or jax.numpy.
    """
    least = [xp.min(xp.where(is_option, cost, xp.inf)) for cost in costs]
    above = [xp.where(is_option, cost, low + LARGEST_FEATURE) - low for cost, low in zip(costs, least, strict=True)]
    used = extra / xp.maximum(1.0, xp.max(extra))
    columns = [*(xp.minimum(cost, LARGEST_FEATURE) for cost in above), used, xp.ones_like(used)]
    return xp.stack(columns, axis=-1)


def optimizer(learning_rate: float) -> Any:
    """Adam."""
    import optax

    return optax.adam(learning_rate)


def cost_scale(problem: Problem) -> float:
    """By how much a node's strategies differ in cost with their edges, on average; 1 if they don't."""
    finite = [matrix[matrix < FORBIDDEN] for matrix in (*problem.costs, *problem.edge_costs)]
    return sum(float(np.ptp(f)) for f in finite if f.size) / max(1, problem.num_nodes) or 1.0


def padded(size: int) -> int:
    """The next power of two from 8 on, so that problems of similar size share what is compiled."""
    return 1 << max(7, size - 1).bit_length()
