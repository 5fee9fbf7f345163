"""What every transformer here is made of: attention and MLP branches, norms, dropout, and a stack of blocks.

Plain flax nnx modules without any sharding. What is unusual:
  - query, key and value weights are one array split by head group, so that one dot projects all three and an axis on
    the groups needs no communication; its backward pass has one dot for the input too;
  - layers are either a list or one stacked block that is scanned; both start from the same values;
  - dropout masks come from a key given to the call, never from state in the model;
  - with `remat` the output of each attention is kept, so the backward pass runs no forward reduction again.

Somewhat longer than other files: a block and its parts are read together.

Shape suffixes: B batch, S sequence, T sequence of keys, M features, F hidden features of the MLP, L layers, H query
heads, G head groups (one key and value head each), Q query heads of a group (in scores no dim where it is one), N =
Q + 2 heads of a group with its key and value, D features of a head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

Dtype = Literal["float32", "bfloat16"]


class Sizes(Protocol):
    """What a block reads of a model's configuration."""

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
    def scan(self) -> bool: ...
    @property
    def remat(self) -> bool: ...


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q_BSHD, k_BTGD, v_BTGD) -> out_BSHD."""


Order = Callable[[int], jax.Array]
"""Number of tokens -> their positions [S], where they don't come one after the other."""


class Branch(Protocol):
    """What `attention` and `mlp` are: a function or class that makes a module x_BSM -> x_BSM."""

    def __call__(self, config: Any, *, rngs: nnx.Rngs) -> Callable[[jax.Array], jax.Array]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What is done between the residual stream and the branches, where the values stay as they are."""

    into: Callable[[jax.Array], jax.Array] = lambda x_BSM: x_BSM
    """Of what goes into a branch, and to the logits."""
    out_of: Callable[[jax.Array], jax.Array] = lambda x_BSM: x_BSM
    """Of what comes out of a branch, and of the embedding."""


PLAIN = Stream()
"""Nothing."""


KEPT = jax.checkpoint_policies.save_only_these_names("attention_out")
"""Of a layer that is computed again in the backward pass."""


class Past(NamedTuple):
    """Keys and values of the tokens before a slice of a sequence, at one block."""

    k_BTGD: jax.Array
    v_BTGD: jax.Array
    length: jax.Array | None = None
    """How many of the T are there yet; the others are room. None: all, and they become more with each slice."""

    @property
    def start(self) -> jax.Array | int:
        """The position of the slice's first token."""
        return self.k_BTGD.shape[1] if self.length is None else self.length

    def then(self, k_BSGD: jax.Array, v_BSGD: jax.Array) -> "Past":
        """With those of the slice."""
        if self.length is None:
            return Past(jnp.concatenate([self.k_BTGD, k_BSGD], 1), jnp.concatenate([self.v_BTGD, v_BSGD], 1))
        k_BTGD, v_BTGD = (
            jax.lax.dynamic_update_slice_in_dim(past, new, self.length, axis=1)
            for past, new in ((self.k_BTGD, k_BSGD), (self.v_BTGD, v_BSGD))
        )
        return Past(k_BTGD, v_BTGD, self.length + k_BSGD.shape[1])


def common_mistakes(config: Any, sizes: Iterable[str]) -> list[str]:
    """What is wrong with the fields that transformers share; `sizes` names those that must be positive."""
    wrong = [f"{name}={getattr(config, name)} must be at least 1" for name in sizes if getattr(config, name) < 1]
    if wrong:
        return wrong
    if config.features % config.heads:
        wrong.append(f"features={config.features} must be a multiple of heads={config.heads}")
    elif config.positions == "rotary" and config.head_features % 2:
        wrong.append(f"features / heads = {config.head_features} must be even, rotary positions turn pairs")
    if config.heads % config.kv_heads:
        wrong.append(f"heads={config.heads} must be a multiple of kv_heads={config.kv_heads}")
    if config.positions not in ("rotary", "learned"):
        wrong.append(f"positions={config.positions!r} must be 'rotary' or 'learned'")
    if config.dtype not in ("float32", "bfloat16"):
        wrong.append(f"dtype={config.dtype!r} must be 'float32' or 'bfloat16'")
    if not 0 <= config.dropout < 1:
        wrong.append(f"dropout={config.dropout} must be at least 0 and less than 1")
    return wrong


def causal_attention(q_BSHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array, start: jax.Array | int = 0) -> jax.Array:
    """Softmax attention of each position to itself and those before it, [B, S, H, D]; softmax in float32.

    The queries' positions begin at `start`, those of keys and values at 0.
    """
    score_BGQST = _scores(q_BSHD, k_BTGD)
    seen_BGQST = jnp.broadcast_to(_seen(q_BSHD.shape[1], k_BTGD.shape[1], start), score_BGQST.shape)
    return _mixed(jnp.where(seen_BGQST, score_BGQST, -jnp.inf), v_BTGD)


def full_attention(q_BSHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array) -> jax.Array:
    """Softmax attention of each position to all, [B, S, H, D]; softmax in float32."""
    return _mixed(_scores(q_BSHD, k_BTGD), v_BTGD)


def _scores(q_BSHD: jax.Array, k_BTGD: jax.Array) -> jax.Array:
    batch, length, heads, size = q_BSHD.shape
    groups = k_BTGD.shape[2]
    # XLA:CPU has fast products for leading batch dims, and copies whole scores for a dim of size 1.
    per_group = () if heads == groups else (heads // groups,)
    q_BGQSD = jnp.moveaxis(q_BSHD.reshape(batch, length, groups, *per_group, size), 1, -2)
    score_BGQST = jnp.einsum("BG...SD,BGTD->BG...ST", q_BGQSD, k_BTGD.transpose(0, 2, 1, 3))
    return score_BGQST.astype(jnp.float32) / math.sqrt(size)


def _mixed(score_BGQST: jax.Array, v_BTGD: jax.Array) -> jax.Array:
    highest_BGQS1 = jax.lax.stop_gradient(jnp.max(score_BGQST, axis=-1, keepdims=True))
    weight_BGQST = jnp.exp(score_BGQST - highest_BGQS1)
    out_BGQSD = jnp.einsum("BG...ST,BGTD->BG...SD", weight_BGQST.astype(v_BTGD.dtype), v_BTGD.transpose(0, 2, 1, 3))
    # Their sum divides here, where there is less to divide than weights.
    out_BGQSD = (out_BGQSD / jnp.sum(weight_BGQST, axis=-1, keepdims=True)).astype(v_BTGD.dtype)
    out_BSGQD = jnp.moveaxis(out_BGQSD, -2, 1)
    return out_BSGQD.reshape(*out_BSGQD.shape[:2], -1, out_BSGQD.shape[-1])


def _seen(length: int, keys: int, start: jax.Array | int) -> jax.Array:
    if isinstance(start, int):
        return jnp.tri(length, keys, start, dtype=bool)
    return jnp.arange(keys)[None, :] <= start + jnp.arange(length)[:, None]


def rotate(x_BSND: jax.Array, start: jax.Array | int = 0) -> jax.Array:
    """The heads turned by their position, in pairs (i, i + D/2), at speeds from 1 to 1/10,000 per position.

    The first position is `start`, or each is that of `start` [S].

    References: Su et al., RoFormer, arXiv:2104.09864, section 3.2.
    """
    length, half = x_BSND.shape[1], x_BSND.shape[3] // 2
    speed = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position_S = _positions(length, start)
    angle = (position_S[:, None] * speed[None, :])[None, :, None, :]
    a, b = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
    return jnp.concatenate(turned, axis=-1).astype(x_BSND.dtype)


def _positions(length: int, start: jax.Array | int) -> jax.Array:
    if isinstance(start, int):
        return jnp.arange(start, start + length, dtype=jnp.float32)
    return start.astype(jnp.float32) if start.ndim else start + jnp.arange(length, dtype=jnp.float32)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """`x` with a share `rate` of its entries zeroed and the others scaled up; `x` itself without a key."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], *, fan_in: int) -> nnx.Param[jax.Array]:
    """Independent initial values of variance 1 / fan_in, float32."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in))


def zeros(*shape: int) -> nnx.Param[jax.Array]:
    """A bias at its start, float32."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))


class RMSNorm(nnx.Module):
    """Each position divided by its root mean square, in float32, then scaled by feature."""

    def __init__(self, features: int):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        x = x_BSM.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return (x * self.scale[...][None, None, :]).astype(x_BSM.dtype)


class LayerNorm(nnx.Module):
    """Each position with its mean taken off and divided by its deviation, in float32, then scaled and shifted."""

    def __init__(self, features: int):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = zeros(features)

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        x = x_BSM.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return (x * self.scale[...][None, None, :] + self.bias[...][None, None, :]).astype(x_BSM.dtype)


class Attention(nnx.Module):
    """x_BSM -> x_BSM through heads that `attend` to each other's positions.

    Args:
        config: its sizes.
        rngs: its `params` stream gives the initial values.
        attend: (q_BSHD, k_BTGD, v_BTGD) -> out_BSHD.
        order: the positions of sequences that come in another order.
    """

    def __init__(self, config: Sizes, *, rngs: nnx.Rngs, attend: Attend = causal_attention, order: Order | None = None):
        groups, size = config.kv_heads, config.head_features
        self.config = config
        self.attend = attend
        self.order = order
        shape = (config.features, groups, config.heads // groups + 2, size)
        self.qkv = normal(rngs, shape, fan_in=config.features)
        # Every branch adds to the residual stream; counting them all in the fan-in keeps its variance at any depth.
        self.out = normal(rngs, (config.heads, size, config.features), fan_in=2 * config.layers * config.features)
        self.qkv_bias = zeros(*shape[1:]) if config.biases else None
        self.out_bias = zeros(config.features) if config.biases else None

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        start = 0 if self.order is None else self.order(x_BSM.shape[1])
        return self._out(self.attend(*self._projected(x_BSM, start)))

    def continued(self, x_BSM: jax.Array, past: Past) -> tuple[jax.Array, Past]:
        """The same for a slice of a sequence, and the past of the next one."""
        if self.attend is not causal_attention:
            raise ValueError("Attention.continued: a slice of a sequence needs attend=causal_attention")
        q_BSHD, k_BSGD, v_BSGD = self._projected(x_BSM, past.start)
        after = past.then(k_BSGD, v_BSGD)
        return self._out(causal_attention(q_BSHD, after.k_BTGD, after.v_BTGD, past.start)), after

    def _projected(self, x_BSM: jax.Array, start: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q_BSHD, k_BSGD, v_BSGD."""
        config, dtype = self.config, x_BSM.dtype
        qkv_BSGND = jnp.einsum("BSM,MGND->BSGND", x_BSM, self.qkv[...].astype(dtype))
        if self.qkv_bias is not None:
            qkv_BSGND += self.qkv_bias[...].astype(dtype)[None, None, :, :, :]
        per_group = config.heads // config.kv_heads
        q_BSGQD, k_BSG1D, v_BSG1D = jnp.split(qkv_BSGND, [per_group, per_group + 1], axis=3)
        k_BSGD, v_BSGD = k_BSG1D.squeeze(3), v_BSG1D.squeeze(3)
        q_BSHD = q_BSGQD.reshape(*x_BSM.shape[:2], config.heads, config.head_features)
        if config.positions == "rotary":
            q_BSHD, k_BSGD = rotate(q_BSHD, start), rotate(k_BSGD, start)
        return q_BSHD, k_BSGD, v_BSGD

    def _out(self, out_BSHD: jax.Array) -> jax.Array:
        dtype = out_BSHD.dtype
        return _with_bias(jnp.einsum("BSHD,HDM->BSM", out_BSHD, self.out[...].astype(dtype)), self.out_bias)


bidirectional: Branch = functools.partial(Attention, attend=full_attention)
"""Attention to all positions."""


class MLP(nnx.Module):
    """x_BSM -> x_BSM, each position for itself: two matrices and a GELU between them."""

    def __init__(self, config: Sizes, *, rngs: nnx.Rngs):
        self.w1 = normal(rngs, (config.features, config.mlp_features), fan_in=config.features)
        self.w2 = normal(rngs, (config.mlp_features, config.features), fan_in=2 * config.layers * config.mlp_features)
        self.bias1 = zeros(config.mlp_features) if config.biases else None
        self.bias2 = zeros(config.features) if config.biases else None

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        h_BSF = _with_bias(jnp.einsum("BSM,MF->BSF", x_BSM, self.w1[...].astype(x_BSM.dtype)), self.bias1)
        return _with_bias(jnp.einsum("BSF,FM->BSM", jax.nn.gelu(h_BSF), self.w2[...].astype(x_BSM.dtype)), self.bias2)


def _with_bias(x_BSM: jax.Array, bias_M: nnx.Param[jax.Array] | None) -> jax.Array:
    return x_BSM if bias_M is None else x_BSM + bias_M[...].astype(x_BSM.dtype)[None, None, :]


class Block(nnx.Module):
    """One layer: an attention branch, then an MLP branch, each added to the residual stream.

    Args:
        config: its sizes.
        rngs: its `params` stream gives the initial values.
        attention, mlp: make the branches.
        norm: number of features -> a norm.
        order: `pre` norms what goes into each branch, `post` norms the stream after each.
        stream: see `Stream`.
    """

    def __init__(
        self,
        config: Sizes,
        *,
        rngs: nnx.Rngs,
        attention: Branch,
        mlp: Branch,
        norm: Callable[[int], Callable[[jax.Array], jax.Array]] = RMSNorm,
        order: Literal["pre", "post"] = "pre",
        stream: Stream = PLAIN,
    ):
        self.dropout = config.dropout
        self.stream = stream
        self.order = order
        self.norm1 = norm(config.features)
        self.attention = attention(config, rngs=rngs)
        self.norm2 = norm(config.features)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x_BSM: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return self._run(lambda x_BSM: (self.attention(x_BSM), None), x_BSM, key)[0]

    def continued(self, x_BSM: jax.Array, past: Past) -> tuple[jax.Array, Past]:
        """The same for a slice of a sequence, without dropout, and the past of the next one."""
        attention = self.attention
        if not isinstance(attention, Attention):
            raise ValueError(f"Block.continued: {type(attention).__name__} knows no tokens before a slice")
        return self._run(lambda x_BSM: attention.continued(x_BSM, past), x_BSM, None)

    def _run(
        self, attention: Callable[[jax.Array], tuple[jax.Array, Any]], x_BSM: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        key1, key2 = (None, None) if key is None else jax.random.split(key)
        into, out_of = self.stream.into, self.stream.out_of
        branch_BSM, after = attention(into(x_BSM if self.order == "post" else self.norm1(x_BSM)))
        x_BSM = x_BSM + dropout(checkpoint_name(out_of(branch_BSM), "attention_out"), self.dropout, key1)
        if self.order == "post":
            x_BSM = self.norm1(x_BSM)
            return self.norm2(x_BSM + dropout(out_of(self.mlp(into(x_BSM))), self.dropout, key2)), after
        return x_BSM + dropout(out_of(self.mlp(into(self.norm2(x_BSM)))), self.dropout, key2), after


def stack(block: Callable[[jax.Array], Block], config: Sizes, key: jax.Array) -> Any:
    """The blocks of a model, `block` made from a key for each: a list, or one stacked `Block` to be scanned."""
    keys_L = jax.random.split(key, config.layers)
    return jax.vmap(block)(keys_L) if config.scan else nnx.List([block(key) for key in keys_L])


def run(blocks: Any, x_BSM: jax.Array, key: jax.Array | None, config: Sizes) -> jax.Array:
    """The residual stream after all `blocks`; a `key` turns dropout on."""
    call = _rematerialised(config) if config.remat else Block.__call__
    keys_L = None if key is None else jax.random.split(key, config.layers)
    if isinstance(blocks, Block):
        return jax.lax.scan(lambda x, layer: (call(layer[0], x, layer[1]), None), x_BSM, (blocks, keys_L))[0]
    for i, block in enumerate(blocks):
        x_BSM = call(block, x_BSM, None if keys_L is None else keys_L[i])
    return x_BSM


def _rematerialised(config: Sizes) -> Callable[[Block, jax.Array, jax.Array | None], jax.Array]:
    # Inside a scan the loop already keeps XLA from merging the two computations.
    return jax.checkpoint(Block.__call__, policy=KEPT, prevent_cse=not config.scan)


def loss(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Mean cross entropy in nats of each target, float32.

    Only sums over the vocabulary, so an axis that splits it costs three reductions of [B, S] and no gather.
    """
    return jnp.mean(losses(logits_BSV, targets_BS))


def losses(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Cross entropy in nats of each target, [B, S], float32."""
    logits_BSV = logits_BSV.astype(jnp.float32)
    token_BSV = jax.lax.broadcasted_iota(targets_BS.dtype, logits_BSV.shape, logits_BSV.ndim - 1)
    hit_BSV = jnp.where(token_BSV == targets_BS[..., None], logits_BSV, jnp.zeros_like(logits_BSV))
    return jax.nn.logsumexp(logits_BSV, axis=-1) - jnp.sum(hit_BSV, axis=-1)
