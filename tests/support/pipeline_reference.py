"""Pipelined models, and reference losses and gradients from a loop over microbatches and stages on one device."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sharding
from sharding import pipeline

SAMPLES, TOKENS, FEATURES, HIDDEN, VOCAB = 4, 3, 8, 16, 12


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """A model split into stages."""

    stage_fn: Callable[..., Any]
    loss_fn: Callable[..., Any]
    first_fn: Callable[..., Any] | None = None
    last_fn: Callable[..., Any] | None = None
    params: Callable[[int], Any]
    """Number of stages -> parameters."""
    batch: Callable[[int], Any]
    """Number of microbatches -> (inputs, targets)."""
    specs: dict[str, P]
    """Specs of a stage's parameters on meshes with an axis "tensor"."""

    def functions(self):
        return {"first_fn": self.first_fn, "last_fn": self.last_fn}


def residual_mlp(w, x):
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


def normal(seed, *shape):
    """Normal values from numpy, which compiles nothing."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def tokens(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(VOCAB, size=shape), jnp.int32)


def weights(stages):
    return {"a": normal(0, stages, FEATURES, HIDDEN) / 3, "b": normal(1, stages, HIDDEN, FEATURES) / 3}


SPECS = {"a": P("pipe", None, "tensor"), "b": P("pipe", "tensor", None)}

MLP = Example(
    stage_fn=residual_mlp,
    loss_fn=lambda y, target: jnp.square(y - target).mean(),
    params=weights,
    batch=lambda microbatches: (normal(2, microbatches, SAMPLES, FEATURES), normal(3, microbatches, SAMPLES, FEATURES)),
    specs=SPECS,
)


def _embed(own, words, shared):
    h = shared["table"][words] + own["position"]
    number = jnp.stack([words[0, 0], words[0, 1]]).astype(jnp.uint32)
    return {"h": h, "key": jax.random.wrap_key_data(number), "stage": jnp.int32(0), "extra": jnp.zeros(())}


def _mlp_with_dropout(w, x):
    """Dropout by key and stage number, by a formula that compiles faster than JAX's own."""
    h = residual_mlp(w, x["h"])
    number = jax.random.key_data(x["key"]).astype(jnp.float32).sum() + x["stage"]
    h = h * (jnp.sin(number + jnp.arange(h.size, dtype=h.dtype)) > -0.8).reshape(h.shape)
    return {**x, "h": h, "stage": x["stage"] + 1, "extra": x["extra"] + jnp.square(h).mean()}


def _logits(own, y, shared):
    return (y["h"] * own["scale"]) @ shared["table"].T, y["extra"]


def _cross_entropy(output, target):
    logits, extra = output
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], -1).mean() + 0.1 * extra


def _params_with_ends(stages):
    return {
        "stages": weights(stages),
        "first": {"position": normal(4, 1, TOKENS, FEATURES)},
        "last": {"scale": jnp.ones((1, 1, FEATURES))},
        "shared": {"table": normal(5, VOCAB, FEATURES)},
    }


TIED = Example(
    stage_fn=_mlp_with_dropout,
    loss_fn=_cross_entropy,
    first_fn=_embed,
    last_fn=_logits,
    params=_params_with_ends,
    batch=lambda microbatches: (tokens(6, microbatches, SAMPLES, TOKENS), tokens(7, microbatches, SAMPLES, TOKENS)),
    specs=SPECS,
)
"""A tied embedding, parameters of each end, dropout by key, and an auxiliary loss carried with the activations."""


def mean_loss(example, params, inputs, targets):
    """Mean loss from a loop over microbatches and stages."""
    has_ends = example.first_fn is not None
    stages = params["stages"] if has_ends else params
    shared = (params["shared"],) if has_ends and "shared" in params else ()
    losses = []
    for microbatch in range(jax.tree.leaves(inputs)[0].shape[0]):
        x, target = (jax.tree.map(lambda leaf, m=microbatch: leaf[m], tree) for tree in (inputs, targets))
        if has_ends:
            x = example.first_fn(params.get("first"), x, *shared)
        for stage in range(jax.tree.leaves(stages)[0].shape[0]):
            x = example.stage_fn(jax.tree.map(lambda leaf, s=stage: leaf[s], stages), x)
        losses.append(example.loss_fn(example.last_fn(params.get("last"), x, *shared) if has_ends else x, target))
    return sum(losses) / len(losses)


@functools.cache
def reference(example, stages, microbatches):
    """Loss and gradients on one device, as numpy arrays."""
    step = jax.jit(jax.value_and_grad(functools.partial(mean_loss, example)))
    return jax.tree.map(np.asarray, step(example.params(stages), *example.batch(microbatches)))


def pipelined(example, schedule, *, executor="spmd", jit=sharding.jit, axes=None, placed=False, remat=None):
    """Loss and gradients of the pipeline over virtual devices, gradients in model order."""
    axes = axes or {}
    params, (inputs, targets) = example.params(schedule.stages), example.batch(schedule.microbatches)
    devices = jax.devices()[: schedule.devices * int(np.prod([1, *axes.values()]))]
    with sharding.mesh(pipe=schedule.devices, **axes, devices=devices) as mesh:
        step = pipeline.value_and_grad(
            example.stage_fn,
            example.loss_fn,
            schedule,
            **example.functions(),
            executor=executor,
            placed=placed,
            remat=remat,
        )
        stages = params["stages"] if example.first_fn else params
        order = None
        if placed:
            stages, order = (found := pipeline.place(stages, schedule)).stages, found.order
        if "tensor" in axes and (placed or schedule.stages % schedule.devices == 0):
            stages = {
                name: jax.device_put(leaf, NamedSharding(mesh, example.specs[name])) for name, leaf in stages.items()
            }
        if "data" in axes:
            sharded = NamedSharding(mesh, P(None, "data"))
            inputs, targets = jax.tree.map(lambda leaf: jax.device_put(leaf, sharded), (inputs, targets))
        stages = stages if order is None else pipeline.PlacedStages(stages, order)
        params = {**params, "stages": stages} if example.first_fn else stages
        loss, gradients = jax.block_until_ready((jit(step) if executor == "spmd" else step)(params, inputs, targets))
    loss, gradients = jax.tree.map(np.asarray, (loss, gradients))
    if placed:
        own = gradients["stages"] if example.first_fn else gradients
        of_stages = [own.order.index(stage) for stage in range(schedule.stages)]
        own = {name: leaf[of_stages] for name, leaf in own.stages.items()}
        gradients = {**gradients, "stages": own} if example.first_fn else own
    return loss, gradients


def max_relative_error(found, wanted):
    """Maximum absolute error of each array relative to its maximum, over all arrays."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
