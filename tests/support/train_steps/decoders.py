"""Train steps of decoders as users write them: bfloat16 compute on float32 parameters, AdamW, remat, scanned layers.

Shape suffixes: B batch, S sequence, M model features, H heads, D features of a head, F hidden features, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import sharding
from sharding import P
from sharding.models import gpt, layouts

from .small_models import floats, ints
from .step import Sizes, Step, on_mesh

FEATURES, HIDDEN, HEADS, VOCABULARY, ROWS, LENGTH = 256, 512, 8, 1024, 16, 128

REMATS: dict[str, Callable[..., Any]] = {
    "stored": lambda f, **options: f,
    "remat": jax.checkpoint,
    "dots saved": lambda f, **options: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable, **options),
    "attention saved": lambda f, **options: jax.checkpoint(
        f, policy=jax.checkpoint_policies.save_only_these_names("attention_out"), **options
    ),
}
"""What the backward pass recomputes of a layer."""


def norm(scale_M, x_BSM):
    x = x_BSM.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale_M).astype(x_BSM.dtype)


def rotate(x_BSHD):
    angles = jnp.arange(x_BSHD.shape[1])[:, None] * 1e4 ** -jnp.linspace(0, 1, x_BSHD.shape[-1] // 2)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    one, two = jnp.split(x_BSHD.astype(jnp.float32), 2, -1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1).astype(x_BSHD.dtype)


def attention(w, x_BSM):
    """Causal attention with three projections."""
    q, k, v = ((x_BSM @ w[name].astype(x_BSM.dtype)).reshape(*x_BSM.shape[:2], HEADS, -1) for name in "qkv")
    scores_BHST = jnp.einsum("bshd,bthd->bhst", rotate(q), rotate(k)).astype(jnp.float32) * q.shape[-1] ** -0.5
    mask_ST = jnp.tril(jnp.ones((x_BSM.shape[1],) * 2, bool))
    weights = jax.nn.softmax(jnp.where(mask_ST, scores_BHST, -1e30)).astype(x_BSM.dtype)
    out_BSM = jnp.einsum("bhst,bthd->bshd", weights, v).reshape(*x_BSM.shape[:2], -1)
    return checkpoint_name(out_BSM @ w["o"].astype(x_BSM.dtype), "attention_out")


def llama_layer(w, x_BSM):
    x_BSM = x_BSM + attention(w, norm(w["norm1"], x_BSM))
    h_BSM = norm(w["norm2"], x_BSM)
    gate, up, down = (w[name].astype(x_BSM.dtype) for name in ("gate", "up", "down"))
    return x_BSM + (jax.nn.silu(h_BSM @ gate) * (h_BSM @ up)) @ down


LLAMA_LAYER = {
    **dict.fromkeys("qkvo", floats(FEATURES, FEATURES)),
    **dict.fromkeys(("gate", "up"), floats(FEATURES, HIDDEN)),
    "down": floats(HIDDEN, FEATURES),
    **dict.fromkeys(("norm1", "norm2"), floats(FEATURES)),
}
LLAMA_SPECS = {
    **dict.fromkeys(("q", "k", "v", "gate", "up"), P("fsdp", "model")),
    **dict.fromkeys(("o", "down"), P("model", "fsdp")),
    **dict.fromkeys(("norm1", "norm2"), P()),
}


def stacked(array, layers):
    return floats(layers, *array.shape)


def llama_step(
    sizes: Sizes, *, layers=2, scan=False, remat="stored", rows=("data", "fsdp"), weights="fsdp", constrained="layers"
) -> Step:
    """A step of a Llama-like decoder, whose weights are sharded over `weights` and `model`.

    Args:
        sizes: of the mesh axes.
        layers: their number.
        scan: whether the layers are stacked and scanned.
        remat: one of `REMATS`.
        rows: the axes of the batch.
        weights: the axis that stores weights besides `model`.
        constrained: where rows are constrained to these axes: of every layer's input, of the embedding, or nowhere.
    """
    by_rows = on_mesh(P(rows), sizes)

    def constrain(x_BSM, place):
        return jax.lax.with_sharding_constraint(x_BSM, by_rows) if place == constrained else x_BSM

    layer = REMATS[remat](lambda w, x_BSM: llama_layer(w, constrain(x_BSM, "layers")))

    def loss(params, tokens_BS):
        x_BSM = constrain(params["embed"].astype(jnp.bfloat16)[tokens_BS[:, :-1]], "embedding")
        if scan:
            x_BSM, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x_BSM, params["layers"])
        else:
            for w in params["layers"]:
                x_BSM = layer(w, x_BSM)
        logits_BSV = norm(params["norm"], x_BSM) @ params["head"].astype(jnp.bfloat16)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits_BSV.astype(jnp.float32), tokens_BS[:, 1:])
        return entropy.mean()

    many = {k: stacked(a, layers) for k, a in LLAMA_LAYER.items()} if scan else [LLAMA_LAYER] * layers
    specs = {k: P(None, *spec) if scan else spec for k, spec in LLAMA_SPECS.items()}
    params = {
        "embed": floats(VOCABULARY, FEATURES),
        "layers": many,
        "norm": floats(FEATURES),
        "head": floats(FEATURES, VOCABULARY),
    }
    all_specs = {
        "embed": P("model", "fsdp"),
        "layers": specs if scan else [specs] * layers,
        "norm": P(),
        "head": P("fsdp", "model"),
    }
    own = jax.tree.map(lambda spec: on_mesh(renamed(spec, weights), sizes), all_specs, is_leaf=is_spec)
    return trained(loss, params, own, sizes, rows)


def gpt_step(sizes: Sizes, *, layers=2, scan=False, remat="stored", rows=("data", "fsdp"), weights="fsdp") -> Step:
    """A step of the GPT of `sharding.models`, with its layout; `remat` is its own, which saves the attention."""
    assert remat in ("stored", "attention saved")
    config = gpt.Config(
        vocab=VOCABULARY, context=LENGTH, layers=layers, features=FEATURES, heads=HEADS, kv_heads=HEADS,
        mlp_features=HIDDEN, scan=scan, remat=remat != "stored", dtype="bfloat16",
    )  # fmt: skip
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # or Flax adds replicated shardings
        graph, params = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
    axes = {"fsdp": weights, "tensor": "model" if "model" in sizes else P.UNCONSTRAINED}
    layout = tuple(dataclasses.replace(rule, spec=P(*(axes.get(a, a) for a in rule.spec))) for rule in layouts.GPT)
    layout = sharding.layout(rule for rule in layout if sizes.keys() & {*rule.spec})

    def loss(params, tokens):
        return gpt.next_token_loss(nnx.merge(graph, layout.annotate(params)), tokens)

    return trained(loss, params, None, sizes, rows)


def is_spec(leaf: Any) -> bool:
    return isinstance(leaf, P)


def renamed(spec: P, weights: str) -> P:
    """A spec with `weights` for the axis `fsdp`."""
    return P(*(weights if axis == "fsdp" else axis for axis in spec))


def trained(loss, params, specs, sizes: Sizes, rows) -> Step:
    """The step of AdamW on a loss."""
    optimizer = optax.adamw(1e-3)

    def update(state, tokens):
        params, optimizer_state = state
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    state = params, jax.eval_shape(optimizer.init, params)
    batch = ints(ROWS, LENGTH + 1)
    return Step(run=update, args=(state, batch), specs=((specs, None), on_mesh(P(rows), sizes)))
