"""Qwix: flax's decoders with quantized training, and with quantized weights at inference, in nnx and in linen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from support.train_steps.step import Sizes, Step

from . import MakeProgram, flax_linen_models, flax_nnx_models
from .common import ints, largest_dim
from .nnx_training import Weights, forward, half, stateful

PACKAGE = "qwix"

Provider = qwix.QuantizationProvider
Nnx = flax_nnx_models.Config
Linen = flax_linen_models.Config


def training(qtype: Any, backward: Any = None, **options: Any) -> Provider:
    """Quantized operands of every product, and of the gradients' products if a `backward` type is given."""
    return qwix.QtProvider([qwix.QtRule(weight_qtype=qtype, act_qtype=qtype, bwd_qtype=backward, **options)])


def inference(weights: Any, activations: Any = None, **options: Any) -> Provider:
    """Quantized weights, and activations quantized as the model runs."""
    return qwix.PtqProvider([qwix.QuantizationRule(weight_qtype=weights, act_qtype=activations, **options)])


def quantized(config: Nnx, provider: Provider) -> nnx.Module:
    """An nnx decoder with a provider's products."""
    make = partial(flax_nnx_models.Decoder, config, nnx.Rngs(0))
    model = half(make)() if isinstance(provider, qwix.PtqProvider) else make()
    return qwix.quantize_model(model, provider, jnp.zeros((2, 8), jnp.int32))


def trained(config: Nnx, provider: Provider, rows: int, sizes: Sizes, weights: Weights | None = None) -> Step:
    """The train step of a quantized nnx decoder."""

    def make() -> dict[str, Any]:
        model = quantized(config, provider)
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)}

    return stateful(make, flax_nnx_models.update, (ints(rows, config.context),), sizes, weights=weights)


def scored(config: Nnx, provider: Provider, rows: int, sizes: Sizes) -> Step:
    """The logits of each row's last token."""

    def apply(model: nnx.Module, cache: None, tokens_BS: jax.Array) -> Any:
        return cache, model(tokens_BS)[:, -1]

    return forward(partial(quantized, config, provider), apply, None, (ints(rows, config.context),), sizes)


def linen(config: Linen, provider: Provider) -> Any:
    """A quantized linen decoder."""
    return qwix.quantize_model(flax_linen_models.LanguageModel(config), provider)


MEGATRON = flax_linen_models.MEGATRON
NNX = Nnx(features=1024, heads=16, layers=8, context=512, remat=True)
LINEN = Linen(features=2048, mlp=8192, heads=16, layers=8, dropout=0.0)

PROGRAMS: dict[str, MakeProgram] = {
    "nnx decoder, int8 forward": partial(trained, NNX, training(jnp.int8), 16),
    "nnx decoder, float8": partial(trained, NNX, training(jnp.float8_e4m3fn, jnp.float8_e5m2), 16),
    "nnx decoder, int8, fsdp": partial(
        trained, replace(NNX, remat=False), training(jnp.int8, jnp.int8), 8, weights=largest_dim
    ),
    "nnx decoder, int8 inference": partial(scored, replace(NNX, remat=False), inference(jnp.int8, jnp.int8), 32),
    "nnx decoder, int4 weights": partial(scored, replace(NNX, remat=False), inference(jnp.int4, tile_size=64), 32),
    "linen decoder, int8": partial(flax_linen_models.trained, linen(LINEN, training(jnp.int8, jnp.int8)), 16, MEGATRON),
    "linen decoder, int8 weights, cached": partial(
        flax_linen_models.decoded,
        linen(replace(LINEN, decode=True), inference(jnp.int8, module_path="Stack.*")),
        64,
        MEGATRON,
    ),
}
