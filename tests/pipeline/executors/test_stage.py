"""A stage's programs against ``jax.vjp``; what waits between them is small, and nothing is computed twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.pipeline.executors.flow import Flow, Passing
from sharding.pipeline.executors.stage import traced

BATCH, TOKENS, FEATURES, HIDDEN = 3, 5, 7, 11  # all different, so that a shape says what an array is


def weights(chance=0):
    keys = jax.random.split(jax.random.key(chance), 3)
    return {
        "a": jax.random.normal(keys[0], (FEATURES, HIDDEN)) / 3,
        "b": jax.random.normal(keys[1], (HIDDEN, FEATURES)) / 3,
        "bias": jax.random.normal(keys[2], (FEATURES,)),
    }


def array(chance=1):
    return jax.random.normal(jax.random.key(chance), (BATCH, TOKENS, FEATURES))


def mlp(w, x):
    return x + jnp.tanh(x @ w["a"]) @ w["b"] + w["bias"].reshape(1, 1, -1)


def two_layers(w, x):
    return mlp(w, mlp(w, x))


def attention(w, x, dtype=jnp.bfloat16):
    """In half precision with a causal mask."""
    half = jax.tree.map(lambda leaf: leaf.astype(dtype), w)
    h = x.astype(dtype) @ half["a"]
    scores = jnp.einsum("bth,bsh->bts", h, h)
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    share = jax.nn.softmax(jnp.where(mask[None], scores, -1e4).astype(jnp.float32)).astype(dtype)
    return x + (share @ h @ half["b"]).astype(x.dtype)


def whole_attention(w, x):
    """In single precision: in half, results depend on what XLA fuses."""
    return attention(w, x, jnp.float32)


def normalized(w, x):
    """Its weights are of length one."""
    unit = {name: leaf / jnp.sqrt((leaf**2).sum()) for name, leaf in w.items()}
    return mlp(unit, x)


def scanned(w, x):
    return jax.lax.scan(lambda x, _: (mlp(w, x), None), x, None, length=3)[0]


def written_gradient(w, x):
    """With a gradient of its own, which is not what differentiation would give."""

    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))
    return mlp(w, double(x))


TABLE = np.linspace(-1, 1, FEATURES, dtype=np.float32)


def with_constant(w, x):
    return mlp(w, x * jnp.asarray(TABLE).reshape(1, 1, -1))


def unused_weights(w, x):
    return x + w["bias"].reshape(1, 1, -1)


def same(w, x):
    return x


def constant(w, x):
    return jnp.ones_like(x)


def dropped(w, x):
    """With a random key, integers and a sum that ride along."""
    h = mlp(w, x["h"])
    kept = jax.random.bernoulli(jax.random.fold_in(x["key"], x["stage"]), 0.5, h.shape)
    return {"h": h * kept, "key": x["key"], "stage": x["stage"] + 1, "sum": x["sum"] + (h**2).mean()}


def riding(_chance=1):
    zero = jnp.zeros((), jnp.int32)
    return {"h": array(), "key": jax.random.key(4), "stage": zero, "sum": jnp.ones(())}


STAGES = [mlp, two_layers, whole_attention, normalized, scanned, written_gradient, with_constant, unused_weights, same]
STAGES += [constant, dropped]
POLICIES = {
    "none": lambda stage: stage,
    "all": lambda stage: jax.checkpoint(stage, prevent_cse=False),
    "default": jax.checkpoint,
    "dots": lambda stage: jax.checkpoint(stage, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable),
}


def inputs(stage_fn):
    return riding() if stage_fn is dropped else array()


def expected(stage_fn, w, x, gradient):
    """By jax.vjp: output, gradients of the weights and of the floats that come in."""
    passing = Passing.of(x)
    flow = passing.flow(x)

    def run(w, floats):
        y = passing.flow(stage_fn(w, passing.tree_of(Flow(floats, flow.others))))
        return y.floats, y.others

    y, vjp, others = jax.vjp(run, w, flow.floats, has_aux=True)
    return Flow(y, others), *vjp(gradient)


def close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), found, wanted)


@pytest.mark.parametrize(
    "policy", ["none", "default", *(pytest.param(name, marks=pytest.mark.slow) for name in ("all", "dots"))]
)
@pytest.mark.parametrize("stage_fn", STAGES, ids=lambda stage: stage.__name__)
def test_programs_equal_vjp(stage_fn, policy):
    w, x = weights(), inputs(stage_fn)
    stage = traced(POLICIES[policy](stage_fn), w, x)
    flow = stage.passing.flow(x)
    gradient = [jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape) for leaf in flow.floats]

    def run(w, flow):
        y, _, residuals = stage.forward(w, flow)
        dw, dx, _ = stage.backward(w, residuals, gradient)
        own_dx, _, saved = stage.backward_input(w, residuals, gradient)
        return y, (dw, dx), (stage.backward_weight(w, saved), own_dx)

    y, whole, parts = jax.jit(run)(w, flow)
    wanted = jax.jit(lambda w, x: expected(stage_fn, w, x, gradient))(w, x)
    close((y, *whole), wanted)
    close(parts, whole)


def test_numbers_among_the_weights_have_a_gradient_of_zero():
    def shifted(w, x):
        return mlp(w["float"], x) + w["whole"].astype(x.dtype)

    w, x = {"float": weights(), "whole": jnp.full((BATCH, TOKENS, FEATURES), 2)}, array()
    stage = traced(shifted, w, x)
    y, _, residuals = stage.forward(w, stage.passing.flow(x))
    dw, dx, _ = stage.backward(w, residuals, [jnp.ones_like(x)])
    wanted, vjp = jax.vjp(mlp, w["float"], x)
    assert dw["whole"].dtype == w["whole"].dtype
    assert not dw["whole"].any()
    close((y.floats[0] - 2, dw["float"], dx[0]), (wanted, *vjp(jnp.ones_like(x))))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stage_fn", [mlp, two_layers, attention, normalized], ids=lambda stage: stage.__name__)
def test_what_waits_depends_on_the_microbatch(stage_fn, policy):
    """Every array in a slot has a dim of the batch: no weights, casts of them, masks, or norms of weights."""
    stage = traced(POLICIES[policy](stage_fn), weights(), array())
    sums = [(FEATURES,), (FEATURES, HIDDEN), (HIDDEN, FEATURES)]
    for shape in stage.residual_shapes:
        assert BATCH in shape.shape
    own = dict.fromkeys(map(id, stage.weight_program.outputs))
    for var, shape in zip(stage.weight_program.inputs[len(weights()) :], stage.saved_shapes, strict=True):
        # A gradient of weights that the input part had to make anyway is one of this microbatch.
        assert BATCH in shape.shape or (id(var) in own and shape.shape in sums)


def test_whole_remat_keeps_the_input_alone():
    stage = traced(POLICIES["all"](attention), weights(), array())
    assert [shape.shape for shape in stage.residual_shapes] == [(BATCH, TOKENS, FEATURES)]


def test_a_policy_keeps_what_it_says():
    stage = traced(POLICIES["dots"](mlp), weights(), array())
    assert sorted(shape.shape for shape in stage.residual_shapes) == [
        (BATCH, TOKENS, FEATURES),
        (BATCH, TOKENS, HIDDEN),
    ]


def test_what_is_cheap_to_make_does_not_wait():
    """Of a GELU by tanh its input and the tanh; of a residual stream its start and what was added."""

    def gelu(w, x):
        return x + jax.nn.gelu(x @ w["a"]) @ w["b"]

    rows, hidden = (BATCH, TOKENS, FEATURES), (BATCH, TOKENS, HIDDEN)
    kept = [shape.shape for shape in traced(gelu, weights(), array()).residual_shapes]
    assert sorted(kept) == sorted([rows, hidden, hidden])

    def stream(w, x):
        x = x + jnp.tanh(x @ w["a"] @ w["b"])
        return x + jnp.tanh(x @ w["a"] @ w["b"])

    kept = [shape.shape for shape in traced(stream, weights(), array()).residual_shapes]
    assert sorted(kept) == sorted([*[rows] * 3, *[hidden] * 2])


def products(program):
    return sum(eqn.primitive.name == "dot_general" for eqn in program.eqns)


@pytest.mark.parametrize(("policy", "again"), [("none", 0), ("all", 3), ("default", 3), ("dots", 0)])
def test_parts_compute_together_what_the_whole_does(policy, again):
    """Per layer two products for the input, two for the weights; with remat also those of the forward again but the
    last, whose result nothing needs."""
    stage = traced(POLICIES[policy](two_layers), weights(), array())
    assert products(stage.forward_program) == 4
    assert products(stage.backward_program) == 8 + again
    assert products(stage.input_program) == 4 + again
    assert products(stage.weight_program) == 4


def test_nothing_waits_twice():
    stage = traced(two_layers, weights(), array())
    saved = stage.weight_program.inputs[len(weights()) :]
    assert len(set(saved)) == len(saved)
    kept = stage.forward_program.outputs[1:]
    assert len(set(kept)) == len(kept)
    rows, hidden = (BATCH, TOKENS, FEATURES), (BATCH, TOKENS, HIDDEN)
    # Per product its operand and the gradient of its result, which is one with that of the sum it goes into.
    assert sorted(shape.shape for shape in stage.saved_shapes) == sorted([*[rows] * 4, *[hidden] * 4])
