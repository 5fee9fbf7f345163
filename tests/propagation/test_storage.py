"""Storage specs: parameters that share an axis with the batch are gathered for their use, whatever the program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding
from sharding import P

VOCAB, FEATURES, HIDDEN, BATCH, LENGTH = 64, 16, 32, 8, 8
FSDP = {
    "table": P(None, "fsdp"),
    "up": P("fsdp", None),
    "down": P(None, "fsdp"),
    "head": P("fsdp", None),
    "bias": P("fsdp"),
}
SHAPES = {
    "table": (VOCAB, FEATURES),
    "up": (FEATURES, HIDDEN),
    "down": (HIDDEN, FEATURES),
    "head": (FEATURES, VOCAB),
    "bias": (HIDDEN,),
}
TX = optax.adam(1e-2)


def params():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {name: 0.1 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)}


def tokens():
    return jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCAB)


def hidden(w, x):
    h = sharding.annotate(w["table"][x], name="embedded")
    h = h + sharding.annotate(jax.nn.gelu(h @ w["up"] + w["bias"][None, None]), name="hidden") @ w["down"]
    return h


def loss(w, x, mask=None):
    logits = sharding.annotate(hidden(w, x) @ w["head"], name="logits")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], x[:, 1:])
    return losses.mean() if mask is None else (losses * mask[:, 1:]).sum() / mask.sum()


def train(state, x):
    w, opt = state
    value, grads = jax.value_and_grad(loss)(w, x)
    updates, opt = TX.update(grads, opt, w)
    return (optax.apply_updates(w, updates), opt), value


def fsdp(tree):
    """The spec of every array of a state, by the name that ends its path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: FSDP.get(getattr(path[-1], "key", None), P()), tree)


def completed(f, args, specs, policy="storage", donate=(), sizes=None):
    with sharding.mesh(sizes or {"fsdp": 8}, devices=8):
        return sharding.jit(f, in_shardings=specs, policy=policy, donate_argnums=donate).complete(*args)


def state():
    return params(), TX.init(params())


def keeps_batch(c, *names, axis="fsdp"):
    return all(axis in str(c.spec(name)[0]) for name in names)


def test_activations_keep_the_batch_and_parameters_are_gathered():
    specs = (fsdp(jax.eval_shape(state)), P("fsdp"))
    c = completed(train, (state(), tokens()), specs, donate=(0,))
    assert keeps_batch(c, "embedded", "hidden", "logits")
    assert c.spec("state/0/up") == P("fsdp") == c.out_shardings[0][0]["up"]  # stored as the user said
    gathered = {e.cause.split(", resharded")[0] for e in c.communication() if e.kind == "all-gather"}
    assert {f"operand 1 of dot_general, state/0/{name}" for name in ("up", "down", "head")} <= gathered
    assert not c.conflicts
    assert "stored so" in str(c.why("state/0/up")) and "stored so" not in str(c.why("hidden"))
    shardy = completed(train, (state(), tokens()), specs, "shardy", donate=(0,))
    assert not keeps_batch(shardy, "embedded") and shardy.conflicts


@pytest.mark.parametrize("spec", [P("fsdp"), P(("data", "fsdp"))])
def test_the_numbers_are_those_of_one_device(spec):
    start = state()
    expected, value = jax.jit(train)(start, tokens())
    with sharding.mesh(data=2, fsdp=4):
        found, sharded = sharding.jit(train, in_shardings=(fsdp(start), spec), donate_argnums=0)(start, tokens())
    np.testing.assert_allclose(sharded, value, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6), found, expected)


def test_axes_that_only_weights_have_are_propagated_as_ever():
    both = {name: P(*[("tensor" if i == d else e) for i, e in enumerate((*spec, None)[: len(SHAPES[name])])])
            for (name, spec), d in zip(FSDP.items(), (0, 1, 0, 1, 0), strict=True)}  # fmt: skip
    c = completed(jax.grad(loss), (params(), tokens()), (both, P("fsdp")), sizes={"fsdp": 2, "tensor": 4})
    assert c.spec("hidden") == P("fsdp", None, "tensor") and c.spec("logits") == P("fsdp", None, "tensor")


def gradient(w, x):
    return jax.grad(loss)(w, x)


def masked(w, batch):
    return jax.value_and_grad(loss)(w, *batch)


def recomputed(w, x):
    return jax.grad(jax.checkpoint(loss))(w, x)


def frozen(adapters, w, x):
    def with_adapters(adapters):
        up = w["up"] + adapters["a"] @ adapters["b"]
        return loss({**w, "up": up}, x)

    return jax.tree.map(lambda p, g: p - g, adapters, jax.grad(with_adapters)(adapters))


def accumulated(w, microbatches):
    def one(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None

    return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, w), microbatches)[0]


MASKED = (P("fsdp"), P("fsdp"))
ADAPTERS = {"a": jnp.ones((FEATURES, 8)), "b": jnp.ones((8, HIDDEN))}
PROGRAMS = {
    "forward": (loss, (params(), tokens()), (FSDP, P("fsdp")), ()),
    "gradient, not donated": (gradient, (params(), tokens()), (FSDP, P("fsdp")), ()),
    "masked": (masked, (params(), (tokens(), jnp.ones((BATCH, LENGTH)))), (FSDP, MASKED), ()),
    "recomputed": (recomputed, (params(), tokens()), (FSDP, P("fsdp")), (0,)),
    "frozen base": (frozen, (ADAPTERS, params(), tokens()), ({"a": P("fsdp"), "b": P()}, FSDP, P("fsdp")), (0,)),
    "accumulated": (accumulated, (params(), jnp.stack([tokens()] * 2)), (FSDP, P(None, "fsdp")), (0,)),
    "batch first": (lambda x, w: loss(w, x), (tokens(), params()), (P("fsdp"), FSDP), ()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_batch_is_found_in_any_program(name):
    f, args, specs, donate = PROGRAMS[name]
    c = completed(f, args, specs, donate=donate)
    embedded = [n for n in c.assignment.graph.names if n.startswith(("embedded", "hidden"))]
    assert embedded and keeps_batch(c, *embedded)


def test_in_scanned_layers():
    def layers(w, x):
        def layer(h, w):
            h = h + jnp.tanh(h @ w["up"]) @ w["down"]
            return sharding.annotate(h, name="carried"), None

        h, _ = jax.lax.scan(layer, sharding.annotate(w["table"][x], name="embedded"), w["layers"])
        return (h @ w["head"]).mean()

    w = params()
    stacked = {k: jnp.stack([w[k]] * 3) for k in ("up", "down")}
    w = {"table": w["table"], "head": w["head"], "layers": stacked}
    specs = {"table": FSDP["table"], "head": FSDP["head"], "layers": {k: P(None, *FSDP[k]) for k in stacked}}
    c = completed(jax.grad(layers), (w, tokens()), (specs, P("fsdp")), donate=(0,))
    assert keeps_batch(c, "embedded", *[n for n in c.assignment.graph.names if n.startswith("carried")])


def test_images_and_regression():
    def fit(w, x, y):
        h = sharding.annotate(jax.lax.conv_general_dilated(x, w["kernel"], (1, 1), "SAME"), name="features")
        return ((h.mean((2, 3)) @ w["out"] - y) ** 2).mean()

    w = {"kernel": jnp.ones((16, 8, 3, 3)), "out": jnp.ones((16, 4))}
    specs = {"kernel": P("fsdp"), "out": P("fsdp")}
    args = (w, jnp.ones((8, 8, 8, 8)), jnp.ones((8, 4)))
    assert keeps_batch(completed(jax.grad(fit), args, (specs, P("fsdp"), P("fsdp"))), "features")


def test_few_tokens_do_not_gather_weights():
    """As in decoding: the activations of 8 tokens are smaller than the weights that they meet."""
    wide = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    f, specs = lambda w, x: jnp.tanh(x @ w["up"]) @ w["down"], {"up": P("fsdp"), "down": P(None, "fsdp")}
    found = []
    for rows in (8, 1 << 15):
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
        c = completed(f, ({"up": wide, "down": wide}, x), (specs, P("fsdp")))
        found.append({e.kind for e in c.communication() if e.bytes > 1 << 24})
    assert found == [set(), {"all-gather"}]


def test_an_optimizer_that_contracts_its_state_is_no_evidence():
    def step(w, momentum, x):
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, jax.grad(loss)(w, x))
        scaled = {k: m @ m.T @ m if m.ndim == 2 else m for k, m in momentum.items()}
        return jax.tree.map(jnp.subtract, w, scaled), momentum

    c = completed(step, (params(), params(), tokens()), (FSDP, FSDP, P("fsdp")), donate=(0, 1))
    assert keeps_batch(c, "embedded", "hidden", "logits")


def test_explicit_priorities_and_constraints_stand():
    def constrained(w, x):
        h = jax.lax.with_sharding_constraint(w["table"][x], P(None, None, "fsdp"))
        return sharding.annotate(h @ w["up"], name="hidden").sum()

    c = completed(constrained, (params(), tokens()), (FSDP, P("fsdp")))
    assert any(
        "with_sharding_constraint" in a.origin and a.spec.dims[2].axes == ("fsdp",) and a.spec.dims[2].priority == 0
        for a in c.assignment.graph.annotations.values()
    )


def test_the_policy_is_applied_again_to_new_annotations():
    c = completed(train, (state(), tokens()), (fsdp(jax.eval_shape(state)), None), donate=(0,))
    assert not keeps_batch(c, "embedded")
    assert keeps_batch(c.annotate("x", P("fsdp")), "embedded", "hidden", "logits")


def test_an_unknown_policy_is_an_error():
    with pytest.raises(sharding.ShardingError, match="policy='batch'"):
        sharding.jit(loss, policy="batch")


def test_experts_keep_their_axis():
    """Tokens are sent to the experts: no weight of an expert is gathered over its own axis."""

    def mixture(w, x):
        gates = jax.nn.softmax(x @ w["router"])
        sent = jnp.einsum("ble,bld->ebld", gates, x)
        h = sharding.annotate(jax.nn.relu(jnp.einsum("ebld,edf->eblf", sent, w["up"])), name="experts")
        return (jnp.einsum("eblf,efd->bld", h, w["down"]) ** 2).mean()

    w = {"router": jnp.ones((16, 8)), "up": jnp.ones((8, 16, 32)), "down": jnp.ones((8, 32, 16))}
    specs = {"router": P(), "up": P("expert", "fsdp"), "down": P("expert", None, "fsdp")}
    args, sizes = (w, jnp.ones((64, 16, 16))), {"expert": 4, "fsdp": 2}
    c = completed(jax.grad(mixture), args, (specs, P(("fsdp", "expert"))), sizes=sizes)
    annotations = c.assignment.graph.annotations
    up = annotations[c.assignment.graph.names["w/up"]].spec
    assert [dim.priority for dim in up.dims] == [0, 1, 0]


def test_annotated_gradients_are_stored_alike():
    """`annotate` gives a cotangent its primal's spec, with the same claim."""

    def annotated(w, x):
        return jax.grad(lambda w: loss({k: sharding.annotate(v, FSDP[k]) for k, v in w.items()}, x))(w)

    c = completed(annotated, (params(), tokens()), (None, P("fsdp")))
    assert keeps_batch(c, "embedded", "hidden", "logits")
    assert all("fsdp" in str(spec) for spec in c.out_shardings.values())


def test_an_op_without_a_rule_is_no_evidence():
    """A callback that reads a weight beside the batch tells nothing of either."""

    def scaled(x, w):
        return jax.pure_callback(lambda x, w: x * w[0, 0], jax.ShapeDtypeStruct(x.shape, x.dtype), x, w)

    def observed(w, x):
        return loss(w, x) + scaled(hidden(w, x), w["up"]).sum()

    c = completed(observed, (params(), tokens()), (FSDP, P("fsdp")))
    embedded = [n for n in c.assignment.graph.names if n.startswith(("embedded", "hidden", "logits"))]
    assert embedded and keeps_batch(c, *embedded) and c.unknown


@pytest.mark.parametrize("batch, is_batch", [(8, True), (4, False)])
def test_activations_at_least_as_large_as_the_weights_they_meet_are_a_batch(batch, is_batch):
    args = jax.ShapeDtypeStruct((batch, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    c = completed(lambda x, w: x @ w, args, (P("data"), P("data")), sizes={"data": 4, "rest": 2})
    assert (c.out_shardings == P("data") and not c.conflicts) == is_batch
