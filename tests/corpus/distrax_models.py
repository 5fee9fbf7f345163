"""Distrax: normalizing flows, a policy's update, a mixture and a hidden Markov model.

Shape suffixes: B batch, T time, M features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, ints, largest_dim, replicated, specs, training

PACKAGE = "distrax"


def conditioner(shape: tuple[int, ...], width: int, outputs: int) -> Any:
    """A net from the masked features to each feature's parameters; zeros at first."""
    return hk.Sequential(
        [
            hk.Flatten(preserve_dims=-len(shape)),
            hk.nets.MLP([width, width], activate_final=True),
            hk.Linear(shape[0] * outputs, w_init=jnp.zeros, b_init=jnp.zeros),
            hk.Reshape((*shape, outputs), preserve_dims=-1),
        ]
    )


def spline_flow(features: int, width: int, layers: int, bins: int) -> distrax.Transformed:
    """Coupling layers of rational quadratic splines over a uniform base."""
    mask = jnp.arange(features) % 2 == 0
    spline = partial(distrax.RationalQuadraticSpline, range_min=0.0, range_max=1.0)
    nets = [conditioner((features,), width, 3 * bins + 1) for _ in range(layers)]
    masks = [mask if n % 2 else ~mask for n in range(layers)]
    couplings = [distrax.MaskedCoupling(m, net, spline) for m, net in zip(masks, nets, strict=True)]
    base = distrax.Independent(distrax.Uniform(jnp.zeros(features), jnp.ones(features)), 1)
    return distrax.Transformed(base, distrax.Inverse(distrax.Chain(couplings)))


def affine_flow(features: int, width: int, layers: int) -> distrax.Transformed:
    """RealNVP: half of the features scale and shift the other half, with triangular mixing in between."""

    def affine(params: jax.Array) -> distrax.Bijector:
        return distrax.Block(distrax.ScalarAffine(params[..., 0], log_scale=jnp.tanh(params[..., 1])), 1)

    half, chain = features // 2, []
    for n in range(layers):
        matrix = hk.get_parameter(f"mix{n}", (features, features), init=hk.initializers.Identity())
        chain += [
            distrax.SplitCoupling(half, 1, conditioner((half,), width, 2), affine, swap=n % 2 == 1),
            distrax.TriangularLinear(matrix, is_lower=n % 2 == 0),
        ]
    base = distrax.MultivariateNormalDiag(jnp.zeros(features), jnp.ones(features))
    return distrax.Transformed(base, distrax.Chain(chain))


def mixture(features: int, width: int, components: int) -> distrax.Distribution:
    """A mixture of normals with learned locations and scales of low rank."""
    locations = hk.get_parameter("locations", (components, features), init=hk.initializers.RandomNormal())
    factors = hk.get_parameter("factors", (components, features, width), init=hk.initializers.RandomNormal(0.01))
    normal = distrax.MultivariateNormalDiagPlusLowRank(locations, jnp.ones((components, features)), factors)
    weights = distrax.Categorical(hk.get_parameter("logits", (components,), init=jnp.zeros))
    return distrax.MixtureSameFamily(weights, normal)


def likelihood(make: Any, rows: int, features: int, weights: Any, sizes: Sizes) -> Step:
    """The train step of a density on its negative log-likelihood."""
    density = hk.without_apply_rng(hk.transform(lambda x: make(features).log_prob(x)))
    x = floats(rows, features)
    params = jax.eval_shape(density.init, KEY, x)
    return training(lambda p, x: -density.apply(p, x).mean(), params, (x,), sizes, weights=weights(params, sizes))


def policy(sizes: Sizes) -> Step:
    """A policy gradient of squashed normal actions with an entropy bonus from samples."""

    def forward(x: jax.Array) -> distrax.Distribution:
        h = hk.nets.MLP([8192, 8192], activate_final=True)(x)
        normal = distrax.Normal(hk.Linear(64)(h), jax.nn.softplus(hk.Linear(64)(h)) + 1e-3)
        return distrax.Independent(distrax.Transformed(normal, distrax.Tanh()), 1)

    net = hk.without_apply_rng(hk.transform(forward))
    x = floats(16_384, 512)
    params = jax.eval_shape(
        lambda key, x: hk.transform(lambda x: forward(x).log_prob(jnp.zeros(64))).init(key, x), KEY, x
    )

    def loss(params: Any, x: jax.Array, action: jax.Array, advantage: jax.Array, key: jax.Array) -> jax.Array:
        chosen = net.apply(params, x)
        _, fresh = chosen.sample_and_log_prob(seed=key, sample_shape=(4,))
        return -(chosen.log_prob(action) * advantage).mean() + 1e-3 * fresh.mean()

    data = x, floats(16_384, 64), floats(16_384), KEY
    return training(loss, params, data, sizes, weights=specs(params, WIDE, sizes))


def hidden_markov(sizes: Sizes) -> Step:
    """The states' posteriors by the forward and backward recursions."""
    states, symbols = 512, 4096

    def run(observed_BT: jax.Array, initial: jax.Array, transition: jax.Array, emission: jax.Array) -> Any:
        model = distrax.HMM(
            distrax.Categorical(initial), distrax.Categorical(transition), distrax.Categorical(emission)
        )
        return jax.vmap(model.forward_backward)(observed_BT)

    logits = floats(states), floats(states, states), floats(states, symbols)
    rows = ints(512, 256)
    return Step(
        run=run, args=(rows, *logits), specs=(batch_specs(rows, sizes), P(), P(None, "model"), P("model", None))
    )


WIDE: Rules = (
    ("*mlp*/*linear_0/w", P(None, "model")),
    ("*mlp*/*linear_0/b", P("model")),
    ("*mlp*/*linear_1/w", P("model", None)),
)


def wide(params: Any, sizes: Sizes) -> Any:
    """Tensor parallelism of each MLP."""
    return specs(params, WIDE, sizes)


PROGRAMS: dict[str, MakeProgram] = {
    "spline flow": partial(likelihood, partial(spline_flow, width=2048, layers=8, bins=16), 4096, 64, replicated),
    "affine flow": partial(likelihood, partial(affine_flow, width=8192, layers=6), 4096, 2048, wide),
    "mixture": partial(likelihood, partial(mixture, width=16, components=256), 1024, 2048, largest_dim),
    "policy": policy,
    "hidden markov": hidden_markov,
}
