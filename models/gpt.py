"""A GPT: a causal transformer over tokens, as plain flax nnx modules without any sharding.

What is unusual:
  - query, key and value weights are one array split by head group, so that one dot projects all three and an axis on
    the groups needs no communication; its backward pass has one dot for the input too;
  - layers are either a list or one stacked `Block` that is scanned; both start from the same values;
  - dropout masks come from a key given to the call, never from state in the model;
  - with `remat` the output of each attention is kept, so the backward pass runs no forward reduction again;
  - RMS norms before each branch, rotary or learned positions, no biases.

Shape suffixes: B batch, S sequence, T sequence of keys, M features, F hidden features of the MLP, V vocabulary,
L layers, H query heads, G head groups (one key and value head each), Q query heads of a group, N = Q + 2 heads of a
group with its key and value, D features of a head.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of a model and how it is computed; mistakes are all reported together."""

    vocab: int
    """Number of different tokens."""
    context: int
    """Longest sequence."""
    layers: int
    """Number of blocks."""
    features: int
    """Width of the residual stream."""
    heads: int
    """Number of query heads; divides `features`."""
    kv_heads: int
    """Number of key and value heads, each shared by `heads / kv_heads` query heads."""
    mlp_features: int
    """Width of the hidden layer of each MLP."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Where positions enter: queries and keys are rotated, or a learned table is added to the embedding."""
    tied: bool = True
    """Whether the embedding table also makes the logits; otherwise the head has its own."""
    scan: bool = False
    """Whether layers are stacked and scanned, which compiles one block for any depth, or unrolled."""
    remat: bool = False
    """Whether blocks are computed again in the backward pass, all but their attention output."""
    dropout: float = 0.0
    """Share of the embedding and of each branch's output that is dropped when the call is given a key."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; parameters, norms and softmax stay in float32."""

    def __post_init__(self):
        wrong = _mistakes(self)
        if wrong:
            raise ValueError("gpt.Config: " + "; ".join(wrong))

    @property
    def head_features(self) -> int:
        return self.features // self.heads


def _mistakes(config: Config) -> list[str]:
    sizes = ("vocab", "context", "layers", "features", "heads", "kv_heads", "mlp_features")
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


# A vocabulary of 50,304 is GPT-2's 50,257 rounded up to a multiple of 128, so that axes divide it.
PRESETS = {
    "gpt-tiny": Config(vocab=256, context=128, layers=4, features=128, heads=8, kv_heads=8, mlp_features=512),
    "gpt-small": Config(
        vocab=50_304, context=1024, layers=12, features=768, heads=12, kv_heads=12, mlp_features=3072,
        positions="learned", dtype="bfloat16",
    ),
    "gpt-xl": Config(
        vocab=50_304, context=1024, layers=48, features=1600, heads=25, kv_heads=25, mlp_features=6400,
        positions="learned", scan=True, remat=True, dtype="bfloat16",
    ),
    "gpt-7b": Config(
        vocab=50_304, context=4096, layers=32, features=4096, heads=32, kv_heads=8, mlp_features=16_384,
        tied=False, scan=True, remat=True, dtype="bfloat16",
    ),
    "gpt3-175b": Config(
        vocab=50_304, context=2048, layers=96, features=12_288, heads=96, kv_heads=96, mlp_features=49_152,
        positions="learned", scan=True, remat=True, dtype="bfloat16",
    ),
}  # fmt: skip


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q_BSHD, k_BTGD, v_BTGD) -> out_BSHD, causal."""


class Branch(Protocol):
    """What `attention` and `mlp` are: a function or class that makes a module x_BSM -> x_BSM."""

    def __call__(self, config: Config, *, rngs: nnx.Rngs) -> Callable[[jax.Array], jax.Array]: ...


def causal_attention(q_BSHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array) -> jax.Array:
    """Softmax attention of each position to itself and those before it, [B, S, H, D]; softmax in float32."""
    batch, length, heads, size = q_BSHD.shape
    groups = k_BTGD.shape[2]
    q_BSGQD = q_BSHD.reshape(batch, length, groups, heads // groups, size)
    score_BGQST = jnp.einsum("BSGQD,BTGD->BGQST", q_BSGQD, k_BTGD).astype(jnp.float32) / math.sqrt(size)
    seen_ST = jnp.tri(length, dtype=bool)[None, None, None, :, :]
    weight_BGQST = jax.nn.softmax(jnp.where(seen_ST, score_BGQST, -jnp.inf), axis=-1).astype(v_BTGD.dtype)
    return jnp.einsum("BGQST,BTGD->BSGQD", weight_BGQST, v_BTGD).reshape(q_BSHD.shape)


def rotate(x_BSND: jax.Array) -> jax.Array:
    """The heads turned by their position, in pairs (i, i + D/2), at speeds from 1 to 1/10,000 per position.

    References: Su et al., RoFormer, arXiv:2104.09864, section 3.2.
    """
    length, half = x_BSND.shape[1], x_BSND.shape[3] // 2
    speed = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (jnp.arange(length, dtype=jnp.float32)[:, None] * speed[None, :])[None, :, None, :]
    a, b = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
    return jnp.concatenate(turned, axis=-1).astype(x_BSND.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """`x` with a share `rate` of its entries zeroed and the others scaled up; `x` itself without a key."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], *, fan_in: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in))


class RMSNorm(nnx.Module):
    """Each position divided by its root mean square, in float32, then scaled by feature."""

    def __init__(self, features: int):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        x = x_BSM.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return (x * self.scale[...][None, None, :]).astype(x_BSM.dtype)


class Attention(nnx.Module):
    """x_BSM -> x_BSM through heads that `attend` to each other's positions.

    Args:
        config: its sizes.
        rngs: its `params` stream gives the initial values.
        attend: (q_BSHD, k_BTGD, v_BTGD) -> out_BSHD, causal.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, attend: Attend = causal_attention):
        groups, size = config.kv_heads, config.head_features
        self.config = config
        self.attend = attend
        shape = (config.features, groups, config.heads // groups + 2, size)
        self.qkv = _normal(rngs, shape, fan_in=config.features)
        # Every branch adds to the residual stream; counting them all in the fan-in keeps its variance at any depth.
        self.out = _normal(rngs, (config.heads, size, config.features), fan_in=2 * config.layers * config.features)

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        config, dtype = self.config, x_BSM.dtype
        qkv_BSGND = jnp.einsum("BSM,MGND->BSGND", x_BSM, self.qkv[...].astype(dtype))
        q_BSGQD, k_BSGD, v_BSGD = qkv_BSGND[..., :-2, :], qkv_BSGND[..., -2, :], qkv_BSGND[..., -1, :]
        q_BSHD = q_BSGQD.reshape(*x_BSM.shape[:2], config.heads, config.head_features)
        if config.positions == "rotary":
            q_BSHD, k_BSGD = rotate(q_BSHD), rotate(k_BSGD)
        out_BSHD = self.attend(q_BSHD, k_BSGD, v_BSGD)
        return jnp.einsum("BSHD,HDM->BSM", out_BSHD, self.out[...].astype(dtype))


class MLP(nnx.Module):
    """x_BSM -> x_BSM, each position for itself: two matrices and a GELU between them."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.w1 = _normal(rngs, (config.features, config.mlp_features), fan_in=config.features)
        self.w2 = _normal(rngs, (config.mlp_features, config.features), fan_in=2 * config.layers * config.mlp_features)

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        h_BSF = jax.nn.gelu(jnp.einsum("BSM,MF->BSF", x_BSM, self.w1[...].astype(x_BSM.dtype)))
        return jnp.einsum("BSF,FM->BSM", h_BSF, self.w2[...].astype(x_BSM.dtype))


class Block(nnx.Module):
    """One layer: an attention branch, then an MLP branch, each added to the residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, attention: Branch = Attention, mlp: Branch = MLP):
        self.dropout = config.dropout
        self.norm1 = RMSNorm(config.features)
        self.attention = attention(config, rngs=rngs)
        self.norm2 = RMSNorm(config.features)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x_BSM: jax.Array, key: jax.Array | None = None) -> jax.Array:
        key1, key2 = (None, None) if key is None else jax.random.split(key)
        branch_BSM = checkpoint_name(self.attention(self.norm1(x_BSM)), "attention_out")
        x_BSM = x_BSM + dropout(branch_BSM, self.dropout, key1)
        return x_BSM + dropout(self.mlp(self.norm2(x_BSM)), self.dropout, key2)


class Embed(nnx.Module):
    """tokens_BS -> x_BSM: a row of the table for each token, plus one for its position if positions are learned."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        learned = config.positions == "learned"
        self.dtype = config.dtype
        self.table = _normal(rngs, (config.vocab, config.features), fan_in=config.features)
        self.positions = _normal(rngs, (config.context, config.features), fan_in=config.features) if learned else None

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSM = jnp.take(self.table[...].astype(self.dtype), tokens_BS, axis=0, mode="clip")
        if self.positions is None:
            return x_BSM
        return x_BSM + self.positions[: tokens_BS.shape[1]].astype(self.dtype)[None, :, :]


class Head(nnx.Module):
    """The table that makes logits, laid out as the embedding's, which takes its place when they are tied."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.table = _normal(rngs, (config.vocab, config.features), fan_in=config.features)


class GPT(nnx.Module):
    """The whole model: tokens_BS -> logits_BSV.

    Args:
        config: its sizes.
        rngs: its `params` stream gives the initial values.
        attention, mlp: make the two branches of a block. For another attention between the same projections:
            `functools.partial(Attention, attend=...)`.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, attention: Branch = Attention, mlp: Branch = MLP):
        def block(key: jax.Array) -> Block:
            return Block(config, rngs=nnx.Rngs(params=key), attention=attention, mlp=mlp)

        keys_L = jax.random.split(rngs.params(), config.layers)
        self.config = config
        self.embed = Embed(config, rngs=rngs)
        self.blocks = jax.vmap(block)(keys_L) if config.scan else nnx.List([block(key) for key in keys_L])
        self.final_norm = RMSNorm(config.features)
        self.head = None if config.tied else Head(config, rngs=rngs)

    def __call__(self, tokens_BS: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [B, S, V] of the token after each position; a `key` turns dropout on."""
        if tokens_BS.shape[1] > self.config.context:
            raise ValueError(f"GPT: {tokens_BS.shape[1]} tokens in a sequence, the context is {self.config.context}")
        keys = (None, None) if key is None else jax.random.split(key)
        x_BSM = dropout(self.embed(tokens_BS), self.config.dropout, keys[0])
        x_BSM = self.final_norm(self._run_blocks(x_BSM, keys[1]))
        table_VM = (self.embed if self.head is None else self.head).table[...]
        return jnp.einsum("BSM,VM->BSV", x_BSM, table_VM.astype(x_BSM.dtype))

    def _run_blocks(self, x_BSM: jax.Array, key: jax.Array | None) -> jax.Array:
        run = _rematerialised(self.config) if self.config.remat else Block.__call__
        keys_L = None if key is None else jax.random.split(key, self.config.layers)
        if isinstance(self.blocks, Block):
            return jax.lax.scan(lambda x, layer: (run(layer[0], x, layer[1]), None), x_BSM, (self.blocks, keys_L))[0]
        for i, block in enumerate(self.blocks):
            x_BSM = run(block, x_BSM, None if keys_L is None else keys_L[i])
        return x_BSM


def _rematerialised(config: Config) -> Callable[[Block, jax.Array, jax.Array | None], jax.Array]:
    policy = jax.checkpoint_policies.save_only_these_names("attention_out")
    # Inside a scan the loop already keeps XLA from merging the two computations.
    return jax.checkpoint(Block.__call__, policy=policy, prevent_cse=not config.scan)


def loss(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Mean cross entropy in nats per token, float32.

    Only sums over the vocabulary, so an axis that splits it costs three reductions of [B, S] and no gather.
    """
    logits_BSV = logits_BSV.astype(jnp.float32)
    token_BSV = jax.lax.broadcasted_iota(targets_BS.dtype, logits_BSV.shape, 2)
    hit_BSV = jnp.where(token_BSV == targets_BS[..., None], logits_BSV, jnp.zeros_like(logits_BSV))
    return jnp.mean(jax.nn.logsumexp(logits_BSV, axis=-1) - jnp.sum(hit_BSV, axis=-1))


def next_token_loss(model: GPT, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Mean nats per token of predicting tokens [B, S + 1] from their first S."""
    return loss(model(tokens[:, :-1], key), tokens[:, 1:])


def num_params(model: nnx.Module) -> int:
    """Number of scalars in the parameters, also of an abstract model."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def generate(model: GPT, prompt_BS: jax.Array, *, steps: int, key: jax.Array, temperature: float = 1.0) -> jax.Array:
    """The prompt and `steps` sampled tokens, [B, S + steps]; temperature 0 takes the likeliest.

    Every step runs the whole model on the last `context` tokens: no cache.
    """
    batch, length = prompt_BS.shape
    width = min(model.config.context, length + steps)

    def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
        start = jnp.maximum(i - width, 0)
        window_BS = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
        # What lies after the last token is not seen, attention is causal.
        logits_BV = jax.lax.dynamic_index_in_dim(model(window_BS), i - 1 - start, axis=1, keepdims=False)
        next_B = _sample(logits_BV.astype(jnp.float32), jax.random.fold_in(key, i), temperature)
        return jax.lax.dynamic_update_slice_in_dim(tokens, next_B.astype(tokens.dtype)[:, None], i, axis=1)

    tokens = jnp.concatenate([prompt_BS, jnp.zeros((batch, steps), prompt_BS.dtype)], axis=1)
    return jax.lax.fori_loop(length, length + steps, step, tokens)


def _sample(logits_BV: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    return jax.random.categorical(key, logits_BV / temperature, axis=-1)
