"""KerasHub: language models, classifiers, image models and a denoiser with their own layers, at real sizes.

Shape suffixes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import keras_hub
import optax
from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import Rules, batch_specs, floats, ints, largest_dim, replicated, specs, specs_by
from .keras_training import abstract, keras_step, shapes

PACKAGE = "keras-hub"
MODELS = keras_hub.models


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def next_token(logits_BSV: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """The mean cross-entropy of each next token."""
    return cross_entropy(logits_BSV[:, :-1], tokens_BS[:, 1:])


def text(rows: int, length: int) -> dict[str, Any]:
    """The shapes of padded tokens."""
    return {"token_ids": ints(rows, length), "padding_mask": ints(rows, length)}


def causal(sizes: Sizes, *, task: Any, backbone: Any, rows: int, length: int, weights: Any, **config: Any) -> Step:
    """The train step of a causal language model."""
    model = task(backbone=abstract(partial(backbone, **config)), preprocessor=None)
    return keras_step(model, next_token, text(rows, length), ints(rows, length), sizes, weights=weights)


def classifier(sizes: Sizes) -> Step:
    """BERT base fine-tuned to classify texts, in float32."""
    backbone = abstract(
        partial(
            MODELS.BertBackbone,
            vocabulary_size=30522,
            num_layers=12,
            num_heads=12,
            hidden_dim=768,
            intermediate_dim=3072,
        )
    )
    model = MODELS.BertTextClassifier(backbone=backbone, num_classes=4)
    inputs = text(16, 512) | {"segment_ids": ints(16, 512)}
    return keras_step(model, cross_entropy, inputs, ints(16), sizes, weights=replicated)


def decoded(sizes: Sizes) -> Step:
    """A token of each row by Gemma, with a cache of all positions."""
    rows, length, layers, heads, head_dim = 64, 2048, 18, 4, 256
    config = {"vocabulary_size": 65536, "num_layers": layers, "num_query_heads": 8, "num_key_value_heads": heads}
    config |= {"hidden_dim": 2048, "intermediate_dim": 32768, "head_dim": head_dim, "dtype": "bfloat16"}
    model = MODELS.GemmaCausalLM(backbone=abstract(partial(MODELS.GemmaBackbone, **config)))
    params = shapes(model.trainable_variables)

    def run(cache: jax.Array, params: Any, tokens: jax.Array, index: jax.Array) -> Any:
        with keras.StatelessScope([(v, params[v.path]) for v in model.trainable_variables]):
            logits, _, cache = model.call_with_cache(tokens, cache, index)
        return cache, jnp.argmax(logits[:, -1], axis=-1)

    cache = floats(rows, layers, 2, length, heads, head_dim, dtype=jnp.bfloat16)
    tokens = ints(rows, 1)
    cache_spec = batch_specs(cache, sizes, P(("data", "fsdp"), None, None, None, "model"))
    return Step(
        run=run,
        args=(cache, params, tokens, ints()),
        specs=(cache_spec, specs(params, MEGATRON, sizes), batch_specs(tokens, sizes), None),
    )


def vision_transformer(sizes: Sizes) -> Step:
    """ViT-L/16 trained in mixed precision."""
    make = partial(MODELS.ViTBackbone, (224, 224, 3), 16, 24, 16, 1024, 4096, dtype="mixed_bfloat16")
    model = MODELS.ViTImageClassifier(backbone=abstract(make), num_classes=1000)
    batch = floats(64, 224, 224, 3), ints(64)
    return keras_step(model, cross_entropy, *batch, sizes, weights=megatron)


def residual(sizes: Sizes) -> Step:
    """ResNet-101 trained by SGD with momentum."""
    widths, depths = [64, 128, 256, 512], [3, 4, 23, 3]
    make = partial(
        MODELS.ResNetBackbone, [64], [7], widths, depths, [1, 2, 2, 2], "bottleneck_block", image_shape=(224, 224, 3)
    )
    model = MODELS.ResNetImageClassifier(backbone=abstract(make), num_classes=1000)
    batch = floats(128, 224, 224, 3), ints(128)
    optimizer = optax.sgd(0.1, momentum=0.9)
    return keras_step(model, cross_entropy, *batch, sizes, weights=replicated, optimizer=optimizer)


def denoiser(sizes: Sizes) -> Step:
    """Rectified flow with Stable Diffusion 3's transformer over latents and text."""
    latent, context = (64, 64, 16), (154, 4096)
    make = partial(MMDiT, 2, 1024, 16, 16, 64, latent_shape=latent, context_shape=context, dtype="mixed_bfloat16")
    inputs = {
        "latent": floats(16, *latent),
        "context": floats(16, *context),
        "pooled_projection": floats(16, 2048),
        "timestep": floats(16, 1),
    }

    def loss(velocity: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((velocity.astype(jnp.float32) - target) ** 2)

    return keras_step(abstract(make), loss, inputs, floats(16, *latent), sizes, weights=megatron)


def transcriber(sizes: Sizes) -> Step:
    """Whisper small: the decoder's cross-entropy given spectrograms, with a tied head."""
    make = partial(
        MODELS.WhisperBackbone,
        vocabulary_size=51864,
        num_layers=12,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
        dropout=0.1,
    )
    backbone = abstract(make)
    hidden = backbone.output["decoder_sequence_output"]
    model = abstract(lambda: keras.Model(backbone.input, backbone.token_embedding(hidden, reverse=True)))
    inputs = {
        "encoder_features": floats(8, 3000, 80),
        "decoder_token_ids": ints(8, 448),
        "decoder_padding_mask": ints(8, 448),
    }
    return keras_step(model, next_token, inputs, ints(8, 448), sizes, weights=megatron)


MEGATRON: Rules = (
    ("*token_embedding*/embeddings", P("model", "fsdp")),
    ("*/reverse_embeddings", P("fsdp", "model")),
    ("decoder_block_*/attention/attention_output/kernel", P("model", None, "fsdp")),
    ("decoder_block_*/attention/*/kernel", P("model", "fsdp", None)),  # Gemma's heads are first
    ("*/ffw_gating*/kernel", P("fsdp", "model")),
    ("*/ffw_linear/kernel", P("model", "fsdp")),
    ("*/attention_output/kernel", P("model", None, "fsdp")),
    ("*/query/kernel", P("fsdp", "model", None)),
    ("*/key/kernel", P("fsdp", "model", None)),
    ("*/value/kernel", P("fsdp", "model", None)),
    ("*/expert_feedforward_*", P("model", "fsdp", None)),
    ("*/*_intermediate_dense/kernel", P("fsdp", "model")),
    ("*/*_gate_dense/kernel", P("fsdp", "model")),
    ("*/*_output_dense/kernel", P("model", "fsdp")),
    ("*/dense*1/kernel", P("fsdp", "model")),
    ("*/dense*2/kernel", P("model", "fsdp")),
    ("*/attention_qkv/kernel", P("fsdp", "model")),
    ("*/attention_proj/kernel", P("model", "fsdp")),
    ("*/ada_layer_norm/dense/kernel", P("fsdp", "model")),
)
megatron = partial(specs_by, MEGATRON)


PROGRAMS: dict[str, MakeProgram] = {
    "bert classifier": classifier,
    "gpt2, mixed precision": partial(
        causal,
        task=MODELS.GPT2CausalLM,
        backbone=MODELS.GPT2Backbone,
        rows=16,
        length=1024,
        weights=megatron,
        vocabulary_size=50304,
        num_layers=12,
        num_heads=16,
        hidden_dim=1024,
        intermediate_dim=4096,
        dtype="mixed_bfloat16",
    ),
    "llama, bfloat16, fsdp": partial(
        causal,
        task=MODELS.LlamaCausalLM,
        backbone=MODELS.LlamaBackbone,
        rows=8,
        length=1024,
        weights=largest_dim,
        vocabulary_size=32000,
        num_layers=8,
        num_query_heads=16,
        num_key_value_heads=4,
        hidden_dim=2048,
        intermediate_dim=5632,
        dtype="bfloat16",
    ),
    "qwen3": partial(
        causal,
        task=MODELS.Qwen3CausalLM,
        backbone=MODELS.Qwen3Backbone,
        rows=8,
        length=1024,
        weights=megatron,
        vocabulary_size=65536,
        num_layers=8,
        num_query_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        hidden_dim=1024,
        intermediate_dim=3072,
        tie_word_embeddings=True,
    ),
    "mixtral, bfloat16": partial(
        causal,
        task=MODELS.MixtralCausalLM,
        backbone=MODELS.MixtralBackbone,
        rows=8,
        length=1024,
        weights=megatron,
        vocabulary_size=32000,
        num_layers=6,
        num_query_heads=16,
        num_key_value_heads=8,
        num_experts=8,
        hidden_dim=1024,
        intermediate_dim=3584,
        dtype="bfloat16",
    ),
    "gemma, cached": decoded,
    "vit, mixed precision": vision_transformer,
    "resnet101": residual,
    "mmdit, mixed precision": denoiser,
    "whisper": transcriber,
}
