"""FlowJAX: maximum likelihood steps of normalizing flows, whose layers are scanned."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import paramax
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import Normal
from flowjax.flows import block_neural_autoregressive_flow, coupling_flow, masked_autoregressive_flow
from flowjax.train.losses import MaximumLikelihoodLoss
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, specs
from .equinox_models import is_shape

PACKAGE = "flowjax"


def is_trainable(leaf: Any) -> bool:
    """Whether a leaf of an abstract flow is a parameter."""
    return is_shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_fixed(leaf: Any) -> bool:
    """Whether a node is marked as not trainable."""
    return isinstance(leaf, paramax.NonTrainable)


def fitted(
    sizes: Sizes, *, flow: Any, dim: int, rows: int, weights: Rules, condition: int | None = None, **config: Any
) -> Step:
    """A minibatch step of `fit_to_data` with Adam."""

    def make(key: jax.Array) -> Any:
        return flow(key, base_dist=Normal(jnp.zeros(dim)), cond_dim=condition, **config)

    params, rest = eqx.partition(eqx.filter_eval_shape(make, KEY), is_trainable, is_leaf=is_fixed)
    constants, static = eqx.partition(rest, is_shape)
    optimizer = optax.adam(5e-4)

    def run(state: Any, constants: Any, *batch: jax.Array) -> Any:
        params, optimizer_state = state
        rest = eqx.combine(constants, static)
        value, gradient = eqx.filter_value_and_grad(MaximumLikelihoodLoss())(params, rest, *batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (eqx.apply_updates(params, updates), optimizer_state), value

    state = params, jax.eval_shape(optimizer.init, params)
    batch = (floats(rows, dim),) if condition is None else (floats(rows, dim), floats(rows, condition))
    batch_spec = (batch_specs(b, sizes) for b in batch)
    return Step(
        run=run, args=(state, constants, *batch), specs=((specs(params, weights, sizes), None), None, *batch_spec)
    )


# Layers are stacked: weights are [layers, out, in].
COLUMNS: Rules = (
    ("*layers/0/weight*", P("model", None)),
    ("*layers/0/bias*", P("model")),
    ("*layers/1/weight*", P(None, "model")),
    ("*layers/2/weight*", P("model", None)),
    ("*layers/2/bias*", P("model")),
)

PROGRAMS: dict[str, MakeProgram] = {
    "masked autoregressive": partial(
        fitted,
        flow=masked_autoregressive_flow,
        dim=512,
        rows=4096,
        weights=COLUMNS,
        flow_layers=6,
        nn_width=4096,
        nn_depth=2,
    ),
    "coupling, splines, conditional": partial(
        fitted,
        flow=partial(coupling_flow, transformer=RationalQuadraticSpline(knots=8, interval=4)),
        dim=64,
        rows=8192,
        weights=COLUMNS,
        condition=256,
        flow_layers=8,
        nn_width=2048,
        nn_depth=2,
    ),
    "block neural autoregressive": partial(
        fitted, flow=block_neural_autoregressive_flow, dim=64, rows=4096, weights=(), nn_depth=2, nn_block_dim=32
    ),
}
