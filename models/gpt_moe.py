"""A GPT with a mixture of experts in place of the MLP of every other layer.

As in GShard and GLaM, layers come in pairs, a dense one and a sparse one; scanned models stack the pairs. Blocks,
embedding and head are those of `gpt`; the experts are `sharding.expert`'s, which annotate their own sharding: a mesh
needs an axis `expert`. The call's key drives the random choice of second experts.

References: Lepikhin et al., GShard, ICLR 2021 (2006.16668); Du et al., GLaM, ICML 2022 (2112.06905).

Shape suffixes as in `gpt`, and N pairs of layers.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from sharding import expert

from . import gpt
from .remat_policy import rematerialised, scan_layers
from .transformer_block import Block
from .transformer_layers import MLP, Attention, Branch, RMSNorm, dropout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config(gpt.Config):
    """Model sizes and compute options; each expert is as wide as a dense layer's MLP."""

    num_experts: int = 8
    """Number of experts of each sparse layer."""
    top_k: int = 2
    """Number of experts per token."""
    router: Literal["noisy_top_k", "gshard", "switch"] | None = None
    """Router; None: chosen by `top_k`, see `sharding.expert.MoE`."""
    capacity_factor: float | None = 1.25
    """Expert capacity relative to a perfectly balanced load; None is dropless."""

    def __post_init__(self):
        gpt.Config.__post_init__(self)
        if self.layers % 2:
            raise ValueError(f"gpt_moe.Config: layers={self.layers} must be even: every other layer has experts")


# GLaM's models with 64 experts (table 4 there), without gated units and relative positions, and with the vocabulary of
# `gpt`; the largest keeps their head size with half as many heads.
PRESETS = {
    "gpt-moe-tiny": Config(vocab=256, context=128, layers=4, features=128, heads=8, kv_heads=8, mlp_features=512),
    "gpt-moe-2b": Config(
        vocab=50_304, context=1024, layers=12, features=768, heads=12, kv_heads=12, mlp_features=3072,
        num_experts=64, scan=True, remat=True, dtype="bfloat16",
    ),
    "gpt-moe-140b": Config(
        vocab=50_304, context=1024, layers=32, features=4096, heads=32, kv_heads=32, mlp_features=16_384,
        num_experts=64, scan=True, remat=True, dtype="bfloat16",
    ),
    "gpt-moe-1t": Config(
        vocab=50_304, context=1024, layers=64, features=8192, heads=64, kv_heads=64, mlp_features=32_768,
        num_experts=64, scan=True, remat=True, dtype="bfloat16",
    ),
}  # fmt: skip


class Sparse(nnx.Module):
    """A layer with a mixture of experts as its second branch."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, attention: Branch = Attention):
        self.dropout = config.dropout
        self.norm1 = RMSNorm(config.features, config.kernels)
        self.attention = attention(config, rngs=rngs)
        self.norm2 = RMSNorm(config.features, config.kernels)
        self.experts = expert.MoE(
            features=config.features,
            hidden=config.mlp_features,
            num_experts=config.num_experts,
            top_k=config.top_k,
            router=config.router,
            capacity_factor=config.capacity_factor,
            rngs=rngs,
        )
        # As in `MLP`: keeps the residual stream's variance independent of depth.
        self.experts.down[...] = self.experts.down[...] / math.sqrt(2 * config.layers)

    def __call__(self, x_BSM: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, expert.Balance]:
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        branch_BSM = checkpoint_name(self.attention(self.norm1(x_BSM)), "attention_out")
        x_BSM = x_BSM + dropout(branch_BSM, self.dropout, keys[0])
        branch_BSM, balance = self.experts(self.norm2(x_BSM), keys[1])
        return x_BSM + dropout(branch_BSM, self.dropout, keys[2]), balance


class Pair(nnx.Module):
    """A dense layer followed by a sparse one."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, attention: Branch = Attention):
        self.dense = Block(config, rngs=rngs, attention=attention, mlp=MLP)
        self.sparse = Sparse(config, rngs=rngs, attention=attention)

    def __call__(self, x_BSM: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, expert.Balance]:
        keys = (None, None) if key is None else jax.random.split(key)
        return self.sparse(self.dense(x_BSM, keys[0]), keys[1])


class GPTMoE(nnx.Module):
    """A GPT with experts: tokens_BS -> logits_BSV.

    Args:
        config: model configuration.
        rngs: initialises parameters from its `params` stream.
        attention: factory of the attention branch, as in `gpt`.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, attention: Branch = Attention):
        def pair(key: jax.Array) -> Pair:
            return Pair(config, rngs=nnx.Rngs(params=key), attention=attention)

        keys_N = jax.random.split(rngs.params(), config.layers // 2)
        self.config = config
        self.blocks = jax.vmap(pair)(keys_N) if config.scan else nnx.List([pair(key) for key in keys_N])
        self.embed = gpt.Embed(config, rngs=rngs)
        self.final_norm = RMSNorm(config.features, config.kernels)
        self.head = None if config.tied else gpt.Head(config, rngs=rngs)

    def __call__(self, tokens_BS: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [B, S, V] of the token after each position."""
        return self.balanced(tokens_BS, key)[0]

    def balanced(self, tokens_BS: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, expert.Balance]:
        """Logits [B, S, V], and the balance of each sparse layer, [N, ...].

        A `key` enables dropout and the routers' randomness.
        """
        if tokens_BS.shape[1] > self.config.context:
            raise ValueError(
                f"GPTMoE: {tokens_BS.shape[1]} tokens in a sequence exceed the context of {self.config.context}"
            )
        keys = (None, None) if key is None else jax.random.split(key)
        x_BSM, balance = _run(self.blocks, self.before_blocks(tokens_BS, keys[0]), keys[1], self.config)
        return self.after_blocks(x_BSM), balance

    def before_blocks(self, tokens_BS: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """The input x_BSM of the first pair."""
        return dropout(self.embed(tokens_BS), self.config.dropout, key)

    def after_blocks(self, x_BSM: jax.Array) -> jax.Array:
        """Logits [B, S, V] from the last pair's output."""
        x_BSM = self.final_norm(x_BSM)
        table_VM = (self.embed if self.head is None else self.head).table[...]
        return jnp.einsum("BSM,VM->BSV", x_BSM, table_VM.astype(x_BSM.dtype))


def _run(blocks: Any, x_BSM: jax.Array, key: jax.Array | None, config: Config) -> tuple[jax.Array, expert.Balance]:
    calls = rematerialised(Pair.__call__, config.remat, scan=config.scan)
    keys_N = None if key is None else jax.random.split(key, config.layers // 2)
    if isinstance(blocks, Pair):
        scanned = [lambda x, pair, call=call: call(pair[0], x, pair[1]) for call in calls]
        return scan_layers(scanned, x_BSM, (blocks, keys_N))
    found = []
    for i, pair in enumerate(blocks):
        x_BSM, balance = calls[i % len(calls)](pair, x_BSM, None if keys_N is None else keys_N[i])
        found.append(balance)
    return x_BSM, jax.tree.map(lambda *each: jnp.stack(each), *found)


def next_token_loss(model: GPTMoE, tokens: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, expert.Balance]:
    """Mean next-token cross entropy in nats of tokens [B, S + 1], and the balance of each sparse layer."""
    return loss(model, tokens[:, :-1], tokens[:, 1:], key)


def loss(
    model: GPTMoE, tokens_BS: jax.Array, targets_BS: jax.Array, key: jax.Array | None = None
) -> tuple[jax.Array, expert.Balance]:
    """Mean cross entropy in nats per target, and the balance of each sparse layer."""
    logits_BSV, balance = model.balanced(tokens_BS, key)
    return gpt.loss(logits_BSV, targets_BS), balance
