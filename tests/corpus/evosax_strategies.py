"""evosax: a generation of evolution strategies over the weights of networks, evaluated on a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from evosax.algorithms import CMA_ES, PGPE, Open_ES
from evosax.problems.networks import MLP, identity_output_fn
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, ints, specs

PACKAGE = "evosax"


def generation(
    sizes: Sizes, *, strategy: Callable[..., Any], population: int, layers: tuple[int, ...], rows: int, weights: Rules
) -> Step:
    """Asks for a population, evaluates each network on the batch, and tells its losses."""
    inputs, *widths = layers
    network = MLP(layer_sizes=tuple(widths), output_fn=identity_output_fn)
    solution = jax.eval_shape(lambda key, x: network.init(key, x, key), KEY, floats(inputs))

    def started(key: jax.Array, solution: Any) -> Any:
        algorithm = strategy(population_size=population, solution=solution)
        params = algorithm.default_params
        return algorithm.init(key, solution, params), params

    state, params = jax.eval_shape(started, KEY, solution)

    def loss(solution: Any, x: jax.Array, label: jax.Array) -> jax.Array:
        logits = jax.vmap(lambda x: network.apply(solution, x, jax.random.key(0)))(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    def run(state: Any, key: jax.Array, params: Any, x: jax.Array, label: jax.Array) -> Any:
        algorithm = strategy(population_size=population, solution=jax.tree.map(jnp.zeros_like, solution))
        ask, tell = jax.random.split(key)
        candidates, state = algorithm.ask(ask, state, params)
        fitness = jax.vmap(loss, (0, None, None))(candidates, x, label)
        state, metrics = algorithm.tell(tell, candidates, fitness, state, params)
        return state, metrics["best_fitness"]

    batch = floats(rows, inputs), ints(rows)
    batch_spec = (batch_specs(b, sizes) for b in batch)
    return Step(
        run=run, args=(state, KEY, params, *batch), specs=(specs(state, weights, sizes), None, None, *batch_spec)
    )


MEAN: Rules = (("*mean", P("model")), ("*std", P("model")), ("*opt_state*", P("model")))
COVARIANCE: Rules = (("*C", P("model", None)), ("*B", P("model", None)))

PROGRAMS: dict[str, MakeProgram] = {
    "openai-es": partial(
        generation,
        strategy=partial(Open_ES, optimizer=optax.adam(1e-2)),
        population=512,
        layers=(784, 1024, 512, 10),
        rows=1024,
        weights=MEAN,
    ),
    "pgpe": partial(generation, strategy=PGPE, population=256, layers=(1024, 1024, 1024, 1), rows=512, weights=MEAN),
    "cma-es": partial(generation, strategy=CMA_ES, population=2048, layers=(32, 32, 31), rows=4096, weights=COVARIANCE),
}
