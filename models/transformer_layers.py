"""Layers of a transformer as plain flax nnx modules: attention, MLP, norms and dropout.

- The fused QKV weight is one array [M, G, N, D] grouped by key/value head: one dot projects all three, its backward has
  one dot for the input too, and sharding the groups over an axis needs no communication.
- Dropout masks come from a key passed to the call, never from state in the model.

Shape suffixes: B batch, S sequence, T sequence of keys, M features, F hidden features of the MLP, H query heads, G
key/value heads (one per head group), Q query heads per group (absent from scores where it is 1), N = Q + 2 heads of a
group with its key and value, D features of a head.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from sharding import kernels

from .remat_policy import Remat


class TransformerConfig(Protocol):
    """The fields of a model configuration that a block reads."""

    @property
    def layers(self) -> int: ...
    @property
    def features(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_features(self) -> int: ...
    @property
    def mlp_features(self) -> int: ...
    @property
    def positions(self) -> str: ...
    @property
    def biases(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    @property
    def kernels(self) -> str: ...
    @property
    def scan(self) -> bool: ...
    @property
    def remat(self) -> Remat: ...


AttentionFn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q_BSHD, k_BTGD, v_BTGD) -> out_BSHD."""


TokenPositions = Callable[[int], jax.Array]
"""Number of tokens -> their positions [S], for sequences in a permuted order."""


class Branch(Protocol):
    """Factory of an attention or MLP branch: a class or function that returns a module x_BSM -> x_BSM."""

    def __call__(self, config: Any, *, rngs: nnx.Rngs) -> Callable[[jax.Array], jax.Array]: ...


class KVCache(NamedTuple):
    """Keys and values, in one block, of the tokens before a slice of a sequence."""

    k_BTGD: jax.Array
    v_BTGD: jax.Array
    length: jax.Array | None = None
    """Number of the T entries in use. None: all of them, and the cache grows with each slice."""

    @property
    def start(self) -> jax.Array | int:
        """The position of the slice's first token."""
        return self.k_BTGD.shape[1] if self.length is None else self.length

    def append(self, k_BSGD: jax.Array, v_BSGD: jax.Array) -> "KVCache":
        """The cache with the slice's keys and values added."""
        if self.length is None:
            return KVCache(jnp.concatenate([self.k_BTGD, k_BSGD], 1), jnp.concatenate([self.v_BTGD, v_BSGD], 1))
        k_BTGD, v_BTGD = (
            jax.lax.dynamic_update_slice_in_dim(past, new, self.length, axis=1)
            for past, new in ((self.k_BTGD, k_BSGD), (self.v_BTGD, v_BSGD))
        )
        return KVCache(k_BTGD, v_BTGD, self.length + k_BSGD.shape[1])


def causal_attention(q_BSHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array, start: jax.Array | int = 0) -> jax.Array:
    """Causal softmax attention, [B, S, H, D]; softmax in float32.

    Query positions begin at `start`, key and value positions at 0.
    """
    score_BGQST = _scores(q_BSHD, k_BTGD)
    seen_BGQST = jnp.broadcast_to(_causal_mask(q_BSHD.shape[1], k_BTGD.shape[1], start), score_BGQST.shape)
    return _weighted_values(jnp.where(seen_BGQST, score_BGQST, -jnp.inf), v_BTGD)


def full_attention(q_BSHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array) -> jax.Array:
    """Bidirectional softmax attention, [B, S, H, D]; softmax in float32."""
    return _weighted_values(_scores(q_BSHD, k_BTGD), v_BTGD)


def by_kernels(attend: AttentionFn, implementation: str) -> AttentionFn:
    """The attention function itself, or the same by a kernel or in blocks, where one is asked for and knows it."""
    is_causal = {causal_attention: True, full_attention: False}.get(attend)
    if is_causal is None:
        return attend

    def attended(q_BSHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array) -> jax.Array:
        if not kernels.takes_blocks(q_BSHD, k_BTGD, implementation):
            return attend(q_BSHD, k_BTGD, v_BTGD)
        return kernels.attention(q_BSHD, k_BTGD, v_BTGD, causal=is_causal, implementation=implementation)

    return attended


def _scores(q_BSHD: jax.Array, k_BTGD: jax.Array) -> jax.Array:
    batch, length, heads, size = q_BSHD.shape
    groups = k_BTGD.shape[2]
    # XLA:CPU has fast matmuls for leading batch dims, and copies all scores for a dim of size 1.
    per_group = () if heads == groups else (heads // groups,)
    q_BGQSD = jnp.moveaxis(q_BSHD.reshape(batch, length, groups, *per_group, size), 1, -2)
    score_BGQST = jnp.einsum("BG...SD,BGTD->BG...ST", q_BGQSD, k_BTGD.transpose(0, 2, 1, 3))
    return score_BGQST.astype(jnp.float32) / math.sqrt(size)


def _weighted_values(score_BGQST: jax.Array, v_BTGD: jax.Array) -> jax.Array:
    highest_BGQS1 = jax.lax.stop_gradient(jnp.max(score_BGQST, axis=-1, keepdims=True))
    weight_BGQST = jnp.exp(score_BGQST - highest_BGQS1)
    out_BGQSD = jnp.einsum("BG...ST,BGTD->BG...SD", weight_BGQST.astype(v_BTGD.dtype), v_BTGD.transpose(0, 2, 1, 3))
    # Normalise the output, which has fewer elements than the weights.
    out_BGQSD = (out_BGQSD / jnp.sum(weight_BGQST, axis=-1, keepdims=True)).astype(v_BTGD.dtype)
    out_BSGQD = jnp.moveaxis(out_BGQSD, -2, 1)
    return out_BSGQD.reshape(*out_BSGQD.shape[:2], -1, out_BSGQD.shape[-1])


def _causal_mask(length: int, keys: int, start: jax.Array | int) -> jax.Array:
    if isinstance(start, int):
        return jnp.tri(length, keys, start, dtype=bool)
    return jnp.arange(keys)[None, :] <= start + jnp.arange(length)[:, None]


def _positions(length: int, start: jax.Array | int) -> jax.Array:
    """Positions [S] that begin at `start`, or are `start`."""
    if isinstance(start, int) or not start.ndim:
        return start + jnp.arange(length)
    return start


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """`x` with a fraction `rate` of its entries zeroed and the rest scaled up; `x` itself without a key."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], *, fan_in: int) -> nnx.Param[jax.Array]:
    """A float32 parameter of independent normal values of variance 1 / fan_in."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in))


def zeros(*shape: int) -> nnx.Param[jax.Array]:
    """A zero-initialised float32 parameter, such as a bias."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))


class RMSNorm(nnx.Module):
    """Root-mean-square norm over features, in float32, with a scale."""

    def __init__(self, features: int, implementation: str = "auto"):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.implementation = implementation

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        return kernels.rms_norm(x_BSM, self.scale[...], implementation=self.implementation)


class LayerNorm(nnx.Module):
    """Layer norm over features, in float32, with a scale and a bias."""

    def __init__(self, features: int, implementation: str = "auto"):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = zeros(features)
        self.implementation = implementation

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        return kernels.layer_norm(x_BSM, self.scale[...], self.bias[...], implementation=self.implementation)


class Attention(nnx.Module):
    """Multi-head (or grouped-query) attention with its projections, x_BSM -> x_BSM.

    Args:
        config: model configuration.
        rngs: initialises parameters from its `params` stream.
        attend: (q_BSHD, k_BTGD, v_BTGD) -> out_BSHD.
        token_positions: positions of sequences in a permuted order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rngs: nnx.Rngs,
        attend: AttentionFn = causal_attention,
        token_positions: TokenPositions | None = None,
    ):
        groups, size = config.kv_heads, config.head_features
        self.config = config
        self.attend = attend
        self.token_positions = token_positions
        shape = (config.features, groups, config.heads // groups + 2, size)
        self.qkv = normal(rngs, shape, fan_in=config.features)
        # Counting all branches in the fan-in keeps the residual stream's variance independent of depth.
        self.out = normal(rngs, (config.heads, size, config.features), fan_in=2 * config.layers * config.features)
        self.qkv_bias = zeros(*shape[1:]) if config.biases else None
        self.out_bias = zeros(config.features) if config.biases else None

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        start = 0 if self.token_positions is None else self.token_positions(x_BSM.shape[1])
        return self._out(by_kernels(self.attend, self.config.kernels)(*self._projected(x_BSM, start)))

    def continued(self, x_BSM: jax.Array, past: KVCache) -> tuple[jax.Array, KVCache]:
        """Attention for a slice of a sequence given the cache of earlier slices; returns the updated cache too."""
        if self.attend is not causal_attention:
            raise ValueError("Attention.continued: a slice of a sequence needs attend=causal_attention")
        q_BSHD, k_BSGD, v_BSGD = self._projected(x_BSM, past.start)
        after = past.append(k_BSGD, v_BSGD)
        return self._out(causal_attention(q_BSHD, after.k_BTGD, after.v_BTGD, past.start)), after

    def _projected(self, x_BSM: jax.Array, start: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q_BSHD, k_BSGD, v_BSGD."""
        config, dtype = self.config, x_BSM.dtype
        qkv_BSGND = jnp.einsum("BSM,MGND->BSGND", x_BSM, self.qkv[...].astype(dtype))
        if self.qkv_bias is not None:
            qkv_BSGND += self.qkv_bias[...].astype(dtype)[None, None, :, :, :]
        qkv_BSGND = checkpoint_name(qkv_BSGND, "qkv")
        per_group = config.heads // config.kv_heads
        q_BSGQD, k_BSG1D, v_BSG1D = jnp.split(qkv_BSGND, [per_group, per_group + 1], axis=3)
        k_BSGD, v_BSGD = k_BSG1D.squeeze(3), v_BSG1D.squeeze(3)
        q_BSHD = q_BSGQD.reshape(*x_BSM.shape[:2], config.heads, config.head_features)
        if config.positions == "rotary":
            at_S = _positions(x_BSM.shape[1], start)
            q_BSHD, k_BSGD = (kernels.rotary(y, at_S, implementation=config.kernels) for y in (q_BSHD, k_BSGD))
        return q_BSHD, k_BSGD, v_BSGD

    def _out(self, out_BSHD: jax.Array) -> jax.Array:
        dtype = out_BSHD.dtype
        return _with_bias(jnp.einsum("BSHD,HDM->BSM", out_BSHD, self.out[...].astype(dtype)), self.out_bias)


bidirectional_attention: Branch = functools.partial(Attention, attend=full_attention)
"""Attention over all positions."""


class MLP(nnx.Module):
    """Two matrices with a GELU between them, applied to each position: x_BSM -> x_BSM."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.w1 = normal(rngs, (config.features, config.mlp_features), fan_in=config.features)
        self.w2 = normal(rngs, (config.mlp_features, config.features), fan_in=2 * config.layers * config.mlp_features)
        self.bias1 = zeros(config.mlp_features) if config.biases else None
        self.bias2 = zeros(config.features) if config.biases else None
        self.implementation = config.kernels

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        h_BSF = _with_bias(jnp.einsum("BSM,MF->BSF", x_BSM, self.w1[...].astype(x_BSM.dtype)), self.bias1)
        h_BSF = kernels.gelu(checkpoint_name(h_BSF, "mlp_hidden"), implementation=self.implementation)
        return _with_bias(jnp.einsum("BSF,FM->BSM", h_BSF, self.w2[...].astype(x_BSM.dtype)), self.bias2)


def _with_bias(x_BSM: jax.Array, bias_M: nnx.Param[jax.Array] | None) -> jax.Array:
    return x_BSM if bias_M is None else x_BSM + bias_M[...].astype(x_BSM.dtype)[None, None, :]
