"""Optax: its optimizers, wrappers and losses over a transformer and an acoustic model in plain JAX.

Shape suffixes: B batch, S sequence, M features, H heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import Rules, batch_specs, bfloat16, floats, ints, largest_dim, replicated, specs, training

PACKAGE = "optax"
VOCAB, HEADS = 32768, 16


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square norm."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def block(layer: Any, x_BSM: jax.Array) -> jax.Array:
    """Causal attention and an MLP; weights are matrices, as matrix optimizers expect."""
    heads = (*x_BSM.shape[:2], HEADS, -1)
    h = norm(x_BSM, layer["norm1"])
    q, k, v = ((h @ layer[name]).reshape(heads) for name in ("query", "key", "value"))
    x_BSM = x_BSM + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x_BSM.shape) @ layer["out"]
    return x_BSM + jax.nn.gelu(norm(x_BSM, layer["norm2"]) @ layer["up"]) @ layer["down"]


def next_token_loss(params: Any, tokens_BS: jax.Array) -> jax.Array:
    """The mean cross-entropy of each next token, computed in bfloat16 with remat of each layer."""
    half = bfloat16(params)
    x_BSM = half["embedding"][tokens_BS[:, :-1]]
    for layer in half["layers"]:
        x_BSM = jax.checkpoint(block)(layer, x_BSM)
    logits = (norm(x_BSM, half["norm"]) @ half["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BS[:, 1:]).mean()


def transformer(features: int, layers: int) -> Any:
    """The shapes of its parameters."""
    square, vector = floats(features, features), floats(features)
    attention = dict.fromkeys(("query", "key", "value", "out"), square)
    mlp = {"up": floats(features, 4 * features), "down": floats(4 * features, features)}
    layer = {**attention, **mlp, "norm1": vector, "norm2": vector}
    ends = {"embedding": floats(VOCAB, features), "head": floats(features, VOCAB), "norm": vector}
    return {**ends, "layers": [layer] * layers}


MEGATRON: Rules = (
    ("embedding", P("model", "fsdp")),
    ("head", P("fsdp", "model")),
    ("layers/*/out", P("model", "fsdp")),
    ("layers/*/down", P("model", "fsdp")),
    ("layers/*/norm?", P(None)),
    ("layers/*", P("fsdp", "model")),
)


def megatron(params: Any, sizes: Sizes) -> Any:
    """Tensor parallelism, and FSDP over the other dim."""
    return specs(params, MEGATRON, sizes)


LARGE, SMALL = transformer(2048, 8), transformer(1024, 4)
TOKENS = ints(16, 1025)


def optimized(optimizer: optax.GradientTransformation, weights: Any, sizes: Sizes, *, params: Any = LARGE) -> Step:
    """The transformer's train step with an optimizer."""
    return training(next_token_loss, params, (TOKENS,), sizes, weights=weights(params, sizes), optimizer=optimizer)


def lookahead(sizes: Sizes) -> Step:
    """Slow weights follow the fast ones every sixth step."""
    optimizer = optax.lookahead(optax.adamw(3e-4), sync_period=6, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(LARGE)
    weights = megatron(LARGE, sizes)

    def run(state: Any, tokens: jax.Array) -> Any:
        params, optimizer_state = state
        value, gradient = jax.value_and_grad(next_token_loss)(params.fast, tokens)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    state = params, jax.eval_shape(optimizer.init, params)
    both = optax.LookaheadParams(weights, weights)
    return Step(run=run, args=(state, TOKENS), specs=((both, None), batch_specs(TOKENS, sizes)))


def with_value(
    optimizer: optax.GradientTransformationExtraArgs, extra: Callable[..., Any], params: Any, sizes: Sizes
) -> Step:
    """The train step of an optimizer whose update takes the loss: `extra(loss, value, gradient)` are its keywords."""

    def run(state: Any, tokens: jax.Array) -> Any:
        params, optimizer_state = state
        loss = partial(next_token_loss, tokens_BS=tokens)
        value, gradient = jax.value_and_grad(loss)(params)
        keywords = extra(loss, value, gradient)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params, **keywords)
        return (optax.apply_updates(params, updates), optimizer_state), value

    state = params, jax.eval_shape(optimizer.init, params)
    return Step(run=run, args=(state, TOKENS), specs=((largest_dim(params, sizes), None), batch_specs(TOKENS, sizes)))


def private(sizes: Sizes) -> Step:
    """DP-SGD: the gradient of each example is clipped, their sum gets noise."""
    optimizer = optax.contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, seed=0, momentum=0.9)

    def run(state: Any, tokens: jax.Array) -> Any:
        params, optimizer_state = state
        each = jax.vmap(jax.value_and_grad(next_token_loss), (None, 0))
        values, gradients = each(params, tokens[:, None])
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), values.mean()

    state = SMALL, jax.eval_shape(optimizer.init, SMALL)
    return Step(run=run, args=(state, TOKENS), specs=((replicated(SMALL, sizes), None), batch_specs(TOKENS, sizes)))


def acoustic_loss(
    params: Any, audio: jax.Array, pads: jax.Array, labels: jax.Array, label_pads: jax.Array
) -> jax.Array:
    """Connectionist temporal classification over strided convolutions."""
    h = audio
    for kernel in params["convolutions"]:
        h = jax.nn.gelu(jax.lax.conv_general_dilated(h, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))
    return optax.ctc_loss(h @ params["head"], pads, labels, label_pads).mean()


def acoustic(sizes: Sizes) -> Step:
    """The train step of an acoustic model with warm-up, clipping and LAMB."""
    kernels = [floats(5, i, o) for i, o in ((128, 1024), (1024, 2048), (2048, 2048))]
    params = {"convolutions": kernels, "head": floats(2048, 1024)}
    weights: Rules = (("convolutions/[02]", P(None, None, "model")), ("*/1", P(None, "model", None)))
    batch = floats(64, 1600, 128), floats(64, 200), ints(64, 64), floats(64, 64)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 1000, 10000)
    optimizer = optax.chain(optax.adaptive_grad_clip(0.1), optax.lamb(schedule))
    return training(acoustic_loss, params, batch, sizes, weights=specs(params, weights, sizes), optimizer=optimizer)


def contrastive(sizes: Sizes) -> Step:
    """The train step of an embedding MLP whose loss compares all pairs of the global batch."""
    widths = 4096, 8192, 8192, 512
    params = [floats(i, o) for i, o in zip(widths, widths[1:], strict=False)]

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return optax.losses.ntxent(x @ params[-1], labels)

    weights: Rules = (("[02]", P(None, "model")), ("1", P("model", None)))
    batch = floats(4096, 4096), ints(4096)
    return training(
        loss, params, batch, sizes, weights=specs(params, weights, sizes), optimizer=optax.lars(0.1, momentum=0.9)
    )


PROGRAMS: dict[str, MakeProgram] = {
    "adafactor": partial(optimized, optax.adafactor(1e-3, momentum=0.9), megatron),
    "lion": partial(optimized, optax.lion(1e-4, weight_decay=0.1, mu_dtype=jnp.bfloat16), megatron),
    "muon": partial(optimized, optax.contrib.muon(2e-2), largest_dim),
    "galore": partial(optimized, optax.contrib.galore(1e-3, rank=256), replicated, params=SMALL),
    "sm3": partial(optimized, optax.sm3(0.1), megatron),
    "accumulation": partial(optimized, optax.MultiSteps(optax.adamw(3e-4), 4).gradient_transformation(), largest_dim),
    "schedule free": partial(optimized, optax.contrib.schedule_free_adamw(2e-3, 1000), largest_dim),
    "prodigy": partial(optimized, optax.contrib.prodigy(), megatron),
    "lookahead": lookahead,
    "sophia": partial(with_value, optax.contrib.sophia(1e-4), lambda loss, *_: {"obj_fn": loss}, SMALL),
    "lbfgs": partial(
        with_value, optax.lbfgs(), lambda loss, value, grad: {"value": value, "grad": grad, "value_fn": loss}, SMALL
    ),
    "dp-sgd": private,
    "ctc": acoustic,
    "contrastive": contrastive,
}
