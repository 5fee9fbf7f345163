"""Train steps of further models in plain JAX: AdamW on the mean loss of a batch.

Shape suffixes: B batch, S sequence, M model features, H heads, D features of a head, E experts, C slots of an expert, F
hidden features, N blocks of a sequence, T positions of a block.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sharding import P

from .small_models import ROWS, floats, ints
from .step import MakeStep, Step, on_mesh, over_all_axes

NHWC = ("NHWC", "HWIO", "NHWC")
BATCH = P(("data", "fsdp"))
"""Rows sharded over the data axes."""


def step(loss, params, batch, weights, rows=BATCH) -> MakeStep:
    """The train step of a loss.

    Args:
        loss: (params, batch) -> loss of every row.
        params: shapes by name.
        batch: shapes.
        weights: specs of some parameters by name, for style `weights`.
        rows: spec of every array of the batch in that style, without axes absent from the mesh.
    """
    optimizer = optax.adamw(1e-3)

    def update(state, batch):
        params, optimizer_state = state
        value, gradient = jax.value_and_grad(lambda p: jnp.mean(loss(p, batch)))(params)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    def make(style, sizes):
        shards_weights = style == "weights"
        specs = {k: on_mesh(weights[k], sizes) if shards_weights and k in weights else None for k in params}
        state = params, jax.eval_shape(optimizer.init, params)
        batch_spec = on_mesh(rows, sizes) if shards_weights else over_all_axes(sizes)
        return Step(run=update, args=(state, batch), specs=((specs, None), batch_spec))

    return make


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


# A mixture of experts: top-2 routing with expert capacity


def experts(params, x_BSM):
    gates_BSE = jax.nn.softmax(x_BSM @ params["gate"])
    best, chosen = lax.top_k(gates_BSE, 2)
    weights = best / best.sum(-1, keepdims=True)
    chosen_BSKE = jax.nn.one_hot(chosen, params["gate"].shape[1])
    flat = chosen_BSKE.reshape(x_BSM.shape[0], -1, chosen_BSKE.shape[-1])
    slot = (jnp.cumsum(flat, axis=1) * flat - 1).reshape(chosen_BSKE.shape)
    slots_BSKEC = jax.nn.one_hot(slot.astype(jnp.int32), 8)  # tokens beyond the capacity are dropped
    dispatch_BSEC = jnp.einsum("bskec->bsec", slots_BSKEC)
    combine_BSEC = jnp.einsum("bskec,bsk->bsec", slots_BSKEC, weights)
    dispatched_EBCM = jnp.einsum("bsec,bsm->ebcm", dispatch_BSEC, x_BSM)
    hidden_EBCF = jax.nn.gelu(jnp.einsum("ebcm,emf->ebcf", dispatched_EBCM, params["up"]))
    out_EBCM = jnp.einsum("ebcf,efm->ebcm", hidden_EBCF, params["down"])
    balance = (gates_BSE.mean(1) * chosen_BSKE.sum(2).mean(1)).sum(-1)
    return ((x_BSM + jnp.einsum("ebcm,bsec->bsm", out_EBCM, combine_BSEC)) ** 2).mean((1, 2)) + balance


EXPERTS = {"gate": floats(32, 8), "up": floats(8, 32, 64), "down": floats(8, 64, 32)}


# Blockwise attention with an online softmax


def heads(params, x_BSM):
    return (jnp.einsum("bsm,mhd->bshd", norm(x_BSM), params[k]) for k in ("q", "k", "v"))


def online_softmax_update(state, scores_BHST, v_BTHD):
    """The running weighted sum, maximum and sum of weights after another block of keys."""
    out, top, total = state
    new_top = jnp.maximum(top, scores_BHST.max(-1))
    weights, scale = jnp.exp(scores_BHST - new_top[..., None]), jnp.exp(top - new_top)
    out = out * scale[..., None] + jnp.einsum("...hst,...thd->...hsd", weights, v_BTHD)
    return out, new_top, total * scale + weights.sum(-1)


def empty_softmax(q):
    """The softmax state before any keys."""
    lead = jnp.moveaxis(q, -2, -3)
    return jnp.zeros_like(lead), jnp.full_like(lead[..., 0], -jnp.inf), jnp.zeros_like(lead[..., 0])


def projected(params, out, total, x_BSM):
    out_BSHD = jnp.moveaxis(out / total[..., None], -3, -2).reshape(*x_BSM.shape[:2], *params["o"].shape[:2])
    return ((x_BSM + jnp.einsum("bshd,hdm->bsm", out_BSHD, params["o"])) ** 2).mean((1, 2))


def blockwise(params, x_BSM):
    q, k, v = heads(params, x_BSM)
    blocks = [jnp.moveaxis(a.reshape(a.shape[0], 4, -1, *a.shape[2:]), 1, 0) for a in (k, v)]

    def body(state, block):
        k, v = block
        return online_softmax_update(state, jnp.einsum("bshd,bthd->bhst", q, k), v), None

    (out, _, total), _ = lax.scan(body, empty_softmax(q), tuple(blocks))
    return projected(params, out, total, x_BSM)


def ring(params, x_BSM):
    """Ring attention as rolls of blocks of keys and values in a global array."""
    q, k, v = (a.reshape(a.shape[0], 8, -1, *a.shape[2:]) for a in heads(params, x_BSM))

    def body(carry, _):
        state, k, v = carry
        state = online_softmax_update(state, jnp.einsum("bnshd,bnthd->bnhst", q, k), v)
        return (state, jnp.roll(k, 1, axis=1), jnp.roll(v, 1, axis=1)), None

    ((out, _, total), _, _), _ = lax.scan(body, (empty_softmax(q), k, v), None, length=8)
    return projected(params, out, total, x_BSM)


def ring_by_hand(params, x_BSM):
    """Ring attention in a `shard_map` over the last axis, with collective-permutes between neighbours."""
    mesh = jax.sharding.get_abstract_mesh()
    axis = mesh.axis_names[-1]
    pairs = [(i, (i + 1) % mesh.shape[axis]) for i in range(mesh.shape[axis])]

    def body(carry, _):
        q, state, k, v = carry
        state = online_softmax_update(state, jnp.einsum("bshd,bthd->bhst", q, k), v)
        return (q, state, *(lax.ppermute(a, axis, pairs) for a in (k, v))), None

    def local(q, k, v):
        (_, (out, _, total), _, _), _ = lax.scan(body, (q, empty_softmax(q), k, v), None, length=len(pairs))
        return out, total

    by_sequence = P(None, axis), P(None, None, axis)
    mapped = jax.shard_map(local, in_specs=by_sequence[0], out_specs=by_sequence[1], axis_names={axis}, check_vma=False)
    return projected(params, *mapped(*heads(params, x_BSM)), x_BSM)


ATTENTION = {**dict.fromkeys("qkv", floats(32, 8, 4)), "o": floats(8, 4, 32)}
BY_HEADS = {**dict.fromkeys("qkv", P("fsdp", "tensor")), "o": P("tensor", None, "fsdp")}
FULLY = {**dict.fromkeys("qkv", P("fsdp")), "o": P(None, None, "fsdp")}


# Convolutions, recurrence, graphs


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=NHWC)


def unet(params, images):
    """Two downsampling and two upsampling stages with skip connections."""
    first = jax.nn.relu(conv(images, params["in"]))
    second = jax.nn.relu(conv(first, params["down1"], 2))
    low = jax.nn.relu(conv(second, params["down2"], 2))
    up = jnp.repeat(jnp.repeat(low, 2, 1), 2, 2)
    up = jax.nn.relu(conv(jnp.concatenate([up, second], -1), params["up1"]))
    up = lax.conv_transpose(up, params["up2"], (2, 2), "SAME", dimension_numbers=NHWC)
    out = conv(jnp.concatenate([jax.nn.relu(up), first], -1), params["out"])
    return ((out - images) ** 2).mean((1, 2, 3))


UNET = {
    "in": floats(3, 3, 4, 16), "down1": floats(3, 3, 16, 32), "down2": floats(3, 3, 32, 64),
    "up1": floats(3, 3, 96, 32), "up2": floats(3, 3, 32, 16), "out": floats(3, 3, 32, 4),
}  # fmt: skip


def lstm(params, x_BSM):
    def cell(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["bias"][None], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x_BSM.shape[0], params["h"].shape[0]))
    _, hidden = lax.scan(cell, (zero, zero), jnp.moveaxis(x_BSM, 1, 0))
    return ((jnp.moveaxis(hidden, 0, 1) @ params["out"] - x_BSM) ** 2).mean((1, 2))


LSTM = {"x": floats(16, 128), "h": floats(32, 128), "bias": floats(128), "out": floats(32, 16)}


def graph_net(params, batch):
    """Two rounds of message passing along edges, summed at their targets."""
    nodes, ends = batch
    h = jax.nn.relu(nodes @ params["in"])
    for _ in range(2):
        both = jnp.concatenate([h[ends[:, 0]], h[ends[:, 1]]], -1)
        messages = jax.nn.relu(both @ params["edge"])
        received = jax.ops.segment_sum(messages, ends[:, 1], num_segments=nodes.shape[0])
        h = h + jax.nn.relu(jnp.concatenate([h, received], -1) @ params["node"])
    return (h @ params["out"]).mean(-1) ** 2


GRAPH = {"in": floats(16, 32), "edge": floats(64, 64), "node": floats(96, 32), "out": floats(32, 8)}


# A Fourier neural operator: low frequencies are mixed by learned weights


def fno(params, fields):
    """Two spectral layers on fields [B, rows, columns, channels] that keep 4 x 4 frequencies of each sign."""
    x = fields @ params["in"]
    for i in range(2):
        waves = jnp.fft.rfft2(x, axes=(1, 2))
        low = jnp.concatenate([waves[:, :4, :4], waves[:, -4:, :4]], axis=1)
        weights = lax.complex(params[f"real{i}"], params[f"imaginary{i}"])
        mixed = jnp.einsum("brkm,rkmn->brkn", low, weights)
        out = jnp.zeros_like(waves).at[:, :4, :4].set(mixed[:, :4]).at[:, -4:, :4].set(mixed[:, 4:])
        x = jax.nn.gelu(jnp.fft.irfft2(out, s=x.shape[1:3], axes=(1, 2)) + x @ params[f"local{i}"])
    return ((x @ params["out"] - fields) ** 2).mean((1, 2, 3))


FNO = {
    "in": floats(4, 32), "out": floats(32, 4), **{f"local{i}": floats(32, 32) for i in range(2)},
    **{f"{part}{i}": floats(8, 4, 32, 32) for part in ("real", "imaginary") for i in range(2)},
}  # fmt: skip
SPECTRAL = {f"{part}{i}": P(None, None, "fsdp", "tensor") for part in ("real", "imaginary") for i in range(2)}


X = floats(ROWS, 16, 32)

STEPS: dict[str, MakeStep] = {
    "experts": step(experts, EXPERTS, X, {"up": P("tensor", "fsdp"), "down": P("tensor", None, "fsdp")}),
    "blockwise attention": step(blockwise, ATTENTION, X, BY_HEADS),
    "ring attention": step(ring, ATTENTION, X, FULLY, rows=P(("data", "fsdp"), "tensor")),
    "ring attention by hand": step(ring_by_hand, ATTENTION, X, FULLY),
    "u-net": step(
        unet, UNET, floats(ROWS, 16, 16, 4),
        {"in": P(None, None, None, "tensor"), "down1": P(None, None, "tensor", "fsdp"),
         "down2": P(None, None, "fsdp", "tensor"), "up1": P(None, None, None, ("fsdp", "tensor"))},
    ),
    "lstm": step(
        lstm, LSTM, floats(ROWS, 8, 16),
        {"x": P("fsdp", "tensor"), "h": P("fsdp", "tensor"), "out": P("tensor", "fsdp")},
    ),
    "fno": step(fno, FNO, floats(ROWS, 16, 16, 4), SPECTRAL),
    "graph net": step(
        graph_net, GRAPH, (floats(32, 16), ints(64, 2)), {"edge": P("fsdp", "tensor"), "node": P("tensor", "fsdp")}
    ),
}  # fmt: skip
