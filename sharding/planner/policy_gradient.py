"""REINFORCE: a policy network samples choices and makes those more probable that cost less than usual."""

from __future__ import annotations

import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShardingError
from .partial_choice import PartialChoice, decision_order
from .problem import Problem
from .solution import Solution, nothing_found
from .strategy_scores import Weights, cost_scale, features_of, initial_weights, optimizer, padded, scores

STEPS = 300
"""Updates of the policy, each from `SAMPLES` choices."""
SAMPLES = 64
"""Of each step. With few the gradient is so noisy that the policy settles on early luck; `SAMPLES` divides its
variance."""
LEARNING_RATE = 0.1
BASELINE_DECAY = 0.9
VALID_ONLY_FROM = 0.5
"""Part of the steps after which samples that ran into a dead end no longer change the policy."""
SETTLED_STEPS = 10
"""After which the search ends if all their samples are equal."""
MOST_ENTRIES = 50_000_000
"""Entries of edges' matrices, each padded to the largest, up to which a problem is taken."""
DEAD = 1e6
"""Cost in place of inf, in multiples of the scale of costs."""


class Tables(NamedTuple):
    """A problem as arrays of one size per node, nodes in the order of decisions; costs in multiples of a scale."""

    costs: np.ndarray
    """[nodes, strategies]"""
    neighbours: np.ndarray
    """[nodes, edges]; the number of nodes where there is none."""
    edge_costs: np.ndarray
    """[nodes, edges, own strategies, neighbour's strategies]"""
    extra: np.ndarray
    """Bytes above the node's smallest, [nodes, strategies]."""
    is_alive: np.ndarray
    """[nodes, times]"""
    room: np.ndarray
    """[times]"""


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """The cheapest choice that a policy sampled while it learned.

    The policy decides node by node, with probabilities `softmax(scores)` of the strategies that fit
    (`strategy_scores`). With R the square root of a choice's cost above a lower bound and B its moving average over
    earlier steps, each step follows the gradient of `mean (R - B) log probability of the choice` over `SAMPLES` choices
    (the K of the paper's equation 3). Choices that run into a dead end have a large R, and are left out in the second
    half.

    Raises:
        ShardingError: the problem's edges, padded to one size, don't fit; or no choice that fits was sampled.

    References:
        Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017 (1706.04972),
        section 3. Deviation: a small network in place of a recurrent one with attention, and calculated costs.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    tables, order, scale, bound = _padded(problem)
    key = jax.random.key(seed)
    weights = initial_weights(key, *tables.costs.shape)
    state = optimizer(LEARNING_RATE).init(weights)
    baseline = jnp.float32(math.nan)
    best, best_cost, samples, settled = None, math.inf, 0, 0
    try:
        for step in range(STEPS):
            key, own = jax.random.split(key)
            is_late = step >= VALID_ONLY_FROM * STEPS
            weights, state, baseline, sampled = _step(tables, weights, state, baseline, own, is_late)
            choices, costs = np.asarray(sampled.choices), bound + scale * np.asarray(sampled.costs)
            samples += len(costs)
            # Costs are rounded to 32 bits here.
            limit = best_cost if best is None else best_cost + 1e-5 * abs(best_cost)
            for k in np.flatnonzero(costs < limit).tolist():
                choice = np.zeros(problem.num_nodes, np.int64)
                choice[order] = choices[k, : len(order)]
                if problem.is_feasible(choice) and (cost := problem.cost(choice)) < best_cost:
                    best, best_cost = choice, cost
            settled = settled + 1 if (choices == choices[0]).all() else 0
            if settled == SETTLED_STEPS or time.monotonic() - start > seconds:
                break
    except KeyboardInterrupt:
        if best is None:
            raise
    if best is None:
        raise nothing_found(problem, "reinforce", is_proven=False, fix='algorithm="auto"')
    return Solution(
        problem=problem,
        choice=best,
        algorithm="reinforce",
        bound=-math.inf,
        evaluations=samples,
        seconds=time.monotonic() - start,
    )


class Samples(NamedTuple):
    """Choices of a policy."""

    choices: jax.Array
    """[samples, nodes]"""
    costs: jax.Array
    """In multiples of the scale, above the sum of least costs; at least `DEAD` in a dead end."""
    log_probabilities: jax.Array


def sample(tables: Tables, weights: Weights, key: jax.Array) -> Samples:
    """One choice, node by node."""
    num_nodes = len(tables.costs)

    def decide(carry: tuple, inputs: tuple) -> tuple:
        choice, room, cost, log_probability = carry
        node, own, neighbours, edges, extra, is_alive, key = inputs
        theirs = choice[neighbours]
        is_decided = theirs >= 0
        known = jnp.take_along_axis(edges, jnp.maximum(theirs, 0)[:, None, None], axis=2)[..., 0]
        local = own + jnp.sum(jnp.where(is_decided[:, None], known, 0.0), axis=0)
        ahead = local + jnp.sum(jnp.where(is_decided[:, None], 0.0, edges.min(axis=2)), axis=0)
        fits = extra <= jnp.min(jnp.where(is_alive, room, jnp.inf))
        is_option = fits & (local < DEAD)
        # In a dead end anything that fits goes on.
        is_option = jnp.where(is_option.any(), is_option, fits & (own < 2 * DEAD))
        features = features_of((local, ahead, own), extra, is_option, jnp)
        logits = jnp.where(is_option, scores(weights, node, features), -1e9)
        taken = jax.random.categorical(key, logits)
        log_probability += jax.nn.log_softmax(logits)[taken]
        room = room - jnp.where(is_alive, extra[taken], 0.0)
        carry = choice.at[node].set(taken), room, cost + local[taken], log_probability
        return carry, None

    start = jnp.full(num_nodes + 1, -1), jnp.asarray(tables.room), jnp.float32(0), jnp.float32(0)
    nodes = jnp.arange(num_nodes), *tables[:5], jax.random.split(key, num_nodes)
    (choice, _, cost, log_probability), _ = jax.lax.scan(decide, start, nodes)
    return Samples(choice[:-1], cost, log_probability)


def surrogate(
    weights: Weights, tables: Tables, baseline: jax.Array, key: jax.Array, is_late: jax.Array
) -> tuple[jax.Array, tuple[Samples, jax.Array]]:
    """A function of the weights whose gradient is REINFORCE's; and the samples with their mean R."""
    sampled = jax.vmap(functools.partial(sample, tables, weights))(jax.random.split(key, SAMPLES))
    is_valid = sampled.costs < DEAD
    root = jnp.sqrt(jnp.maximum(sampled.costs, 0.0))
    # A large R, but of the order of the others.
    root = jnp.where(is_valid, root, 2.0 * jnp.max(jnp.where(is_valid, root, 1.0)))
    counts = jnp.where(is_late, is_valid, True)
    mean = jnp.sum(jnp.where(counts, root, 0.0)) / jnp.maximum(1.0, jnp.sum(jnp.where(counts, 1.0, 0.0)))
    average = jnp.where(jnp.isnan(baseline), mean, baseline)
    advantage = jax.lax.stop_gradient(jnp.where(counts, root - average, 0.0))
    loss = jnp.mean(advantage * sampled.log_probabilities)
    return loss, (sampled, BASELINE_DECAY * average + (1 - BASELINE_DECAY) * mean)


@jax.jit
def _step(tables: Tables, weights: Weights, state: Any, baseline: jax.Array, key: jax.Array, is_late: jax.Array):
    gradient = jax.grad(surrogate, has_aux=True)
    slope, (sampled, baseline) = gradient(weights, tables, baseline, key, is_late)
    updates, state = optimizer(LEARNING_RATE).update(slope, state)
    return jax.tree.map(jnp.add, weights, updates), state, baseline, sampled


class Padded(NamedTuple):
    """A problem as arrays, and what leads back from them."""

    tables: Tables
    order: np.ndarray
    """Nodes in the order of decisions."""
    scale: float
    bound: float
    """The sum of all least costs, which those of the arrays are above."""


def _padded(problem: Problem) -> Padded:
    """The arrays of a problem."""
    start, order, scale = PartialChoice(problem), np.array(decision_order(problem), np.int64), cost_scale(problem)
    nodes, strategies = padded(problem.num_nodes), padded(int(problem.num_strategies.max(initial=1)))
    degree = padded(max(map(len, start.edges), default=1))
    if (entries := nodes * degree * strategies**2) > MOST_ENTRIES:
        required = f"at most {MOST_ENTRIES:,}: nodes x largest number of edges x strategies^2, rounded up to 2^k"
        found = f"{entries:,} entries of padded edges"
        raise ShardingError(f"reinforce: {problem!r}", found=found, required=required, fix='algorithm="auto"')
    (tight,) = problem.is_tight.nonzero()
    times = padded(len(tight))
    # Strategies that only fill up are no options.
    costs = np.full((nodes, strategies), 2 * DEAD, np.float32)
    costs[problem.num_nodes :, 0] = 0.0
    tables = Tables(
        costs=costs,
        neighbours=np.full((nodes, degree), nodes, np.int32),
        edge_costs=np.zeros((nodes, degree, strategies, strategies), np.float32),
        extra=np.zeros((nodes, strategies), np.float32),
        is_alive=np.zeros((nodes, times), bool),
        room=np.full(times, np.inf, np.float32),
    )
    tables.room[: len(tight)] = start.room[tight]
    place, bound = np.argsort(order), 0.0
    for at, node in enumerate(order.tolist()):
        own = slice(start.offsets[node], start.offsets[node + 1])
        count = own.stop - own.start
        shifted, least = _above_least(start.local[own])
        costs[at, :count] = np.minimum(shifted / scale, DEAD)
        bound += least
        tables.extra[at, :count] = start.extra[own]
        first, end = problem.spans[node]
        tables.is_alive[at, : len(tight)] = (first <= tight) & (tight < end)
        for k, (j, matrix, _) in enumerate(start.edges[node]):
            tables.neighbours[at, k] = place[j]
            shifted, least = _above_least(matrix)
            tables.edge_costs[at, k, :count] = DEAD
            tables.edge_costs[at, k, :count, : matrix.shape[1]] = np.minimum(shifted / scale, DEAD)
            bound += least / 2  # each edge is in the lists of both its nodes
    return Padded(tables, order, scale, bound)


def _above_least(costs: np.ndarray) -> tuple[np.ndarray, float]:
    """Costs above their least, and that."""
    least = float(costs.min())
    return (costs - least, least) if math.isfinite(least) else (costs, 0.0)
