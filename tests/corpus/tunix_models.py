"""Tunix: Llama, Gemma and Qwen fine-tuned by its trainers, with its own sharding configs; LoRA, DPO and decoding.

Shape suffixes: B batch, S sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from support.train_steps.step import Sizes, Step
from tunix.models.gemma import model as gemma2
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils
from tunix.sft.dpo import dpo_trainer

from sharding import P

from . import MakeProgram
from .common import batch_specs, ints, largest_dim, replicated
from .nnx_training import Weights, forward, half, stateful

PACKAGE = "google-tunix"
AXES = {"tp": "model"}
"""Tunix's name of an axis -> ours."""

MakeModel = Callable[[], nnx.Module]


def llama(config: Callable[[], Any], **options: Any) -> MakeModel:
    """Llama 3, whose parameters are float32."""
    return lambda: llama3.Llama3(dataclasses.replace(config(), **options), rngs=nnx.Rngs(0))


def gemma(config: Callable[[], Any], **options: Any) -> MakeModel:
    """Gemma 3, whose parameters are bfloat16."""
    return lambda: gemma3.Gemma3(dataclasses.replace(config(), **options), rngs=nnx.Rngs(0))


def qwen(config: Callable[[], Any], **options: Any) -> MakeModel:
    """Qwen 3, dense or with experts."""
    return lambda: qwen3.Qwen3(dataclasses.replace(config(), **options), rngs=nnx.Rngs(0))


def with_lora(make: MakeModel, rank: int = 16, **quantization: Any) -> MakeModel:
    """The model with LoRA on its projections; its base quantized if a `weight_qtype` is given."""
    modules = ".*(q_einsum|kv_einsum|[qkvo]_proj|gate_proj|up_proj|down_proj)"
    lora = qwix.LoraProvider(module_path=modules, rank=rank, alpha=2.0 * rank, **quantization)

    def adapted() -> nnx.Module:
        base = make()
        return qwix.apply_lora_to_model(base, lora, **base.get_model_input(), rngs=nnx.Rngs(1))

    return adapted


def model_inputs(batch: peft_trainer.TrainingInput) -> dict[str, jax.Array]:
    """The arguments of the default loss."""
    padded = batch.input_tokens != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(padded),
        "attention_mask": utils.make_causal_attn_mask(padded),
    }


def trained(
    make_model: MakeModel, make_trainer: Callable[..., Any], batch: Any, sizes: Sizes, weights: Weights | None = None
) -> Step:
    """The train step of a trainer, which is built on shapes with its model."""
    trainers = []

    def make() -> dict[str, Any]:
        trainers.append(make_trainer(make_model()))
        return {"model": trainers[0].model, "optimizer": trainers[0].optimizer}

    def update(node: dict[str, Any], batch: Any) -> jax.Array:
        loss, *_ = trainers[0].create_train_step_fn()(node["model"], node["optimizer"], batch)
        return loss

    return stateful(make, update, (batch,), sizes, axes=AXES, weights=weights)


def sft(make_model: MakeModel, rows: int, context: int, sizes: Sizes, weights: Weights | None = None) -> Step:
    """Supervised fine-tuning."""

    def make_trainer(model: nnx.Module) -> peft_trainer.PeftTrainer:
        config = peft_trainer.TrainingConfig(eval_every_n_steps=100)
        trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-5), config)
        return trainer.with_gen_model_input_fn(model_inputs)

    mask = jax.ShapeDtypeStruct((rows, context), jnp.bool_)
    batch = peft_trainer.TrainingInput(input_tokens=ints(rows, context), input_mask=mask)
    return trained(make_model, make_trainer, batch, sizes, weights)


def dpo(make_model: MakeModel, rows: int, context: int, sizes: Sizes, algorithm: str = "dpo") -> Step:
    """Direct preference optimization, or ORPO without a reference model."""

    def make_trainer(model: nnx.Module) -> dpo_trainer.DPOTrainer:
        config = dpo_trainer.DPOTrainingConfig(eval_every_n_steps=100, algorithm=algorithm)
        return dpo_trainer.DPOTrainer(model, None, optax.adamw(1e-6), config)

    answers, logps = 2 * rows, None if algorithm == "orpo" else jax.ShapeDtypeStruct((rows,), jnp.float32)
    batch = dpo_trainer.TrainExample(
        input_ids=ints(answers, context),
        positions=ints(answers, context),
        attention_mask=jax.ShapeDtypeStruct((answers, context, context), jnp.bool_),
        ref_chosen_logps=logps,
        ref_rejected_logps=logps,
        completion_mask=ints(answers, context // 2),
        logits_to_keep=context // 2,
    )
    return trained(make_model, make_trainer, batch, sizes)


def decode(make_model: MakeModel, layers: int, kv_heads: int, head: int, rows: int, slots: int, sizes: Sizes) -> Step:
    """One token of each sequence, with a cache."""
    values = jax.ShapeDtypeStruct((rows, slots, kv_heads, head), jnp.bfloat16)
    cache = {f"layer_{i}": {"k": values, "v": values, "end_index": ints(rows)} for i in range(layers)}

    def apply(model: nnx.Module, cache: Any, tokens: jax.Array, positions: jax.Array, mask: jax.Array) -> Any:
        logits, cache = model(tokens, positions, cache, mask)
        return cache, jnp.argmax(logits[:, -1], axis=-1)

    mask = jax.ShapeDtypeStruct((rows, 1, slots), jnp.bool_)
    rules = batch_specs(cache, sizes, P(("data", "fsdp"), None, "model"))
    batch = ints(rows, 1), ints(rows, 1), mask
    return forward(half(make_model), apply, cache, batch, sizes, axes=AXES, cache_specs=rules)


def evaluation(make_model: MakeModel, rows: int, context: int, sizes: Sizes) -> Step:
    """The default loss of a batch, without gradients."""

    def apply(model: nnx.Module, cache: None, batch: peft_trainer.TrainingInput) -> Any:
        return cache, peft_trainer._default_loss_fn(model, **model_inputs(batch))

    mask = jax.ShapeDtypeStruct((rows, context), jnp.bool_)
    batch = peft_trainer.TrainingInput(input_tokens=ints(rows, context), input_mask=mask)
    return forward(half(make_model), apply, None, (batch,), sizes, axes=AXES)


HALF = {"dtype": jnp.bfloat16}
EXPERTS = {"num_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, **HALF}


def gemma2_2b(**options: Any) -> MakeModel:
    """Gemma 2, whose parameters are float32."""
    config = dataclasses.replace(gemma2.ModelConfig.gemma2_2b(), **options)
    return lambda: gemma2.Gemma(config, rngs=nnx.Rngs(0))


def qwen2_0p5b(**options: Any) -> MakeModel:
    """Qwen 2.5, whose 14 heads don't divide over 4."""
    config = dataclasses.replace(qwen2.ModelConfig.qwen2p5_0p5b(), **options)
    return lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(0))


LLAMA, GEMMA, QWEN = llama3.ModelConfig, gemma3.ModelConfig, qwen3.ModelConfig
PROGRAMS: dict[str, MakeProgram] = {
    "llama 3.2 1b": partial(sft, llama(LLAMA.llama3p2_1b), 16, 256),
    "llama 3.2 1b, 16 bits, remat": partial(
        sft, half(llama(LLAMA.llama3p2_1b, remat_config=llama3.RematConfig.DECODER)), 16, 512
    ),
    "llama 3.2 3b, decode": partial(decode, llama(LLAMA.llama3p2_3b), 28, 8, 128, 32, 4096),
    "llama 3.2 3b, qlora, remat": partial(
        sft,
        with_lora(
            half(llama(LLAMA.llama3p2_3b, remat_config=llama3.RematConfig.DECODER)), weight_qtype="nf4", tile_size=128
        ),
        16,
        256,
    ),
    "gemma 3 270m, data": partial(sft, gemma(GEMMA.gemma3_270m), 8, 256, weights=replicated),
    "gemma 3 1b, lora, remat": partial(
        sft, with_lora(gemma(GEMMA.gemma3_1b_pt, remat_config=gemma3.RematConfig.DECODER)), 16, 256
    ),
    "gemma 2 2b, evaluation": partial(evaluation, gemma2_2b(), 16, 512),
    "qwen 3 0.6b": partial(sft, qwen(QWEN.qwen3_0p6b, remat_config=qwen3.RematConfig.BLOCK, **HALF), 16, 512),
    "qwen 3 0.6b, fsdp": partial(
        sft, half(qwen(QWEN.qwen3_0p6b, remat_config=qwen3.RematConfig.DECODER, **HALF)), 8, 256, weights=largest_dim
    ),
    "qwen 3 1.7b, lora": partial(sft, with_lora(qwen(QWEN.qwen3_1p7b, **HALF)), 16, 256),
    "qwen 3, experts": partial(sft, qwen(QWEN.qwen3_30b_a3b, **EXPERTS), 16, 256),
    "qwen 2.5 0.5b, dpo": partial(dpo, qwen2_0p5b(remat_config=qwen2.RematConfig.DECODER, **HALF), 8, 512),
    "qwen 2.5 0.5b, orpo": partial(dpo, qwen2_0p5b(), 8, 256, algorithm="orpo"),
}
